"""The trials and their results as a page of Markdown in the public format.

Departures from the released page, where a hypothesis could break it: line breaks become blanks, pipes and backticks are
escaped, control characters are written as escapes. A limit of 0 shows nothing. An id that already has the prefix
``exp_`` gets no second prefix.
"""

from collections.abc import Iterable, Sequence

from verl_credit.errors import one_line
from verl_credit.records.lineage.trial import Trial

NONE = "\N{EM DASH}"


def page(
    for_specialist: str,
    session_timestamp: str,
    *,
    to_best: Sequence[Trial],
    top: Sequence[Trial],
    recent: Sequence[Trial],
    full: Sequence[Trial],
) -> str:
    """Returns the page. ``to_best``: the trials from the root to the best; ``recent`` and ``full`` have the newest first."""
    label, metric, current = NONE, NONE, [f"*({NONE})*"]
    if to_best:
        best = to_best[-1]
        label, metric = best.label, _metric(best.core_metric)
        current = [
            f"- **exp_id**: {_flat(best.exp_id)}",
            f"- **core_metric**: {metric}",
            f"- **specialist**: {_flat(best.specialist)}",
            f"- **hypothesis**: {_flat(_cut(best.hypothesis, 110))}",
        ]
        if best.snapshot_path:
            current.append(f"- **snapshot**: `{_flat(best.snapshot_path)}`")
    kept = [
        (t.exp_id, _metric(t.core_metric), _delta(t.delta_vs_best), t.specialist, _cut(t.hypothesis, 100))
        for t in top
    ]
    done = [
        (t.exp_id, t.specialist, t.status, _metric(t.core_metric), _cut(t.hypothesis, 80)) for t in recent
    ]
    board = ("exp", "core_metric", "Δ", "specialist", "hypothesis")
    activity = ("exp", "specialist", "status", "core_metric", "hypothesis")
    lines = [
        f"# Session start — {_flat(session_timestamp) or NONE}",
        f"You are specialist **{_flat(for_specialist)}**. Current best: **{label}** (core_metric={metric}).",
        *("", "## LEADERBOARD.md", "", "## Current Best", *current, ""),
        *(f"## Top {len(top)} Kept Trials", "", *(_table(board, kept) if top else ["*(no keeps yet)*"]), ""),
        *(
            "## KNOWLEDGE.md",
            "",
            "**Current-best lineage** (root → best):",
            "```",
            *_steps(to_best),
            "```",
            "",
        ),
        *(f"## Recent Activity (last {len(recent)})", "", *_table(activity, done), ""),
    ]
    if full:
        lines += [f"## Recent Activity (most recent {len(full)} — full hypothesis)", *_in_full(full), ""]
    return "\n".join(lines) + "\n"


def _table(names: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterable[str]:
    yield f"| {' | '.join(names)} |"
    yield f"|{'|'.join('-' * (len(name) + 2) for name in names)}|"
    yield from (f"| {' | '.join(map(_flat, cells))} |" for cells in rows)


def _steps(to_best: Sequence[Trial]) -> Iterable[str]:
    for t in to_best:
        before, after = (" └─ " if t is not to_best[0] else ""), (" ← BEST" if t is to_best[-1] else "")
        facts = _facts(one_line(t.specialist) or "baseline", t)
        yield f"{before}{one_line(t.label)} {facts} {_cut(t.hypothesis, 100)}{after}"


def _in_full(full: Sequence[Trial]) -> Iterable[str]:
    for t in full:
        yield f"- {_flat(t.label)} {_facts(_flat(t.specialist), t)} {_flat(t.hypothesis)}"
        if t.notes:
            yield f"  └─ {_flat(_cut(t.notes, 200))}"


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
