"""The policy's uncertainty of each token, from log-probs or from entropies."""

from __future__ import annotations

import math

from verl_credit.credit.arguments import as_bool, check_name, check_shape, first_row, output_dtype
from verl_credit.lazy import torch

MAX_SURPRISAL = 50.0
UNCERTAINTY_KINDS = ("surprisal", "predictive_variance", "shannon_entropy")
ALIASES = {
    "token_surprisal": "surprisal",
    "neg_logprob": "surprisal",
    "negative_logprob": "surprisal",
    "nll": "surprisal",
    "pred_var": "predictive_variance",
    "bernoulli_variance": "predictive_variance",
    "shannon": "shannon_entropy",
    "entropy": "shannon_entropy",
    "token_entropy": "shannon_entropy",
}


def canonical_kind(name: str) -> str | None:
    """The built-in kind that ``name`` means, or None."""
    kind = ALIASES.get(name, name)
    return kind if kind in UNCERTAINTY_KINDS else None


def uncertainty(
    kind: str, log_prob_B_T: torch.Tensor, mask_B_T: torch.Tensor, *, entropy_B_T: torch.Tensor | None = None
) -> torch.Tensor:
    """Returns one number per policy token, 0 elsewhere.

        surprisal            h = min(-log p, 50)      in nats, of the token that was sampled
        predictive_variance  h = p (1 - p)
        shannon_entropy      h = min(H, 50)           the entropy of the whole distribution, given

    Surprisal is a sample of the entropy: E[-log p] = H. As a weight on the policy gradient it does more than
    redistribute credit, because E[-log p grad log p] = grad H (an entropy bonus on positive, a penalty on negative
    advantages); predictive_variance and shannon_entropy have less or none of this effect.
    Aliases: token_surprisal, neg_logprob, negative_logprob, nll; pred_var, bernoulli_variance; shannon, entropy,
    token_entropy. Values where the mask is 0 may be anything; a log-prob of -inf has surprisal 50.
    Computed in float64; returns the input's dtype, at least float32. No gradient flows. Raises ValueError for an
    unknown kind, shapes, missing entropies, and NaN or an uncertainty of -inf on a policy token.
    """
    kind = canonical_kind(kind) or kind
    if kind == "varentropy":
        raise ValueError("uncertainty_kind='varentropy' is named in published code but defined nowhere")
    check_name("uncertainty_kind", kind, (*UNCERTAINTY_KINDS, *ALIASES))
    check_shape("mask_B_T", mask_B_T, log_prob_B_T.shape, "log_prob_B_T")
    mask_B_T = as_bool("mask_B_T", mask_B_T)
    source_B_T, name = log_prob_B_T, "log_prob_B_T"
    if kind == "shannon_entropy":
        if entropy_B_T is None:
            raise ValueError(
                "uncertainty_kind='shannon_entropy' needs entropy_B_T, the entropies of the whole distributions; "
                "log-probs of the sampled tokens cannot give them"
            )
        check_shape("entropy_B_T", entropy_B_T, log_prob_B_T.shape, "log_prob_B_T")
        source_B_T, name = entropy_B_T, "entropy_B_T"
    value_B_T = torch.where(mask_B_T, source_B_T.detach().to(torch.float64), 0.0)
    impossible = -math.inf if kind == "shannon_entropy" else math.inf
    bad_B_T = value_B_T.isnan() | (value_B_T == impossible)
    if bad_B_T.any():
        bad = float(value_B_T[bad_B_T][0])
        raise ValueError(f"{name} row {first_row(bad_B_T)} holds {bad} on a policy token; expected a number")
    if kind == "predictive_variance":
        p_B_T = value_B_T.clamp(min=-MAX_SURPRISAL).exp().clamp(0, 1)
        value_B_T = p_B_T * (1 - p_B_T)
    else:
        value_B_T = (-value_B_T if kind == "surprisal" else value_B_T).clamp(max=MAX_SURPRISAL)
    return torch.where(mask_B_T, value_B_T, 0.0).to(output_dtype(source_B_T))
