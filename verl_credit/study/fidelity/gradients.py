"""The credited gradients of sampled groups, and each credit's agreement with grad E[r] (`alignment`).

The gradient of every distinct turn is sketched:

    G = grad sum over the turn's tokens of log pi(token | context, tokens before it)        at temperature 1

The turn's tokens are those of training's response mask: what the policy wrote, its stop token included. The gradient is
over all parameters that require one. Equal turns (context and text) have equal gradients.

A count sketch S keeps a long vector in few numbers, and inner products on average:

    S(x)_b = sum over the i with bucket b of sign_i x_i        E[S(x) . S(y)] = x . y        sd <= sqrt(2 / buckets) |x| |y|

Bucket and sign of each place are drawn at random, once; the expectation is over that draw. S is linear. With 16,384 buckets
a cosine is off by about .008. Source: Charikar, Chen and Farach-Colton 2002; Weinberger et al. 2009.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice

import numpy as np
import torch
from transformers import PreTrainedModel

from verl_credit.study.fidelity.alignment import Alignment, GradientAgreement, PromptSums
from verl_credit.study.fidelity.credits import Credit
from verl_credit.study.fidelity.true_values import ScoredTurn
from verl_credit.study.stats import Measure
from verl_credit.worlds.rollouts.rollout import Groups, Trajectory
from verl_credit.worlds.rollouts.sampler import Ids

GRPO = "none, grpo"
"""Differences are taken to this credit."""
RLOO = "none, rloo"
REFERENCE = "Monte Carlo, all continuations"
BUCKETS = 16_384


class CountSketch:
    """Sketches vectors of ``length`` entries; the same ``seed`` gives the same sketch."""

    def __init__(self, length: int, *, buckets: int = BUCKETS, seed: int = 0):
        random = torch.Generator().manual_seed(seed)
        self.buckets = buckets
        # Five bytes an entry, because a model has many.
        self._bucket_L = torch.randint(buckets, (length,), generator=random).int()
        self._sign_L = torch.randint(2, (length,), generator=random).mul_(2).sub_(1).to(torch.int8)

    def __call__(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """The sketch [buckets] of the concatenated parts, in their dtype."""
        lengths = [part.numel() for part in parts]
        sketch_S = parts[0].new_zeros(self.buckets)
        places = self._bucket_L.split(lengths), self._sign_L.split(lengths)
        for part, bucket, sign in zip(parts, *places, strict=True):
            sketch_S.index_add_(0, bucket, part.flatten() * sign)
        return sketch_S


TurnGradients = dict[tuple[Ids, Ids], np.ndarray]
"""The sketch of each distinct turn (its context, its text), float32 [S]."""


def turn_gradients(
    model: PreTrainedModel,
    trajectories: Iterable[Trajectory],
    *,
    buckets: int = BUCKETS,
    seed: int = 0,
    say: Callable[[int, int], None] = lambda done, of: None,
) -> TurnGradients:
    """Makes a backward pass for each distinct turn; the model is in eval mode, its weights in float32 or float64."""
    turns = dict.fromkeys((step.state.ids, step.turn_ids) for path in trajectories for step in path.steps)
    parameters = [weight for weight in model.parameters() if weight.requires_grad]
    sketch = CountSketch(sum(p.numel() for p in parameters), buckets=buckets, seed=seed)
    gradients = {}
    for turn in turns:
        log_prob = turn_log_prob(model, *turn)
        gradient = torch.autograd.grad(log_prob, parameters, materialize_grads=True)
        gradients[turn] = sketch(gradient).float().numpy()
        say(len(gradients), len(turns))
    return gradients


def turn_log_prob(model: PreTrainedModel, context: Ids, written: Ids) -> torch.Tensor:
    """log pi(written | context), a float64 scalar with a gradient."""
    ids_1_T = torch.tensor([[*context, *written]])
    logits_n_V = model(input_ids=ids_1_T, use_cache=False, logits_to_keep=len(written) + 1).logits[0, :-1]
    log_prob_n_V = logits_n_V.double().log_softmax(dim=-1)
    return log_prob_n_V.gather(1, torch.tensor(written)[:, None]).sum()


def credited(groups: Groups, gradients: TurnGradients, credit: Credit) -> PromptSums:
    """The sums of a mode or a control."""
    sums_P_S = np.stack([rows.sum(0) for rows in _by_trajectory(groups, gradients, credit.advantage_N)])
    return PromptSums(sums_P_S, sums_P_S, credit.held_out)


def true_credit(groups: Groups, gradients: TurnGradients, turns: Sequence[ScoredTurn]) -> PromptSums:
    """The sums of A*:  E[sum over a prompt's n rollouts of A* x G] = n grad E[r].  ``turns`` are the groups', in order."""
    halves = [
        list(_by_trajectory(groups, gradients, [getattr(turn, name) for turn in turns]))
        for name in ("a_first", "a_second")
    ]
    squares = [square_of_means(first, second) for first, second in zip(*halves, strict=True)]
    first_P_S, second_P_S = (np.stack([rows.sum(0) for rows in half]) for half in halves)
    return PromptSums(first_P_S, second_P_S, square_P=np.array(squares))


def square_of_means(first_n_S: np.ndarray, second_n_S: np.ndarray) -> float:
    """|E[sum over n rollouts of x]|^2 of a prompt, unbiased, from each rollout's x by either half; NaN for one rollout.

        n / (n - 1) sum over i != j of x'_i . x''_j

    Neither a rollout's own noise is in it (i != j), nor that of a value which two rollouts share (two halves).
    """
    n = len(first_n_S)
    if n < 2:
        return float("nan")
    different = first_n_S.sum(0) @ second_n_S.sum(0) - (first_n_S * second_n_S).sum()
    return float(n / (n - 1) * different)


def tokens_of(groups: Groups) -> np.ndarray:
    """Tokens that the policy wrote in answer to each prompt, [P]."""
    tokens = [sum(len(step.turn_ids) for path in group for step in path.steps) for group in groups]
    return np.array(tokens, dtype=float)


def _by_trajectory(
    groups: Groups, gradients: TurnGradients, credit_N: Iterable[float]
) -> Iterator[np.ndarray]:
    """Yields for each prompt the credited gradients of its n trajectories, float64 [n, S]."""
    left = iter(credit_N)
    for group in groups:
        rows = []
        for path in group:
            sketch_K_S = np.stack([gradients[step.state.ids, step.turn_ids] for step in path.steps])
            rows.append(np.array([*islice(left, len(path.steps))]) @ sketch_K_S)
        yield np.stack(rows)


def gradient_agreement(
    model: PreTrainedModel,
    groups: Groups,
    turns: Sequence[ScoredTurn],
    credits: Sequence[Credit],
    replicate: Groups,
    replicate_turns: Sequence[ScoredTurn],
    *,
    batch_prompts: int,
    buckets: int = BUCKETS,
    seed: int = 0,
    say: Callable[[int, int], None] = lambda done, of: None,
) -> dict[str, GradientAgreement]:
    """Returns agreements by the name of each credit that has advantages, and of `REFERENCE`, which is A* as a mode.

    ``turns`` are those of ``groups``, in order, ``replicate_turns`` those of the replicate. The bias of `REFERENCE` is 1 by
    construction: the others' is relative to it.
    """
    usable = {credit.name: credit for credit in credits if credit.advantage_N is not None}
    paths = [path for group in (*groups, *replicate) for path in group]
    gradients = turn_gradients(model, paths, buckets=buckets, seed=seed, say=say)
    true = true_credit(groups, gradients, turns)
    sums = {name: credited(groups, gradients, credit) for name, credit in usable.items()}
    alignment = Alignment(
        true,
        true_credit(replicate, gradients, replicate_turns),
        tokens_of(groups),
        sums[GRPO],
        batch_prompts=batch_prompts,
        seed=seed,
    )
    return {name: alignment.of(of_credit) for name, of_credit in sums.items()} | {
        REFERENCE: alignment.of(true)
    }


def integrity(agreements: dict[str, GradientAgreement]) -> tuple[Measure, bool | None]:
    """(bias of RLOO, does its interval hold 1): RLOO's expected gradient is grad E[r]. None where it has no interval."""
    bias = agreements[RLOO].bias
    return bias, None if bias.low is None else bias.low <= 1 <= bias.high
