"""The trials and their results as a page of Markdown in the public format.

Departures from the released page, where a hypothesis could break it: line breaks become blanks, pipes and backticks are
escaped, control characters are written as escapes. A limit of 0 shows nothing. An id that already has the prefix
``exp_`` gets no second prefix.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from verl_credit.errors import one_line
from verl_credit.records.lineage.trial import Trial

NONE = "\N{EM DASH}"


@dataclass(frozen=True)
class LineageSnapshot:
    """The page and what stands on it; activity is newest first."""

    rendered_prompt: str
    current_best: Trial | None
    chain_to_best: tuple[Trial, ...]
    top_k_leaderboard: tuple[Trial, ...]
    recent_n_activity: tuple[Trial, ...]
    last_m_with_full_hypothesis: tuple[Trial, ...]


def page(found: LineageSnapshot, trials: Sequence[Trial], for_specialist: str, session_timestamp: str) -> str:
    if not trials:
        return "# Session start — empty lineage\n"
    best = found.current_best
    lines = [
        f"# Session start — {_flat(session_timestamp) or NONE}",
        f"You are specialist **{_flat(for_specialist)}**. Current best: **{best.label if best else NONE}** "
        f"(core_metric={_metric(best.core_metric if best else None)}).",
        "",
        *_leaderboard(best, found.top_k_leaderboard),
        *_knowledge(found.chain_to_best),
        *_activity(found.recent_n_activity),
        *_in_full(found.last_m_with_full_hypothesis),
    ]
    return "\n".join(lines) + "\n"


def _leaderboard(best: Trial | None, top: Sequence[Trial]) -> list[str]:
    current = [f"*({NONE})*"]
    if best:
        current = [
            f"- **exp_id**: {_flat(best.exp_id)}",
            f"- **core_metric**: {_metric(best.core_metric)}",
            f"- **specialist**: {_flat(best.specialist)}",
            f"- **hypothesis**: {_flat(_cut(best.hypothesis, 110))}",
            *([f"- **snapshot**: {_code(best.snapshot_path)}"] if best.snapshot_path else []),
        ]
    lines = ["## LEADERBOARD.md", "", "## Current Best", *current, "", f"## Top {len(top)} Kept Trials", ""]
    if not top:
        return [*lines, "*(no keeps yet)*", ""]
    lines += [
        "| exp | core_metric | Δ | specialist | hypothesis |",
        "|-----|-------------|---|------------|------------|",
    ]
    for t in top:
        metric, delta = _metric(t.core_metric), _delta(t.delta_vs_best)
        lines.append(_row(t.exp_id, metric, delta, t.specialist, _cut(t.hypothesis, 100)))
    return [*lines, ""]


def _knowledge(to_best: Sequence[Trial]) -> list[str]:
    lines = []
    for place, t in enumerate(to_best):
        facts = _facts(one_line(t.specialist) or "baseline", t)
        lines.append(f"{' └─ ' if place else ''}{one_line(t.label)} {facts} {_cut(t.hypothesis, 100)}")
    if lines:
        lines[-1] += " ← BEST"
    return ["## KNOWLEDGE.md", "", "**Current-best lineage** (root → best):", "```", *lines, "```", ""]


def _activity(recent: Sequence[Trial]) -> list[str]:
    return [
        f"## Recent Activity (last {len(recent)})",
        "",
        "| exp | specialist | status | core_metric | hypothesis |",
        "|-----|------------|--------|-------------|------------|",
        *(
            _row(t.exp_id, t.specialist, t.status, _metric(t.core_metric), _cut(t.hypothesis, 80))
            for t in recent
        ),
        "",
    ]


def _in_full(full: Sequence[Trial]) -> list[str]:
    if not full:
        return []
    lines = [f"## Recent Activity (most recent {len(full)} — full hypothesis)"]
    for t in full:
        lines.append(f"- {_flat(t.label)} {_facts(_flat(t.specialist), t)} {_flat(t.hypothesis)}")
        if t.notes:
            lines.append(f"  └─ {_flat(_cut(t.notes, 200))}")
    return [*lines, ""]


def _facts(specialist: str, t: Trial) -> str:
    return f"[{specialist}, {t.status}, metric={_metric(t.core_metric)}, Δ={_delta(t.delta_vs_best)}]"


def _metric(value: float | None) -> str:
    return NONE if value is None else f"{value:.6f}"


def _delta(value: float | None) -> str:
    return NONE if value is None else f"{value:+.6f}"


def _cut(text: str, n: int) -> str:
    """Returns at most n characters, on one line."""
    text = one_line(text)
    return text if len(text) <= n else text[: n - 1] + "…"


def _flat(text: str) -> str:
    """Escapes the text so that nothing in it ends a Markdown line, a cell or a span of code."""
    return one_line(text).replace("`", "\\`").replace("|", "\\|")


def _row(*cells: str) -> str:
    return f"| {' | '.join(map(_flat, cells))} |"


def _code(text: str) -> str:
    """A span of code, with as many backticks around it as it needs."""
    text, ticks = one_line(text), "`"
    while ticks in text:
        ticks += "`"
    return f"`{text}`" if ticks == "`" else f"{ticks} {text} {ticks}"
