"""`turn_credit`: one advantage per turn from outcomes, information gains and explicit turn masks."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from verl_credit.credit.checks import as_bool, as_group_ids, check_name, check_shape, first_row, output_dtype
from verl_credit.credit.groups import EPS
from verl_credit.credit.outcome.outcome import OUTCOME_OPERATORS, group_counts, tied_rows, valid_rows
from verl_credit.credit.turn.modes import MODES, modes_that
from verl_credit.credit.turn.tables import Tables


@dataclass(frozen=True)
class TurnCredit:
    """Advantages and clip scales of the tool turns, and the answer turn's advantage (its clip scale is 1).

    `advantage_B_K1` and `clip_scale_B_K1` append the answer turn as one more column. Because columns past a
    row's tool turns read the outcome advantage and scale 1 too, column n_tool_turns of every row is its answer
    turn, which is what `spread` looks up.
    """

    advantage_B_K: torch.Tensor
    outcome_advantage_B: torch.Tensor
    clip_scale_B_K: torch.Tensor
    counts: dict[str, int] = field(default_factory=dict)

    @property
    def advantage_B_K1(self) -> torch.Tensor:
        return torch.cat([self.advantage_B_K, self.outcome_advantage_B[:, None]], dim=1)

    @property
    def clip_scale_B_K1(self) -> torch.Tensor:
        return torch.nn.functional.pad(self.clip_scale_B_K, (0, 1), value=1.0)


def turn_credit(
    outcome_B: torch.Tensor,
    info_gain_B_K: torch.Tensor,
    turn_mask_B_K: torch.Tensor,
    group_B: torch.Tensor,
    *,
    info_gain_norm_mode: str = "turn-group-v1d",
    gamma: float = 1.0,
    alpha: float = 0.3,
    clip_beta: float = 0.3,
    norm_by_std: bool = True,
    outcome_operator: str | Callable[..., torch.Tensor] = "grpo",
    tied_groups: str = "keep",
    gain_scale: float = 1.0,
    outcome_scale: float = 1.0,
    ddof: int | None = None,
    variance_floor: float | None = None,
    eps: float = EPS,
    outcome_weight: float = 1.5,
    outcome_gamma_power: int = 2,
    sigma_floor: float = 1e-6,
    row_valid_B: torch.Tensor | None = None,
    on_nonfinite: str = "drop",
) -> TurnCredit:
    """Credit every turn of every trajectory; the equations are with the modes (`modes/`).

    Shapes: B rows, K tool turns (0 is allowed). outcome_B finite; turn_mask_B_K True where a tool turn has a
    gain, and a gain of exactly 0 is a gain; group_B integer prompt ids.
    A tool turn without a gain shares the advantage and clip scale of the row's next gain, or reads the
    outcome advantage and 1 when there is none (the released segments; see `info_gain`, first_turn="none").
    Discounts count gains, not turns without one.

    Hidden constants of the release, as arguments: variance_floor (1e-8), eps (1e-6), clip_beta (0.3);
    turn-group only: outcome_weight (1.5), outcome_gamma_power (2: the outcome enters the last gain with
    gamma^2), sigma_floor (1e-6). alpha is 0.3 in the released recipe and absent (1) in the paper.
    ddof=None and variance_floor=None mean verl's GRPO (1 and 0) in `none`, the release (0 and 1e-8) elsewhere.

    outcome_operator, a name or `f(outcome_B, group_B, row_valid_B=) -> advantage_B`, gives the outcome term R of
    `none`, `separate`, v1d and unbiased; `joint` and `turn-group` normalise outcomes themselves and take "grpo".
    tied_groups: a prompt whose outcomes all tie has R = 0. With "keep" (released) its gains still act; "skip" sets
    the advantages of its rows to exactly 0 and their clip scales to 1.

    gain_scale and outcome_scale, the weights of a curriculum, multiply normalised gains and outcomes (before the
    normalisation they would do nothing at all). Not in `turn-group`, which normalises their sum.

    Rows with row_valid_B False (copies that pad a batch, rows hit by a tool fault) enter no statistic and
    get advantage 0 and clip scale 1. An outcome or gain that is not finite does the same to its row or turn
    only (on_nonfinite="drop"), or raises ValueError ("raise").
    `counts` reports invalid_rows, nonfinite_outcomes, nonfinite_gains, skipped_rows and `group_counts`.
    Statistics in float64; returns the widest input dtype, at least float32. No gradient flows.

    Departures from the release: turns are what the mask says, not where a reward differs from 0; the turn
    compared with is the same tool turn, not the same ordinal among non-zero gains; float64.
    Source: A2TGPO, 2605.06200; joint and separate: IGPO, 2510.14967.
    """
    check_name("info_gain_norm_mode", info_gain_norm_mode, MODES)
    mode = MODES[info_gain_norm_mode]
    if not callable(outcome_operator):
        check_name("outcome_operator", outcome_operator, OUTCOME_OPERATORS)
    if outcome_operator != "grpo" and not mode.any_outcome_operator:
        raise ValueError(
            f"outcome_operator={outcome_operator!r} with info_gain_norm_mode={info_gain_norm_mode!r}: that mode "
            f"normalises outcomes itself and accepts 'grpo' only; others: {modes_that('any_outcome_operator')}"
        )
    if not mode.curriculum and not gain_scale == outcome_scale == 1:
        raise ValueError(
            f"gain_scale={gain_scale}, outcome_scale={outcome_scale} with info_gain_norm_mode={info_gain_norm_mode!r}: "
            "that mode normalises gains and outcome together; use another mode"
        )
    check_name("tied_groups", tied_groups, ("keep", "skip"))
    check_name("on_nonfinite", on_nonfinite, ("drop", "raise"))
    valid_B = valid_rows(outcome_B, group_B, row_valid_B)
    if info_gain_B_K.dim() != 2:
        raise ValueError(f"info_gain_B_K has shape {tuple(info_gain_B_K.shape)}; expected rows x tool turns")
    shape = (outcome_B.shape[0], info_gain_B_K.shape[1])
    check_shape("info_gain_B_K", info_gain_B_K, shape, "outcome_B has rows")
    check_shape("turn_mask_B_K", turn_mask_B_K, shape, "info_gain_B_K")
    has_gain_B_K = as_bool("turn_mask_B_K", turn_mask_B_K)

    bad_B = valid_B & ~outcome_B.isfinite()
    bad_B_K = valid_B[:, None] & has_gain_B_K & ~info_gain_B_K.isfinite()
    if on_nonfinite == "raise":
        _refuse("outcome_B", bad_B)
        _refuse("info_gain_B_K", bad_B_K)
    usable_B = valid_B & ~bad_B
    has_gain_B_K = has_gain_B_K & usable_B[:, None] & ~bad_B_K

    with torch.no_grad():
        tables = Tables(
            outcome_B=torch.where(usable_B, outcome_B.to(torch.float64), 0.0),
            gain_B_K=torch.where(has_gain_B_K, info_gain_B_K.to(torch.float64), 0.0),
            has_gain_B_K=has_gain_B_K,
            group_B=as_group_ids("group_B", group_B),
            valid_B=usable_B,
            gamma=gamma,
            alpha=alpha,
            clip_beta=clip_beta,
            norm_by_std=norm_by_std,
            ddof=mode.ddof if ddof is None else ddof,
            variance_floor=mode.variance_floor if variance_floor is None else variance_floor,
            eps=eps,
            outcome_weight=outcome_weight,
            outcome_gamma_power=outcome_gamma_power,
            sigma_floor=sigma_floor,
            gain_scale=gain_scale,
            outcome_scale=outcome_scale,
            known_gains_B=~bad_B_K.any(dim=1),
            outcome_operator=outcome_operator,
        )
        advantage_B_K, outcome_advantage_B, clip_scale_B_K = mode.function(tables)
        skipped_B = torch.zeros_like(usable_B)
        if tied_groups == "skip":
            skipped_B = tied_rows(tables.outcome_B, tables.group_B, usable_B)
        advantage_B_K = torch.where(skipped_B[:, None], 0.0, advantage_B_K)
        outcome_advantage_B = torch.where(skipped_B, 0.0, outcome_advantage_B)
        clip_scale_B_K = torch.where(skipped_B[:, None], 1.0, clip_scale_B_K)
        outputs = (advantage_B_K, outcome_advantage_B, clip_scale_B_K)
    counts = {
        "invalid_rows": int((~valid_B).sum()),
        "nonfinite_outcomes": int(bad_B.sum()),
        "nonfinite_gains": int(bad_B_K.sum()),
        "skipped_rows": int(skipped_B.sum()),
        **group_counts(outcome_B, group_B, row_valid_B=valid_B),
    }
    dtype = output_dtype(outcome_B, info_gain_B_K)
    return TurnCredit(*(tensor.to(dtype) for tensor in outputs), counts=counts)


def _refuse(name: str, bad: torch.Tensor) -> None:
    if bad.any():
        raise ValueError(
            f"{name} row {first_row(bad)} holds a value that is not finite; expected finite numbers"
        )
