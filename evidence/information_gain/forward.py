"""The cost of information gain in the forward that computes old_log_probs.

    python evidence/information_gain/forward.py [--device cpu|cuda] [--kernel auto] [--json FILE]

Per shape (L tokens a row, T tool turns, answers of 8 tokens at L/(T+1), 2L/(T+1), ..., the bare prompt at L/10): seconds
of one row's forward with log-probs, interleaved, medians; ratios to `plain`, the forward without gains. Methods:

    plain      the row alone
    branch     the row with its T + 1 answers behind it, one packed forward
    rows       the row, then T + 1 contexts with their answers as rows of their own, packed without padding
    padded     the row, then T + 1 contexts padded to the longest, in one batch, as released

Peak memory: the largest resident size (CPU, Linux) or allocation (GPU) of a process that runs one method alone, minus
what it had before that forward. On a CPU glibc is told to give freed tensors back at once (`GIVE_BACK`): with its
defaults the figure is mostly what the allocator keeps. The model has random weights: Qwen3 with --hidden 256 and
--layers 4 unless told otherwise. Before it is timed, `branch` is compared with `rows`.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from verl_credit.policy.attention.implementation import choice, install
from verl_credit.policy.attention.pack import PACK, pack_rows

ANSWER = 8
SHAPES = [(1024, 4), (2048, 8), (4096, 8)]
METHODS = ("plain", "branch", "rows", "padded")
GIVE_BACK = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "MALLOC_TOP_PAD_": "0"}


def build(arguments) -> torch.nn.Module:
    install()
    config = AutoConfig.for_model(
        "qwen3", vocab_size=arguments.vocabulary, hidden_size=arguments.hidden, num_hidden_layers=arguments.layers,
        intermediate_size=3 * arguments.hidden, num_attention_heads=arguments.hidden // 64 * 2,
        num_key_value_heads=max(1, arguments.hidden // 128), head_dim=64, max_position_embeddings=40960,
    )  # fmt: skip
    torch.manual_seed(0)
    dtype = torch.float32 if arguments.device == "cpu" else torch.bfloat16
    model = AutoModelForCausalLM.from_config(config, attn_implementation=arguments.kernel, dtype=dtype)
    return model.to(arguments.device, dtype).eval()


def ends(length: int, turns: int) -> list[int]:
    return [length // 10, *(length * k // (turns + 1) for k in range(1, turns + 1))]


@torch.no_grad()
def log_probs(model, ids, positions, pack=None) -> torch.Tensor:
    extra = {} if pack is None else {PACK: pack}
    logits = model(input_ids=ids, position_ids=positions, use_cache=False, **extra).logits[0]
    labels = ids[0].roll(-1)
    return torch.cat([
        chunk.float().log_softmax(dim=-1).gather(1, label[:, None])[:, 0]
        for chunk, label in zip(logits.split(1024), labels.split(1024), strict=True)
    ])  # fmt: skip


def packed(model, rows, branches=None) -> torch.Tensor:
    """Rows (token ids, branches behind their trunk) in one stream."""
    branches = branches or [[] for _ in rows]
    trunks = [len(row) - sum(n for _, n in grown) for row, grown in zip(rows, branches, strict=True)]
    pack = pack_rows(trunks, branches)
    device = rows[0].device
    return log_probs(model, torch.cat(rows)[None], pack.position_ids().to(device)[None], pack)


def run(
    method: str, model, row: torch.Tensor, answers: list[torch.Tensor], at: list[int]
) -> list[torch.Tensor]:
    """Log-probs of every answer's tokens except the first; `plain` has none."""
    if method == "branch":
        order = sorted(range(len(at)), key=lambda i: -at[i])
        whole = torch.cat([row, *(answers[i] for i in order)])
        found = packed(model, [whole], [[(at[i], ANSWER) for i in order]])[len(row) :].split(ANSWER)
        return [found[order.index(i)][:-1] for i in range(len(at))]
    packed(model, [row])
    contexts = [torch.cat([row[:end], answer]) for end, answer in zip(at, answers, strict=True)]
    if method == "rows":
        budget, found, batch = len(row) + ANSWER, [], []
        for context in contexts:  # packs of at most a row's length, as verl's dynamic batching makes them
            if batch and sum(map(len, batch)) + len(context) > budget:
                found += _answers(model, batch)
                batch = []
            batch.append(context)
        return found + _answers(model, batch)
    if method == "padded":
        longest = max(map(len, contexts))
        # right padding: causal attention never looks at it, and it costs what a token costs
        rows = [torch.nn.functional.pad(context, (0, longest - len(context))) for context in contexts]
        found = packed(model, rows).split(longest)
        return [out[end : end + ANSWER - 1] for out, end in zip(found, at, strict=True)]
    return []


