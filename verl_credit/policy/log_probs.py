"""Log-probs of tokens and entropies of their distributions, computed in chunks of tokens, forward and backward.

With logits x, temperature t and z = x / t, in nats, summed in float32 (float64 for float64 logits):

    log p = z[label] - logsumexp(z)                    ∂/∂z_j = [j = label] - p_j
    H     = logsumexp(z) - Σ_j p_j z_j                 ∂/∂z_j = -p_j (log p_j + H)

Besides the logits at most `chunk_tokens` rows are held in the wide dtype, twice. The backward recomputes the probabilities
from the logits, and may overwrite these with the gradient. The code is not compiled: a new number of tokens costs nothing.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.autograd.function import once_differentiable

from verl_credit.policy.log_prob_chunks import chunk_tokens


def log_probs_from_logits(
    logits_T_V: torch.Tensor,
    labels_T: torch.Tensor,
    temperature_T: torch.Tensor | None = None,
    *,
    inplace_backward: bool = False,
    chunk_size: int | None = None,
) -> torch.Tensor:
    """log p(label) of every token, [T].

    ``temperature_T`` (None: 1) is at least 1e-8, as in verl's engine. Departure from verl: half-precision logits are
    divided and normalised in float32, and the result is float32, so that a temperature is not rounded to bfloat16.
    ``inplace_backward``: the gradient overwrites the logits; autograd raises an error if another backward still needs them.
    ``chunk_size``: tokens at a time, by default `chunk_tokens`.
    """
    return _Chunked.apply(logits_T_V, labels_T, temperature_T, False, inplace_backward, chunk_size)[0]


def token_values(
    logits_T_V: torch.Tensor,
    labels_T: torch.Tensor,
    temperature_T: torch.Tensor | None = None,
    *,
    entropy: bool = True,
    inplace_backward: bool = False,
    chunk_size: int | None = None,
) -> dict[str, torch.Tensor]:
    """``log_probs`` and, with ``entropy``, the ``entropy`` from the same pass, under the names of a model's outputs in verl:
    [T] each, otherwise as `log_probs_from_logits`."""
    values = _Chunked.apply(logits_T_V, labels_T, temperature_T, entropy, inplace_backward, chunk_size)
    return dict(zip(("log_probs", "entropy") if entropy else ("log_probs",), values, strict=False))


def entropy_from_logits(
    logits_T_V: torch.Tensor, chunk_size: int | None = None, *, temperature_T: torch.Tensor | None = None
) -> torch.Tensor:
    """The Shannon entropy H of every token's distribution, [T].

    A logit of -inf counts 0, the limit of p log p; verl's ``entropy_from_logits`` gives NaN there.
    """
    return _Chunked.apply(logits_T_V, None, temperature_T, True, False, chunk_size)[1]


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits_T_V, labels_T, temperature_T, entropy, inplace, chunk_size):
        tokens, vocabulary = logits_T_V.shape
        step = chunk_size or chunk_tokens(vocabulary, logits_T_V.device.type)
        norm_T = logits_T_V.new_empty(tokens, dtype=torch.promote_types(logits_T_V.dtype, torch.float32))
        log_prob_T = None if labels_T is None else torch.empty_like(norm_T)
        entropy_T = torch.empty_like(norm_T) if entropy else None
        for rows in _chunks(tokens, step):
            scaled = _scaled(logits_T_V, temperature_T, rows)
            norm_T[rows] = scaled.logsumexp(-1)
            if log_prob_T is not None:
                log_prob_T[rows] = scaled.gather(-1, labels_T[rows, None]).squeeze(-1) - norm_T[rows]
            if entropy_T is not None:
                # nansum drops the NaN of 0 x -inf; a NaN logit still makes the norm NaN.
                entropy_T[rows] = norm_T[rows] - scaled.softmax(-1).mul_(scaled).nansum(-1)
        ctx.save_for_backward(logits_T_V, labels_T, temperature_T, norm_T, entropy_T)
        ctx.inplace, ctx.step = inplace, step
        ctx.set_materialize_grads(False)
        return log_prob_T, entropy_T

    @staticmethod
    @once_differentiable
    def backward(ctx, by_log_prob_T, by_entropy_T):
        logits_T_V, labels_T, temperature_T, norm_T, entropy_T = ctx.saved_tensors
        nothing = (None,) * 5
        if by_log_prob_T is None and by_entropy_T is None:
            return None, *nothing
        gradient_T_V = logits_T_V if ctx.inplace else torch.empty_like(logits_T_V)
        for rows in _chunks(len(logits_T_V), ctx.step):
            gradient = _scaled(logits_T_V, temperature_T, rows) - norm_T[rows, None]  # log p, of all
            if by_entropy_T is None:
                gradient.exp_().mul_(-by_log_prob_T[rows, None])
            else:
                # -inf: p is 0, and 0 x -inf would be NaN
                gradient.clamp_(min=torch.finfo(gradient.dtype).min)
                p = gradient.exp()
                gradient.add_(entropy_T[rows, None]).mul_(p).mul_(-by_entropy_T[rows, None])
                if by_log_prob_T is not None:
                    gradient.addcmul_(p, by_log_prob_T[rows, None], value=-1)
                del p
            if by_log_prob_T is not None:
                own = torch.arange(len(gradient), device=gradient.device)
                gradient[own, labels_T[rows]] += by_log_prob_T[rows]
            if temperature_T is not None:
                gradient.div_(_divisor(temperature_T, rows, gradient.dtype))
            gradient_T_V[rows] = gradient
            del gradient  # or it would live beside the next chunk's
        return gradient_T_V, *nothing


def _chunks(tokens: int, step: int) -> Iterator[slice]:
    return (slice(start, start + step) for start in range(0, tokens, step))


def _divisor(temperature_T: torch.Tensor, rows: slice, dtype: torch.dtype) -> torch.Tensor:
    return temperature_T[rows, None].to(dtype).clamp(min=1e-8)


def _scaled(logits_T_V: torch.Tensor, temperature_T: torch.Tensor | None, rows: slice) -> torch.Tensor:
    """z of some tokens in the wide dtype. It may be the logits themselves, so it must not be overwritten."""
    wide = torch.promote_types(logits_T_V.dtype, torch.float32)
    if temperature_T is None:
        return logits_T_V[rows].to(wide)
    return logits_T_V[rows] / _divisor(temperature_T, rows, wide)
