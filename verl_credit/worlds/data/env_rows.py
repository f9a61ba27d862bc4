"""Rows of an environment in verl's format: one for each seed, whose prompt has the environment's first observation."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as parquet

from verl_credit.config.keys import Environment
from verl_credit.names import ENV_AGENT
from verl_credit.worlds.data.output import check_free, staged
from verl_credit.worlds.data.records import PrepareError
from verl_credit.worlds.environments.interface import shown_step
from verl_credit.worlds.environments.pool import Fault, Pool

PROMPTS = {
    "text": "You act in an environment. After each observation write your next action, and nothing else.",
    "tag": "You act in an environment. After each observation write your next action between <action> and </action>.",
}
"""What the system message says where the user gives no file, by environment.action."""


def seeds_of(text: str, option: str) -> range:
    """The seeds FIRST:END, without the end. Raises PrepareError."""
    first, _, end = text.partition(":")
    if not (first.isdecimal() and end.isdecimal() and int(first) < int(end)):
        raise PrepareError(f"{option}={text}: expected FIRST:END, two whole numbers, the first one smaller")
    return range(int(first), int(end))


def prepare_environment(
    given: Environment,
    splits: Mapping[str, range],
    out: Path,
    *,
    prompt: str | None = None,
    options: Mapping[str, Any] | None = None,
    overwrite: bool = False,
) -> dict[str, tuple[int, int]]:
    """Writes NAME.parquet for each split. Returns (rows, different first observations) of each.

    ``options``: of every reset; ``{seed}`` in a text is the row's seed. Raises PrepareError.
    """
    text = PROMPTS.get(given.action) if prompt is None else prompt
    if text is None:
        raise PrepareError(
            f"--prompt is missing: environment.action={given.action} does not say how an action is written"
        )
    names = list(splits)
    for place, name in enumerate(names):
        for other in names[place + 1 :]:
            if shared := range(
                max(splits[name].start, splits[other].start), min(splits[name].stop, splits[other].stop)
            ):
                raise PrepareError(
                    f"{name} and {other} share {len(shared)} seeds, the first {shared[0]}; give others"
                )
    check_free(out, overwrite)
    counts = {}
    with staged(out, overwrite) as stage:
        for name, seeds in splits.items():
            firsts = asyncio.run(_first_observations(given, seeds, options or {}))
            rows = [_row(given, name, number, text, *first) for number, first in enumerate(firsts)]
            parquet.write_table(pa.Table.from_pylist(rows), stage / f"{name}.parquet")
            counts[name] = len(rows), len({first for _, _, first in firsts})
    return counts


async def _first_observations(
    given: Environment, seeds: Sequence[int], options: Mapping[str, Any]
) -> list[tuple[int, dict, str]]:
    limits = {name: getattr(given, name) for name in ("processes", "deadline_s", "start_s", "max_chars")}
    pool, found = Pool(given.path or "", given.kwargs, **limits), []
    try:
        for seed in seeds:
            of_row = {
                k: v.replace("{seed}", str(seed)) if isinstance(v, str) else v for k, v in options.items()
            }
            try:
                rollout, step = await pool.reset(seed, of_row)
            except Fault as fault:
                raise PrepareError(f"environment.path={given.path}, seed {seed}: {fault}") from fault
            found.append((seed, of_row, shown_step(step, given.list_actions)))
            await pool.close(rollout)
    finally:
        await pool.end()
    return found


def _row(
    given: Environment, split: str, number: int, text: str, seed: int, options: dict, first: str
) -> dict:
    task = {"seed": seed, "observation": first} | ({"options": options} if options else {})
    return {
        "data_source": str(given.kwargs.get("id") or (given.path or "").replace(":", ".").rpartition(".")[2]),
        "agent_name": ENV_AGENT,
        "prompt": [{"role": "system", "content": text}, {"role": "user", "content": first}],
        "ability": "environment",
        "reward_model": {"style": "rule", "ground_truth": ""},
        "extra_info": {"index": number, "split": split, "question": first, "environment": task},
    }
