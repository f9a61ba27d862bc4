"""Every turn mode reads these checked float64 tables and shares the operations here."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from verl_credit.credit.arguments import (
    as_bool,
    as_group_ids,
    check_dims,
    check_integers,
    check_returned,
    check_shape,
    refuse_rows,
)
from verl_credit.credit.groups import group_counts, valid_rows, z_score_per_turn
from verl_credit.credit.outcome import OUTCOME_OPERATORS
from verl_credit.lazy import torch


def return_to_go(reward_B_K1: torch.Tensor, gamma: float) -> torch.Tensor:
    """G_k = sum over j >= k of gamma^(j-k) r_j; columns past a row's answer turn must be 0."""
    columns, next_B = [], torch.zeros_like(reward_B_K1[:, 0])
    for reward_B in reward_B_K1.unbind(dim=1)[::-1]:
        next_B = reward_B + gamma * next_B
        columns.append(next_B)
    return torch.stack(columns[::-1], dim=1)


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
    resolution: float = sys.float_info.epsilon
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
    def columns_K1(self) -> torch.Tensor:
        return torch.arange(self.reward_B_K.shape[1] + 1, device=self.outcome_B.device)

    @property
    def turn_B_K1(self) -> torch.Tensor:
        """True for the turns that a valid row has, its answer turn included."""
        return self.valid_B[:, None] & (self.columns_K1 <= self.n_tool_turns_B[:, None])

    @property
    def is_answer_B_K1(self) -> torch.Tensor:
        return self.columns_K1 == self.n_tool_turns_B[:, None]

    def reward_B_K1(self, answer_B: torch.Tensor | None = None) -> torch.Tensor:
        """Turn rewards with a column for the answer turn, which earns ``answer_B`` (the outcome, if None)."""
        answer_B = self.outcome_B if answer_B is None else answer_B
        padded_B_K1 = torch.nn.functional.pad(self.reward_B_K, (0, 1))
        return padded_B_K1 + torch.where(self.is_answer_B_K1, answer_B[:, None], 0.0)

    return_to_go = staticmethod(return_to_go)

    def next_value(self, value_B_K1: torch.Tensor, end_B: torch.Tensor) -> torch.Tensor:
        """The value of the state that each turn leads to: ``end_B`` after the answer turn."""
        next_B_K1 = torch.nn.functional.pad(value_B_K1[:, 1:], (0, 1))
        return torch.where(self.is_answer_B_K1, end_B[:, None], next_B_K1)

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
        advantage_B = check_returned("outcome_operator returned", advantage_B, self.valid_B)
        return torch.where(self.valid_B, advantage_B, 0.0)

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


def make_tables(
    outcome_B, turn_reward_B_K, turn_mask_B_K, group_B, row_valid_B, n_tool_turns_B, on_nonfinite, given
) -> tuple[Tables, dict[str, int]]:
    """Checked tables, and counts of what was dropped."""
    valid_B = valid_rows(outcome_B, group_B, row_valid_B)
    check_dims("turn_reward_B_K", turn_reward_B_K, 2, "rows x tool turns")
    rows, turns = outcome_B.shape[0], turn_reward_B_K.shape[1]
    check_shape("turn_reward_B_K", turn_reward_B_K, (rows, turns), "outcome_B has rows")
    check_shape("turn_mask_B_K", turn_mask_B_K, (rows, turns), "turn_reward_B_K")
    has_reward_B_K = as_bool("turn_mask_B_K", turn_mask_B_K)
    bad_B = valid_B & ~outcome_B.isfinite()
    lost_B_K = valid_B[:, None] & has_reward_B_K & ~turn_reward_B_K.isfinite()
    if on_nonfinite == "raise":
        for name, bad in (("outcome_B", bad_B), ("turn_reward_B_K", lost_B_K)):
            refuse_rows(name, bad, "holds a value that is not finite; expected finite numbers")
    usable_B = valid_B & ~bad_B
    known_B_K = has_reward_B_K & usable_B[:, None] & ~lost_B_K
    inputs = (outcome_B, turn_reward_B_K)
    coarse = any(x.dtype.is_floating_point and x.dtype != torch.float64 for x in inputs)  # or coarser still
    tables = Tables(
        outcome_B=torch.where(usable_B, outcome_B.to(torch.float64), 0.0),
        reward_B_K=torch.where(known_B_K, turn_reward_B_K.to(torch.float64), 0.0),
        has_reward_B_K=known_B_K,
        lost_reward_B_K=lost_B_K & usable_B[:, None],
        group_B=as_group_ids("group_B", group_B),
        valid_B=usable_B,
        resolution=torch.finfo(torch.float32 if coarse else torch.float64).eps,
        n_tool_turns_B=_n_tool_turns(n_tool_turns_B, has_reward_B_K, usable_B),
    )
    if n_tool_turns_B is None:
        # Rows may have more tool turns than rewards. Without columns no row has tool turns, and `all` is True.
        open_B = usable_B & ~has_reward_B_K[:, -1:].all(dim=1)
        problem = (
            "has no reward in the last column of turn_reward_B_K, so how many tool turns it has, and in which column its "
            "answer stands, is not known; give n_tool_turns_B"
        )
        for name in (name for name in given if name.endswith("_K1")):
            refuse_rows(f"{name} without n_tool_turns_B:", open_B, problem)
    optional: dict[str, Any] = {name: _optional(name, table, tables) for name, table in given.items()}
    tables = replace(tables, **optional)
    counts = {
        "invalid_rows": int((~valid_B).sum()),
        "nonfinite_outcomes": int(bad_B.sum()),
        "nonfinite_rewards": int(lost_B_K.sum()),
        "turns_without_reward": int((tables.turn_B_K1[:, 1:] & ~has_reward_B_K).sum()),
        "skipped_rows": 0,
        **group_counts(outcome_B, group_B, row_valid_B=valid_B),
        **_turn_counts(tables),
    }
    return tables, counts


