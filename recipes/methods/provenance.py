"""Provenance: which turn first showed the page that the answer rests on, right or wrong; `algorithm.turn_signal=provenance`.

Papers: STAMP (2607.11172) and ECHO (2606.31650) credit such turns; their formulas were not read: this one is the project's.
Equation: r_k = 1 for a turn that first showed a page that the last turn cites ([id]), or where none is cited the first page
with the answer's text; 0 for other turns that searched; a turn without a search has no reward. No gold answer is read.
Exact bias: none is known, because the exact world has no pages.
Own cosine minus GRPO's on the lab's policies (9): -.007 ± .020 in turn-group-v1d, -.010 ± .053 as calibadv's evidence.
Area over GRPO: not run.
Commit: 23dae403 had it in verl_credit.turns.signals.
"""

from verl_credit.turns.reward.qa import final_answer, stands_in
from verl_credit.turns.signals.signal import Group, Trajectory
from verl_credit.turns.thoughts import without_thoughts


def provenance(group: Group) -> list[list[float | None]]:
    """A value for every tool turn of every trajectory, None for a turn that did not search."""
    return [_of(trajectory) for trajectory in group.trajectories]


provenance.reads = ("pages",)


def _of(trajectory: Trajectory) -> list[float | None]:
    first_of: dict[str, int] = {}
    for number, turn in enumerate(trajectory.turns):
        for page in turn.pages or ():
            first_of.setdefault(page, number)
    text = without_thoughts(trajectory.turns[-1].text) if trajectory.turns else ""
    credited = {number for page, number in first_of.items() if f"[{page}]" in text}
    answer = final_answer(text, trajectory.ground_truth)
    if answer and not credited:
        searched = (number for number, turn in enumerate(trajectory.turns) if turn.pages is not None)
        holding = (number for number in searched if stands_in(trajectory.turns[number].observation, [answer]))
        credited = {next(holding, -1)}
    return [
        None if turn.pages is None else float(number in credited)
        for number, turn in enumerate(trajectory.tool_turns)
    ]
