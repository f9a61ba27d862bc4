"""Decisions of sampled trajectories: the policy's own alternatives, their completions, and their values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from verl_credit.study.fidelity.scored import ScoredTurn
from verl_credit.study.fidelity.values import Value
from verl_credit.worlds.rollouts.protocol import Protocol, State, Step
from verl_credit.worlds.rollouts.rollout import Groups, Start, Trajectory, roll
from verl_credit.worlds.rollouts.sampler import Ask, Ids, TurnSampler, digest, uniforms

ALTERNATIVES = 8
"""Draws from the policy, the original among them."""
PER_PROMPT = 2


@dataclass(frozen=True)
class Alternative:
    """A distinct text: a search, or a turn that ends (``step.next`` is None)."""

    step: Step
    times: int
    """The number of draws with this text."""


@dataclass(frozen=True)
class Decision:
    """Turn ``turn`` of trajectory ``trajectory`` of prompt ``prompt``, a search; at least two distinct alternatives."""

    prompt: int
    trajectory: int
    turn: int
    alternatives: list[Alternative]
    """The original first."""

    @property
    def state(self) -> State:
        return self.alternatives[0].step.state


def find_decisions(
    groups: Groups, sampler: TurnSampler, protocol: Protocol, *, wanted: int, seed: int
) -> list[Decision]:
    """Returns decisions at up to ``wanted`` tool turns, in random order; at most `PER_PROMPT` a prompt, each context once.

    The other draws are taken from the same state at temperature 1. Turns whose draws are all equal are left out.
    """
    turns = [
        (prompt, number, turn, step)
        for prompt, group in enumerate(groups)
        for number, trajectory in enumerate(group)
        for turn, step in enumerate(trajectory.steps[:-1])
    ]
    order = np.random.default_rng(seed).permutation(len(turns))
    by_context: dict[Ids, tuple[int, int, int, Step]] = {}
    for place in order:
        by_context.setdefault(turns[place][3].state.ids, turns[place])
    states = [step.state for *_, step in by_context.values()]
    texts = sampler.sample([_ask(state, protocol, seed) for state in states])
    decisions, of_prompt = [], Counter()
    for (prompt, number, turn, step), drawn in zip(by_context.values(), texts, strict=True):
        times = Counter([step.turn_ids, *drawn])
        if len(decisions) < wanted and len(times) > 1 and of_prompt[prompt] < PER_PROMPT:
            of_prompt[prompt] += 1
            steps = protocol.steps([(step.state, text) for text in times])
            alternatives = [Alternative(one, n) for one, n in zip(steps, times.values(), strict=True)]
            decisions.append(Decision(prompt, number, turn, alternatives))
    return decisions


def _ask(state: State, protocol: Protocol, seed: int) -> Ask:
    name = seed, "alternative", digest(state.ids)
    return Ask(state.ids, uniforms(*name, particles=ALTERNATIVES - 1, tokens=protocol.budget(state)))


def completed(
    decisions: Sequence[Decision],
    groups: Groups,
    sampler: TurnSampler,
    protocol: Protocol,
    *,
    completions: int,
    seed: int,
) -> list[list[list[Trajectory]]]:
    """``[decision][alternative][completion]``: the decision's trajectory up to its turn, the alternative, and how it ends.

    Completions are independent of the continuations that value a state. An alternative that ends has one way to end.
    """
    goes_on = [a.step.next for d in decisions for a in d.alternatives if a.step.next is not None]
    ends = iter(roll(sampler, protocol, [Start(state, completions, seed, "swap") for state in goes_on]))
    return [
        [
            [
                Trajectory([*groups[d.prompt][d.trajectory].steps[: d.turn], a.step, *rest])
                for rest in _rests(a, ends, completions)
            ]
            for a in d.alternatives
        ]
        for d in decisions
    ]


def _rests(alternative: Alternative, ends, completions: int) -> list[list[Step]]:
    if alternative.step.next is None:
        return [[]] * completions
    return [trajectory.steps for trajectory in next(ends)]


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
    turns = []
    for number, decision in enumerate(decisions):
        for completion in range(completions):
            for a in decision.alternatives:
                after = None if a.step.next is None else digest(a.step.next.ids)
                first, second = (a.step.reward,) * 2 if after is None else values[after].halves
                variance = 0.0 if after is None else judge[after].variance
                turns.append(
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
    return turns
