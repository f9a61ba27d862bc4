"""verl's trainers as keys: what the asynchronous ones refuse."""

import pytest

from kit.recipes import check
from verl_credit.errors import ConfigError
from verl_credit.names import TRAINER_MODE
from verl_credit.recipe.unread import warnings_of

MODE = "trainer.v1.trainer_mode"
COLOCATE, SEPARATE = f"{MODE}=credit_colocate_async", f"{MODE}=credit_separate_async"
WRONG = {
    "actor_rollout_ref.rollout.calculate_log_probs=false": "only the engine knows its log-prob; set it to true",
    "probe.every=5": "the entropy probe needs rollouts of the new weights, and these may be older; set it to 0",
    "trainer.v1.sampler.max_off_policy_threshold=null": "set a whole number",
    "keep_rollouts.groups=null": "rollouts of one policy, and these may be of several; set a whole number",
}
NO_VALUE = {
    "trainer.v1.sampler.max_off_policy_threshold=0": "expected a whole number of at least 1 or null",
    "trainer.v1.sampler.max_off_policy_threshold=2.5": "expected a whole number of at least 1 or null",
    "trainer.v1.sampler.max_off_policy_strategy=keep": ["drop", "wait"],
    "trainer.v1.colocate_async.num_warmup_batches=-1": "expected a number of at least 0",
    "trainer.v1.separate_async.num_warmup_batches=many": "expected a number of at least 0",
}
OF_SEPARATE = {
    "actor_rollout_ref.rollout.nnodes=0": "its rollouts have devices of their own",
    "actor_rollout_ref.rollout.n_gpus_per_node=0": "its rollouts have devices of their own",
    "actor_rollout_ref.rollout.checkpoint_engine.backend=naive": "object_store on CPUs",
    "trainer.v1.separate_async.parameter_sync_step=3": "every update takes a mini-batch of its own",
}
SHARED_REWARD = ("reward.reward_model.enable=true", "reward.reward_model.enable_resource_pool=false")


@pytest.mark.parametrize("mode", [COLOCATE, SEPARATE])
@pytest.mark.parametrize("override", WRONG)
def test_what_cannot_work_is_refused_with_the_mode_and_the_remedy(override, mode):
    refused(override, mode, WRONG[override])
    assert check(override).trainer.v1.trainer_mode == TRAINER_MODE


@pytest.mark.parametrize("override", OF_SEPARATE)
def test_what_separate_devices_need_is_asked_for_by_them_alone(override):
    refused(override, SEPARATE, OF_SEPARATE[override])
    check(override, COLOCATE)


def test_sepa_is_refused_where_a_step_has_several_updates():
    batch = "data.train_batch_size=12", "actor_rollout_ref.actor.ppo_mini_batch_size=4"
    refused("algorithm.transform_mode=gtpo_sepa", SEPARATE, "or data.train_batch_size=4", *batch)
    check("algorithm.transform_mode=gtpo_sepa", SEPARATE, "data.train_batch_size=4", batch[1])
    check("algorithm.transform_mode=gtpo_sepa", COLOCATE, *batch)


def test_a_reward_model_needs_devices_beside_rollouts_that_never_pause():
    refused(SHARED_REWARD[1], SEPARATE, "rollouts that never pause; set it to true", SHARED_REWARD[0])
    check(COLOCATE, *SHARED_REWARD)


@pytest.mark.parametrize("override", NO_VALUE)
def test_a_value_that_verl_only_asserts_is_refused_in_every_mode(override):
    for mode in (f"{MODE}=credit", COLOCATE, SEPARATE):
        with pytest.raises(ConfigError) as caught:
            check(mode, override)
        key, _, value = override.partition("=")
        assert (caught.value.key, str(caught.value.value)) == (key, value)
        assert caught.value.accepted == NO_VALUE[override]


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


def refused(override, mode, why, *more):
    with pytest.raises(ConfigError) as caught:
        check(mode, override, *more)
    assert caught.value.key == override.split("=")[0] and why in caught.value.accepted
    assert str(caught.value).startswith(f"{override} with {mode}")


def test_what_follows_from_the_trainer_is_decided():
    own = check(SEPARATE, "data.train_batch_size=12", "actor_rollout_ref.actor.ppo_mini_batch_size=4")
    assert own.trainer.v1.separate_async.parameter_sync_step == 3
    assert own.actor_rollout_ref.hybrid_engine is False
    assert check(COLOCATE).actor_rollout_ref.hybrid_engine is True
    assert check(SEPARATE, "actor_rollout_ref.hybrid_engine=true").actor_rollout_ref.hybrid_engine is True


def test_a_mode_that_is_none_is_refused_with_those_that_are():
    with pytest.raises(ConfigError) as caught:
        check(f"{MODE}=separate_async")
    assert (caught.value.key, caught.value.value) == (MODE, "separate_async")
    assert caught.value.accepted[:3] == ["credit", "credit_colocate_async", "credit_separate_async"]


def test_every_engine_that_is_accepted_can_abort():
    """An engine that cannot would go on writing with old weights while new ones come."""
    import ast
    from importlib.util import find_spec
    from pathlib import Path

    import verl_credit

    hf = Path(verl_credit.__file__).parent / "host/hf_rollout/server.py"
    rollouts = Path(find_spec("verl").origin).parent / "workers/rollout"
    vllm, sglang = (
        rollouts / "vllm_rollout/vllm_async_server.py",
        rollouts / "sglang_rollout/async_sglang_server.py",
    )
    for source in (hf, vllm, sglang):  # vLLM and SGLang are not installed here
        names = {node.name for node in ast.walk(ast.parse(source.read_text())) if hasattr(node, "name")}
        assert {"abort_all_requests", "resume_generation"} <= names, source
    with pytest.raises(ConfigError) as caught:
        check(COLOCATE, "actor_rollout_ref.rollout.name=trtllm")
    assert (caught.value.key, caught.value.value) == ("actor_rollout_ref.rollout.name", "trtllm")
    assert caught.value.accepted == ["hf", "vllm", "sglang"]
