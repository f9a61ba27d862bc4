"""The page of a run with its choice of trajectories and the sentences that explain their groups."""

from functools import cache, partial
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template

from verl_credit.credit.groups import SOLVED_ABOVE
from verl_credit.credit.turn.modes import MODES
from verl_credit.records.report import text
from verl_credit.records.report.curves import panel_data_uri
from verl_credit.records.report.lens import NO_TABLES, lens
from verl_credit.records.report.opening import opening
from verl_credit.records.report.panels import Panel
from verl_credit.records.report.run_data import Run
from verl_credit.records.report.summary import ending, held_out_lines, held_out_rows, notes, training_rows
from verl_credit.records.run.files import VALIDATION

# Longer blocks scroll, so that one page of search results does not push the next turn out of sight.
SCROLL_CHARACTERS = 1200
# algorithm.info_gain_context decides what a gain's sign means.
GAIN_MEANS = {
    "observation": "after reading it than before",
    "call": "at the end of the turn's call than at the end of the call before (what it returned counts next turn)",
}
# Key: is the turn reward something else than information gain? Values: its name, its short name, the meaning of its sign.
SIGNALS = {
    False: ("Information gain", "gain", "gold answer likelier", "gold answer less likely", "no difference"),
    True: ("Turn reward", "reward", "above 0", "below 0", "0"),
}


RECENT_STEPS = 10


def solved(trajectory: dict) -> bool:
    """Is it solved, as the group metrics count it?"""
    return trajectory["outcome"] > SOLVED_ABOVE


def mixed(row: dict) -> bool:
    """Its group has several outcomes: outcomes and gains both act."""
    return len({one["outcome"] for one in row["group"]}) > 1


def choose(trajectories: list[dict], count: int = 3) -> list[dict]:
    """Returns up to ``count`` trajectories: a solved and a failed one if both exist, then what differs most.

    Within the last ``RECENT_STEPS`` recorded steps groups with several outcomes come first, then a search that differs
    from its siblings', then more turns, then the later step; older trajectories are taken only when the recent ones do
    not suffice. Solved trajectories are listed first.
    """
    recent = set(sorted({row["step"] for row in trajectories})[-RECENT_STEPS:])

    def rank(row: dict) -> tuple:
        count, step = len(row["turns"]), row["step"]
        stands_out = any(abs(turn["z"] or 0.0) > 0.5 for turn in row["turns"])
        return (True, mixed(row), stands_out, count, step) if step in recent else (False, step, count)

    ordered = sorted(trajectories, key=rank, reverse=True)
    chosen: list[dict] = []
    for wanted in (True, False):
        chosen += [row for row in ordered if solved(row) is wanted][:1]
    while len(chosen) < min(count, len(ordered)):
        left = [row for row in ordered if not any(row is taken for taken in chosen)]
        seen = {name: {taken[name] for taken in chosen} for name in ("question", "outcome")}
        # A new question comes first, then a new outcome; max() keeps the order among equals.
        chosen.append(max(left, key=lambda row: [row[name] not in known for name, known in seen.items()]))
    return sorted(chosen[:count], key=solved, reverse=True)


def heading(group: list[dict]) -> str:
    count = sum(solved(one) for one in group)
    return f"The group: {len(group)} rollout{'s' * (len(group) > 1)} of this question, {count} solved"


def searches(group: list[dict]) -> int:
    """Columns of the table: the most turns before the answer."""
    return max(len(one["turns"]) - 1 for one in group)


def sentences(row: dict, scale: text.Scale, by_values: bool = False) -> list[str]:
    """Returns the sentences that explain the advantages of ``row``. ``scale``: of the advantages. ``by_values``: the credit
    compares no rollouts."""
    if by_values:
        return [
            "Credit follows values of states: a turn is compared with what was expected before it, not with its siblings."
        ]
    group = row["group"]
    turns = [turn for one in group for turn in one["turns"]]
    lines = ["Credit is relative to the group: every rollout is compared with its siblings."]
    if any(turn["z"] is not None for turn in turns):
        lines = [
            "Credit is relative to the group: a search that raised the probability of the gold answer is still made less "
            "likely where its siblings raised it more, or where they solved the question and its rollout did not."
        ]
    if len(group) > 1 and not mixed(row):
        all_did = "solved" if solved(group[0]) else "failed"
        if not any(scale.counts(turn["advantage"]) for turn in turns):
            effect = "so the update learns nothing from them"
        elif any(turn["reward"] is not None for turn in turns):
            effect = "so the outcomes cancel and only the turn rewards act"
        else:
            effect = "so the outcomes tell them not apart"
        lines.append(f"This group tied: all {len(group)} rollouts {all_did}, {effect}.")
    return lines


def direction(value: float | None, scale: text.Scale, above: str, below: str, zero: str) -> str:
    """The sign in words; noise has none."""
    if value is None:
        return "not recorded"
    return zero if not scale.counts(value) else above if value > 0 else below


@cache
def template(name: str) -> Template:
    """Returns a template that escapes every value; a missing value is an error."""
    strict = {"autoescape": True, "finalize": text.bounded, "undefined": StrictUndefined}
    environment = Environment(loader=FileSystemLoader(Path(__file__).parent), **strict)
    environment.filters |= {name: getattr(text, name) for name in ("dialogue", "signed", "plain", "percent")}
    return environment.get_template(name)


def page(run: Run, panels: list[Panel]) -> str:
    """A complete HTML document. Both colour scales are the run's, so that equal colours mean equal values."""
    turns = [turn for row in run.trajectories for turn in row["turns"]]
    scales = {name: text.Scale.of(turn[name] for turn in turns) for name in ("advantage", "reward")}
    found = lens(run.folder, run.metrics[-1]["step"], scales)
    warnings, others = notes(run)
    context = run.settings.get("algorithm.info_gain_context", "observation")
    mode = MODES.get(run.settings.get("algorithm.info_gain_norm_mode", ""))
    return template("page.html").render(
        run=run,
        title=f"Run report: {run.folder.resolve().name}",
        ending=ending(run),
        held_out_lines=held_out_lines(run),
        warnings=warnings,
        notes=others,
        opening=opening(found.groups[0], scales["advantage"]) if found.groups else None,
        groups=[("Held-out questions", held_out_rows(run)), ("Training", training_rows(run))],
        panels=panels,
        picture=panel_data_uri,
        lens=found,
        no_tables=NO_TABLES,
        chosen=choose(run.trajectories),
        scales=scales,
        signal=SIGNALS[run.other_signal],
        compared=GAIN_MEANS.get(context, "than before"),
        stopped=text.STOPPED,
        solved=solved,
        heading=heading,
        searches=searches,
        sentences=partial(sentences, by_values=mode is not None and not mode.compares),
        direction=direction,
        scroll_characters=SCROLL_CHARACTERS,
        validation=VALIDATION,
    )
