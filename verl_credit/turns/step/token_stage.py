"""Outcome and token level of one run: operators and the planning detector, resolved once and used inside the estimator."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from verl_credit.config.keys import Algorithm
from verl_credit.credit.groups import SOLVED_ABOVE
from verl_credit.credit.outcome import OUTCOME_OPERATORS
from verl_credit.credit.planning.planning import STRATEGIC_GRAMS, coverage, parse_grams, planning_mask
from verl_credit.credit.plugins import (
    TurnInputs,
    as_transform_spec,
    as_uncertainty_spec,
    load,
    run_algorithm,
    run_transform,
    run_uncertainty,
)
from verl_credit.credit.plugins.calls import outcome_operator
from verl_credit.credit.token.gtpo_canonical import grpo_s, gtpo_canonical
from verl_credit.credit.token.sepa_controller import SepaController
from verl_credit.credit.token.token_credit import token_credit, token_stats
from verl_credit.credit.token.token_transforms import TRANSFORMS
from verl_credit.credit.token.uncertainty import canonical_kind, uncertainty
from verl_credit.lazy import torch


@dataclass(frozen=True)
class TokenInputs:
    """The token level's inputs from a batch, row for row as verl's data."""

    step: int
    mask_B_T: torch.Tensor
    """Tokens that the policy wrote, including tokens that rollout correction rejects."""
    token_ids_B_T: torch.Tensor
    log_prob_B_T: torch.Tensor
    entropy_B_T: torch.Tensor | None
    row_valid_B: torch.Tensor


class TokenStage:
    """The operators and SEPA's state of a run. The constructor raises for a wrong dotted path or a missing model."""

    def __init__(self, settings: Algorithm, tokenizer):
        def own(key: str):
            return load(getattr(settings, key), f"algorithm.{key}")

        self.settings = settings
        self.active = settings.token_level
        self.outcome_operator = name = settings.advantage_mode
        if name not in OUTCOME_OPERATORS:
            self.outcome_operator = outcome_operator(own("advantage_mode"), name, settings.advantage_params)
        self._algorithm = self._transform = self._canonical = self._uncertainty = None
        spec, c = TRANSFORMS.get(settings.transform_mode), settings.canonical
        if settings.algorithm_mode:
            options = {"name": settings.algorithm_mode, "params": settings.algorithm_params}
            self._algorithm = partial(run_algorithm, own("algorithm_mode"), **options)
        elif settings.own_transform:
            spec = as_transform_spec(own("transform_mode"), settings.transform_mode)
            options = {"uncertainty_kind": settings.uncertainty_kind, "params": settings.transform_params}
            self._transform = partial(run_transform, spec, **options)
        elif settings.transform_mode == "gtpo_canonical":
            options = {"alpha_1": c.alpha_1, "alpha_2": c.alpha_2, "population": c.population}
            self._canonical = partial(gtpo_canonical, entropy_clip=c.entropy_clip, **options)
        elif settings.transform_mode == "grpo_s":
            options = {"beta_1": c.beta_1, "beta_2": c.beta_2}
            self._canonical = partial(grpo_s, entropy_clip=c.entropy_clip, **options)
        if canonical_kind(settings.uncertainty_kind) is None:
            operator = as_uncertainty_spec(own("uncertainty_kind"), settings.uncertainty_kind)
            self._uncertainty = partial(run_uncertainty, operator, params=settings.transform_params)
        self.detect: Detector | None = None
        """Marks planning tokens; None where no operator reads them."""
        pooled = self._algorithm is not None or (spec is not None and spec.uses_sepa_controller)
        if pooled or (spec is not None and spec.needs_planning):  # the controller observes execution tokens
            self.detect = planning_detector(settings, tokenizer)
        self.controller = SepaController(**settings.sepa.model_dump()) if pooled else None

    def apply(
        self,
        turn_advantage_B_T: torch.Tensor,
        outcome_advantage_B: torch.Tensor,
        outcome_B: torch.Tensor,
        group_B: torch.Tensor,
        inputs: TokenInputs,
        trained_B_T: torch.Tensor,
        turns: TurnInputs | None = None,
    ) -> tuple[torch.Tensor, dict[str, float]]:
        """(advantage_B_T, metrics) with lambda as it was before this step; then the controller observes the step.

        ``trained_B_T``: the policy's tokens in the loss. They lack the tokens that rollout correction (``rollout_rs``)
        rejects: token statistics exclude them, and planning phrases are matched in the full text. ``turns``:
        an argument of the user's algorithm.
        """
        settings, written_B_T = self.settings, inputs.mask_B_T.bool() & inputs.row_valid_B[:, None]
        mask_B_T = written_B_T & trained_B_T.bool()
        planning_B_T = None
        if self.detect is not None:
            planning_B_T = self.detect(inputs.token_ids_B_T, written_B_T) & mask_B_T
        known = {"entropy_B_T": inputs.entropy_B_T}
        if self._uncertainty is None:
            kind = settings.uncertainty_kind
            uncertainty_B_T = uncertainty(kind, inputs.log_prob_B_T, mask_B_T, **known)
        else:
            known["planning_B_T"] = planning_B_T
            uncertainty_B_T = self._uncertainty(inputs.log_prob_B_T, mask_B_T, **known)
        lam = 0.0 if self.controller is None else self.controller.lam(inputs.step)
        shared = {
            "planning_B_T": planning_B_T,
            "sepa_lambda": lam,
            "gtpo_beta": settings.gtpo.beta,
            "hicra_alpha": settings.hicra.alpha,
        }
        rows = mask_B_T, group_B, inputs.row_valid_B
        stats, extra = None, {}
        if self._algorithm is not None:
            shared |= {"entropy_B_T": inputs.entropy_B_T, "turns": turns, "step": inputs.step}
            advantage_B_T, extra = self._algorithm(outcome_B, inputs.log_prob_B_T, *rows, **shared)
        elif self._canonical is not None:
            *rows, valid_B = rows
            advantage_B_T = self._canonical(outcome_B, uncertainty_B_T, *rows, row_valid_B=valid_B)
            if advantage_B_T.dim() == 1:  # grpo_s: one for all tokens of a row
                advantage_B_T = torch.where(mask_B_T, advantage_B_T[:, None], 0.0)
        elif self._transform is not None:
            shared |= {
                "log_prob_B_T": inputs.log_prob_B_T,
                "uncertainty_B_T": uncertainty_B_T,
                "step": inputs.step,
            }
            advantage_B_T, extra = self._transform(turn_advantage_B_T, outcome_advantage_B, *rows, **shared)
        else:
            credit = token_credit(
                turn_advantage_B_T,
                mask_B_T,
                transform_mode=settings.transform_mode,
                uncertainty_B_T=uncertainty_B_T,
                group_B=group_B,
                entropy_mask_rho=settings.entropy_mask.rho,
                **shared,
            )
            advantage_B_T, stats = credit.advantage_B_T, credit.stats
            extra = weight_metrics(credit.weight_B_T, mask_B_T)
        if stats is None:
            stats = token_stats(uncertainty_B_T, planning_B_T, mask_B_T)
        values = stats | extra
        if mask_B_T.any():
            values["advantage_abs/token"] = advantage_B_T[mask_B_T].abs().double().mean()
        if planning_B_T is not None:
            values |= coverage(planning_B_T, mask_B_T)
        if self.controller is not None:
            values |= self.controller.metrics(inputs.step) | {"sepa_lambda": lam}
            outcomes_b = outcome_B[inputs.row_valid_B]
            correct = (outcomes_b > SOLVED_ABOVE).double().mean().item()  # NaN without a valid row
            self.controller.observe(inputs.step, correct, uncertainty_B_T[mask_B_T & ~planning_B_T.bool()])
        return advantage_B_T, {f"credit/{name}": float(value) for name, value in values.items()}


