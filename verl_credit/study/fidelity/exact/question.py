"""A question as a small decision process, the tabular softmax policy over its choices, and every trajectory.

A question says what can be read, what that is worth, and how long one may search. The policy has one logit per state and
action, in float64. V and Q are found by dynamic programming.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import torch

from verl_credit.credit import info_gain

STOP = "stop"


@dataclass(frozen=True)
class Place:
    """The pages that a trajectory has read so far."""

    potential: float
    """The policy's probability of the gold answer here, above 0 and at most 1. A constant: no gradient goes through it."""
    success: float
    """Probability that an answer given here is right. 0 and 1 make one trajectory of a path, other values two."""
    searches: Mapping[str, tuple[str, float]] = field(default_factory=dict)
    """Query -> (the place that it leads to, its share of the policy's searches here)."""


@dataclass(frozen=True)
class Question:
    """Places by name. A trajectory has at most ``turns`` turns; the last one can only be the answer."""

    name: str
    places: Mapping[str, Place]
    start: str
    turns: int


# The page with the answer is one search away. Reading on without need makes the answer harder to find.
ONE_HOP = Question(
    name="one hop",
    start="question",
    turns=4,
    places={
        "question": Place(0.15, 0.4, {"answer": ("found", 0.6), "other": ("distractor", 0.4)}),
        "distractor": Place(0.08, 0.0, {"answer": ("found", 1.0)}),
        "found": Place(0.7, 1.0, {"more": ("crowded", 1.0)}),
        "crowded": Place(0.6, 0.5, {"more": ("crowded", 1.0)}),
    },
)
# The bridge page leads to the answer's page and hardly moves the potential, as on real text (evidence/real, section 2).
TWO_HOPS = Question(
    name="two hops",
    start="question",
    turns=4,
    places={
        "question": Place(0.1, 0.2, {"bridge": ("bridge", 0.6), "other": ("distractor", 0.4)}),
        "distractor": Place(0.06, 0.0, {"bridge": ("bridge", 1.0)}),
        "bridge": Place(0.12, 0.2, {"answer": ("both", 1.0)}),
        "both": Place(0.55, 1.0, {"more": ("crowded", 1.0)}),
        "crowded": Place(0.5, 0.5),
    },
)
QUESTIONS: Mapping[str, Question] = MappingProxyType({q.name: q for q in (ONE_HOP, TWO_HOPS)})


@dataclass(frozen=True)
class Choices:
    """S states (a place at a turn), in the order of their turns; D choices, each a state and an action: the parameters.

    In a state at the last turn, or at a place without searches, stop is the only choice: its probability is 1, and its
    logit has no gradient.
    """

    question: Question
    states: tuple[tuple[str, int], ...]
    actions: tuple[str, ...]
    state_D: torch.Tensor
    next_D: torch.Tensor
    """The state that the choice leads to; -1: the trajectory ends."""
    share_D: torch.Tensor
    """Share of a search among the searches of its state; 1 for stop."""

    @property
    def free_D(self) -> torch.Tensor:
        """The state has more than this choice."""
        return self.state_D.bincount()[self.state_D] > 1

    def log_prob_D(self, logits_D: torch.Tensor) -> torch.Tensor:
        """log pi(action | state) = logit - logsumexp of the state's logits; differentiable."""
        own_S_D = self.state_D == torch.arange(len(self.states))[:, None]
        return logits_D - torch.where(own_S_D, logits_D, -torch.inf).logsumexp(1)[self.state_D]

    def score_D_D(self, logits_D: torch.Tensor) -> torch.Tensor:
        """Row d: the gradient of log pi of choice d; 1 at d minus pi over the choices of its state."""
        same_D_D = self.state_D[:, None] == self.state_D
        return torch.eye(len(logits_D), dtype=torch.float64) - same_D_D * self.log_prob_D(logits_D).exp()

    def entropy_S(self, logits_D: torch.Tensor) -> torch.Tensor:
        log_prob_D = self.log_prob_D(logits_D)
        zeros_S = log_prob_D.new_zeros(len(self.states))
        return zeros_S.index_add(0, self.state_D, -log_prob_D.exp() * log_prob_D)

    def logits_with_stop(self, stop: float) -> torch.Tensor:
        """Logits of the policy that stops with probability ``stop`` wherever it may search, and searches by the shares."""
        chosen_D = torch.where(self.next_D < 0, stop, (1 - stop) * self.share_D)
        return torch.where(self.free_D, chosen_D, 1.0).log()


def list_choices(question: Question) -> Choices:
    """The states that can be reached, and what can be done in them."""
    states = [(question.start, 0)]
    rows: list[tuple[int, str, int, float]] = []
    for number, (name, turn) in enumerate(states):  # the loop appends to this list
        rows.append((number, STOP, -1, 1.0))
        searches = question.places[name].searches if turn + 1 < question.turns else {}
        for query, (to, share) in searches.items():
            if (to, turn + 1) not in states:
                states.append((to, turn + 1))
            rows.append((number, query, states.index((to, turn + 1)), share))
    state, actions, to, share = zip(*rows, strict=True)
    return Choices(
        question, tuple(states), actions, torch.tensor(state), torch.tensor(to),
        torch.tensor(share, dtype=torch.float64),
    )  # fmt: skip


