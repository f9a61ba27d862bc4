"""The gradient side of one measurement: turns' gradients, each mode's agreement with grad E[r], and its own check."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from transformers import PreTrainedModel

from verl_credit.study.fidelity.credit import Credit
from verl_credit.study.fidelity.gradient.alignment import BATCH_PROMPTS, Alignment, GradientAgreement
from verl_credit.study.fidelity.gradient.sketch import BUCKETS
from verl_credit.study.fidelity.gradient.sums import Groups, credited, tokens_of, true_credit
from verl_credit.study.fidelity.gradient.turns import turn_gradients
from verl_credit.study.fidelity.measured import Measured
from verl_credit.study.fidelity.measures import Measure
from verl_credit.study.fidelity.scored import ScoredTurn, score_turns
from verl_credit.study.fidelity.values import Value
from verl_credit.worlds.rollouts.rollout import Start, Trajectory

GRPO = "none, grpo"
"""What differences are taken to."""
RLOO = "none, rloo"
REFERENCE = "Monte Carlo, all continuations"


def replicate_groups(subject: Measured, *, rollouts: int, seed: int) -> list[list[Trajectory]]:
    """Rollouts of the same prompts, independent of those of `sample_groups` with this seed."""
    starts = [Start(state, rollouts, seed, "replicate") for state in subject.prompts]
    return subject.roll(starts)


def score_without_gains(groups: Groups, values: dict[str, Value]) -> list[ScoredTurn]:
    """A* of every turn."""
    return score_turns(groups, values, [[[None] * len(path.steps) for path in group] for group in groups])


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
    """By the name of each credit that has advantages, and of `REFERENCE`: A* as a mode of its own.

    ``turns`` are those of ``groups``, in order, ``replicate_turns`` those of the replicate. The bias of `REFERENCE` is 1 by
    construction: the others' is taken against it. Raises ValueError where no credit is named `GRPO`.
    """
    made = {credit.name: credit for credit in credits if credit.advantages is not None}
    if GRPO not in made:
        raise ValueError(f"credits {', '.join(made)}; expected one named {GRPO!r}, for differences")
    paths = [path for group in (*groups, *replicate) for path in group]
    gradients = turn_gradients(model, paths, buckets=buckets, seed=seed, say=say)
    true = true_credit(groups, gradients, turns)
    sums = {
        name: credited(groups, gradients, credit.advantages, held_out=credit.held_out)
        for name, credit in made.items()
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
