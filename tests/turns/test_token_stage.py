"""The token level of a run: every transform runs, rows that do not count change nothing, SEPA looks once per step."""

from dataclasses import replace

import pytest
import torch
from verl.utils.metric import reduce_metrics

from kit.settings import algorithm
from verl_credit.config.keys import CANONICAL
from verl_credit.credit import turn_credit
from verl_credit.credit.token import token_credit
from verl_credit.credit.token.token_transforms import TRANSFORMS
from verl_credit.turns.step.token_stage import TokenInputs, TokenStage

WORDS = (" so", " let", " me", " check", " the", " page", " then", " answer", " Paris", ".")
ROWS, WIDTH = 8, 12
OUTCOME_B = torch.tensor([1.0, 0.0, 0.0, 1.0, 1.0, 0.0, 1.0, 0.0])
GROUP_B = torch.tensor([0, 0, 0, 0, 1, 1, 1, 1])
OPEN = {"steps": 100, "delay_steps": 0, "correct_rate_gate": 0.0}  # lambda = step / 100
STEP = 50
MODES = (*TRANSFORMS, *CANONICAL)


class Tokenizer:
    """Ids are places in WORDS."""

    def batch_decode(self, ids_N, *, clean_up_tokenization_spaces):
        assert not clean_up_tokenization_spaces
        return ["".join(WORDS[i] for i in ids) for ids in ids_N]


def halve(context):
    return [[value / 2 for value in values] for values in context.turn_advantages_G]


def reward_per_token(context):
    return [
        [reward] * len(values) for reward, values in zip(context.rewards_G, context.logprobs_G, strict=True)
    ]


OWN = {"transform_mode": f"{__name__}.halve"}, {"algorithm_mode": f"{__name__}.reward_per_token"}


def stage_of(transform_mode="none", **changes):
    changes = {"sepa": OPEN, **changes}
    return TokenStage(algorithm(transform_mode=transform_mode, **changes), Tokenizer())


def batch(step=STEP):
    """Rows of different length with an observation in the middle; three of them plan."""
    random = torch.Generator().manual_seed(0)
    ids_B_T = torch.randint(4, len(WORDS), (ROWS, WIDTH), generator=random)
    ids_B_T[0, 1:4] = ids_B_T[2, 7:10] = ids_B_T[5, :3] = torch.tensor([1, 2, 3])
    mask_B_T = torch.arange(WIDTH) < torch.tensor([12, 9, 11, 10, 12, 8, 7, 12])[:, None]
    mask_B_T[:, 4:6] = False
    entropy_B_T = torch.rand(ROWS, WIDTH, generator=random) * 2
    log_prob_B_T = -torch.rand(ROWS, WIDTH, generator=random) * 3
    return TokenInputs(step, mask_B_T, ids_B_T, log_prob_B_T, entropy_B_T, torch.ones(ROWS, dtype=torch.bool))


def apply(stage, inputs, outcome_B=OUTCOME_B, group_B=GROUP_B, trained_B_T=None):
    """(advantage_B_T, metrics, turn_advantage_B_T); one turn per row. Without ``trained_B_T`` nothing is rejected."""
    trained_B_T = inputs.mask_B_T if trained_B_T is None else trained_B_T
    credit = turn_credit(
        outcome_B,
        torch.zeros(len(outcome_B), 0),
        torch.zeros(len(outcome_B), 0, dtype=torch.bool),
        group_B,
        info_gain_norm_mode="none",
        norm_by_std=False,
        outcome_operator=stage.outcome_operator,
        row_valid_B=inputs.row_valid_B,
    )
    turn_B_T = torch.where(trained_B_T, credit.outcome_advantage_B[:, None], 0.0)
    done = stage.apply(turn_B_T, credit.outcome_advantage_B, outcome_B, group_B, inputs, trained_B_T)
    return *done, turn_B_T


