"""A tabular softmax over the choices of a question: one logit per state and action, float64."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from verl_credit.study.fidelity.exact.question import STOP, Question


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
        if not 0 < stop < 1:
            raise ValueError(f"stop={stop}; expected a probability above 0 and below 1")
        chosen_D = torch.where(self.next_D < 0, stop, (1 - stop) * self.share_D)
        return torch.where(self.free_D, chosen_D, 1.0).log()


def list_choices(question: Question) -> Choices:
    """The states that can be reached, and what can be done in them."""
    states = [(question.start, 0)]
    rows: list[tuple[int, str, int, float]] = []
    for number, (name, turn) in enumerate(states):  # grows while it is walked
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