@dataclass(frozen=True)
class Trajectories:
    """N trajectories, K1 = the question's turns. A path whose answer may be right or wrong stands here twice."""

    choices: Choices
    choice_N_K1: torch.Tensor
    """The choice of each turn; -1 past the answer."""
    outcome_N: torch.Tensor
    """0 or 1."""
    chance_N: torch.Tensor
    """Probability of the outcome, given the path."""

    @property
    def turn_N_K1(self) -> torch.Tensor:
        """The turns that a trajectory has, its answer included."""
        return self.choice_N_K1 >= 0

    @property
    def n_turns_N(self) -> torch.Tensor:
        return self.turn_N_K1.sum(1)

    @property
    def state_N_K1(self) -> torch.Tensor:
        """The state before each turn; -1 past the answer."""
        return torch.where(self.turn_N_K1, self.choices.state_D[self.choice_N_K1], -1)

    @property
    def potential_N_K1(self) -> torch.Tensor:
        """The potential before each turn; 1 past the answer, where nothing reads it."""
        places = self.choices.question.places
        potential_S = [places[name].potential for name, _ in self.choices.states]
        potential_S = torch.tensor([*potential_S, 1.0], dtype=torch.float64)  # place -1
        return potential_S[self.state_N_K1]

    @property
    def gain_N_K(self) -> torch.Tensor:
        """Information gain of each search: the potential after it minus the potential before it; 0 past the searches."""
        return info_gain(self.potential_N_K1.log(), self.turn_N_K1).info_gain_B_K

    def turn_log_prob_N_K1(self, logits_D: torch.Tensor) -> torch.Tensor:
        """log pi of each turn's choice; 0 past the answer. Differentiable."""
        return torch.where(self.turn_N_K1, self.choices.log_prob_D(logits_D)[self.choice_N_K1], 0.0)

    def probability_N(self, logits_D: torch.Tensor) -> torch.Tensor:
        """p = chance of the outcome x product over turns of pi; sums to 1. Differentiable."""
        return self.chance_N * self.turn_log_prob_N_K1(logits_D).sum(1).exp()

    def score_N_K1_D(self, logits_D: torch.Tensor) -> torch.Tensor:
        """The gradient of each turn's log pi; 0 past the answer."""
        score_D_D = self.choices.score_D_D(logits_D)
        return torch.where(self.turn_N_K1[..., None], score_D_D[self.choice_N_K1], 0.0)


def list_trajectories(question: Question) -> Trajectories:
    """All of them, in the order of a depth-first walk."""
    choices = list_choices(question)
    rows = []
    for path in _paths(choices, 0):
        name, _ = choices.states[choices.state_D[path[-1]]]
        success = question.places[name].success
        padded = path + [-1] * (question.turns - len(path))
        rows += [(padded, r, p) for r, p in ((1.0, success), (0.0, 1 - success)) if p > 0]
    chosen, outcome, chance = zip(*rows, strict=True)
    return Trajectories(
        choices, torch.tensor(chosen), torch.tensor(outcome, dtype=torch.float64),
        torch.tensor(chance, dtype=torch.float64),
    )  # fmt: skip


def _paths(choices: Choices, state: int) -> Iterator[list[int]]:
    for number in (choices.state_D == state).nonzero().flatten().tolist():
        to = int(choices.next_D[number])
        for rest in [[]] if to < 0 else _paths(choices, to):
            yield [number, *rest]


def values(choices: Choices, logits_D: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(V per state, Q per choice), the expected outcome from there on.

    Q(s, stop) = success at s        Q(s, search) = V(next)        V(s) = sum over actions of pi Q
    """
    places = choices.question.places
    success_S = torch.tensor([places[name].success for name, _ in choices.states], dtype=torch.float64)
    pi_D = choices.log_prob_D(logits_D).exp()
    value_S, q_D = torch.zeros(len(choices.states), dtype=torch.float64), torch.zeros_like(pi_D)
    for state in reversed(range(len(choices.states))):  # a search leads to a later state
        own_D = choices.state_D == state
        after_D = torch.where(choices.next_D < 0, success_S[state], value_S[choices.next_D])
        q_D = torch.where(own_D, after_D, q_D)
        value_S[state] = (pi_D * after_D)[own_D].sum()
    return value_S, q_D


def turn_values(trajectories: Trajectories, logits_D: torch.Tensor) -> torch.Tensor:
    """V before each turn, [N, K1]; 0 past the answer."""
    value_S, _ = values(trajectories.choices, logits_D)
    return torch.where(trajectories.turn_N_K1, value_S[trajectories.state_N_K1], 0.0)
