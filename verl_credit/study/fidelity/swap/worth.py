"""What an alternative is worth: V behind one that searches, the outcome of one that ends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from verl_credit.study.fidelity.scored import ScoredTurn
from verl_credit.study.fidelity.swap.decisions import Alternative, Decision
from verl_credit.study.fidelity.values import Value
from verl_credit.worlds.rollouts.sampler import digest


def worth(alternative: Alternative, values: Mapping[str, Value]) -> float:
    """Q."""
    step = alternative.step
    return step.reward if step.next is None else values[digest(step.next.ids)].value


def as_turns(
    decisions: Sequence[Decision], values: Mapping[str, Value], judge: Mapping[str, Value], completions: int
) -> list[ScoredTurn]:
    """An alternative as a turn of a trajectory that is its decision, once for every completion, by completion: what
    `Agreements` measures within trajectories, and within turns of one number, is then measured within decisions.

    V(s_k) and its error are left out. ``judge`` gives Q, ``values`` its halves.
    """
    found = []
    for number, decision in enumerate(decisions):
        for completion in range(completions):
            for a in decision.alternatives:
                after = None if a.step.next is None else digest(a.step.next.ids)
                first, second = (a.step.reward,) * 2 if after is None else values[after].halves
                variance = 0.0 if after is None else judge[after].variance
                found.append(
                    ScoredTurn(
                        prompt=decision.prompt,
                        trajectory=number * completions + completion,
                        turn=number * completions + completion,
                        kind="tool",
                        before=digest(decision.state.ids),
                        after=after,
                        a_star=worth(a, judge),
                        a_first=first,
                        a_second=second,
                        se=variance**0.5,
                        variance_before=0.0,
                        variance_after=variance,
                        gain=None,
                        outcome=worth(a, judge),
                    )
                )
    return found
