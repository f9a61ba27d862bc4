"""The pages of `verl-credit evaluate`: the measures, and every trajectory, on pages of `QUESTIONS` questions each."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from verl_credit.records.report.page import SCROLL_CHARACTERS, template
from verl_credit.records.report.text import STOPPED, colour, percent, plain
from verl_credit.records.run.files import write_text

PAGE = "evaluation.html"
QUESTIONS = 100
LABELS = {
    "em": "Exact match (EM)",
    "f1": "F1",
    "answered": "Ended with an answer",
    "calls": "Tool calls per trajectory",
    "reward": "Reward",
    "return": "Return of an environment",
    "steps": "Steps in an environment",
}


def label(measure: str) -> str:
    return LABELS.get(measure, measure)


def number(measure: str, value: float | None) -> str:
    if value is None:
        return "undefined"
    return plain(value) if measure in ("calls", "reward", "return", "steps") else percent(value)


def interval(row: Mapping[str, Any]) -> str:
    if row["low"] is None:
        return "no interval"
    return f"{number(row['measure'], row['low'])} to {number(row['measure'], row['high'])}"


def write_pages(folder: Path, result: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], right) -> Path:
    """Writes complete HTML documents without a script; returns the first. ``right``: is a row's answer right?"""
    questions: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        questions.setdefault(row["id"], []).append(row)
    several, parts = list(questions.values()), []
    shown = {"right": right, "stopped": STOPPED, "colour": colour(None, 1.0), "start": PAGE}
    for begin in range(0, len(several), QUESTIONS):
        part = several[begin : begin + QUESTIONS]
        name, first, last = f"trajectories_{len(parts) + 1:04d}.html", begin + 1, begin + len(part)
        parts.append((name, first, last))
        title = f"{result['name']}: questions {first} to {last}"
        page = template("evaluation_trajectories.html")
        text = page.render(
            shown, title=title, first=first, questions=part, scroll_characters=SCROLL_CHARACTERS
        )
        write_text(folder / name, text)
    tables: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for row in result["measures"]:
        tables.setdefault((row["source"], row["mode"]), []).append(row)
    words = {"label": label, "number": number, "interval": interval}
    text = template("evaluation.html").render(words, result=result, tables=tables, parts=parts)
    return write_text(folder / PAGE, text)
