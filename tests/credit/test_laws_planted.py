"""`check` finds every planted violation, by the law that tells of it."""

import math
import random
import statistics

import pytest
import torch

from verl_credit.credit.laws import LAWS, PROPERTIES, check, own_subject
from verl_credit.credit.laws.check import counterexample, lines, smallest
from verl_credit.credit.laws.drawn_world import make_world
from verl_credit.credit.laws.effects import weighs_by
from verl_credit.credit.laws.laws import Broken, nonfinite, travels
from verl_credit.credit.laws.subjects import TURNS
from verl_credit.credit.plugins import AlgorithmContext, TransformContext, UncertaintyContext
from verl_credit.credit.token.gtpo import SMALLEST_MEAN, gtpo_weights

SEEN: list[float] = []
CALLS: list[int] = []


def centred(rewards):
    mean = sum(rewards) / len(rewards)
    return [r - mean for r in rewards]


def running_mean(rewards):
    SEEN.extend(rewards)
    mean = sum(SEEN) / len(SEEN)
    return [0.0 if max(rewards) == min(rewards) else r - mean for r in rewards]


def previous_mean(rewards):
    before = SEEN[-1] if SEEN else 0.0
    SEEN.append(sum(rewards) / len(rewards))
    return [0.0 if max(rewards) == min(rewards) else r - before for r in rewards]


def order_of_three(rewards):
    return [a * (2 if i == 2 else 1) for i, a in enumerate(centred(rewards))]


def order_of_six(rewards):
    return [a * (2 if i == 5 else 1) for i, a in enumerate(centred(rewards))]


def drops(rewards):
    return [a * (random.random() < 0.9) for a in centred(rewards)]


def shuffles(rewards):
    return random.sample(centred(rewards), len(rewards))


def undefined_for_ties(rewards):
    spread = max(rewards) - min(rewards)
    return [math.nan if spread == 0 else a / spread for a in centred(rewards)]


def undefined_for_ties_of_eight(rewards):
    spread = max(rewards) - min(rewards)
    return [math.nan if spread == 0 and len(rewards) >= 8 else a for a in centred(rewards)]


def not_normalised(rewards):
    return centred(rewards)


not_normalised.properties = ("centred", "normalised")


def flipped(rewards):
    return [-a for a in centred(rewards)]


def flipped_tool_turns(tables):
    outcome_B = tables.outcome_advantage("grpo")
    return -outcome_B[:, None].expand_as(tables.reward_B_K), outcome_B, tables.ones()


def flipped_answer(tables):
    outcome_B = tables.outcome_advantage("grpo")
    return 3 * outcome_B[:, None].expand_as(tables.reward_B_K), -outcome_B, tables.ones()


def slightly_flipped_tool_turns(tables):
    tool_B_K, outcome_B, scale_B_K = flipped_tool_turns(tables)
    return 0.1 * tool_B_K, outcome_B, scale_B_K


def lost_without_siblings(tables):
    """Less the mean of the rows that have siblings, which is that of nothing where every row is alone."""
    size_B = (tables.group_B[:, None] == tables.group_B).sum(dim=1)
    outcome_B = tables.outcome_B - tables.outcome_B[size_B > 1].mean()
    return outcome_B[:, None].expand_as(tables.reward_B_K), outcome_B, tables.ones()


def shifted_a_little(rewards):
    return [a + 3e-8 for a in centred(rewards)]


def flipped_in_large_signed_groups(rewards):
    return flipped(rewards) if len(rewards) >= 6 and min(rewards) < 0 else centred(rewards)


def small_and_uncentred(rewards):
    return [1e-10 * r for r in rewards]


def leaks_late(rewards):
    CALLS.append(1)
    return [a + (len(CALLS) > 10_000 and a != 0) for a in centred(rewards)]


def fails_later(rewards):
    CALLS.append(1)
    if len(CALLS) > 100:
        raise MemoryError
    return centred(rewards)


def roots(rewards):
    return centred([math.sqrt(r) for r in rewards])


def neighbour(context: TransformContext):
    a = context.episode_advantages
    return [[a[i - 1]] * len(row) for i, row in enumerate(context.logprobs_G)]


def flipped_tokens(context: TransformContext):
    return [[-a for a in row] for row in context.turn_advantages_G]


def episode_in_place_of_turn(context: TransformContext):
    return [[a] * len(row) for a, row in zip(context.episode_advantages, context.logprobs_G, strict=True)]


def reversed_credit(context: TransformContext):
    return [row[::-1] for row in context.turn_advantages_G]


def smeared_credit(context: TransformContext):
    return [[statistics.fmean(row)] * len(row) if row else [] for row in context.turn_advantages_G]


