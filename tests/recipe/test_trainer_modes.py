"""verl's trainers as keys: what the asynchronous ones refuse."""

import ast
from importlib.util import find_spec
from pathlib import Path

import pytest

import verl_credit
from kit.recipes import check, refused
from verl_credit.names import TRAINER_MODE
from verl_credit.recipe.unread import warnings_of

MODE = "trainer.v1.trainer_mode"
COLOCATE, SEPARATE = f"{MODE}=credit_colocate_async", f"{MODE}=credit_separate_async"
WRONG = (
    "actor_rollout_ref.rollout.calculate_log_probs=false",
    "probe.every=5",
    "trainer.v1.sampler.max_off_policy_threshold=null",
    "keep_rollouts.groups=null",
)
NO_VALUE = {
    "trainer.v1.sampler.max_off_policy_threshold=0": "expected a whole number of at least 1 or null",
    "trainer.v1.sampler.max_off_policy_threshold=2.5": "expected a whole number of at least 1 or null",
    "trainer.v1.sampler.max_off_policy_strategy=keep": ["drop", "wait"],
    "trainer.v1.colocate_async.num_warmup_batches=-1": "expected a number of at least 0",
    "trainer.v1.separate_async.num_warmup_batches=many": "expected a number of at least 0",
}
OF_SEPARATE = (
    "actor_rollout_ref.rollout.nnodes=0",
    "actor_rollout_ref.rollout.n_gpus_per_node=0",
    "actor_rollout_ref.rollout.checkpoint_engine.backend=naive",
    "trainer.v1.separate_async.parameter_sync_step=3",
)
SHARED_REWARD = ("reward.reward_model.enable_resource_pool=false", "reward.reward_model.enable=true")
SEPA = ("algorithm.transform_mode=gtpo_sepa", "actor_rollout_ref.actor.ppo_mini_batch_size=4")


def is_refused(mode, override, *more):
    error = refused(mode, override, *more)
    assert error.key == override.split("=")[0]
    assert str(error).startswith(f"{override} with {mode}")


@pytest.mark.slow
@pytest.mark.parametrize("mode", [COLOCATE, SEPARATE])
@pytest.mark.parametrize("override", WRONG)
def test_what_cannot_work_is_refused_with_the_mode(override, mode):
    is_refused(mode, override)
    assert check(override).trainer.v1.trainer_mode == TRAINER_MODE


@pytest.mark.slow
@pytest.mark.parametrize(
    "given", [(one,) for one in OF_SEPARATE] + [SHARED_REWARD, (*SEPA, "data.train_batch_size=12")]
)
def test_what_separate_devices_need_is_asked_for_by_them_alone(given):
    is_refused(SEPARATE, *given)
    check(COLOCATE, *given)
    check(SEPARATE, *SEPA, "data.train_batch_size=4")


@pytest.mark.slow
@pytest.mark.parametrize("override", NO_VALUE)
def test_a_value_that_verl_only_asserts_is_refused_in_every_mode(override):
    for mode in (f"{MODE}=credit", COLOCATE, SEPARATE):
        error = refused(mode, override)
        assert (error.key, str(error.value)) == tuple(override.split("="))
        assert error.accepted == NO_VALUE[override]


@pytest.mark.slow
@pytest.mark.parametrize("name, mode", [("colocate_async", COLOCATE), ("separate_async", SEPARATE)])
def test_batches_ahead_that_will_be_too_old_are_warned_of_as_waste(name, mode):
    """With w batches ahead a step trains on what was handed out w steps before, w + 1 versions of the weights."""
    bound, key = "trainer.v1.sampler.max_off_policy_threshold", f"trainer.v1.{name}.num_warmup_batches"

    def said(*overrides):
        return [line for line in warnings_of(check(mode, *overrides)) if line.startswith(key)]

    assert said() == said(f"{bound}=3", f"{key}=2") == []
    assert said(f"{bound}=3", f"{key}=9", "trainer.v1.sampler.max_off_policy_strategy=wait") == []
    for ahead in ("3", "2.5"):
        (line,) = said(f"{bound}=3", f"{key}={ahead}")
        assert (
            line.startswith(f"{key}={ahead} with {bound}=3: ") and "Avoided with num_warmup_batches=2" in line
        )


@pytest.mark.slow
def test_what_follows_from_the_trainer_is_decided():
    own = check(SEPARATE, "data.train_batch_size=12", "actor_rollout_ref.actor.ppo_mini_batch_size=4")
    assert own.trainer.v1.separate_async.parameter_sync_step == 3
    assert own.actor_rollout_ref.hybrid_engine is False
    assert check(COLOCATE).actor_rollout_ref.hybrid_engine is True
    assert check(SEPARATE, "actor_rollout_ref.hybrid_engine=true").actor_rollout_ref.hybrid_engine is True


@pytest.mark.slow
def test_a_mode_or_engine_that_is_none_is_refused_with_those_that_are():
    error = refused(f"{MODE}=separate_async")
    assert (error.key, error.value) == (MODE, "separate_async")
    assert error.accepted[:3] == ["credit", "credit_colocate_async", "credit_separate_async"]
    error = refused(COLOCATE, "actor_rollout_ref.rollout.name=trtllm")
    assert (error.value, error.accepted) == ("trtllm", ["hf", "vllm", "sglang"])


def test_every_engine_that_is_accepted_can_abort():
    """An engine that cannot would go on writing with old weights while new ones come."""
    hf = Path(verl_credit.__file__).parent / "host/hf_rollout/server.py"
    rollouts = Path(find_spec("verl").origin).parent / "workers/rollout"
    others = [
        rollouts / f"{name}_rollout" / f"{file}_server.py"
        for name, file in (("vllm", "vllm_async"), ("sglang", "async_sglang"))
    ]
    for source in (hf, *others):  # vLLM and SGLang are not installed here
        names = {node.name for node in ast.walk(ast.parse(source.read_text())) if hasattr(node, "name")}
        assert {"abort_all_requests", "resume_generation"} <= names, source
