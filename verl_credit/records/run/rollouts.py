"""The kept rollouts of a run: their tokens with the credit of each, and their texts beside the credit of their turns."""

import json
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from verl_credit.records.run import table_files as tables
from verl_credit.records.run.files import plain

STEPS = 100
"""Steps whose texts are read at most; the latest that have some."""
OVER_TOKENS = ("pieces", "trained", "turn", "advantage", "old_log_prob", "planning", "uncertainty")
"""What a credit lens reads of each token."""


def token_steps(run_dir: Path) -> dict[int, Path]:
    """Steps of our estimator whose rollouts are kept token by token, and the file that has them."""
    kept = {}
    for step, path in tables.tables_of(run_dir, tables.ROLLOUTS).items():
        with suppress(tables.DamagedTable):  # the file's reader reports it
            if not tables.read_table(path, ("row",)).pipeline:
                continue
        kept[step] = path
    return kept


def read_tokens(path: Path) -> tables.StepTable:
    """A table of rollouts whose lists `OVER_TOKENS` have the policy's tokens alone. Raises DamagedTable."""
    table = tables.read_table(path)
    c = table.columns
    cut = {
        name: [
            values and [value for value, ours in zip(values, written, strict=True) if ours]
            for values, written in zip(c[name], c["written"], strict=True)
        ]
        for name in OVER_TOKENS
    }
    return replace(table, columns=c | cut)


def keep_samples(run_dir: Path, step: int) -> None:
    """The rollouts of a step go, but for the texts of the longest of each group. Nothing stays of a damaged file."""
    path = tables.table_path(run_dir, tables.ROLLOUTS, step)
    try:
        table = tables.read_table(path, tables.SAMPLE_NAMES)
    except tables.DamagedTable:  # no reason to end a run
        path.unlink(missing_ok=True)
        return
    if table.pipeline:
        write_samples(run_dir, step, table.columns, table.pipeline)
    path.unlink(missing_ok=True)


def write_samples(run_dir: Path, step: int, c: dict[str, list], pipeline: dict) -> None:
    """Keeps the texts of the longest rollout of each group. ``c``: the columns `SAMPLE_NAMES`, and any others."""
    longest: dict[int, int] = {}
    for line, group in enumerate(c["group"]):
        longest[group] = max(longest.get(group, line), line, key=lambda one: len(c["texts"][one] or ()))
    columns = {name: [c[name][line] for line in sorted(longest.values())] for name in tables.SAMPLE_NAMES}
    tables.write_table(run_dir, tables.SAMPLES, step, columns, pipeline)


def read_samples(run_dir: Path, last_step: int | None = None) -> tuple[list[dict], list[str]]:
    """(rollouts of the latest `STEPS` steps up to ``last_step`` that have some, what cannot be read).

    A rollout has the credit of its turns, and its whole ``group`` in numbers, itself at ``place``: credit means nothing
    without the siblings.
    """
    rows, problems = [], []
    kept = tables.tables_of(run_dir, tables.SAMPLES) | tables.tables_of(run_dir, tables.ROLLOUTS)
    for step in sorted(step for step in kept if last_step is None or step <= last_step)[-STEPS:]:
        try:
            table = tables.read_table(kept[step], tables.SAMPLE_NAMES)
            if table.pipeline:
                rows += _with_credit(table, tables.read_table(tables.table_path(run_dir, tables.TURNS, step)))
        except tables.DamagedTable as error:
            problems.append(f"{error}.")
        except (KeyError, TypeError, ValueError) as error:
            why = f"{type(error).__name__}: {error}"
            problems.append(f"The tables of step {step} do not fit together: {why}.")
    return rows, problems


def _with_credit(table: tables.StepTable, turns: tables.StepTable) -> list[dict]:
    credit: dict[int, dict] = {}  # each valid row has an entry
    t = turns.columns
    group_of = dict(zip(t["row"], t["group"], strict=True))
    for line, row in enumerate(t["row"]):
        if t["valid"][line]:
            turns_of_row = credit.setdefault(row, {"outcome": t["outcome"][line], "turns": []})["turns"]
            numbers = {name: t[name][line] for name in ("reward", "z", "advantage", "clip_scale")}
            turns_of_row.append(plain(numbers))
    c, rows = table.columns, []
    for line, row in enumerate(c["row"]):
        texts = zip(c["texts"][line], c["observations"][line], credit[row]["turns"], strict=True)
        members = [one for one in credit if group_of[one] == group_of[row]]
        shown = {name: c[name][line] for name in ("question", "golds", "stop_reason")}
        shown |= {name: json.loads(c[name][line]) for name in ("gold_ids", "searches")}
        rows.append(
            shown
            | {
                "step": table.step,
                "outcome": credit[row]["outcome"],
                "turns": [{"text": text, "observation": seen} | numbers for text, seen, numbers in texts],
                "group": [credit[one] for one in members],
                "place": members.index(row),
            }
        )
    return sorted(rows, key=lambda row: -len(row["turns"]))
