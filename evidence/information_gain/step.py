"""What gains add to a training step's own work, by the way that they are scored, as ratios in one run.

    python evidence/information_gain/step.py [--device cpu|cuda] [--json FILE]

A step without gains is here the forward of old_log_probs and the update's forward and backward of the same row, all with
`forward.py`'s model, rows and ways. Generation is left out, so a real step's share is smaller. CPU seconds of one thread (a
GPU: seconds), medians of --repeats, all interleaved.
"""

from __future__ import annotations

import json
import statistics
import time

import torch
from forward import METHODS, SHAPES, build, inputs, options_of, run, wait

from verl_credit.policy.attention.pack import PACK, pack_rows


def update(model, row: torch.Tensor) -> None:
    """The forward and the backward of the policy's loss, with this row's log-probs."""
    pack = pack_rows([len(row)])
    positions = pack.position_ids().to(row.device)[None]
    logits = model(input_ids=row[None], position_ids=positions, use_cache=False, **{PACK: pack}).logits[0]
    torch.nn.functional.cross_entropy(logits[:-1].float(), row[1:]).backward()
    model.zero_grad()


def measure(arguments, model, length: int, turns: int) -> dict:
    row, answers, at = inputs(arguments, length, turns)
    clock = time.process_time if arguments.device == "cpu" else time.perf_counter
    parts = {method: (lambda method=method: run(method, model, row, answers, at)) for method in METHODS}
    parts["update"] = lambda: update(model, row)
    taken = {name: [] for name in parts}
    for repeat in range(arguments.repeats + 1):  # the first warms up
        for name, part in parts.items():
            wait(arguments.device)
            begun = clock()
            part()
            wait(arguments.device)
            if repeat:
                taken[name].append(clock() - begun)
    median = {name: statistics.median(times) for name, times in taken.items()}
    step = median["plain"] + median["update"]
    found = {
        "length": length,
        "turns": turns,
        "step_s": round(step, 3),
        "update_s": round(median["update"], 3),
    }
    return found | {name: round(1 + (median[name] - median["plain"]) / step, 3) for name in METHODS[1:]}


def main() -> None:
    arguments = options_of(__doc__, repeats=3).parse_args()
    torch.set_num_threads(1)
    model, found = build(arguments), []
    print("| L, T | step without gains | of it the update |", *(f" {name} |" for name in METHODS[1:]), sep="")
    print("|---" * (3 + len(METHODS) - 1) + "|")
    for length, turns in SHAPES:
        found.append(one := measure(arguments, model, length, turns))
        ratios = " | ".join(f"{one[name]:.3f}" for name in METHODS[1:])
        print(
            f"| {length}, {turns} | {one['step_s']:.2f} s | {one['update_s']:.2f} s | {ratios} |", flush=True
        )
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
