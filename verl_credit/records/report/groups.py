"""The siblings of a shown trajectory: all rollouts of its question in that step, and what must be said about them."""

from __future__ import annotations

from verl_credit.records.report.choose import mixed, solved


def heading(group: list[dict]) -> str:
    count = sum(solved(one) for one in group)
    return f"The group: {len(group)} rollout{'s' * (len(group) > 1)} of this question, {count} solved"


def searches(group: list[dict]) -> int:
    """Columns of the table: the most turns before the answer."""
    return max((len(one["turns"]) - 1 for one in group), default=0)


def sentences(row: dict) -> list[str]:
    """What a reader must know to understand an advantage; ``row`` has its group."""
    group = row["group"]
    turns = [turn for one in group for turn in one["turns"]]
    said = ["Credit is relative to the group: every rollout is compared with its siblings."]
    if any(turn["z"] is not None for turn in turns):
        said = [
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
        said.append(f"This group tied: all {len(group)} rollouts {all_did}, {effect}.")
    return said
