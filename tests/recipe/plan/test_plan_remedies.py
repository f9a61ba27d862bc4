"""Every remedy that a plan proposes is one that `train` accepts, and lessens what is missing as the plan says."""

import pytest

from kit.recipes import load_config
from verl_credit.cli.recipe.plan import OURS, _values
from verl_credit.recipe.plan.plan import make_plan
from verl_credit.recipe.plan.remedies import missing
from verl_credit.recipe.rules import validate

GIVEN = ["data.train_files=x", "data.val_files=x", "search.url=http://x"]
STATIC = [
    "actor_rollout_ref.actor.use_dynamic_bsz=false",
    "actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=false",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=4",
]
CASES = [
    ("multihop_qwen3_4b", ["hardware=h100x1", "hardware.memory_gib=40"]),
    ("multihop_qwen3_4b", ["hardware=h100x1"]),
    ("multihop_qwen3_4b", ["hardware.memory_gib=24", "hardware.host_memory_gib=60"]),
    ("multihop_qwen3_4b", ["hardware=node4", "model=qwen3_8b", "hardware.memory_gib=40"]),
    ("multihop_qwen3_4b", ["hardware=spark", "hardware.memory_gib=90"]),
    ("multihop_qwen3_4b", ["hardware=spark", "hardware.index.kind=flat"]),
    ("multihop_qwen3_4b", ["hardware.memory_gib=24", *STATIC]),
    (
        "multihop_qwen3_4b",
        ["hardware.memory_gib=40", "actor_rollout_ref.model.enable_gradient_checkpointing=false"],
    ),
    (
        "multihop_qwen3_4b",
        [
            "hardware.memory_gib=30",
            "actor_rollout_ref.actor.entropy_from_logits_with_chunking=false",
            "actor_rollout_ref.actor.use_torch_compile=false",
            "actor_rollout_ref.actor.fsdp_config.use_torch_compile=false",
        ],
    ),
    ("multihop_qwen3_4b", ["hardware=laptop", "hardware.memory_gib=40"]),
    ("spark_qwen3_4b", ["hardware.memory_gib=50"]),
    ("spark_qwen3_4b", ["hardware.index.kind=flat", "hardware.memory_gib=90"]),
    ("math_sepa", ["hardware.memory_gib=24"]),
    ("math_sepa", ["actor_rollout_ref.rollout.gpu_memory_utilization=0.1"]),
    ("search_cpu", ["actor_rollout_ref.model.path=Qwen/Qwen3-0.6B", "hardware.memory_gib=16"]),
]


def composed(name, overrides):
    """(the configuration that `train` would get, the plan of it with what is the planner's own)"""
    ours = [override for override in overrides if override.startswith(OURS)]
    config = load_config(name, [override for override in overrides if override not in ours])
    return config, make_plan(_values(config, ours))


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, overrides", CASES, ids=lambda value: value if isinstance(value, str) else "+".join(value)
)
def test_every_remedy_is_accepted_and_does_what_it_says(name, overrides):
    given = [*GIVEN, *overrides]
    _, plan = composed(name, given)
    assert not plan.fits and plan.remedies
    left = missing(plan.phases)
    for remedy in plan.remedies:
        given += remedy.overrides
        config, then = composed(name, given)
        validate(config)
        now = missing(then.phases)
        assert now == pytest.approx(remedy.missing, rel=0.01, abs=2**20) and now < left, remedy
        left = now


def test_a_micro_batch_keeps_room_for_the_answers_behind_a_row():
    _, plan = composed("multihop_qwen3_4b", [*GIVEN, *CASES[0][1]])
    budgets = [o for remedy in plan.remedies for o in remedy.overrides if "log_prob_max_token_len" in o]
    assert budgets and all(int(o.partition("=")[2]) >= 8192 + 7 * 8 for o in budgets)


def test_an_8_bit_index_is_not_made_smaller_by_being_8_bit():
    for name, overrides in CASES:
        if "hardware.index.kind=flat" not in overrides and "hardware=spark" in overrides:
            _, plan = composed(name, [*GIVEN, *overrides])
            assert not [r for r in plan.remedies if "index" in r.what]
