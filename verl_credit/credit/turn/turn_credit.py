"""`turn_credit`: one advantage per turn from outcomes, turn rewards and explicit turn masks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from verl_credit.credit.arguments import check_name
from verl_credit.credit.turn.mode import TurnCredit, TurnMode, as_turn_mode
from verl_credit.credit.turn.modes import MODES
from verl_credit.lazy import torch


def turn_credit(
    outcome_B: torch.Tensor,
    turn_reward_B_K: torch.Tensor,
    turn_mask_B_K: torch.Tensor,
    group_B: torch.Tensor,
    *,
    info_gain_norm_mode: str | Callable = "turn-group-v1d",
    **keywords,
) -> TurnCredit:
    """Credit every turn of every trajectory, by the mode of a name: each mode is a function of its own, with its equation.

    Shapes: B rows, K tool turns (0 is allowed). outcome_B finite; turn_reward_B_K is what each tool turn earned, such as
    its information gain; turn_mask_B_K True where a tool turn has a reward, and a reward of exactly 0 is a reward;
    group_B integer prompt ids.
    A tool turn without a reward shares the advantage and clip scale of the row's next reward, or reads the
    outcome advantage and 1 when there is none (the released segments). Discounts count rewards, not turns without one. Modes
    that compare whole returns leave out a row with such a turn; turn_gae and progress say what they do.

    Keywords of every mode:
    row_valid_B: rows with False (copies that pad a batch, rows hit by a tool fault) enter no statistic and get
    advantage 0 and clip scale 1. n_tool_turns_B: the tool turns of each row, where the last ones have no reward.
    tied_groups: a prompt whose outcomes all tie has R = 0. With "keep" (released) its turn rewards still act; "skip" sets
    the advantages of its rows to exactly 0 and their clip scales to 1.
    on_nonfinite: an outcome that is not finite invalidates its row, a turn reward that is not finite is a missing one
    ("drop"), or both raise ValueError ("raise").

    Keywords of some modes, refused by those that do not read them, as are values out of range:
    gamma, alpha (0.3 in the released recipe, absent (1) in the paper), clip_beta; norm_by_std, ddof, variance_floor, eps;
    outcome_operator, a name or `f(outcome_B, group_B, row_valid_B=) -> advantage_B`, gives the outcome term R;
    gain_scale and outcome_scale, the weights of a curriculum, multiply normalised rewards and outcomes; and those that
    stand with a single mode. `TurnMode.options` has them with their defaults.

    Optional tables, each of the modes that read it (`mode.OPTIONAL_TABLES`; `needs` says which cannot do without):
    anchor_B_K1 (`exact_anchors`), value_B_K1, bootstrap_B, state_score_B_K1, initial_score_B,
    turn_tokens_B_K1, result_turn_B. K1 tables have a column for every tool turn and one more for the answer turn, which
    stands at column n_tool_turns_B of its row: n_tool_turns_B has to come with them, unless every row has a reward in the
    last tool turn.

    info_gain_norm_mode is a name, or a function `f(tables, *, ...) -> (advantage_B_K, outcome_advantage_B,
    clip_scale_B_K)` of your own (`as_turn_mode`).

    `counts` reports invalid_rows, nonfinite_outcomes, nonfinite_rewards, turns_without_reward, skipped_rows,
    `group_counts`, and the groups per prompt and turn: turn_groups, turn_groups_of_one, turn_groups_of_two. With anchors:
    turns_without_anchor, states, states_of_one; with state scores: turns_without_score, groups_with_and_without_scores.
    Of modes that compare whole returns: rows_left_out, the valid rows whose rewards are not all known.
    Statistics in float64; returns the widest input dtype, at least float32. No gradient flows.

    Departures from the release: turns are what the mask says, not where a reward differs from 0; the turn
    compared with is the same tool turn, not the same ordinal among non-zero gains; float64.
    Source: A2TGPO, 2605.06200; joint and separate: IGPO, 2510.14967.
    """
    mode = info_gain_norm_mode
    if callable(mode):
        mode = as_turn_mode(mode, getattr(mode, "__name__", type(mode).__name__))
    else:
        check_name("info_gain_norm_mode", mode, MODES)
        mode = MODES[mode]
    return mode(outcome_B, turn_reward_B_K, turn_mask_B_K, group_B, **keywords)


@dataclass(frozen=True)
class BatchTables:
    """A batch as every turn mode is called with it; the mode reads the checked `Tables` that are made of it."""

    outcome_B: torch.Tensor
    reward_B_K: torch.Tensor
    has_reward_B_K: torch.Tensor
    group_B: torch.Tensor
    valid_B: torch.Tensor
    n_tool_turns_B: torch.Tensor
    optional: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """Tables by name (`mode.OPTIONAL_TABLES`). A mode gets those that it reads."""


def credit_of(mode: TurnMode, tables: BatchTables, options: Mapping[str, Any]) -> TurnCredit:
    """The credit of a batch by a mode. Trainer, twin, fidelity, report and laws call it."""
    read: dict[str, Any] = {name: table for name, table in tables.optional.items() if name in mode.tables}
    return mode(
        tables.outcome_B,
        tables.reward_B_K,
        tables.has_reward_B_K,
        tables.group_B,
        row_valid_B=tables.valid_B,
        n_tool_turns_B=tables.n_tool_turns_B,
        **read,
        **options,
    )
