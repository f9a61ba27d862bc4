"""Inputs and outputs of a user's operators: plain lists for one prompt's completions.

Names and fields are those of retrain's plug-in interface, so that its plug-ins run here unchanged. G completions of one
prompt; token lists contain only the policy's own tokens, without observations.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from verl_credit.credit.token.gtpo import gtpo_weights, hicra, sepa_amp, sepa_pool
from verl_credit.lazy import torch

Lists = list[list[float]]


@dataclass(frozen=True)
class TransformContext:
    """Input of a token transform."""

    episode_advantages: list[float]
    """The outcome advantage of each completion."""
    logprobs_G: Lists
    planning_masks_G: list[list[int]]
    """Empty lists unless the transform sets ``needs_planning``."""
    sepa_lambda: float = 0.0
    params: dict[str, Any] = field(default_factory=dict)
    step: int = 0
    gtpo_beta: float = 0.1
    hicra_alpha: float = 0.2
    token_distributions_G: Any = None
    """Always None: whole distributions are not kept."""
    uncertainties_G: Lists = field(default_factory=list)
    """Each token's uncertainty, as ``uncertainty_kind`` defines it."""
    uncertainty_kind: str = "surprisal"
    turn_advantages_G: Lists = field(default_factory=list)
    """The advantage of each token's turn; equal to ``episode_advantages`` without a turn mode."""

    def gtpo(self, advantage: float, uncertainties: list[float], beta: float | None = None) -> list[float]:
        """The advantage times the `gtpo_weights` of one completion's tokens. beta: by default ``gtpo_beta``."""
        values, mask, _ = _row(uncertainties, [0] * len(uncertainties))
        weights = gtpo_weights(values, mask, beta=self.gtpo_beta if beta is None else beta)
        return (advantage * weights)[0].tolist()

    def hicra(self, token_advs: list[float], planning_mask: list[int]) -> list[float]:
        """`hicra` of one completion, with ``hicra_alpha``. Raises ValueError for a mask of another length."""
        values, _, planning = _row(token_advs, planning_mask)
        return hicra(values, planning, self.hicra_alpha)[0].tolist()

    def sepa_pool(self, uncertainties: list[float], planning_mask: list[int]) -> list[float]:
        """`sepa_pool` of one completion, with ``sepa_lambda``; errors as of `hicra`."""
        values, mask, planning = _row(uncertainties, planning_mask)
        return sepa_pool(values, planning, mask, self.sepa_lambda)[0].tolist()

    def sepa_amp(self, uncertainties: list[float], planning_mask: list[int]) -> list[float]:
        """`sepa_amp` of one completion, with ``sepa_lambda``; errors as of `hicra`."""
        values, mask, planning = _row(uncertainties, planning_mask)
        return sepa_amp(values, planning, mask, self.sepa_lambda)[0].tolist()


@dataclass(frozen=True)
class AlgorithmOutput:
    """An algorithm returns one list of token advantages per completion."""

    token_advs: Lists
    has_stats: bool = False
    stats: Any = None
    extra_metrics: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class TransformOutput(AlgorithmOutput):
    """Output of a token transform: one list of token advantages per completion."""

    needs_planning: bool = False
    uses_sepa_controller: bool = False


@dataclass(frozen=True)
class TransformSpec:
    """A token transform by parts: entropy_transform -> GTPO -> HICRA -> post_process, or all at once."""

    name: str
    use_gtpo: bool = True
    needs_planning: bool = False
    uses_sepa_controller: bool = False
    apply_hicra: bool = False
    entropy_transform: Callable[[list[float], list[int], float], list[float]] | None = None
    post_process: Callable[[Lists, Lists, dict], tuple[Lists, dict]] | None = None
    compute_context: Callable[[TransformContext], Any] | None = None
    uses_turn_advantages: bool = False
    """True for a context transform that reads ``turn_advantages_G``; others are refused together with a turn mode."""


@dataclass(frozen=True)
class AlgorithmContext:
    """Input of an algorithm that replaces the whole pipeline."""

    rewards_G: list[float]
    logprobs_G: Lists
    planning_masks_G: list[list[int]]
    params: dict[str, Any] = field(default_factory=dict)
    step: int = 0
    sepa_lambda: float = 0.0
    gtpo_beta: float = 0.1
    hicra_alpha: float = 0.2
    token_distributions_G: Any = None
    precomputed_entropies_G: Lists | None = None
    turn_ids_G: list[list[int]] = field(default_factory=list)
    """The turn of each token of the policy: 0, 1, ..., the answer turn last. Empty when the caller brings no turns."""
    turn_rewards_G: list[list[float | None]] = field(default_factory=list)
    """The reward of each tool turn; None when it is not known. Empty when the caller brings no turns."""
    anchors_G: list[list[int | None]] = field(default_factory=list)
    """The number of the state before each turn (`algorithm.turn_anchor`): equal numbers of a prompt are one state, None
    is no state. Empty where the caller brings none."""
    observations_G: list[list[str]] = field(default_factory=list)
    """The text that the tool returned in each tool turn. Empty when the caller brings no texts."""


@dataclass(frozen=True)
class UncertaintyContext:
    """Input of an uncertainty: one completion."""

    logprobs: list[float]
    token_distributions: Any = None
    precomputed_entropy: list[float] | None = None
    planning_mask: list[int] | None = None
    params: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class UncertaintySpec:
    """An uncertainty by name. ``needs_distributions`` is refused: whole distributions are not kept."""

    name: str
    compute: Callable[[UncertaintyContext], list[float]]
    needs_distributions: bool = False


def _row(values: list[float], planning_mask: list[int]) -> tuple[torch.Tensor, ...]:
    """Returns (values, mask, planning mask) of one completion."""
    if len(planning_mask) != len(values):
        raise ValueError(f"planning_mask has {len(planning_mask)} entries for {len(values)} tokens")
    row = torch.tensor([values], dtype=torch.float64)
    return row, torch.ones_like(row, dtype=torch.bool), torch.tensor([planning_mask], dtype=torch.bool)