def with_padding(inputs):
    """Three more rows that do not count, in groups of real rows, full of what must never be read."""
    nan_3_T = torch.full((3, WIDTH), float("nan"))
    return TokenInputs(
        inputs.step,
        torch.cat([inputs.mask_B_T, torch.ones(3, WIDTH, dtype=torch.bool)]),
        torch.cat([inputs.token_ids_B_T, torch.full((3, WIDTH), -7)]),
        torch.cat([inputs.log_prob_B_T, nan_3_T]),
        torch.cat([inputs.entropy_B_T, nan_3_T]),
        torch.cat([inputs.row_valid_B, torch.zeros(3, dtype=torch.bool)]),
    )


each_pipeline = pytest.mark.parametrize(
    "pipeline",
    [*({"transform_mode": mode, "uncertainty_kind": "shannon_entropy"} for mode in MODES), *OWN],
    ids=lambda pipeline: next(iter(pipeline.values())),
)


@each_pipeline
def test_every_mode_gives_finite_credit_to_policy_tokens_and_none_to_others(pipeline):
    inputs = batch()
    advantage_B_T, metrics, turn_B_T = apply(stage_of(**pipeline), inputs)
    assert advantage_B_T.shape == turn_B_T.shape and advantage_B_T.isfinite().all()
    assert not advantage_B_T[~inputs.mask_B_T].any() and advantage_B_T[inputs.mask_B_T].any()
    assert torch.equal(advantage_B_T, turn_B_T) == (pipeline.get("transform_mode") == "none")
    assert metrics["credit/advantage_abs/token"] == pytest.approx(
        advantage_B_T[inputs.mask_B_T].abs().mean().item()
    )


@each_pipeline
def test_rows_that_do_not_count_change_no_bit_and_no_observation(pipeline):
    outcome_B = torch.cat([OUTCOME_B, torch.tensor([float("nan"), 1e9, 1.0])])
    group_B = torch.cat([GROUP_B, torch.tensor([0, 1, 1])])
    alone, padded = stage_of(**pipeline), stage_of(**pipeline)
    for step in (1, 2):
        expected_B_T, expected, _ = apply(alone, batch(step))
        advantage_B_T, metrics, _ = apply(padded, with_padding(batch(step)), outcome_B, group_B)
        assert torch.equal(advantage_B_T[:ROWS], expected_B_T) and not advantage_B_T[ROWS:].any()
        assert metrics == pytest.approx(expected, rel=1e-12)
    if alone.controller is not None:
        assert alone.controller.state_dict() == padded.controller.state_dict()


def rejected(inputs):
    """What rollout correction leaves of the policy's tokens: single ones are gone, a row's beginning, a row."""
    trained_B_T = inputs.mask_B_T.clone()
    trained_B_T[1, 7] = trained_B_T[5, 1] = False  # the latter in the middle of a planning phrase
    trained_B_T[4, :4] = trained_B_T[6] = False
    return trained_B_T


@each_pipeline
def test_rejected_tokens_are_in_no_statistic(pipeline):
    """Whatever stands on them, advantages, metrics and what SEPA observed are the same; they get nothing."""
    here, there, inputs = stage_of(**pipeline), stage_of(**pipeline), batch()
    trained_B_T = rejected(inputs)
    advantage_B_T, metrics, _ = apply(here, inputs, trained_B_T=trained_B_T)
    assert advantage_B_T[trained_B_T].isfinite().all() and not advantage_B_T[~trained_B_T].any()
    wild = replace(
        inputs,
        log_prob_B_T=torch.where(trained_B_T, inputs.log_prob_B_T, torch.nan),
        entropy_B_T=torch.where(trained_B_T, inputs.entropy_B_T, torch.nan),
    )
    other_B_T, others, _ = apply(there, wild, trained_B_T=trained_B_T)
    assert torch.equal(other_B_T, advantage_B_T) and others == metrics
    assert not apply(stage_of(**pipeline), inputs, trained_B_T=torch.zeros_like(trained_B_T))[0].any()
    if here.controller is not None:
        assert here.controller.state_dict() == there.controller.state_dict()