def _answers(model, batch: list[torch.Tensor]) -> list[torch.Tensor]:
    found = packed(model, batch).split([len(row) for row in batch])
    return [out[-ANSWER:-1] for out in found]


def inputs(arguments, length: int, turns: int):
    random = torch.Generator().manual_seed(length)
    row = torch.randint(0, arguments.vocabulary, (length,), generator=random).to(arguments.device)
    at = ends(length, turns)
    answers = [torch.randint(0, arguments.vocabulary, (ANSWER,), generator=random).to(row.device) for _ in at]
    return row, answers, at


def wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def time_shape(arguments, model, length: int, turns: int) -> dict:
    given = inputs(arguments, length, turns)
    exact = max(
        float((a - b).abs().max())
        for a, b in zip(run("branch", model, *given), run("rows", model, *given), strict=True)
    )
    taken: dict[str, list[float]] = {method: [] for method in METHODS}
    for _ in range(arguments.repeats):
        for method in METHODS:
            wait(arguments.device)
            start = time.perf_counter()
            run(method, model, *given)
            wait(arguments.device)
            taken[method].append(time.perf_counter() - start)
    median = {method: statistics.median(times) for method, times in taken.items()}
    return {
        "length": length,
        "turns": turns,
        "plain_s": round(median["plain"], 4),
        **{f"{method}_ratio": round(median[method] / median["plain"], 3) for method in METHODS[1:]},
        "branch_to_rows_largest_difference": exact,
    }


def peak(arguments, method: str, length: int, turns: int) -> float:
    """Bytes that one method needs above the model, measured in a separate process."""
    command = [sys.executable, "-W", "ignore", __file__, "--peak-of", method, str(length), str(turns)]
    for name in ("device", "kernel", "hidden", "layers", "vocabulary"):
        command += [f"--{name}", str(getattr(arguments, name))]
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=os.environ | GIVE_BACK)
    return float(done.stdout.split()[-1])


def print_peak(arguments) -> None:
    method, length, turns = arguments.peak_of[0], int(arguments.peak_of[1]), int(arguments.peak_of[2])
    model = build(arguments)
    run("plain", model, *inputs(arguments, 64, 2))
    if arguments.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run(method, model, *inputs(arguments, length, turns))
        print(torch.cuda.max_memory_allocated() - before)
        return
    Path("/proc/self/clear_refs").write_text("5")  # the largest resident size starts again
    before = status_bytes("VmRSS")
    run(method, model, *inputs(arguments, length, turns))
    print(status_bytes("VmHWM") - before)


def status_bytes(name: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) * 1024


def options_of(description: str, *, repeats: int) -> argparse.ArgumentParser:
    """The model, and how often each way is timed."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--kernel", default="auto")
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--vocabulary", type=int, default=4096)
    parser.add_argument("--repeats", type=int, default=repeats)
    parser.add_argument("--json", type=Path)
    return parser


def main() -> None:
    parser = options_of(__doc__, repeats=7)
    parser.add_argument("--peak-of", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.peak_of:
        print_peak(arguments)
        return
    model = build(arguments)
    heads = [model.config.num_attention_heads, model.config.num_key_value_heads]
    query, key = (torch.empty(1, n, 1, 64, device=arguments.device, dtype=model.dtype) for n in heads)
    device = torch.cuda.get_device_name() if arguments.device == "cuda" else f"{platform.machine()}, 1 thread"
    result = {
        "machine": f"{device}, torch {torch.__version__}",
        "model": f"qwen3, hidden {arguments.hidden}, {arguments.layers} layers, vocabulary {arguments.vocabulary}",
        "kernel": str(choice(arguments.kernel, query, key)),
        "shapes": [],
    }
    print(json.dumps(result))
    for length, turns in SHAPES:
        row = time_shape(arguments, model, length, turns)
        memory = {method: peak(arguments, method, length, turns) for method in METHODS}
        row["plain_bytes"] = int(memory["plain"])
        row |= {
            f"{method}_memory_ratio": round(memory[method] / memory["plain"], 2) for method in METHODS[1:]
        }
        result["shapes"].append(row)
        print(json.dumps(row), flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