def _n_tool_turns(n_tool_turns_B, has_reward_B_K: torch.Tensor, valid_B: torch.Tensor) -> torch.Tensor:
    """The tool turns of each row: as given, or up to the last one with a reward. 0 for rows that are not valid."""
    turns = has_reward_B_K.shape[1]
    number_K = torch.arange(1, turns + 1, device=has_reward_B_K.device)
    last_B = torch.nn.functional.pad(number_K * has_reward_B_K, (0, 1)).amax(dim=1)
    if n_tool_turns_B is not None:
        check_shape("n_tool_turns_B", n_tool_turns_B, valid_B.shape, "outcome_B")
        check_integers("n_tool_turns_B", n_tool_turns_B, "numbers of turns")
        bad_B = valid_B & ((n_tool_turns_B < last_B) | (n_tool_turns_B > turns))
        problem = f"is {{value:g}}; expected the turns up to its last reward, or more, and at most {turns} (turn_reward_B_K)"
        refuse_rows("n_tool_turns_B", bad_B, problem, n_tool_turns_B)
        last_B = n_tool_turns_B.long()
    return torch.where(valid_B, last_B, 0)


USABLE: dict[str, tuple[str, Callable[[torch.Tensor, int], torch.Tensor]]] = {
    "anchor_B_K1": ("ids", lambda x, turns: x == x),
    "result_turn_B": ("a turn's number, -1 for none", lambda x, turns: (x >= -1) & (x <= turns)),
    "value_B_K1": ("finite values", lambda x, turns: x.isfinite()),
    "bootstrap_B": ("finite values", lambda x, turns: x.isfinite()),
    "turn_tokens_B_K1": ("0 or more tokens", lambda x, turns: x.isfinite() & (x >= 0)),
    "state_score_B_K1": ("finite scores, NaN for none", lambda x, turns: ~x.isinf()),
    "initial_score_B": ("finite scores, NaN for none", lambda x, turns: ~x.isinf()),
}
"""What an optional table must hold on the turns that a row has. The first two hold integers."""


def _optional(name: str, table: torch.Tensor, tables: Tables) -> torch.Tensor:
    """The table in float64 or int64. Raise ValueError for a number that no turn mode can use."""
    member = tables.turn_B_K1 if name.endswith("_K1") else tables.valid_B
    check_shape(
        name, table, member.shape, "outcome_B has rows and turn_reward_B_K turns, plus the answer turn"
    )
    if name in ("anchor_B_K1", "result_turn_B"):
        check_integers(name, table, "ids, -1 for none,")
        table = table.long()
    else:
        table = table.to(torch.float64)
    use, good = USABLE[name]
    bad = member & ~good(table, tables.reward_B_K.shape[1])
    if bad.any():
        place = tuple(bad.nonzero()[0].tolist())
        where = ", ".join(f"{axis} {n}" for axis, n in zip(("row", "turn"), place, strict=False))
        raise ValueError(f"{name} {where} is {float(table[place]):g}; expected {use}")
    return table


def _turn_counts(tables: Tables) -> dict[str, int]:
    """Groups per prompt and tool turn with a reward, and those of one (z = 0) and two members (z = +-1 or 0).

    Anchors: turns without one, states per prompt and those with a single turn. State scores: turns without one, and
    groups in which some rows have a score and others have none.
    """
    turns, turn_B_K1 = tables.reward_B_K.shape[1], tables.turn_B_K1
    group_B_K = tables.group_B[:, None] * turns + torch.arange(turns, device=tables.group_B.device)
    size_G = group_B_K[tables.has_reward_B_K].bincount()
    sizes = {"turn_groups": size_G > 0, "turn_groups_of_one": size_G == 1, "turn_groups_of_two": size_G == 2}
    counts = {name: int(groups.sum()) for name, groups in sizes.items()}
    if tables.anchor_B_K1 is not None:
        visit_B_K1 = turn_B_K1 & (tables.anchor_B_K1 != -1)
        pair_B_K1 = torch.stack([tables.group_B[:, None].expand_as(visit_B_K1), tables.anchor_B_K1])
        size_S = pair_B_K1[:, visit_B_K1].unique(dim=1, return_counts=True)[1]
        counts["turns_without_anchor"] = int((turn_B_K1 & ~visit_B_K1).sum())
        counts["states"], counts["states_of_one"] = len(size_S), int((size_S == 1).sum())
    if tables.state_score_B_K1 is not None:
        scored_B_K1 = turn_B_K1 & tables.state_score_B_K1.isfinite()
        scored_B = scored_B_K1.any(dim=1)
        of_both = (tables.group_B[member_B].tolist() for member_B in (scored_B, tables.valid_B & ~scored_B))
        counts["turns_without_score"] = int((turn_B_K1 & ~scored_B_K1).sum())
        counts["groups_with_and_without_scores"] = len(set.intersection(*map(set, of_both)))
    return counts