@pytest.mark.parametrize("mode", [mode for mode in MODES if mode not in ("none",)])
def test_what_is_left_is_credited_as_if_the_rest_had_not_been_written(mode):
    """But for planning phrases, which are found in the text as it was written."""
    inputs, pipeline = batch(), {"uncertainty_kind": "shannon_entropy"}
    trained_B_T = rejected(inputs)
    if "sepa" in mode or "hicra" in mode:
        trained_B_T[5] = inputs.mask_B_T[5]
    left_B_T, metrics, _ = apply(stage_of(mode, **pipeline), inputs, trained_B_T=trained_B_T)
    alone_B_T, expected, _ = apply(stage_of(mode, **pipeline), replace(inputs, mask_B_T=trained_B_T))
    assert torch.equal(left_B_T, alone_B_T) and metrics == expected
    whole_B_T = torch.where(trained_B_T, apply(stage_of(mode, **pipeline), inputs)[0], 0.0)
    assert torch.equal(left_B_T, whole_B_T) == (mode == "hicra")  # which compares a token with no other


WEIGHTED = set(TRANSFORMS) - {"none", "hicra"}
READS = {  # setting: (another value, the modes whose advantages it changes)
    "gtpo__beta": (0.5, WEIGHTED),
    "hicra__alpha": (0.5, {m for m in TRANSFORMS if "hicra" in m}),
    "entropy_mask__rho": (0.7, {"entropy_mask"}),
    "strategic_grams": (["the page"], {m for m in TRANSFORMS if "hicra" in m or "sepa" in m}),
    "sepa": (OPEN | {"steps": 500}, {m for m in TRANSFORMS if "sepa" in m}),
    "uncertainty_kind": ("predictive_variance", WEIGHTED),
    "canonical__population": ("joint", {"gtpo_canonical"}),
    "canonical__alpha_2": (0.5, {"gtpo_canonical"}),
    "canonical__beta_2": (0.5, {"grpo_s"}),
    "canonical__entropy_clip": ((0.5, 1.0), set(CANONICAL)),
    "advantage_mode": ("maxrl", set(TRANSFORMS)),
}


@pytest.mark.parametrize("name", READS)
def test_every_setting_reaches_the_modes_that_read_it_and_no_other(name):
    value, readers = READS[name]
    for mode in MODES:
        if name == "uncertainty_kind" and mode in CANONICAL:
            continue  # refused by the configuration
        vetted = {"uncertainty_kind": "shannon_entropy"}
        before, after = (
            apply(stage_of(mode, **vetted | changes), batch())[0] for changes in ({}, {name: value})
        )
        assert torch.equal(before, after) == (mode not in readers), mode


def test_metrics_are_averaged_over_workers_not_reduced_to_an_extreme():
    for pipeline in (*({"transform_mode": mode} for mode in MODES), *OWN):
        _, metrics, _ = apply(stage_of(**pipeline), batch())
        assert all(name.startswith("credit/") and type(value) is float for name, value in metrics.items())
        assert set(reduce_metrics({name: [1.0, 2.0, 6.0] for name in metrics}).values()) == {3.0}
        assert not [name for name in metrics for word in ("max", "min", "sum", "total") if word in name]


def test_sepa_is_observed_once_per_step_and_after_lambda_was_used(monkeypatch):
    """The step whose outcomes open the gate is itself computed with the gate closed."""
    stage, plain = stage_of("gtpo_sepa", sepa=OPEN | {"correct_rate_gate": 0.5}), stage_of("gtpo")
    seen, observe = [], stage.controller.observe
    monkeypatch.setattr(stage.controller, "observe", lambda *args: (seen.append(args), observe(*args)))
    advantage_B_T, metrics, _ = apply(stage, batch(40))
    assert torch.equal(advantage_B_T, apply(plain, batch(40))[0])
    assert (metrics["credit/sepa_lambda"], metrics["credit/sepa_gate_open"]) == (0.0, 0.0)
    assert stage.controller.gate_open and len(seen) == 1
    advantage_B_T, metrics, _ = apply(stage, batch(41))
    assert (metrics["credit/sepa_lambda"], metrics["credit/sepa_gate_open"]) == (0.41, 1.0) and len(seen) == 2
    assert not torch.equal(advantage_B_T, apply(plain, batch(41))[0])
    with pytest.raises(ValueError, match="step 41 was observed already"):
        apply(stage, batch(41))


