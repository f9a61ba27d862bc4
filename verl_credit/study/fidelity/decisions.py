"""Decisions of sampled trajectories: the policy's own alternatives, their completions and values; and does a credit choose
the better alternative? By order and regret.

    Q(a)      V(s_{k+1}) after an alternative that searches, r of one that ends. A*(a) = Q(a) - V(s_k), and V(s_k) is the
              same for all alternatives of a decision: it cancels in everything here, and adds no error.
    pairs     share of the alternatives' pairs in the right order, of those whose Q differ by 4 standard errors; a tie of
              credit is one half
    searches  the same of pairs of two searches: which one, and not whether to search on
    within    correlation of credit and Q less their means over the decision, corrected for the noise of Q
    regret    Q(b) - Q(c): b is best by the first half of the continuations, c has the most credit (the mean over those that
              tie), and both are valued by the second half, so that chance in the choice of b does not raise its value. It is
              negative where c is better than b

Each twice, because an outcome depends on what came after the turn:

    one       credit from one completion after each alternative, as a training step gives it; mean over the completions
    mean      the mean credit over the completions: the chance of one completion mostly averages out, so that a wrong
              order is due to the credit itself

A credit that is affine in the outcome orders rightly in ``mean`` as completions grow, because its mean is affine in Q.
Intervals are by bootstrap over prompts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from verl_credit.study.fidelity.agreements import Agreements
from verl_credit.study.fidelity.values import ScoredTurn, Value, part_of, turns_of
from verl_credit.study.stats import RESAMPLES, Measure, prompt_weights, with_interval
from verl_credit.worlds.rollouts.protocol import Protocol, State, Step
from verl_credit.worlds.rollouts.rollout import Groups, Start, Trajectory, roll
from verl_credit.worlds.rollouts.sampler import Ask, Ids, TurnSampler, digest, uniforms

ALTERNATIVES = 8
"""Draws from the policy, the original among them."""
PER_PROMPT = 2
CreditOfDecisions = Sequence[np.ndarray]
"""An array [alternatives, completions] for each decision."""


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

    @property
    def states(self) -> list[State]:
        """The decision's state and the states after its searches."""
        return [self.state, *(a.step.next for a in self.alternatives if a.step.next is not None)]


