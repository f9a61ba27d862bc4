"""The choice of the trajectories in a report, and the sentences that explain their groups."""

from __future__ import annotations

RECENT_STEPS = 10


def solved(trajectory: dict) -> bool:
    """An outcome above 0.5, as the group metrics count it."""
    return (trajectory.get("outcome") or 0.0) > 0.5


def mixed(row: dict) -> bool:
    """Its group has several outcomes: outcomes and gains both act."""
    return len({one.get("outcome") for one in row.get("group") or ()}) > 1


def choose(trajectories: list[dict], count: int = 3) -> list[dict]:
    """Returns up to ``count`` trajectories: a solved and a failed one if both exist, then what differs most.

    Within the last ``RECENT_STEPS`` recorded steps groups with several outcomes come first, then a search that differs
    from its siblings', then more turns, then the later step; older trajectories are taken only when the recent ones do
    not suffice. Solved trajectories are listed first.
    """
    usable = [row for row in trajectories if row.get("turns")]
    recent = set(sorted({_step(row) for row in usable})[-RECENT_STEPS:])

    def rank(row: dict) -> tuple:
        turns, step = len(row["turns"]), _step(row)
        return (True, mixed(row), _stands_out(row), turns, step) if step in recent else (False, step, turns)

    ordered = sorted(usable, key=rank, reverse=True)
    chosen: list[dict] = []
    for wanted in (True, False):
        chosen += [row for row in ordered if solved(row) is wanted][:1]
    while len(chosen) < min(count, len(ordered)):
        left = [row for row in ordered if not any(row is taken for taken in chosen)]
        chosen.append(max(left, key=lambda row: _news(row, chosen)))
    return sorted(chosen[:count], key=solved, reverse=True)


def _stands_out(row: dict) -> bool:
    return any(abs(turn.get("z") or 0.0) > 0.5 for turn in row["turns"])


def _news(row: dict, chosen: list[dict]) -> tuple[bool, bool]:
    """Has the row a new question, and a new outcome? max() keeps the order among equals."""
    return (
        row.get("question") not in {taken.get("question") for taken in chosen},
        row.get("outcome") not in {taken.get("outcome") for taken in chosen},
    )


def _step(row: dict) -> int:
    return row.get("step") or 0


def heading(group: list[dict]) -> str:
    count = sum(solved(one) for one in group)
    return f"The group: {len(group)} rollout{'s' * (len(group) > 1)} of this question, {count} solved"


def searches(group: list[dict]) -> int:
    """Columns of the table: the most turns before the answer."""
    return max((len(one["turns"]) - 1 for one in group), default=0)


def sentences(row: dict) -> list[str]:
    """Returns the sentences that explain the advantages of ``row``, which has its group."""
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
        if not any(turn["advantage"] for turn in turns):
            effect = "so the update learns nothing from them"
        elif any(turn["reward"] is not None for turn in turns):
            effect = "so the outcomes cancel and only the turn rewards act"
        else:
            effect = "so the outcomes tell them not apart"
        lines.append(f"This group tied: all {len(group)} rollouts {all_did}, {effect}.")
    return lines
