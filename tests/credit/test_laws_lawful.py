"""`check` calls no lawful operator broken, whatever its scale and its precision."""

import math
import statistics

import pytest
import torch

from kit.fuzz import LAW_SEEDS
from verl_credit.credit.laws import LAWS, PROPERTIES, check, own_subject
from verl_credit.credit.laws import laws as steady
from verl_credit.credit.laws.check import counterexample
from verl_credit.credit.plugins import (
    AlgorithmContext,
    TransformContext,
    TransformOutput,
    TransformSpec,
    UncertaintyContext,
)


def centred(rewards):
    mean = sum(rewards) / len(rewards)
    return [r - mean for r in rewards]


def hipa_like(rewards):
    """The founding document's example of an outcome operator."""
    if not rewards:
        return []
    mean_r = sum(rewards) / len(rewards)
    return [2.0 * (r - mean_r) for r in rewards]


def scaled(ctx):
    """The founding document's example of a token transform."""
    scale = float(ctx.params.get("scale", 1.0))
    token_advs = []
    for i, logprobs in enumerate(ctx.logprobs_G):
        token_advs.append([ctx.episode_advantages[i] * scale for _ in logprobs])
    return TransformOutput(token_advs=token_advs)


def large(rewards):
    return [1e10 * a for a in centred(rewards)]


def small(rewards):
    return [1e-10 * a for a in centred(rewards)]


def in_float32(tables):
    """Its means depend on the order of the rows by what float32 rounds."""
    thirds_B, mean_B = tables.outcome_B.float() / 3, torch.zeros(len(tables.outcome_B))
    for group in tables.group_B.unique():
        member_B = (tables.group_B == group) & tables.valid_B
        if member_B.any():
            mean_B[member_B] = float(sum(thirds_B[member_B])) / int(member_B.sum())
    outcome_B = torch.where(tables.valid_B, thirds_B - mean_B, 0.0)
    return outcome_B[:, None].expand_as(tables.reward_B_K), outcome_B, tables.ones()


def only_normalised(rewards):
    return grpo(rewards)


only_normalised.properties = ("normalised",)


def grpo(rewards):
    deviations = centred(rewards)
    spread = math.sqrt(sum(d * d for d in deviations) / len(rewards))
    return [d / (spread + 1e-8) for d in deviations]


def hard_prompts(rewards):
    if max(rewards) > 1:
        raise ValueError("a reward above 1")
    mean = sum(rewards) / len(rewards)
    return [(r - mean) * (1 - mean) for r in rewards]


def leave_one_out(rewards):
    n = len(rewards)
    return [0.0 if n == 1 else r - (sum(rewards) - r) / (n - 1) for r in rewards]


def by_rank(rewards):
    return [float(sum(r > other for other in rewards) - sum(r < other for other in rewards)) for r in rewards]


def late_tokens(context: TransformContext):
    return [
        [a * (0.5 + t / max(1, len(row) - 1)) for t, a in enumerate(row)] for row in context.turn_advantages_G
    ]


def weighted_turns(context: TransformContext):
    rows = zip(context.turn_advantages_G, context.uncertainties_G, strict=True)
    return [[a * w for a, w in zip(row, context.gtpo(1.0, h), strict=True)] for row, h in rows]


def half_smeared(context: TransformContext):
    return [[0.5 * a + 0.5 * statistics.fmean(row) for a in row] for row in context.turn_advantages_G]


def return_to_go(context: TransformContext):
    return [[0.9 * a + 0.1 * sum(row[t:]) for t, a in enumerate(row)] for row in context.turn_advantages_G]


for transform in (late_tokens, weighted_turns, half_smeared, return_to_go):
    transform.uses_turn_advantages = True


def position_weights(context: TransformContext):
    return [
        [a * t for t in range(len(row))]
        for a, row in zip(context.episode_advantages, context.logprobs_G, strict=True)
    ]


def mean_uncertainty(context: TransformContext):
    return [
        [a * statistics.fmean(h)] * len(h) if h else []
        for a, h in zip(context.episode_advantages, context.uncertainties_G, strict=True)
    ]


def most_uncertain(context: TransformContext):
    return [
        [a * (x >= statistics.median(h)) for x in h]
        for a, h in zip(context.episode_advantages, context.uncertainties_G, strict=True)
    ]


def pooled(context: TransformContext):
    rows = zip(context.episode_advantages, context.uncertainties_G, context.planning_masks_G, strict=True)
    return [context.gtpo(a, context.sepa_pool(h, plan)) for a, h, plan in rows]


pooled.needs_planning = True


def entropy_declared(context: UncertaintyContext):
    return context.precomputed_entropy


entropy_declared.reads = ("entropy",)


def margin(context: UncertaintyContext):
    return [1 - math.exp(x) for x in context.logprobs]


def reinforce(context: AlgorithmContext):
    return [[a] * len(row) for a, row in zip(centred(context.rewards_G), context.logprobs_G, strict=True)]


def turn_by_turn(context: AlgorithmContext):
    rows = zip(centred(context.rewards_G), context.turn_ids_G, context.turn_rewards_G, strict=True)
    return [[a + ((*earned, None)[turn] or 0.0) for turn in ids] for a, ids, earned in rows]


PARTS = TransformSpec("parts", apply_hicra=True, needs_planning=True)
NEAREST = {
    centred: ("ties", "better", "order"),
    hipa_like: ("better", "signed"),
    large: ("ties", "better"),
    small: ("ties", "better"),
    in_float32: ("pure", "order", "dtype", "ties", "others"),
    grpo: ("ties", "edges", "normalised"),
    only_normalised: ("ties", "normalised"),
    leave_one_out: ("edges", "better", "centred"),
    hard_prompts: ("better", "ties"),
    by_rank: ("better", "signed", "dtype"),
    scaled: ("runs", "reads", "flat"),
    late_tokens: ("turns", "follows"),
    weighted_turns: ("turns", "follows", "flat"),
    half_smeared: ("turns",),
    return_to_go: ("turns",),
    mean_uncertainty: ("follows", "flat"),
    most_uncertain: ("follows", "flat"),
    position_weights: ("order", "width", "observations"),
    pooled: ("absent", "follows"),
    entropy_declared: ("absent", "weighs_by", "follows"),
    margin: ("weighs_by", "flat"),
    reinforce: ("better", "ties", "absent"),
    turn_by_turn: ("better", "reads", "width"),
    PARTS: ("absent", "turns"),
}
"""Each with the laws and properties that it keeps by the least."""


def subject_of(operator):
    kind = "transform" if operator is scaled else None  # its argument says nothing
    return own_subject(operator, "mine", kind=kind)


@pytest.mark.parametrize("operator", NEAREST, ids=lambda value: getattr(value, "__name__", "parts"))
def test_a_lawful_operator_keeps_the_laws_that_are_nearest_to_it(operator, monkeypatch):
    monkeypatch.setattr(steady, "CALLS", 100)
    for law in NEAREST[operator]:
        assert counterexample((LAWS | PROPERTIES)[law], subject_of(operator), range(1)) is None, law


@pytest.mark.slow
@pytest.mark.parametrize("operator", NEAREST, ids=lambda value: getattr(value, "__name__", "parts"))
def test_a_lawful_operator_is_not_called_broken(operator, monkeypatch):
    monkeypatch.setattr(steady, "CALLS", 1000)
    wrong = [finding for finding in check(subject_of(operator), LAW_SEEDS) if finding.wrong]
    assert not wrong, "\n".join(f"{finding.name}: {finding.detail} {finding.example}" for finding in wrong)
