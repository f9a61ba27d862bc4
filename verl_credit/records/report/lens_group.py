"""The rollouts of one prompt in the lens: the credit of their turns, GRPO's beside it, and what is told of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch

from verl_credit.credit.groups import SOLVED_ABOVE
from verl_credit.credit.turn.modes import MODES
from verl_credit.credit.turn.turn_credit import BatchTables, credit_of
from verl_credit.records.report.text import Scale
from verl_credit.records.run.table_files import StepTable

# The page shows at most this much of a group; what is told of the group is told of all its rollouts.
ROLLOUTS, TOKENS_A_ROLLOUT = 16, 1500


@dataclass(frozen=True)
class StepTurns:
    """The turns of all rows of a step, as its table has them; the last of a row's turns is its answer."""

    pipeline: dict
    rows: list[int]
    outcome_B: torch.Tensor
    valid_B: torch.Tensor
    group_B: torch.Tensor
    n_tool_turns_B: torch.Tensor
    reward_B_K: torch.Tensor
    """NaN for a turn without a reward."""
    tokens_B_K1: torch.Tensor
    advantage_B_K1: torch.Tensor
    clip_scale_B_K1: torch.Tensor

    @classmethod
    def of(cls, table: StepTable) -> StepTurns:
        c, order = table.columns, {}
        for row in c["row"]:
            order.setdefault(row, len(order))
        wide = max(c["turn"], default=0) + 1

        def filled(name: str, fill: float, dtype: torch.dtype = torch.float64) -> torch.Tensor:
            out = torch.full((len(order), wide), fill, dtype=dtype)
            for row, turn, value in zip(c["row"], c["turn"], c[name], strict=True):
                if value is not None:
                    out[order[row], turn] = value
            return out

        def per_row(name: str) -> list:
            return list(dict(zip(c["row"], c[name], strict=True)).values())

        valid_B = torch.tensor(per_row("valid"))
        known_B_K1 = filled("has_reward", 0, torch.bool) & valid_B[:, None]
        return cls(
            pipeline=table.pipeline,
            rows=list(order),
            outcome_B=torch.tensor(per_row("outcome"), dtype=torch.float64),
            valid_B=valid_B,
            group_B=torch.tensor(per_row("group")),
            n_tool_turns_B=torch.tensor(per_row("turn")),
            reward_B_K=torch.where(known_B_K1, filled("reward", torch.nan), torch.nan)[:, :-1],
            tokens_B_K1=filled("tokens", 0, torch.int64),
            advantage_B_K1=filled("advantage", 0.0),
            clip_scale_B_K1=filled("clip_scale", 1.0),
        )

    @cached_property
    def grpo_B_K1(self) -> torch.Tensor:
        """GRPO's advantage, every turn's that of its rollout, with the run's `norm_adv_by_std_in_grpo`."""
        norm = {key: value for key, value in self.pipeline["shared"].items() if key == "norm_by_std"}
        known_B_K, tokens = self.reward_B_K.isfinite(), {"turn_tokens_B_K1": self.tokens_B_K1}
        rows = self.group_B, self.valid_B, self.n_tool_turns_B
        batch = BatchTables(self.outcome_B, self.reward_B_K, known_B_K, *rows, tokens)
        return credit_of(MODES["none"], batch, norm).advantage_B_K1


@dataclass(frozen=True)
class Group:
    """The rollouts of one prompt at one step; G of them."""

    turns: StepTurns
    rows: list[int]
    scales: Mapping[str, Scale]
    """Of advantages and rewards; they decide what is noise."""

    @cached_property
    def place_G(self) -> torch.Tensor:
        """The indices of the group's rollouts among all rows."""
        place = {row: index for index, row in enumerate(self.turns.rows)}
        return torch.tensor([place[row] for row in self.rows])

    @property
    def shown_tokens(self) -> int:
        lengths_G = self.turns.tokens_B_K1[self.place_G[:ROLLOUTS]].sum(dim=1)
        return int(lengths_G.clamp(max=TOKENS_A_ROLLOUT).sum())

    @property
    def reward_G_K(self) -> torch.Tensor:
        return self.turns.reward_B_K[self.place_G]

    @property
    def gained_G_K(self) -> torch.Tensor:
        """Turns with a reward above 0 that is no noise."""
        return self.reward_G_K > self.scales["reward"].floor

    @property
    def right_G(self) -> list[bool]:
        return (self.turns.outcome_B[self.place_G] > SOLVED_ABOVE).tolist()

    @property
    def given_G_K1(self) -> torch.Tensor:
        """Each turn's advantage, as it was given."""
        return self.turns.advantage_B_K1[self.place_G]

    @cached_property
    def factor(self) -> float:
        """The answers' advantages over GRPO's, where one positive factor is all that tells them apart, as by another
        standard deviation; else 1."""
        answer_G_1 = self.turns.n_tool_turns_B[self.place_G, None]
        given_G, grpo_G = (
            of[self.place_G].gather(1, answer_G_1)[:, 0]
            for of in (self.turns.advantage_B_K1, self.turns.grpo_B_K1)
        )
        factor = (given_G @ grpo_G / grpo_G.square().sum()).item()  # NaN in a tied group
        apart = (given_G - factor * grpo_G).abs().max().item()
        return factor if factor > 0 and not self.scales["advantage"].counts(apart) else 1.0

    @property
    def contrast(self) -> float:
        """Root mean square of given advantages minus `factor` times GRPO's, over the group's turns; 0 where it is noise."""
        turn_G_K1 = torch.arange(self.given_G_K1.shape[1]) <= self.turns.n_tool_turns_B[self.place_G, None]
        apart_G_K1 = self.given_G_K1 - self.factor * self.turns.grpo_B_K1[self.place_G]
        apart = apart_G_K1[turn_G_K1].square().mean().sqrt().item()
        return apart if self.scales["advantage"].counts(apart) else 0.0

    @property
    def punished(self) -> int:
        """The number of turns that gained and have an advantage below 0 that is no noise."""
        lower_G_K1 = self.given_G_K1 < -self.scales["advantage"].floor
        return int((self.gained_G_K & lower_G_K1[:, :-1]).sum())

    @property
    def sentence(self) -> str:
        """The group's result and the number of rewarded turns with negative credit."""
        right, count, n = sum(self.right_G), len(self.right_G), self.punished
        whole = {count: "every rollout is right", 0: "no rollout is right"}
        one, many, which = "turn", "turns", "with a reward above 0"
        if list(self.turns.pipeline["signals"]) == ["info_gain"]:
            one, many, which = "search", "searches", "that gained information"
        number = f"and {n} {one} {which} has" if n == 1 else f"and {n} {many} {which} have"
        result = f"In this group {whole.get(right, f'{right} of {count} rollouts are right')}"
        number = f", {number} negative credit." if n else f"; no {one} {which} has negative credit."
        return result + number

    def by_turn(self, values_B_K1: torch.Tensor) -> list[list[float]]:
        """The values of the turns of each of its rollouts, rounded for the page."""
        counts = (self.turns.n_tool_turns_B[self.place_G] + 1).tolist()
        rows = values_B_K1[self.place_G].tolist()
        return [[round(v, 6) for v in row[:n]] for row, n in zip(rows, counts, strict=True)]
