"""Every turn mode reads these checked float64 tables and shares the operations here."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from verl_credit.credit.checks import first_row
from verl_credit.credit.groups import z_score, z_score_per_turn
from verl_credit.credit.outcome import OUTCOME_OPERATORS


@dataclass(frozen=True)
class Tables:
    """Inputs of a mode. Shapes: B rows, K tool turns; K1 = K + 1 columns end with the answer turn.

    A row's answer turn is column ``n_tool_turns_B[b]`` of a K1 table. Rows that are not valid have no turn reward.
    Optional tables are None unless the caller brings them.
    """

    outcome_B: torch.Tensor
    reward_B_K: torch.Tensor
    """The reward of each tool turn (information gain, a tool's reward, ...); 0 where it has none."""
    has_reward_B_K: torch.Tensor
    lost_reward_B_K: torch.Tensor
    """The turn has a reward, and its value is not known (a failed score). ``has_reward_B_K`` is False there."""
    group_B: torch.Tensor
    valid_B: torch.Tensor
    n_tool_turns_B: torch.Tensor
    anchor_B_K1: torch.Tensor | None = None
    """State before each turn's response: equal ids are equal states, -1 is none."""
    value_B_K1: torch.Tensor | None = None
    """Value of the state before each turn's response."""
    bootstrap_B: torch.Tensor | None = None
    """Value after a row's last turn; None: 0, a real end."""
    state_score_B_K1: torch.Tensor | None = None
    """Score of the state after each turn; NaN: not scored."""
    initial_score_B: torch.Tensor | None = None
    """Score of the state before the first turn; NaN: not scored."""
    turn_tokens_B_K1: torch.Tensor | None = None
    """The policy's tokens of each turn."""
    resolution: float = torch.finfo(torch.float64).eps
    """The step from 1 to the next number in the dtype of outcomes and rewards: float32's, or float64's if both have it."""
    result_turn_B: torch.Tensor | None = None
    """The first turn that a tool answered with a result; -1: none."""

    @property
    def known_B(self) -> torch.Tensor:
        """False for a row with a lost or a missing turn reward, because the row's sum is not known."""
        return self.valid_B & ~(self.lost_reward_B_K | self.missing_reward_B_K).any(dim=1)

    @property
    def missing_reward_B_K(self) -> torch.Tensor:
        """A tool turn without a reward, from the first turn on for which any trajectory of its prompt has one.

        Turns before that are not measured at all and count 0 in every row: the first one of first_turn="none", or all turns
        of a step without rewards.
        """
        asked_B_K = self.has_reward_B_K | self.lost_reward_B_K
        turns = asked_B_K.shape[1]
        column_K = torch.arange(turns, device=asked_B_K.device)
        place_B_K = torch.where(asked_B_K, column_K, turns)
        first_B = torch.nn.functional.pad(place_B_K, (0, 1), value=turns).amin(dim=1)
        first_G = torch.full_like(first_B, turns).scatter_reduce(0, self.group_B, first_B, "amin")
        return self.turn_B_K1[:, 1:] & ~asked_B_K & (column_K >= first_G[self.group_B][:, None])

    @property
    def turn_B_K1(self) -> torch.Tensor:
        """True for the turns that a valid row has, its answer turn included."""
        columns_K1 = torch.arange(self.reward_B_K.shape[1] + 1, device=self.outcome_B.device)
        return self.valid_B[:, None] & (columns_K1 <= self.n_tool_turns_B[:, None])

    @property
    def is_answer_B_K1(self) -> torch.Tensor:
        columns_K1 = torch.arange(self.reward_B_K.shape[1] + 1, device=self.outcome_B.device)
        return columns_K1 == self.n_tool_turns_B[:, None]

    def reward_B_K1(self, answer_B: torch.Tensor | None = None) -> torch.Tensor:
        """Turn rewards with a column for the answer turn, which earns ``answer_B`` (the outcome, if None)."""
        answer_B = self.outcome_B if answer_B is None else answer_B
        padded_B_K1 = torch.nn.functional.pad(self.reward_B_K, (0, 1))
        return padded_B_K1 + torch.where(self.is_answer_B_K1, answer_B[:, None], 0.0)

    def return_to_go(self, reward_B_K1: torch.Tensor, gamma: float) -> torch.Tensor:
        """G_k = sum over j >= k of gamma^(j-k) r_j; columns past a row's answer turn must be 0."""
        columns, next_B = [], torch.zeros_like(reward_B_K1[:, 0])
        for k in reversed(range(reward_B_K1.shape[1])):
            next_B = reward_B_K1[:, k] + gamma * next_B
            columns.append(next_B)
        return torch.stack(columns[::-1], dim=1)

    def rounding(self, gamma: float) -> torch.Tensor:
        """How far G_k of equal sums may be apart, because rewards were rounded to their dtype: two steps of sum |r|."""
        return 2 * self.resolution * self.return_to_go(self.reward_B_K1().abs(), gamma)

    def split(self, value_B_K1: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(tool turns, answer turn) of a K1 table; columns past a row's tool turns read its answer turn."""
        answer_B = value_B_K1.gather(1, self.n_tool_turns_B[:, None]).squeeze(1)
        return torch.where(self.turn_B_K1[:, 1:], value_B_K1[:, :-1], answer_B[:, None]), answer_B

    def outcome_advantage(self, operator: str | Callable[..., torch.Tensor], **norm) -> torch.Tensor:
        """The outcome operator's advantage, 0 for rows that are not valid. ``norm``: options of `grpo`."""
        named = OUTCOME_OPERATORS[operator].function if isinstance(operator, str) else operator
        options = norm if operator == "grpo" else {}
        advantage_B = named(self.outcome_B, self.group_B, row_valid_B=self.valid_B, **options)
        return _checked(advantage_B, self.valid_B)

    def z_score_over_turns(self, **norm) -> torch.Tensor:
        """Turn rewards compared with those of all turns of the prompt."""
        group_B_K = self.group_B[:, None].expand_as(self.reward_B_K)
        z_N = z_score(
            self.reward_B_K.flatten(), group_B_K.flatten(), member_N=self.has_reward_B_K.flatten(), **norm
        )
        return z_N.view_as(self.reward_B_K)

    def z_score_per_turn(self, values_B_K: torch.Tensor, **norm) -> torch.Tensor:
        """Turn rewards compared with those of the same tool turn in the prompt's other trajectories."""
        return z_score_per_turn(values_B_K, self.has_reward_B_K, self.group_B, **norm)

    def backward(
        self, last_B: torch.Tensor, step: Callable[[int, torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        """out[:, k] = step(k, next) where turn k has a reward, else next; next starts as `last_B`."""
        columns, next_B = [], last_B
        for k in reversed(range(self.reward_B_K.shape[1])):
            next_B = torch.where(self.has_reward_B_K[:, k], step(k, next_B), next_B)
            columns.append(next_B)
        return torch.stack(columns[::-1], dim=1) if columns else torch.zeros_like(self.reward_B_K)

    def ones(self) -> torch.Tensor:
        return torch.ones_like(self.reward_B_K)


def _checked(advantage_B: torch.Tensor, valid_B: torch.Tensor) -> torch.Tensor:
    """Returns an outcome operator's result in float64, 0 for rows that are not valid."""
    if not isinstance(advantage_B, torch.Tensor) or advantage_B.shape != valid_B.shape:
        is_tensor = isinstance(advantage_B, torch.Tensor)
        got = tuple(advantage_B.shape) if is_tensor else type(advantage_B).__name__
        raise ValueError(
            f"outcome_operator returned {got}; expected a tensor of shape {tuple(valid_B.shape)}"
        )
    bad_B = valid_B & ~advantage_B.isfinite()
    if bad_B.any():
        row = first_row(bad_B)
        raise ValueError(
            f"outcome_operator returned {float(advantage_B[row])} for row {row}; expected finite numbers"
        )
    return torch.where(valid_B, advantage_B.detach().to(torch.float64), 0.0)
