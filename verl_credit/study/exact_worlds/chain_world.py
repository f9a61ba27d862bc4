"""The chain world: a question takes H right searches in a row, and then the answer. Values and gradients are exact.

A state is a question, the hops that are done (0 to H), and the searches that were wasted. The policy searches rightly,
searches in vain, or answers. After H + 2 searches, or three in vain, it can only answer. An answer is right with
probability `RIGHT` after H hops, and never before. The logits of an action are

    base of the question + weight(hops, action) + `PRIVATE` weight(question, hops, wasted, action)

so that a gradient has a part that questions share and one that they do not. Worlds stand beside each other: R worlds have Q
questions each, N = R Q in all, and P = H + 1 numbers of hops.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import one_hot

from verl_credit.study.exact_worlds.fed_credit import Rolled

RIGHT, PRIVATE, SUCCESS = 0.95, 3.0, 0.35
FORWARD, WASTE, ANSWER = range(3)
WASTED = 3
"""So many searches in vain end the search."""


def first_policy(
    hops: int, worlds: int, questions: int, random: torch.Generator, success: float = SUCCESS
) -> torch.Tensor:
    """Logits [N, P, 3, 3] whose mean chance of the right answer is ``success`` in every world: a chance to answer at once,
    the same in all states, is bisected. Questions and hops differ in how well the policy searches."""
    skill_N_P = torch.randn(worlds * questions, hops + 1, generator=random, dtype=torch.float64)

    def logits(stop_R: torch.Tensor) -> torch.Tensor:
        stop_N_1 = stop_R.repeat_interleave(questions)[:, None]
        found_N_P_W_A = torch.zeros(worlds * questions, hops + 1, WASTED, 3, dtype=torch.float64)
        found_N_P_W_A[..., FORWARD] = (skill_N_P + (1 - stop_N_1).log())[:, :, None]
        found_N_P_W_A[..., WASTE] = torch.tensor(0.1).log()
        found_N_P_W_A[..., ANSWER] = stop_N_1.log()[:, :, None]
        found_N_P_W_A[:, hops, :, FORWARD] = -torch.inf
        found_N_P_W_A[:, hops, :, ANSWER] = torch.tensor(0.9).log()
        return found_N_P_W_A

    low_R, high_R = (torch.full((worlds,), end, dtype=torch.float64) for end in (1e-6, 1 - 1e-6))
    for _ in range(40):
        middle_R = (low_R + high_R) / 2
        value_N, _ = values(logits(middle_R).softmax(-1))
        good_R = value_N[:, 0, 0].view(worlds, questions).mean(1) > success
        low_R, high_R = torch.where(good_R, middle_R, low_R), torch.where(good_R, high_R, middle_R)
    return logits((low_R + high_R) / 2)


def is_free(hops_done: int | torch.Tensor, wasted: int | torch.Tensor, hops: int):
    """May the policy still search?"""
    return (wasted < WASTED) & (hops_done + wasted < hops + 2)


def values(prob_N_P_W_A: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(V [N, P, 4], Q [N, P, 3, 3]) by dynamic programming.

    V = sum over actions of pi Q, Q(forward) = V(one hop more), Q(waste) = V(one wasted more), Q(answer) = the chance that it
    is right. V of a state that can only answer is that chance.
    """
    n, places = prob_N_P_W_A.shape[:2]
    value_N_P_W1 = prob_N_P_W_A.new_zeros(n, places, WASTED + 1)
    q_N_P_W_A = torch.zeros_like(prob_N_P_W_A)
    value_N_P_W1[:, -1] = RIGHT
    for place in reversed(range(places)):
        for wasted in reversed(range(WASTED)):
            if is_free(place, wasted, places - 1):
                q_N_A = q_N_P_W_A[:, place, wasted]
                q_N_A[:, FORWARD] = value_N_P_W1[:, place + 1, wasted] if place < places - 1 else 0.0
                q_N_A[:, WASTE] = value_N_P_W1[:, place, wasted + 1]
                q_N_A[:, ANSWER] = RIGHT if place == places - 1 else 0.0
                value_N_P_W1[:, place, wasted] = (prob_N_P_W_A[:, place, wasted] * q_N_A).sum(1)
    return value_N_P_W1, q_N_P_W_A


def exact_gradient(prob_N_P_W_A: torch.Tensor, worlds: int) -> torch.Tensor:
    """The gradient of each world's sum of V(start), [R, D]: P(state) pi(action | state) (Q - V) by the logit."""
    places = prob_N_P_W_A.shape[1]
    value_N_P_W1, q_N_P_W_A = values(prob_N_P_W_A)
    chance_N_P_W1 = torch.zeros_like(value_N_P_W1)
    chance_N_P_W1[:, 0, 0] = 1
    gradient_N_P_W_A = torch.zeros_like(q_N_P_W_A)
    for place in range(places):
        for wasted in range(WASTED):
            if is_free(place, wasted, places - 1):
                chosen_N_A = chance_N_P_W1[:, place, wasted, None] * prob_N_P_W_A[:, place, wasted]
                if place < places - 1:
                    chance_N_P_W1[:, place + 1, wasted] += chosen_N_A[:, FORWARD]
                chance_N_P_W1[:, place, wasted + 1] += chosen_N_A[:, WASTE]
                better_N_A = q_N_P_W_A[:, place, wasted] - value_N_P_W1[:, place, wasted, None]
                gradient_N_P_W_A[:, place, wasted] = chosen_N_A * better_N_A
    return of_weights(gradient_N_P_W_A, worlds)


