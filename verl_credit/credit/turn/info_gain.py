"""Information gain: how much more likely the gold answer became through a turn."""

from __future__ import annotations

from dataclasses import dataclass

from verl_credit.credit.arguments import as_bool, check_name, check_shape, output_dtype, refuse_rows
from verl_credit.lazy import torch

INFO_GAIN_TYPES = ("prob_diff", "log_prob_diff", "log_gap")
GAP_EPSILON = 0.1
FIRST_TURN = ("prior", "none")


@dataclass(frozen=True)
class InfoGain:
    """Gains per tool turn, which of them exist, and which are missing because a score is not finite."""

    info_gain_B_K: torch.Tensor  # 0 where turn_mask is False, NaN where the gain is missing
    turn_mask_B_K: torch.Tensor  # True where the tool turn should have a gain (which may be 0, or missing)
    failed_B_K: (
        torch.Tensor
    )  # True where the gain is missing: a score of its two contexts was NaN or infinite

    @property
    def failed_gains(self) -> int:
        return int(self.failed_B_K.sum())

    @property
    def failed_rows(self) -> int:
        return int(self.failed_B_K.any(dim=1).sum())


def info_gain(
    score_B_K1: torch.Tensor,
    context_mask_B_K1: torch.Tensor,
    *,
    info_gain_type: str = "prob_diff",
    first_turn: str = "prior",
) -> InfoGain:
    """Difference of consecutive contexts' scores.

        prob_diff:      gain[k] = exp(score[k+1]) - exp(score[k])
        log_prob_diff:  gain[k] = score[k+1] - score[k]
        log_gap:        gain[k] = log(d[k] / d[k+1]), d = .1 - score

    `score_B_K1` is the mean log-probability of the gold tokens in each context: column 0 the bare prompt,
    column k + 1 the context after tool turn k. `context_mask_B_K1` says which contexts a row has.

    first_turn="prior" measures tool turn 0 against the bare prompt. "none" leaves it without a gain
    (turn_mask False in column 0, whatever its score): `turn_credit` then lets it share turn 1's advantage and
    clip scale, or the outcome's where there is no turn 1.

    A score that is not finite costs the two gains it enters: they are NaN, which is a missing gain to every turn
    mode, and `failed_B_K` has them. The released code instead measures the next gain from the last good score,
    across two turns.
    Raises ValueError for unknown names, shapes, and scores above 0 (they are log-probabilities).
    log_gap is the change of TRACE's value log(d[0] / d[k]) of a state (2607.13988), with its constant .1.
    Released defaults are log_prob_diff and none; the paper's (2605.06200, equation 3) are the ones here.
    """
    check_name("info_gain_type", info_gain_type, INFO_GAIN_TYPES)
    check_name("first_turn", first_turn, FIRST_TURN)
    if score_B_K1.dim() != 2 or score_B_K1.shape[1] < 1:
        raise ValueError(f"score_B_K1 has shape {tuple(score_B_K1.shape)}; expected rows x (1 + tool turns)")
    check_shape("context_mask_B_K1", context_mask_B_K1, score_B_K1.shape, "score_B_K1")
    asked_B_K1 = as_bool("context_mask_B_K1", context_mask_B_K1)
    finite_B_K1 = asked_B_K1 & score_B_K1.isfinite()
    above = finite_B_K1 & (score_B_K1 > 1e-3)  # half precision may round a certain token's 0 upwards
    refuse_rows("score_B_K1", above, "has a score above 0; scores are mean log-probabilities")
    score = torch.where(finite_B_K1, score_B_K1, 0).to(torch.float64)
    if info_gain_type == "prob_diff":
        score = score.exp()
    elif info_gain_type == "log_gap":
        score = -(GAP_EPSILON - score.clamp(max=0)).log()
    exists_B_K = asked_B_K1[:, 1:] & asked_B_K1[:, :-1]
    if first_turn == "none":
        exists_B_K = exists_B_K & (torch.arange(exists_B_K.shape[1], device=score.device) > 0)
    failed_B_K = exists_B_K & ~(finite_B_K1[:, 1:] & finite_B_K1[:, :-1])
    gain_B_K = torch.where(exists_B_K, score[:, 1:] - score[:, :-1], 0.0)
    gain_B_K = gain_B_K.masked_fill(failed_B_K, float("nan"))
    return InfoGain(gain_B_K.to(output_dtype(score_B_K1)), exists_B_K, failed_B_K)