def nearly_smeared_credit(context: TransformContext):
    return [[0.1 * a + 0.9 * statistics.fmean(row) for a in row] for row in context.turn_advantages_G]


for transform in (
    flipped_tokens,
    episode_in_place_of_turn,
    reversed_credit,
    smeared_credit,
    nearly_smeared_credit,
):
    transform.uses_turn_advantages = True


def planning_undeclared(context: TransformContext):
    return [
        [a * (1 + (t < len(plan) and plan[t])) for t in range(len(row))]
        for a, row, plan in zip(
            context.episode_advantages, context.logprobs_G, context.planning_masks_G, strict=True
        )
    ]


def sorted_weights(context: TransformContext):
    return [
        context.gtpo(a, sorted(h))
        for a, h in zip(context.episode_advantages, context.uncertainties_G, strict=True)
    ]


def over_the_spread(context: TransformContext):
    return [
        [a * (x - min(h)) / (max(h) - min(h)) for x in h]
        for a, h in zip(context.episode_advantages, context.uncertainties_G, strict=True)
    ]


def shifted(context: UncertaintyContext):
    return [-context.logprobs[t - 1] for t in range(len(context.logprobs))]


def entropy_undeclared(context: UncertaintyContext):
    return context.precomputed_entropy


def entropy_of_algorithm(context: AlgorithmContext):
    return [
        context_row if a > 0 else [-h for h in context_row]
        for a, context_row in zip(centred(context.rewards_G), context.precomputed_entropies_G, strict=True)
    ]


entropy_of_algorithm.exempt = {"ties": "on purpose", "better": "on purpose", "padding_rows": "on purpose"}


def negative(context: UncertaintyContext):
    return list(context.logprobs)


def one_below_zero(context: UncertaintyContext):
    return [-1e-4, *(-x for x in context.logprobs[1:])]


def tiny(context: UncertaintyContext):
    return [-1e-9 * x for x in context.logprobs]


def sorted_uncertainties(context: UncertaintyContext):
    return sorted(-x for x in context.logprobs)


PLANTED = {
    "pure": (running_mean, previous_mean, leaks_late, fails_later, drops, shuffles),
    "order": (order_of_three, order_of_six, neighbour),
    "ties": (undefined_for_ties, undefined_for_ties_of_eight, shifted_a_little, small_and_uncentred),
    "normalised": (not_normalised,),
    "better": (flipped, flipped_tool_turns, slightly_flipped_tool_turns, flipped_answer),
    "signed": (flipped_in_large_signed_groups, roots),
    "edges": (lost_without_siblings,),
    "turns": (flipped_tokens, episode_in_place_of_turn, reversed_credit, smeared_credit,
        nearly_smeared_credit),
    "absent": (planning_undeclared, entropy_undeclared, entropy_of_algorithm),
    "weighs_by": (negative, one_below_zero, tiny),
    "follows": (sorted_uncertainties, sorted_weights, shifted),
    "flat": (over_the_spread,),
}  # fmt: skip
each_planted = pytest.mark.parametrize(
    "operator, law",
    [(operator, law) for law, several in PLANTED.items() for operator in several],
    ids=lambda value: getattr(value, "__name__", value),
)


def subject_of(operator):
    SEEN.clear()
    CALLS.clear()
    random.seed(0)
    return own_subject(operator, operator.__name__)


@each_planted
def test_a_planted_violation_is_found_by_its_law(operator, law):
    assert counterexample((LAWS | PROPERTIES)[law], subject_of(operator), range(1)) is not None


@pytest.mark.slow
@pytest.mark.parametrize("operator", [running_mean, leaks_late])  # at once, and after 10,000 calls
def test_an_operator_that_remembers_is_told_of_that_alone(operator):
    """With one seed: the small world that is called that often is among its worlds."""
    findings = check(subject_of(operator), seeds=range(1))
    assert [(finding.name, finding.verdict) for finding in findings] == [
        ("runs", "holds"),
        ("pure", "BROKEN"),
    ]


def other_after_a_penalty(rewards):
    """Its state changes between two laws: with the first reward below 0."""
    SEEN.append(min(rewards))
    return [1.5 * a if min(SEEN) < 0 and i == 0 else a for i, a in enumerate(centred(rewards))]


def test_an_operator_that_changes_after_a_law_is_found_by_the_next_ones():
    subject, kept = subject_of(other_after_a_penalty), {}
    assert counterexample(LAWS["better"], subject, range(1), kept) is None
    counterexample(LAWS["signed"], subject, range(1), kept)
    assert counterexample(LAWS["layout"], subject, range(1), kept) is not None


