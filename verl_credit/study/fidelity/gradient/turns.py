"""The gradient of every distinct turn, sketched.

    G = grad sum over the turn's tokens of log pi(token | context, tokens before it)        at temperature 1

The turn's tokens are those that the policy wrote, with the stop token that it sampled: those of training's response mask.
The tool's answers are context. The gradient is over all parameters. Equal turns (context and text) have equal gradients.

A count sketch S keeps a long vector in few numbers, and inner products on average:

    S(x)_b = sum over the i with bucket b of sign_i x_i        E[S(x) . S(y)] = x . y        sd <= sqrt(2 / buckets) |x| |y|

Bucket and sign of each place are drawn at random, once; the expectation is over that draw. S is linear. With 16,384 buckets
a cosine is off by about .008. Source: Charikar, Chen and Farach-Colton 2002; Weinberger et al. 2009.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from transformers import PreTrainedModel

from verl_credit.worlds.rollouts.protocol import Step
from verl_credit.worlds.rollouts.rollout import Trajectory
from verl_credit.worlds.rollouts.sampler import Ids

BUCKETS = 16_384


class CountSketch:
    """Sketches vectors of ``length`` entries; the same ``seed`` gives the same sketch."""

    def __init__(self, length: int, *, buckets: int = BUCKETS, seed: int = 0):
        random = torch.Generator().manual_seed(seed)
        self.buckets = buckets
        self._bucket_L = torch.randint(buckets, (length,), generator=random)
        self._sign_L = torch.randint(2, (length,), generator=random).float() * 2 - 1

    def __call__(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """The sketch [buckets] of the concatenated parts, in their dtype."""
        vector_L = torch.cat([part.flatten() for part in parts])
        if len(vector_L) != len(self._bucket_L):
            raise ValueError(f"{len(vector_L)} entries; expected {len(self._bucket_L)}")
        return vector_L.new_zeros(self.buckets).scatter_add_(0, self._bucket_L, vector_L * self._sign_L)


@dataclass(frozen=True)
class TurnGradients:
    """``sketch_N_S``: float32, N distinct turns by S buckets."""

    place: dict[tuple[Ids, Ids], int]
    sketch_N_S: np.ndarray

    def of(self, step: Step) -> int:
        """The row of this turn."""
        return self.place[step.state.ids, step.turn_ids]


def turn_gradients(
    model: PreTrainedModel,
    trajectories: Iterable[Trajectory],
    *,
    buckets: int = BUCKETS,
    seed: int = 0,
    say: Callable[[int, int], None] = lambda done, of: None,
) -> TurnGradients:
    """Makes a backward pass for each distinct turn; the model is in eval mode, its weights in float32 or float64."""
    turns = list(
        dict.fromkeys((step.state.ids, step.turn_ids) for path in trajectories for step in path.steps)
    )
    parameters = list(model.parameters())
    sketch = CountSketch(sum(p.numel() for p in parameters), buckets=buckets, seed=seed)
    sketch_N_S = np.empty((len(turns), buckets), dtype=np.float32)
    for row, (context, written) in enumerate(turns):
        log_prob = turn_log_prob(model, context, written)
        gradient = torch.autograd.grad(log_prob, parameters, materialize_grads=True)
        sketch_N_S[row] = sketch(gradient).numpy()
        say(row + 1, len(turns))
    return TurnGradients({turn: row for row, turn in enumerate(turns)}, sketch_N_S)


def turn_log_prob(model: PreTrainedModel, context: Ids, written: Ids) -> torch.Tensor:
    """log pi(written | context), a float64 scalar with a gradient."""
    ids_1_T = torch.tensor([[*context, *written]])
    logits_n_V = model(input_ids=ids_1_T, use_cache=False, logits_to_keep=len(written) + 1).logits[0, :-1]
    log_prob_n_V = logits_n_V.double().log_softmax(dim=-1)
    return log_prob_n_V.gather(1, torch.tensor(written)[:, None]).sum()
