"""verl's critic before a start: it is trained where a turn mode reads its values, and nowhere else."""

import pytest

from kit.recipes import check, refused
from verl_credit.cli.recipe.stages import explanation
from verl_credit.config.settings import CreditSettings
from verl_credit.errors import ConfigError
from verl_credit.recipe.unread import unused
from verl_credit.study.twin_check import check_twin

KEY, MODE, ENABLE = "algorithm.turn_values", "algorithm.info_gain_norm_mode", "critic.enable"
ON = (f"{MODE}=turn_gae", f"{KEY}=critic", f"{ENABLE}=true")


@pytest.mark.slow
def test_the_critic_is_built_like_the_policy():
    config = check(*ON, "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=4096")
    critic, policy = config.critic, config.actor_rollout_ref
    assert (critic.model.path, critic.model.override_config) == (
        policy.model.path,
        policy.model.override_config,
    )
    assert critic.model.use_remove_padding and not critic.model.enable_gradient_checkpointing
    assert critic.fsdp.mixed_precision.param_dtype == "fp32" and critic.strategy == "fsdp2"
    assert critic.ppo_infer_max_token_len_per_gpu == 4096 and config.trainer.max_critic_ckpt_to_keep == 2
    text = explanation("lab", config)
    assert "values: critic\n" in text and "a forward and an update of a second model" in text
    settings = CreditSettings.from_config(config)
    assert "values=critic" in settings.banner() and "ridge" not in settings.banner()


@pytest.mark.slow
@pytest.mark.parametrize("values", ["null", "group"])
def test_a_critic_whose_values_nothing_reads_is_refused(values):
    mode = () if values == "null" else (f"{MODE}=turn_gae",)
    error = refused(*mode, f"{KEY}={values}", f"{ENABLE}=true")
    assert (error.key, error.value) == (ENABLE, True) and "would learn advantages" in error.accepted
    assert check("credit=verl", "algorithm.adv_estimator=gae", f"{ENABLE}=true").critic.enable


@pytest.mark.parametrize(
    ("key", "value", "use"),
    [
        (ENABLE, False, "set it to true"),
        ("trainer.critic_warmup", 3, "set it to 0"),
        ("critic.model.lora_rank", 8, "nothing is learned"),
        ("trainer.v1.trainer_mode", "credit_colocate_async", "has not been tried"),
    ],
)
def test_what_a_critic_needs(key, value, use):
    error = refused(*ON, f"{key}={value}")
    assert (error.key, error.value) == (key, value) and use in error.accepted


def test_the_keys_of_the_fit_do_nothing_with_a_critic():
    lines = unused(config := check(*ON, f"{KEY}_replay=2"), CreditSettings.from_config(config))
    assert [line for line in lines if line.startswith(f"{KEY}_replay=2")]


def test_the_twin_has_no_critic():
    with pytest.raises(ConfigError, match="critic.enable=true: the twin knows False alone"):
        check_twin(check(*ON))