def weight_metrics(weight_B_T: torch.Tensor, mask_B_T: torch.Tensor) -> dict[str, float]:
    """Spread of the token weights and the share of tokens whose weight was floored at 0, over policy tokens."""
    weights = weight_B_T[mask_B_T].double()
    if not len(weights):
        return {}
    return {
        "token_weight/mean": weights.mean().item(),
        "token_weight/std": weights.std(correction=0).item(),
        "token_weight/share_zero": (weights == 0).double().mean().item(),
    }


Detector = Callable[["torch.Tensor", "torch.Tensor"], "torch.Tensor"]


def planning_detector(settings: Algorithm, tokenizer) -> Detector:
    """The configured detector, ``f(token_ids_B_T, mask_B_T) -> planning_B_T``.

    A user's detector is ``f(token_ids_B_T, mask_B_T, decode)``; its mask is checked.
    """
    decode = pieces_of(tokenizer)
    if settings.planning.detector == "grams":
        grams = STRATEGIC_GRAMS if settings.strategic_grams is None else parse_grams(settings.strategic_grams)
        return partial(planning_mask, decode=decode, grams=grams)
    own = load(settings.planning.detector, "algorithm.planning.detector")

    def detect(token_ids_B_T: torch.Tensor, mask_B_T: torch.Tensor) -> torch.Tensor:
        planning = torch.as_tensor(own(token_ids_B_T, mask_B_T, decode))
        if planning.shape != mask_B_T.shape or not bool(((planning == 0) | (planning == 1)).all()):
            raise ValueError(
                f"algorithm.planning.detector={settings.planning.detector!r} returned shape {tuple(planning.shape)} "
                f"({planning.dtype}); expected a mask of shape {tuple(mask_B_T.shape)}"
            )
        return planning.bool() & mask_B_T.bool()

    return detect


def pieces_of(tokenizer) -> Callable[[list[int]], list[str]]:
    """A function from token ids to the text of each token."""
    options = {"clean_up_tokenization_spaces": False}
    return lambda token_ids: tokenizer.batch_decode([[i] for i in token_ids], **options)
