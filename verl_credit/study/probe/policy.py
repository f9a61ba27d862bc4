"""A policy on given rollouts: log-probs and entropies of one and the same distribution q, from which tokens are sampled, as
functions of the parameters, and their derivatives. Softmax and entropy are float64."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import nn
from torch.func import functional_call, jvp
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from verl_credit.credit.entropy_gradient import Tokens
from verl_credit.study.probe.kept_rollouts import Rollouts

Parameters = dict[str, torch.Tensor]


def _no_tick(rows: int) -> None:
    """``tick`` is told how many rows are done."""


@dataclass(frozen=True)
class Sampling:
    """Temperature and nucleus of the rollouts. Raises ValueError with the field, its value and what would be right."""

    temperature: float = 1.0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.temperature < math.inf:
            raise ValueError(f"temperature={self.temperature!r}: expected a number above 0")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p!r}: expected a number in (0, 1]")


def log_prob_and_entropy(
    logits_N_V: torch.Tensor,
    token_N: torch.Tensor,
    sampling: Sampling,
    sampled_N_V: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """log q(token) and H(q) = logsumexp_S(a) - Σ_S q a with a = logits / T, both float64 [N], differentiable in both modes.

    q is softmax(a) renormalised on the nucleus S, for both: an entropy of q beside the score of the raw softmax belongs to
    another policy, for which E[∇log q] = 0 does not hold. Tokens in descending probability are in S while the mass *before*
    them is below top_p, so the token that crosses it is in S, as samplers do. S is that of ``sampled_N_V`` where given, the
    logits that the tokens were sampled from. S is a constant of the gradient and of a step: where S changes the entropy
    jumps, and no rollout has the new tokens.

    Raises ValueError for a sampled token that the nucleus excludes, with its place and its probability.
    """
    scaled_N_V = logits_N_V.double() / sampling.temperature
    kept_N_V = torch.ones_like(scaled_N_V, dtype=torch.bool)
    if sampling.top_p < 1:
        of_N_V = scaled_N_V if sampled_N_V is None else sampled_N_V.double() / sampling.temperature
        ordered_N_V, order_N_V = of_N_V.detach().softmax(-1).sort(dim=-1, descending=True, stable=True)
        before_N_V = ordered_N_V.cumsum(-1) - ordered_N_V
        kept_N_V = kept_N_V.scatter(-1, order_N_V, before_N_V < sampling.top_p)
    out_N = ~kept_N_V.gather(-1, token_N[:, None]).squeeze(-1)
    if out_N.any():
        place = int(out_N.nonzero()[0])
        token, p = int(token_N[place]), float(scaled_N_V[place].detach().softmax(-1)[token_N[place]])
        which = (
            f"excludes {int(out_N.sum())} sampled tokens, for example token {token} with probability {p:.3g}"
        )
        raise ValueError(
            f"top_p={sampling.top_p} {which}: expected the top_p, temperature and weights of the rollouts"
        )
    log_q_N_V = scaled_N_V.masked_fill(~kept_N_V, -math.inf).log_softmax(-1).masked_fill(~kept_N_V, 0.0)
    entropy_N = -(log_q_N_V.exp() * kept_N_V * log_q_N_V).sum(-1)
    return log_q_N_V.gather(-1, token_N[:, None]).squeeze(-1), entropy_N


class ModelPolicy:
    """A causal language model on ``rollouts``. Rows are padded on the right, where causal attention cannot see them.

    At other parameters the nucleus stays that of the model's own, which sampled the rollouts: one more forward.
    """

    def __init__(self, model: nn.Module, rollouts: Rollouts, sampling: Sampling):
        self._model, self._rollouts, self._sampling = model, rollouts, sampling
        self.parameters: Parameters = {name: p.detach() for name, p in model.named_parameters()}

    def _logits(self, parameters: Parameters, rows: list[int]):
        """Logits [N, V] before every written token of the rows, those tokens, and their places (row, column)."""
        r, a_parameter = self._rollouts, next(iter(parameters.values()))
        device = a_parameter.device
        ids = [torch.cat([r.prompt_ids[row], r.response_ids[row]]) for row in rows]
        ids_b_L = nn.utils.rnn.pad_sequence(ids, batch_first=True).to(device)
        place_N, column_N = r.written_B_T[rows].nonzero(as_tuple=True)
        prompt_b = torch.tensor([len(r.prompt_ids[row]) for row in rows])
        at_N = prompt_b[place_N] + column_N
        with KeepDouble() if a_parameter.dtype == torch.float64 else nullcontext():
            output = functional_call(self._model, parameters, (), {"input_ids": ids_b_L, "use_cache": False})
        where = place_N.to(device), at_N.to(device)
        return output.logits[where[0], where[1] - 1], ids_b_L[where], (where[0], column_N.to(device))

    def tokens(self, parameters: Parameters, rows: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """(log_prob_b_T, entropy_b_T) of these rows, float64, 0 where the policy wrote nothing."""
        logits_N_V, token_N, where = self._logits(parameters, rows)
        shape = len(rows), self._rollouts.written_B_T.shape[1]
        sampled_N_V = None
        if self._sampling.top_p < 1 and parameters is not self.parameters:
            with torch.no_grad():
                sampled_N_V = self._logits(self.parameters, rows)[0]
        values = log_prob_and_entropy(logits_N_V, token_N, self._sampling, sampled_N_V)
        return tuple(value.new_zeros(shape).index_put(where, value) for value in values)


@torch.no_grad()
def observe(
    policy: ModelPolicy, rows: int, micro_batch: int, parameters: Parameters | None = None, tick=_no_tick
) -> Tokens:
    """Log-probs and entropies of all rows, without gradient, at ``parameters`` (default: the policy's own)."""
    at = policy.parameters if parameters is None else parameters
    return _joined((policy.tokens(at, part) for part in parts(rows, micro_batch)), tick)


def along(policy: ModelPolicy, direction: Parameters, rows: int, micro_batch: int, tick=_no_tick) -> Tokens:
    """d/dη of every log-prob and entropy at θ + η·direction, by forward-mode differentiation: one pass for all rows.
    Parameters that ``direction`` lacks do not move."""
    moving = {name: policy.parameters[name] for name in direction}
    tangents = {name: direction[name].to(p) for name, p in moving.items()}

    def derivatives(part: list[int]):
        with torch.no_grad(), sdpa_kernel(SDPBackend.MATH):  # the fused kernels have no forward mode
            return jvp(lambda p: policy.tokens({**policy.parameters, **p}, part), (moving,), (tangents,))[1]

    return _joined((derivatives(part) for part in parts(rows, micro_batch)), tick)


def gradient(
    policy: ModelPolicy, score_B_T: torch.Tensor, path_B_T: torch.Tensor, micro_batch: int, tick=_no_tick
) -> Parameters:
    """Σ_ij score_ij ∇log q_ij + path_ij ∇H_ij, summed over micro-batches in float64, whatever their size."""
    leaves = {name: p.detach().requires_grad_() for name, p in policy.parameters.items()}
    total = {name: torch.zeros_like(p, dtype=torch.float64) for name, p in policy.parameters.items()}
    for part in parts(len(score_B_T), micro_batch):
        log_prob_b_T, entropy_b_T = policy.tokens(leaves, part)
        score_b_T, path_b_T = score_B_T[part].to(log_prob_b_T), path_B_T[part].to(entropy_b_T)
        surrogate = (score_b_T * log_prob_b_T).sum() + (path_b_T * entropy_b_T).sum()
        gradients = torch.autograd.grad(surrogate, list(leaves.values()), materialize_grads=True)
        for summed, value in zip(total.values(), gradients, strict=True):
            summed += value
        tick(len(part))
    return total


def dot(a: Parameters, b: Parameters) -> float:
    """Σ a·b in float64, over the names that both have."""
    return float(sum((a[name].double() * b[name].double()).sum() for name in a if name in b))


def norm(a: Parameters) -> float:
    return dot(a, a) ** 0.5


def moved(parameters: Parameters, direction: Parameters, eta: float) -> Parameters:
    """θ + η·direction, in the parameters' own dtype."""
    return {
        name: p if name not in direction else (p.double() + eta * direction[name].to(p.device).double()).to(p)
        for name, p in parameters.items()
    }


def parts(rows: int, micro_batch: int) -> Iterator[list[int]]:
    for start in range(0, rows, micro_batch):
        yield list(range(start, min(start + micro_batch, rows)))


def _joined(parts_of_rows: Iterator, tick: Callable[[int], None]) -> Tokens:
    pairs = []
    for of_part in parts_of_rows:
        pairs.append([values_b_T.detach().cpu() for values_b_T in of_part])
        tick(len(of_part[0]))
    return Tokens(*map(torch.cat, zip(*pairs, strict=True)))


class KeepDouble(TorchFunctionMode):
    """A context in which a conversion to float32 gives float64; transformers' norms and softmaxes convert.

    Rounding of 1e-7 inside the forward hides a change of entropy of that size, and makes derivatives differ from finite
    differences.
    """

    casts = (torch.Tensor.to, torch.softmax, torch.Tensor.softmax, torch.nn.functional.softmax)

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.Tensor.float:
            return args[0].double()
        if func in self.casts:
            args = tuple(_double(value) for value in args)
            kwargs = {name: _double(value) for name, value in kwargs.items()}
        return func(*args, **kwargs)


def _double(value):
    return torch.float64 if value is torch.float32 else value
