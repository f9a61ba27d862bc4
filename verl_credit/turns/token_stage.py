"""Outcome and token level of one run: operators and the planning detector, resolved once and used inside the estimator."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from verl_credit.config.keys import Algorithm
from verl_credit.credit.outcome import OUTCOME_OPERATORS
from verl_credit.credit.planning.anchors import planning_mask_by_anchors
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
from verl_credit.credit.plugins.run import outcome_operator
from verl_credit.credit.token.gtpo_canonical import grpo_s, gtpo_canonical
from verl_credit.credit.token.sepa_controller import SepaController
from verl_credit.credit.token.token_credit import token_credit, token_stats
from verl_credit.credit.token.token_transforms import TRANSFORMS
from verl_credit.credit.token.uncertainty import canonical_kind, uncertainty


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
        self.settings = settings
        self.outcome_operator = settings.advantage_mode
        if settings.advantage_mode not in OUTCOME_OPERATORS:
            operator = load(settings.advantage_mode, "algorithm.advantage_mode")
            self.outcome_operator = outcome_operator(
                operator, settings.advantage_mode, settings.advantage_params
            )
        self._algorithm = None
        if settings.algorithm_mode:
            self._algorithm = load(settings.algorithm_mode, "algorithm.algorithm_mode")
        self._transform = None
        if settings.own_transform and self._algorithm is None:
            operator = load(settings.transform_mode, "algorithm.transform_mode")
            self._transform = as_transform_spec(operator, settings.transform_mode)
        self._uncertainty = None
        if canonical_kind(settings.uncertainty_kind) is None:
            operator = load(settings.uncertainty_kind, "algorithm.uncertainty_kind")
            self._uncertainty = as_uncertainty_spec(operator, settings.uncertainty_kind)
        spec = self._transform or TRANSFORMS.get(settings.transform_mode)
        self.detect: Detector | None = None
        """Marks planning tokens; None where no operator reads them."""
        pooled = self._algorithm is not None or (spec is not None and spec.uses_sepa_controller)
        if pooled or (spec is not None and spec.needs_planning):  # the controller observes execution tokens
            self.detect = planning_detector(settings, tokenizer)
        self.controller = SepaController(**settings.sepa.model_dump()) if pooled else None

    @property
    def active(self) -> bool:
        return self.settings.token_level

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
        rejects, so that no statistic of uncertainties has these; planning phrases are sought in the whole text. ``turns``:
        an argument of the user's algorithm.
        """
        settings, written_B_T = self.settings, inputs.mask_B_T.bool() & inputs.row_valid_B[:, None]
        mask_B_T = written_B_T & trained_B_T.bool()
        planning_B_T = None
        if self.detect is not None:
            planning_B_T = self.detect(inputs.token_ids_B_T, written_B_T) & mask_B_T
        uncertainty_B_T = self._uncertainties(inputs, mask_B_T, planning_B_T)
        lam = 0.0 if self.controller is None else self.controller.lam(inputs.step)
        shared = {
            "step": inputs.step,
            "sepa_lambda": lam,
            "gtpo_beta": settings.gtpo.beta,
            "hicra_alpha": settings.hicra.alpha,
        }
        stats, extra = None, {}
        if self._algorithm is not None:
            advantage_B_T, extra = run_algorithm(
                self._algorithm,
                outcome_B,
                inputs.log_prob_B_T,
                mask_B_T,
                group_B,
                inputs.row_valid_B,
                name=settings.algorithm_mode,
                planning_B_T=planning_B_T,
                entropy_B_T=inputs.entropy_B_T,
                params=settings.algorithm_params,
                turns=turns,
                **shared,
            )
        elif settings.canonical_transform:
            advantage_B_T = self._canonical(outcome_B, uncertainty_B_T, mask_B_T, group_B, inputs.row_valid_B)
        elif self._transform is not None:
            advantage_B_T, extra = run_transform(
                self._transform,
                turn_advantage_B_T,
                outcome_advantage_B,
                mask_B_T,
                group_B,
                inputs.row_valid_B,
                log_prob_B_T=inputs.log_prob_B_T,
                uncertainty_B_T=uncertainty_B_T,
                planning_B_T=planning_B_T,
                uncertainty_kind=settings.uncertainty_kind,
                params=settings.transform_params,
                **shared,
            )
        else:
            credit = token_credit(
                turn_advantage_B_T,
                mask_B_T,
                transform_mode=settings.transform_mode,
                uncertainty_B_T=uncertainty_B_T,
                planning_B_T=planning_B_T,
                group_B=group_B,
                sepa_lambda=lam,
                gtpo_beta=settings.gtpo.beta,
                hicra_alpha=settings.hicra.alpha,
                entropy_mask_rho=settings.entropy_mask.rho,
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
            self._observe(inputs, outcome_B, uncertainty_B_T, planning_B_T, mask_B_T)
        return advantage_B_T, {f"credit/{name}": float(value) for name, value in values.items()}

    def _uncertainties(self, inputs: TokenInputs, mask_B_T, planning_B_T) -> torch.Tensor:
        if self._uncertainty is not None:
            return run_uncertainty(
                self._uncertainty,
                inputs.log_prob_B_T,
                mask_B_T,
                entropy_B_T=inputs.entropy_B_T,
                planning_B_T=planning_B_T,
                params=self.settings.transform_params,
            )
        return uncertainty(
            self.settings.uncertainty_kind, inputs.log_prob_B_T, mask_B_T, entropy_B_T=inputs.entropy_B_T
        )

    def _canonical(self, outcome_B, entropy_B_T, mask_B_T, group_B, row_valid_B) -> torch.Tensor:
        settings = self.settings
        shared = {"entropy_clip": settings.canonical.entropy_clip, "row_valid_B": row_valid_B}
        if settings.transform_mode == "gtpo_canonical":
            return gtpo_canonical(
                outcome_B,
                entropy_B_T,
                mask_B_T,
                group_B,
                alpha_1=settings.canonical.alpha_1,
                alpha_2=settings.canonical.alpha_2,
                population=settings.canonical.population,
                **shared,
            )
        advantage_B = grpo_s(
            outcome_B,
            entropy_B_T,
            mask_B_T,
            group_B,
            beta_1=settings.canonical.beta_1,
            beta_2=settings.canonical.beta_2,
            **shared,
        )
        return torch.where(mask_B_T, advantage_B[:, None], 0.0)

    def _observe(self, inputs: TokenInputs, outcome_B, uncertainty_B_T, planning_B_T, mask_B_T) -> None:
        outcomes_b = outcome_B[inputs.row_valid_B]
        correct = (outcomes_b > 0.5).double().mean().item() if len(outcomes_b) else float("nan")
        self.controller.observe(inputs.step, correct, uncertainty_B_T[mask_B_T & ~planning_B_T.bool()])


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


Detector = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def planning_detector(settings: Algorithm, tokenizer) -> Detector:
    """The configured detector, ``f(token_ids_B_T, mask_B_T) -> planning_B_T``.

    A user's detector is ``f(token_ids_B_T, mask_B_T, decode)``; its mask is checked.
    """
    decode = pieces_of(tokenizer)
    if settings.planning.detector == "grams":
        grams = STRATEGIC_GRAMS if settings.strategic_grams is None else parse_grams(settings.strategic_grams)
        return partial(planning_mask, decode=decode, grams=grams)
    if settings.planning.detector == "anchors":
        encode = _sentence_encoder(settings.planning.model)
        return partial(
            planning_mask_by_anchors, decode=decode, encode=encode, threshold=settings.planning.threshold
        )
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

    def decode(token_ids: list[int]) -> list[str]:
        return tokenizer.batch_decode([[i] for i in token_ids], clean_up_tokenization_spaces=False)

    return decode


def _sentence_encoder(folder: str) -> Callable[[list[str]], torch.Tensor]:
    from verl_credit_retriever.encoder import SentenceEncoder

    encoder = SentenceEncoder(folder, query_prefix="")
    return lambda texts: torch.from_numpy(encoder.encode_queries(texts))
