"""The table of the half hour: a line per run, and the rows beneath. It is complete whenever it is written."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from gpu.record import line

WAITING, RUNNING, DONE, CUT, FAILED, NOT_RUN = "waiting", "running", "done", "cut", "failed", "not run"
COLUMNS = {
    "run": "", "recipe": "", "state": "", "steps": "", "first_step_s": "s to the first step", "seconds": "s in all",
    "estimate_s": "s expected", "step_s": "s/step", "step_s_with_gains": "with gains", "step_s_without": "without",
    "contexts_scored": "contexts scored", "clip_scale_std": "clip scales' spread",
    "farthest_phase": "memory farthest from its plan", "mfu": "MFU", "verl_mfu": "verl's MFU", "k3": "k3",
    "resume": "resume", "engine": "engine", "remedies": "remedies", "why": "",
}  # fmt: skip


def runs(content: Mapping) -> str:
    """A line per run; columns in which no run has anything are left out."""
    lines = [
        {"run": name, **{k: v for k, v in state.items() if k in COLUMNS}, **state.get("numbers", {})}
        for name, state in content.get("runs", {}).items()
    ]
    used = [column for column in COLUMNS if any(cell(one.get(column)) for one in lines)]
    rows = [[COLUMNS[column] or column for column in used], ["---"] * len(used)]
    rows[0] = [text if text != "why" else "" for text in rows[0]]
    rows += [[cell(one.get(column)) for column in used] for one in lines]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def cell(value) -> str:
    text = "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)
    return " ".join(text.split()).replace("|", "\\|")


def write(out: Path, content: Mapping) -> None:
    """OUT/table.md, replaced as a whole."""
    out.mkdir(parents=True, exist_ok=True)
    found = "\n".join(line(row) for row in content["rows"])
    text = f"{content.get('device', '')}: {content['state']}\n\n{runs(content)}\n\n{found}\n"
    partial = out / "table.md.partial"
    partial.write_text(text, encoding="utf-8")
    partial.replace(out / "table.md")