def test_sepa_sees_the_share_of_correct_rows_and_the_uncertainty_of_execution_tokens(monkeypatch):
    stage, inputs = stage_of("gtpo_sepa"), batch()
    seen = []
    monkeypatch.setattr(stage.controller, "observe", lambda *args: seen.append(args))
    apply(stage, replace(inputs, row_valid_B=torch.arange(ROWS) != 1), OUTCOME_B * 0.51)
    ((step, correct, values_N),) = seen
    planning = {(0, 1), (0, 2), (0, 3), (2, 7), (2, 8), (2, 9), (5, 0), (5, 1), (5, 2)}
    cells = [c for c in inputs.mask_B_T.nonzero().tolist() if c[0] != 1 and tuple(c) not in planning]
    assert (step, correct) == (STEP, pytest.approx(4 / 7))
    assert values_N.tolist() == [-inputs.log_prob_B_T[row, t].item() for row, t in cells]


@each_pipeline
def test_uncertainties_are_counted_once_and_on_policy_tokens(monkeypatch, pipeline):
    """Once before pooling and, where something is pooled, once after it."""
    seen, moments = [], token_credit.row_moments

    def counting(uncertainty_B_T, planning_B_T, mask_B_T):
        assert not uncertainty_B_T[~mask_B_T].any()
        seen.append(int(mask_B_T.sum()))
        return moments(uncertainty_B_T, planning_B_T, mask_B_T)

    monkeypatch.setattr(token_credit, "row_moments", counting)
    inputs = batch()
    apply(stage_of(**pipeline), inputs)
    pooled = "sepa" in pipeline.get("transform_mode", "")
    assert seen == [int(inputs.mask_B_T.sum())] * (1 + pooled)


def test_what_is_not_needed_is_not_built():
    for mode, spec in TRANSFORMS.items():
        stage = stage_of(mode)
        assert (stage.controller is not None) == spec.uses_sepa_controller and stage.active == (
            mode != "none"
        )
        _, metrics, _ = apply(stage, batch())
        assert ("credit/planning/token_share" in metrics) == spec.needs_planning


def every_token(token_ids_B_T, mask_B_T, decode):
    assert decode([1, 2]) == [" let", " me"]
    return torch.ones_like(mask_B_T)


def two_everywhere(token_ids_B_T, mask_B_T, decode):
    return torch.full(mask_B_T.shape, 2)


def test_a_detector_of_the_users_marks_policy_tokens_only_and_what_it_returns_is_checked():
    inputs = batch()
    advantage_B_T, metrics, _ = apply(
        stage_of("gtpo_hicra", planning__detector=f"{__name__}.every_token"), inputs
    )
    plain_B_T, *_ = apply(stage_of("gtpo"), inputs)
    assert metrics["credit/planning/token_share"] == 1.0
    assert torch.allclose(advantage_B_T, plain_B_T + 0.2 * plain_B_T.abs())
    with pytest.raises(
        ValueError, match=r"algorithm.planning.detector='.*two_everywhere' .* expected a mask of shape"
    ):
        apply(stage_of("gtpo_hicra", planning__detector=f"{__name__}.two_everywhere"), inputs)


def test_entropies_that_never_arrive_are_refused():
    with pytest.raises(ValueError, match="uncertainty_kind='shannon_entropy' needs entropy_B_T"):
        apply(stage_of("gtpo", uncertainty_kind="entropy"), replace(batch(), entropy_B_T=None))


@pytest.mark.parametrize("name", ["advantage_mode", "transform_mode", "algorithm_mode", "uncertainty_kind"])
def test_a_path_that_leads_nowhere_ends_the_run_when_the_stage_is_built(name):
    with pytest.raises(ValueError, match=f"algorithm.{name}='no_such.thing': cannot import 'no_such'"):
        TokenStage(algorithm(sepa=OPEN, **{name: "no_such.thing"}), Tokenizer())