def find_decisions(
    groups: Groups, sampler: TurnSampler, protocol: Protocol, *, wanted: int, seed: int
) -> list[Decision]:
    """Returns decisions at up to ``wanted`` tool turns, in random order; at most `PER_PROMPT` a prompt, each context once.

    The other draws are taken from the same state at temperature 1. Turns whose draws are all equal are left out.
    """
    turns = [turn for turn in turns_of(groups) if turn[3].next is not None]
    by_context: dict[Ids, tuple[int, int, int, Step]] = {}
    for place in np.random.default_rng(seed).permutation(len(turns)):
        by_context.setdefault(turns[place][3].state.ids, turns[place])
    asks = []
    for state in (step.state for *_, step in by_context.values()):
        name, tokens = (seed, "alternative", digest(state.ids)), protocol.budget(state)
        asks.append(Ask(state.ids, uniforms(*name, particles=ALTERNATIVES - 1, tokens=tokens)))
    texts = sampler.sample(asks)
    decisions, of_prompt = [], Counter()
    for (prompt, number, turn, step), drawn in zip(by_context.values(), texts, strict=True):
        times = Counter([step.turn_ids, *drawn])
        if len(decisions) < wanted and len(times) > 1 and of_prompt[prompt] < PER_PROMPT:
            of_prompt[prompt] += 1
            steps = protocol.steps([(step.state, text) for text in times])
            alternatives = [Alternative(one, n) for one, n in zip(steps, times.values(), strict=True)]
            decisions.append(Decision(prompt, number, turn, alternatives))
    return decisions


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
    of_decisions = []
    for d in decisions:
        before, of_alternatives = groups[d.prompt][d.trajectory].steps[: d.turn], []
        for a in d.alternatives:
            rests = [[]] * completions if a.step.next is None else [path.steps for path in next(ends)]
            of_alternatives.append([Trajectory([*before, a.step, *rest]) for rest in rests])
        of_decisions.append(of_alternatives)
    return of_decisions


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
    for number, (decision, _) in enumerate(product(decisions, range(completions))):
        for a in decision.alternatives:
            after = None if a.step.next is None else digest(a.step.next.ids)
            first, second = (a.step.reward,) * 2 if after is None else values[after].halves
            variance = 0.0 if after is None else judge[after].variance
            turns.append(
                ScoredTurn(
                    prompt=decision.prompt,
                    trajectory=number,
                    turn=number,
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


@dataclass(frozen=True)
class Choice:
    pairs: Measure
    searches: Measure
    within: Measure
    regret: Measure


@dataclass(frozen=True)
class SwapAgreement:
    one: Choice
    mean: Choice


class SwapAgreements:
    """The true values of alternatives, prepared once; called with each credit."""

    def __init__(
        self,
        decisions: Sequence[Decision],
        values: Mapping[str, Value],
        completions: int,
        *,
        resamples: int = RESAMPLES,
    ):
        half = next(iter(values.values())).continuations // 2
        first, second = (part_of(values, part) for part in (slice(half), slice(half, None)))
        self._prompt = np.unique([d.prompt for d in decisions], return_inverse=True)[1]
        self._weights = prompt_weights(self._prompt.max() + 1, resamples)
        self._first, self._second = (
            [np.array([worth(a, some) for a in d.alternatives]) for d in decisions]
            for some in (first, second)
        )
        self._agreements = {}
        """The agreement over all alternatives, over those that search, and which alternatives search."""
        for held_out, n in product((False, True), {1, completions}):
            turns = as_turns(decisions, values, second if held_out else values, n)
            searches = [turn for turn in turns if turn.after is not None]
            both = (Agreements(some, one_half=held_out, resamples=resamples) for some in (turns, searches))
            self._agreements[held_out, n] = *both, np.array([turn.after is not None for turn in turns])
        of_all, of_searches, _ = self._agreements[False, 1]
        self.sure = of_all.sure[0], of_searches.sure[0]
        """Pairs of alternatives whose order is beyond doubt: of all, and of searches."""

    def of(self, credit: CreditOfDecisions, *, held_out: bool = False) -> SwapAgreement:
        """``held_out``: made from the first half of the continuations, and compared with the second."""
        mean = [of_one.mean(axis=1, keepdims=True) for of_one in credit]
        return SwapAgreement(one=self._choice(credit, held_out), mean=self._choice(mean, held_out))

    def regret_of_draws(self, decisions: Sequence[Decision]) -> Measure:
        """The regret of what the policy does by itself: the mean over its draws."""
        times = [np.array([a.times for a in d.alternatives]) for d in decisions]
        return self._regret([n[:, None] / n.sum() for n in times])

    def _choice(self, credit: CreditOfDecisions, held_out: bool) -> Choice:
        flat = np.concatenate([of_one.T.ravel() for of_one in credit])
        of_all, of_searches, is_search = self._agreements[held_out, credit[0].shape[1]]
        whole, searches = of_all.of(flat), of_searches.of(flat[is_search])
        regret = self._regret([_chosen(of_one) for of_one in credit])
        return Choice(whole.pairs, searches.pairs, whole.same_turn, regret)

    def _regret(self, share: CreditOfDecisions) -> Measure:
        """``share``: how often each alternative is taken."""
        regret = [
            float(second @ (_chosen(first[:, None])[:, 0] - of_one.mean(axis=1)))
            for first, second, of_one in zip(self._first, self._second, share, strict=True)
        ]
        sums, counts = np.bincount(self._prompt, weights=regret), np.bincount(self._prompt)
        return with_interval((self._weights @ sums) / (self._weights @ counts), len(regret))


def _chosen(credit_A_C: np.ndarray) -> np.ndarray:
    """[alternatives, completions]: 1 for the alternative with the most credit, shared among ties."""
    tied = credit_A_C >= credit_A_C.max(axis=0) - 1e-9 * (1 + np.abs(credit_A_C).max(axis=0))
    return tied / tied.sum(axis=0)
