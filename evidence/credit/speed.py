"""The speed of turn tables and the turn loss: python evidence/credit/speed.py [rows] [tokens per row] [--json FILE]

One thread. Tables: turn ids -> table -> turn-group-v1d credit -> advantages and clip scales per token, 16 trajectories
per prompt, up to 8 turns with observations between; beside two plain Python
loops over the tokens of some of the rows (their time is per row, times the rows): one computes every token from the
definition, the other computes every turn once and looks it up. Loss: forward and backward of `turn_policy_loss`
with ratio_level=turn and a clip scale, beside verl's vanilla loss on the same tensors, alternating. Medians (of
the loss: of the ratios of neighbouring runs). Tokens: `token_credit` and `gtpo_canonical`, processor seconds over those of
the tables, alternating, each the best of its runs; one token in ten plans, at random.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

from verl_credit.credit import gtpo_canonical, spread, token_credit, turn_credit, turn_policy_loss, turn_table

GROUP, TURNS, ORACLE_ROWS, REPEATS, LOSS_ROWS, LOSS_REPEATS, TOKEN_REPEATS = 16, 8, 64, 15, 64, 60, 5
TOKEN_MODES = ("none", "gtpo", "gtpo_sepa_hicra")


def batch(rows: int, tokens: int, seed: int = 0) -> dict[str, torch.Tensor]:
    """Segments of policy and observation tokens in turn; rows end at different lengths."""
    random = torch.Generator().manual_seed(seed)
    n_turns_B = torch.randint(1, TURNS + 1, (rows,), generator=random)
    length_B = torch.randint(tokens // 2, tokens + 1, (rows,), generator=random)
    segment_B = length_B // (2 * n_turns_B - 1)
    place_T = torch.arange(tokens)
    number_B_T = (place_T[None] // segment_B[:, None]).clamp(max=2 * n_turns_B[:, None] - 2)
    mask_B_T = (number_B_T % 2 == 0) & (place_T < length_B[:, None])
    ids_B_T = torch.where(mask_B_T, number_B_T // 2, -1)
    return {
        "ids": ids_B_T,
        "mask": mask_B_T,
        "outcome": torch.randint(0, 2, (rows,), generator=random).float(),
        "gain": torch.randn(rows, TURNS - 1, generator=random) * 0.1,
        "group": torch.arange(rows) // GROUP,
    }


def tables(data: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    table = turn_table(data["ids"], data["mask"])
    columns = table.tool_turn_mask_B_K.shape[1]
    credit = turn_credit(data["outcome"], data["gain"][:, :columns], table.tool_turn_mask_B_K, data["group"])
    return (
        spread(credit.advantage_B_K1, data["ids"], data["mask"]),
        spread(credit.clip_scale_B_K1, data["ids"], data["mask"], fill=1.0),
    )


def definition(data: dict[str, torch.Tensor], rows: int) -> tuple[list[list[float]], list[list[float]]]:
    """Computes every token separately from the equations, for the first ``rows`` rows (whole groups)."""
    ids, mask, outcome, gain, tool_turns = _as_lists(data, rows)

    def token(row: int, t: int) -> tuple[float, float]:
        if not mask[row][t]:
            return 0.0, 1.0
        group = range(row // GROUP * GROUP, row // GROUP * GROUP + GROUP)
        answer = score(outcome[row], [outcome[i] for i in group])
        k, own = ids[row][t], tool_turns[row]
        if k == own:
            return answer, 1.0
        z = [score(gain[row][j], [gain[i][j] for i in group if tool_turns[i] > j]) for j in range(k, own)]
        return 0.3 * sum(z) / math.sqrt(own - k) + answer, 1 + 0.3 * (2 / (1 + math.exp(-z[0])) - 1)

    return _unzipped([[token(row, t) for t in range(len(ids[row]))] for row in range(rows)])


def cached(data: dict[str, torch.Tensor], rows: int) -> tuple[list[list[float]], list[list[float]]]:
    """The same, but computes every turn's value once and looks it up for its tokens, the fastest way with lists."""
    ids, mask, outcome, gain, tool_turns = _as_lists(data, rows)
    result = []
    for row in range(rows):
        group = range(row // GROUP * GROUP, row // GROUP * GROUP + GROUP)
        answer, own = score(outcome[row], [outcome[i] for i in group]), tool_turns[row]
        z = [score(gain[row][j], [gain[i][j] for i in group if tool_turns[i] > j]) for j in range(own)]
        of_turn = [
            (0.3 * sum(z[k:]) / math.sqrt(own - k) + answer, 1 + 0.3 * (2 / (1 + math.exp(-z[k])) - 1))
            for k in range(own)
        ] + [(answer, 1.0)]
        result.append([of_turn[k] if m else (0.0, 1.0) for k, m in zip(ids[row], mask[row], strict=True)])
    return _unzipped(result)


def _as_lists(data: dict[str, torch.Tensor], rows: int) -> tuple[list, ...]:
    ids, mask, outcome, gain = (data[name][:rows].tolist() for name in ("ids", "mask", "outcome", "gain"))
    tool_turns = [max(k for k, m in zip(*row, strict=True) if m) for row in zip(ids, mask, strict=True)]
    return ids, mask, outcome, gain, tool_turns


def _unzipped(pairs: list[list[tuple[float, float]]]) -> tuple[list[list[float]], list[list[float]]]:
    return [[a for a, _ in row] for row in pairs], [[c for _, c in row] for row in pairs]


def score(value: float, values: list[float]) -> float:
    if len(values) < 2:
        return 0.0
    mean = math.fsum(values) / len(values)
    variance = math.fsum((v - mean) ** 2 for v in values) / len(values)
    return (value - mean) / (math.sqrt(variance + 1e-8) + 1e-6)


def loss_pair(data: dict[str, torch.Tensor], rows: int) -> tuple[Callable[[], None], Callable[[], None]]:
    """(ours, verl's vanilla): forward and backward on the same tensors."""
    from verl.trainer.ppo import core_algos
    from verl.workers.config import ActorConfig

    config = ActorConfig(strategy="fsdp2", rollout_n=1, ppo_micro_batch_size_per_gpu=1)
    random = torch.Generator().manual_seed(1)
    advantage, scale = (tensor[:rows].contiguous() for tensor in tables(data))
    ids, mask = data["ids"][:rows].contiguous(), data["mask"][:rows].contiguous()
    old = -torch.rand(mask.shape, generator=random)
    new = (old + 0.02 * torch.randn(mask.shape, generator=random)).requires_grad_()
    vanilla = core_algos.get_policy_loss_fn("vanilla")

    def ours() -> None:
        new.grad = None
        loss, _ = turn_policy_loss(
            new, old, advantage, mask, ids, clip_ratio_low=0.2, clip_ratio_high=0.2, clip_scale_B_T=scale
        )
        loss.backward()

    def theirs() -> None:
        new.grad = None
        loss, _ = vanilla(old, new, advantage, mask, "token-mean", config)
        loss.backward()

    return ours, theirs


def token_ratios(data: dict[str, torch.Tensor]) -> dict[str, float]:
    """Time of the token level over that of `tables`."""
    random = torch.Generator().manual_seed(2)
    rows, tokens = data["mask"].shape
    advantage, _ = tables(data)
    entropy = 3 * torch.rand(rows, tokens, generator=random)
    planning = torch.rand(rows, tokens, generator=random) < 0.1
    given = {"uncertainty_B_T": entropy, "group_B": data["group"], "sepa_lambda": 0.5}
    level = {
        mode: {**given, "transform_mode": mode, "planning_B_T": planning if mode.endswith("hicra") else None}
        for mode in TOKEN_MODES
    }
    timed = samples(
        lambda: tables(data),
        *(
            lambda options=options: token_credit(advantage, data["mask"], **options)
            for options in level.values()
        ),
        lambda: gtpo_canonical(data["outcome"], entropy, data["mask"], data["group"]),
        repeats=TOKEN_REPEATS,
        clock=time.process_time,
    )
    table_s, *token_s = map(min, timed)
    names = (*TOKEN_MODES, "gtpo_canonical")
    return {f"{name}_to_tables": round(s / table_s, 2) for name, s in zip(names, token_s, strict=True)}


def seconds(*functions: Callable[[], object], repeats: int = REPEATS) -> list[float]:
    """Median wall-clock seconds of each; the runs alternate, so that disturbances affect all."""
    return [statistics.median(times) for times in samples(*functions, repeats=repeats)]


def samples(
    *functions: Callable[[], object], repeats: int, clock: Callable[[], float] = time.perf_counter
) -> list[list[float]]:
    taken: list[list[float]] = [[] for _ in functions]
    for _ in range(repeats + 1):
        for function, times in zip(functions, taken, strict=True):
            start = clock()
            function()
            times.append(clock() - start)
    return [times[1:] for times in taken]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rows", nargs="?", type=int, default=1024)
    parser.add_argument("tokens", nargs="?", type=int, default=8192)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    data = batch(arguments.rows, arguments.tokens)
    n, few = min(ORACLE_ROWS, arguments.rows), min(GROUP, arguments.rows)
    ours = tables(data)
    for oracle, rows in ((definition, few), (cached, n)):
        for tensor, expected in zip(ours, oracle(data, rows), strict=True):
            torch.testing.assert_close(
                tensor[:rows].double(), torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-5
            )
    (table_s,) = seconds(lambda: tables(data))
    (definition_s,) = (s / few * arguments.rows for s in seconds(lambda: definition(data, few), repeats=3))
    (cached_s,) = (s / n * arguments.rows for s in seconds(lambda: cached(data, n), repeats=3))
    losses = samples(*loss_pair(data, min(LOSS_ROWS, arguments.rows)), repeats=LOSS_REPEATS)
    loss_s, vanilla_s = map(statistics.median, losses)
    result = {
        "machine": f"{platform.machine()}, torch {torch.__version__}, 1 thread",
        "rows": arguments.rows,
        "tokens": arguments.tokens,
        "tables_ms": round(table_s * 1e3, 1),
        "definition_ms": round(definition_s * 1e3),
        "definition_to_tables": round(definition_s / table_s),
        "cached_loop_ms": round(cached_s * 1e3),
        "cached_loop_to_tables": round(cached_s / table_s),
        "loss_rows": min(LOSS_ROWS, arguments.rows),
        "loss_ms": round(loss_s * 1e3, 2),
        "vanilla_ms": round(vanilla_s * 1e3, 2),
        "loss_to_vanilla": round(statistics.median(a / b for a, b in zip(*losses, strict=True)), 3),
        **token_ratios(data),
    }
    for key, value in result.items():
        print(f"{key:20} {value}")
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