def lost_everywhere(tables):
    """Where one row of the batch has lost a reward, no prompt has an advantage."""
    kept = 1.0 - float(tables.lost_reward_B_K.any())
    outcome_B = tables.outcome_advantage("grpo") * kept
    return outcome_B[:, None].expand_as(tables.reward_B_K), outcome_B, tables.ones()


def test_a_gain_that_is_not_finite_is_tried_where_no_row_has_all_gains():
    world = make_world(3)
    assert world.has_gain_B_K.shape[1] > 1
    only_first = torch.arange(world.has_gain_B_K.shape[1]) == 0
    with pytest.raises(Broken, match="inf in a gain"):
        nonfinite(subject_of(lost_everywhere), world.but(has_gain_B_K=world.has_gain_B_K & only_first))


def test_an_operator_that_does_not_pickle_cannot_travel():
    def mine(rewards):
        return centred(rewards)

    with pytest.raises(Broken, match="does not pickle"):
        travels(own_subject(mine, "mine"), make_world(0))
    travels(own_subject(centred, "centred"), make_world(0))


def test_equal_uncertainties_may_be_as_small_as_they_like():
    def uncertainty(context: UncertaintyContext):
        return [SMALLEST_MEAN / 10] * len(context.logprobs)

    weighs_by(own_subject(uncertainty, "mine"), make_world(0))


@pytest.mark.parametrize("mean, weighs", [(SMALLEST_MEAN, True), (math.nextafter(SMALLEST_MEAN, 0), False)])
def test_an_uncertainty_is_accepted_exactly_where_weights_follow_it(mean, weighs):
    def uncertainty(context: UncertaintyContext):
        """0 and twice the mean in turn, and the mean where the number is odd."""
        n = len(context.logprobs)
        return [mean] * (n % 2) + [0.0, 2 * mean] * (n // 2)

    subject, world = own_subject(uncertainty, "mine"), make_world(0, group_sizes=(2,)).rows(torch.tensor([0]))
    value_B_T = subject.uncertainty(world)
    weights = gtpo_weights(value_B_T, world.counted_B_T)[world.counted_B_T]
    assert (weights != 1).any() == weighs
    if weighs:
        weighs_by(subject, world)
    else:
        with pytest.raises(Broken, match="uncertainties from 0 to"):
            weighs_by(subject, world)


def test_worlds_and_calls_are_as_in_training():
    """Ids are -1 outside the policy's tokens; a prompt's advantages differ, and all tokens of a turn have its advantage."""
    given = []

    def transform(context: TransformContext):
        given.append(context)
        return context.turn_advantages_G

    world = make_world(0, silent_rows=2)
    assert (~world.mask_B_T.any(dim=1)).sum() == 2
    assert torch.equal(world.turn_ids_B_T == -1, ~world.mask_B_T)
    own_subject(transform, "mine").call()
    (context,) = given
    assert len(set(context.episode_advantages)) == 2
    for row, turn_ids in zip(context.turn_advantages_G, TURNS["turn_ids_G"], strict=True):
        assert len(set(zip(turn_ids, row, strict=True))) == len(set(row)) == len(set(turn_ids))


def example_of(operator, law):
    subject, examine = subject_of(operator), (LAWS | PROPERTIES)[law]
    return tuple(lines(smallest(counterexample(examine, subject), subject), subject))


@pytest.mark.slow
@pytest.mark.parametrize(
    "operator, law, lines",
    [
        (flipped, "better", ("rewards = [0.5, 0.0]", "  -> [-0.25, 0.25]", "rewards = [0.0, 0.0]", "  -> [-0.0, -0.0]")),
        (undefined_for_ties, "ties", ("rewards = [0.0]",)),
        (roots, "signed", ("rewards = [-1.0]", "  -> ValueError: math domain error")),
        (leaks_late, "pure", ("rewards = [1.0, 0.0]", "  -> [1.5, 0.5]")),
        (not_normalised, "normalised", ("rewards = [1.5, 0.0]", "  -> [0.75, -0.75]", "rewards = [0.5, 0.0]")),
    ],
)  # fmt: skip
def test_a_counterexample_is_the_smallest_as_lists(operator, law, lines):
    assert example_of(operator, law)[: len(lines)] == lines


@pytest.mark.slow
def test_a_counterexample_of_a_law_of_tokens_is_small_too():
    before, after, *_ = example_of(reversed_credit, "turns")
    assert before.startswith("advantages = [[0.0, 0.5]], logprobs = [[-")
    assert after == "  -> [[0.5, 0.0]]"
    tied = example_of(undefined_for_ties_of_eight, "ties")
    assert tied[0] == f"rewards = {[0.0] * 8}"
