"""verl's trainers as keys: what the asynchronous ones refuse, and keys that another trainer reads."""

import pytest

from kit.recipes import check
from verl_credit.errors import ConfigError
from verl_credit.names import TRAINER_MODE
from verl_credit.recipe.compose import verl_folder
from verl_credit.recipe.rules.trainer_mode import READ_BY, V1
from verl_credit.recipe.unread import without_effect

MODE = "trainer.v1.trainer_mode"
COLOCATE, SEPARATE = f"{MODE}=credit_colocate_async", f"{MODE}=credit_separate_async"
WRONG = {
    "actor_rollout_ref.rollout.calculate_log_probs=false": "only the engine knows its log-prob; set it to true",
    "probe.every=5": "the entropy probe needs rollouts that the new weights wrote, and these may be older; set it to 0",
    "trainer.v1.sampler.max_off_policy_threshold=null": "set a whole number",
    "keep_rollouts=3": "rollouts of one policy, and these may be of several; set it to 0",
}
OF_SEPARATE = {
    "actor_rollout_ref.rollout.nnodes=0": "its rollouts have devices of their own",
    "actor_rollout_ref.rollout.n_gpus_per_node=0": "its rollouts have devices of their own",
    "actor_rollout_ref.rollout.checkpoint_engine.backend=naive": "object_store on CPUs",
    "trainer.v1.separate_async.parameter_sync_step=3": "every update takes a mini-batch of its own",
}


@pytest.mark.parametrize("mode", [COLOCATE, SEPARATE])
@pytest.mark.parametrize("override", WRONG)
def test_what_cannot_work_is_refused_with_the_mode_and_the_remedy(override, mode):
    refused(override, mode, WRONG[override])
    assert check(override).trainer.v1.trainer_mode == TRAINER_MODE


@pytest.mark.parametrize("override", OF_SEPARATE)
def test_what_separate_devices_need_is_asked_for_by_them_alone(override):
    refused(override, SEPARATE, OF_SEPARATE[override])
    check(override, COLOCATE)


def refused(override, mode, why):
    with pytest.raises(ConfigError) as caught:
        check(mode, override)
    key, said = override.split("=")[0], str(caught.value)
    assert said.startswith(f"{key}=") and f"{mode}" in said and why in said


def test_what_follows_from_the_trainer_is_decided():
    own = check(SEPARATE, "data.train_batch_size=12", "actor_rollout_ref.actor.ppo_mini_batch_size=4")
    assert own.trainer.v1.separate_async.parameter_sync_step == 3
    assert own.actor_rollout_ref.hybrid_engine is False
    assert check(COLOCATE).actor_rollout_ref.hybrid_engine is True
    assert check(SEPARATE, "actor_rollout_ref.hybrid_engine=true").actor_rollout_ref.hybrid_engine is True


def test_a_mode_that_is_none_is_refused_with_those_that_are():
    with pytest.raises(ConfigError, match="credit, credit_colocate_async, credit_separate_async"):
        check("trainer.v1.trainer_mode=separate_async")


@pytest.mark.parametrize(
    "override, readers",
    [
        ("trainer.v1.sampler.max_off_policy_threshold=2", [COLOCATE, SEPARATE]),
        ("trainer.v1.colocate_async.num_warmup_batches=2", [COLOCATE]),
        ("trainer.v1.separate_async.num_warmup_batches=2", [SEPARATE]),
        ("actor_rollout_ref.hybrid_engine=false", [SEPARATE]),
    ],
)
def test_a_key_of_another_trainer_is_said_to_be_without_effect(override, readers):
    line = f"{override}: only {MODE}={' or '.join(reader.split('=')[1] for reader in readers)} reads it"
    for mode in (f"{MODE}=credit", COLOCATE, SEPARATE):
        assert (line in without_effect(check(override, mode))) == (mode not in readers)


def test_the_defaults_are_verls():
    import yaml

    read = yaml.safe_load((verl_folder() / "ppo_trainer.yaml").read_text())["trainer"]["v1"]
    for name, (default, _) in READ_BY.items():
        value = read
        for part in name.split("."):
            value = value[part]
        assert value == default, f"{V1}.{name}"