def of_weights(gradient_N_P_W_A: torch.Tensor, worlds: int) -> torch.Tensor:
    """From the gradient by logits that by weights, [R, D]: the shared ones first."""
    gradient_R_Q_P_W_A = gradient_N_P_W_A.view(worlds, -1, *gradient_N_P_W_A.shape[1:])
    shared_R_P_A = gradient_R_Q_P_W_A.sum(dim=(1, 3))
    return torch.cat([shared_R_P_A.flatten(1), PRIVATE * gradient_R_Q_P_W_A.flatten(1)], dim=1)


@dataclass(frozen=True)
class Paths:
    """B trajectories: a row has ``n_tool_turns_B`` columns that search, and one after them that answers; K1 = H + 3."""

    hops: int
    question_B: torch.Tensor
    outcome_B: torch.Tensor
    n_tool_turns_B: torch.Tensor
    action_B_K1: torch.Tensor
    place_B_K1: torch.Tensor
    """Hops done before the turn."""
    wasted_B_K1: torch.Tensor

    @property
    def turn_B_K1(self) -> torch.Tensor:
        return torch.arange(self.hops + 3) <= self.n_tool_turns_B[:, None]

    def of_states(self, table_N_P_W1: torch.Tensor) -> torch.Tensor:
        """The table's entry for the state before each turn, [B, K1, ...]."""
        return table_N_P_W1[self.question_B[:, None], self.place_B_K1, self.wasted_B_K1]

    @property
    def signal_B_K(self) -> torch.Tensor:
        """A right search earns 1."""
        return (self.turn_B_K1 & (self.action_B_K1 == FORWARD))[:, :-1].double()

    def rolled(self, value_N_P_W1: torch.Tensor, questions: int, task_N: torch.Tensor) -> Rolled:
        """What credit reads. A state is hops and wasted searches, which the user's loop sees, too."""
        seen = one_hot(self.place_B_K1, self.hops + 1), one_hot(self.wasted_B_K1, WASTED + 1)
        return Rolled(
            run_B=self.question_B // questions,
            group_B=self.question_B,
            task_B=task_N[self.question_B],
            outcome_B=self.outcome_B,
            n_tool_turns_B=self.n_tool_turns_B,
            signal_B_K=self.signal_B_K,
            state_B_K1=self.place_B_K1 * (WASTED + 1) + self.wasted_B_K1,
            seen_B_K1_D=torch.cat(seen, dim=2).double(),
            true_B_K1=lambda: torch.where(self.turn_B_K1, self.of_states(value_N_P_W1), 0.0),
        )

    def gradient(self, prob_N_P_W_A: torch.Tensor, advantage_B_K1: torch.Tensor, worlds: int) -> torch.Tensor:
        """sum over turns of A grad log pi(action | state), [R, D]; a turn that can only answer has none."""
        free_B_K1 = self.turn_B_K1 & is_free(self.place_B_K1, self.wasted_B_K1, self.hops)
        row_M, turn_M = free_B_K1.nonzero(as_tuple=True)
        at = self.question_B[row_M], self.place_B_K1[row_M, turn_M], self.wasted_B_K1[row_M, turn_M]
        score_M_A = one_hot(self.action_B_K1[row_M, turn_M], 3) - prob_N_P_W_A[at]
        of_logits = torch.zeros_like(prob_N_P_W_A)
        of_logits.index_put_(at, advantage_B_K1[row_M, turn_M, None] * score_M_A, accumulate=True)
        return of_weights(of_logits, worlds)


def roll(prob_N_P_W_A: torch.Tensor, random: torch.Generator, rollouts: int = 8) -> Paths:
    """``rollouts`` trajectories of every question."""
    hops = prob_N_P_W_A.shape[1] - 1
    question_B = torch.arange(len(prob_N_P_W_A)).repeat_interleave(rollouts)
    place_B, wasted_B = torch.zeros_like(question_B), torch.zeros_like(question_B)
    alive_B, n_tool_turns_B = torch.ones_like(question_B, dtype=torch.bool), torch.zeros_like(question_B)
    columns = []
    for _ in range(hops + 3):
        prob_B_A = prob_N_P_W_A[question_B, place_B, wasted_B.clamp(max=WASTED - 1)]
        drawn_B_1 = torch.rand(len(question_B), 1, generator=random, dtype=torch.float64)
        action_B = (drawn_B_1 > prob_B_A.cumsum(1)).sum(1).clamp(max=ANSWER)
        action_B = torch.where(is_free(place_B, wasted_B, hops), action_B, ANSWER)
        columns.append((action_B, place_B, wasted_B))
        alive_B = alive_B & (action_B != ANSWER)
        n_tool_turns_B = n_tool_turns_B + alive_B
        place_B = place_B + (alive_B & (action_B == FORWARD))
        wasted_B = wasted_B + (alive_B & (action_B == WASTE))
    lucky_B = torch.rand(len(question_B), generator=random, dtype=torch.float64) < RIGHT
    outcome_B = ((place_B == hops) & lucky_B).double()
    return Paths(
        hops, question_B, outcome_B, n_tool_turns_B, *(torch.stack(c, 1) for c in zip(*columns, strict=True))
    )
