"""Outcome and token level of one run: operators and the planning detector, resolved once and used inside the estimator."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

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

    def __init__(self, settings: Algorithm, tokenizer: Any) -> None:
        def own(key: str) -> Any:
            return load(getattr(settings, key), f"algorithm.{key}")

        self.settings = settings
        self.active = settings.token_level
        name, kind = settings.advantage_mode, settings.uncertainty_kind
        self.outcome_operator: str | Callable[..., torch.Tensor] = name
        if name not in OUTCOME_OPERATORS:
            self.outcome_operator = outcome_operator(own("advantage_mode"), name, settings.advantage_params)
        self._algorithm = own("algorithm_mode") if settings.algorithm_mode else None
        self._transform = self._uncertainty = None
        if settings.own_transform and self._algorithm is None:
            self._transform = as_transform_spec(own("transform_mode"), settings.transform_mode)
        c = settings.canonical
        self._canonical = {
            "gtpo_canonical": partial(
                gtpo_canonical, alpha_1=c.alpha_1, alpha_2=c.alpha_2, population=c.population
            ),
            "grpo_s": partial(grpo_s, beta_1=c.beta_1, beta_2=c.beta_2),
        }.get(settings.transform_mode)
        if canonical_kind(kind) is None:
            self._uncertainty = as_uncertainty_spec(own("uncertainty_kind"), kind)
        spec = self._transform or TRANSFORMS.get(settings.transform_mode)
        pooled = self._algorithm is not None or (spec is not None and spec.uses_sepa_controller)
        self.detect: Detector | None = None
        """Marks planning tokens; None where no operator reads them."""
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
        a, valid_B = self.settings, inputs.row_valid_B
        log_prob_B_T, entropy_B_T = inputs.log_prob_B_T, inputs.entropy_B_T
        written_B_T = inputs.mask_B_T & valid_B[:, None]
        mask_B_T = written_B_T & trained_B_T.bool()
        planning_B_T = None
        if self.detect is not None:
            planning_B_T = self.detect(inputs.token_ids_B_T, written_B_T) & mask_B_T
        options: dict[str, Any] = {"entropy_B_T": entropy_B_T}
        if self._uncertainty is None:
            uncertainty_B_T = uncertainty(a.uncertainty_kind, log_prob_B_T, mask_B_T, **options)
        else:
            options |= {"planning_B_T": planning_B_T, "params": a.transform_params}
            uncertainty_B_T = run_uncertainty(self._uncertainty, log_prob_B_T, mask_B_T, **options)
        lam = 0.0 if self.controller is None else self.controller.lam(inputs.step)
        shared: dict[str, Any] = {"planning_B_T": planning_B_T, "sepa_lambda": lam}
        shared |= {"gtpo_beta": a.gtpo.beta, "hicra_alpha": a.hicra.alpha}
        rows = mask_B_T, group_B, valid_B
        stats: dict[str, float] | None = None
        metrics: dict[str, float] = {}
        if self._algorithm is not None:
            shared |= {"name": a.algorithm_mode, "params": a.algorithm_params, "turns": turns}
            shared |= {"entropy_B_T": entropy_B_T, "step": inputs.step}
            advantage_B_T, metrics = run_algorithm(self._algorithm, outcome_B, log_prob_B_T, *rows, **shared)
        elif self._transform is not None:
            shared |= {"log_prob_B_T": log_prob_B_T, "uncertainty_B_T": uncertainty_B_T, "step": inputs.step}
            shared |= {"uncertainty_kind": a.uncertainty_kind, "params": a.transform_params}
            advantages = turn_advantage_B_T, outcome_advantage_B
            advantage_B_T, metrics = run_transform(self._transform, *advantages, *rows, **shared)
        elif self._canonical is not None:
            options = {"entropy_clip": a.canonical.entropy_clip, "row_valid_B": valid_B}
            advantage_B_T = self._canonical(outcome_B, uncertainty_B_T, mask_B_T, group_B, **options)
            if advantage_B_T.dim() == 1:  # grpo_s: one for all tokens of a row
                advantage_B_T = torch.where(mask_B_T, advantage_B_T[:, None], 0.0)
        else:
            shared |= {"uncertainty_B_T": uncertainty_B_T, "entropy_mask_rho": a.entropy_mask.rho}
            shared |= {"transform_mode": a.transform_mode, "group_B": group_B}
            credit = token_credit(turn_advantage_B_T, mask_B_T, **shared)
            advantage_B_T, stats = credit.advantage_B_T, credit.stats
            metrics = weight_metrics(credit.weight_B_T, mask_B_T)
        metrics |= token_stats(uncertainty_B_T, planning_B_T, mask_B_T) if stats is None else stats
        if mask_B_T.any():
            metrics["advantage_abs/token"] = advantage_B_T[mask_B_T].abs().double().mean().item()
        executed_B_T = mask_B_T
        if planning_B_T is not None:
            metrics |= coverage(planning_B_T, mask_B_T)
            executed_B_T = mask_B_T & ~planning_B_T
        if self.controller is not None:
            metrics |= self.controller.metrics(inputs.step) | {"sepa_lambda": lam}
            correct = (outcome_B[valid_B] > SOLVED_ABOVE).double().mean().item()  # NaN without a valid row
            self.controller.observe(inputs.step, correct, uncertainty_B_T[executed_B_T])
        return advantage_B_T, {f"credit/{name}": float(value) for name, value in metrics.items()}


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
