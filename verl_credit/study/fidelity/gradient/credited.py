"""The gradient side of one measurement: credited gradients of prompts, and each credit's agreement with grad E[r]."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
from transformers import PreTrainedModel

from verl_credit.study.fidelity.agreements import Measure
from verl_credit.study.fidelity.gradient.alignment import (
    BATCH_PROMPTS,
    Alignment,
    GradientAgreement,
    PromptSums,
)
from verl_credit.study.fidelity.gradient.turns import BUCKETS, TurnGradients, turn_gradients
from verl_credit.study.fidelity.mode_credit import Advantages, Credit, per_turn
from verl_credit.study.fidelity.scored import ScoredTurn
from verl_credit.worlds.rollouts.rollout import Groups


def credited(
    groups: Groups, gradients: TurnGradients, advantages: Advantages, *, held_out: bool = False
) -> PromptSums:
    """The sums of a mode or a control."""
    sums_P_S = np.stack([rows.sum(0) for rows in _by_trajectory(groups, gradients, advantages)])
    return PromptSums(sums_P_S, sums_P_S, held_out)


def true_credit(groups: Groups, gradients: TurnGradients, turns: Sequence[ScoredTurn]) -> PromptSums:
    """The sums of A*:  E[sum over a prompt's n rollouts of A* x G] = n grad E[r].  ``turns`` are the groups', in order."""
    halves = [
        list(_by_trajectory(groups, gradients, per_turn(groups, [getattr(turn, name) for turn in turns])))
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
    return np.array(
        [sum(len(step.turn_ids) for path in group for step in path.steps) for group in groups], dtype=float
    )


def _by_trajectory(groups: Groups, gradients: TurnGradients, advantages: Advantages) -> Iterator[np.ndarray]:
    """Returns for each prompt the credited gradients of its n trajectories, float64 [n, S]."""
    for group, of_group in zip(groups, advantages, strict=True):
        yield np.stack(
            [
                np.asarray(of_path) @ gradients.sketch_N_S[[gradients.of(step) for step in path.steps]]
                for path, of_path in zip(group, of_group, strict=True)
            ]
        )


GRPO = "none, grpo"
"""Differences are taken to this credit."""
RLOO = "none, rloo"
REFERENCE = "Monte Carlo, all continuations"


def gradient_agreement(
    model: PreTrainedModel,
    groups: Groups,
    turns: Sequence[ScoredTurn],
    credits: Sequence[Credit],
    replicate: Groups,
    replicate_turns: Sequence[ScoredTurn],
    *,
    batch_prompts: int = BATCH_PROMPTS,
    buckets: int = BUCKETS,
    seed: int = 0,
    say: Callable[[int, int], None] = lambda done, of: None,
) -> dict[str, GradientAgreement]:
    """Returns agreements by the name of each credit that has advantages, and of `REFERENCE`, which is A* as a mode.

    ``turns`` are those of ``groups``, in order, ``replicate_turns`` those of the replicate. The bias of `REFERENCE` is 1 by
    construction: the others' is relative to it. Raises ValueError when no credit is named `GRPO`.
    """
    usable = {credit.name: credit for credit in credits if credit.advantages is not None}
    if GRPO not in usable:
        raise ValueError(f"credits {', '.join(usable)}; expected one named {GRPO!r}, for differences")
    paths = [path for group in (*groups, *replicate) for path in group]
    gradients = turn_gradients(model, paths, buckets=buckets, seed=seed, say=say)
    true = true_credit(groups, gradients, turns)
    sums = {
        name: credited(groups, gradients, credit.advantages, held_out=credit.held_out)
        for name, credit in usable.items()
    }
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
