"""The entropy probe inside training beside other keys: what is refused, and what is said at the start."""

import pytest

from kit.idle import without_effect
from kit.recipes import check, refused

ON = "probe.every=5"

WRONG = {
    "actor_rollout_ref.rollout.top_p=0.9": "set it to 1",
    "actor_rollout_ref.rollout.top_k=20": "set it to -1",
    "algorithm.rollout_correction.bypass_mode=true": "set it to false",
    "algorithm.filter_groups.enable=true": "set it to false",
    "actor_rollout_ref.actor.fsdp_config.model_dtype=bf16": "set it to fp32 (mixed_precision may stay bf16)",
    "actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype=fp16": "set it to bf16 or fp32",
    "actor_rollout_ref.actor.fsdp_config.qat.enable=true": "set it to false",
    "actor_rollout_ref.model.enable_activation_offload=true": "set it to false",
}


@pytest.mark.parametrize("override", WRONG)
def test_what_the_probe_cannot_work_with_is_refused(override):
    error = refused(ON, "algorithm.info_gain_scorer=rows", override)
    assert error.key == override.partition("=")[0] and str(error).startswith(
        f"{override} with probe.every=5: "
    )
    assert f"{WRONG[override]}, or switch" in error.accepted and error.accepted.endswith("probe.every=0")


@pytest.mark.parametrize("override", [o for o in WRONG if "bypass" not in o])
def test_without_the_probe_it_is_accepted(override):
    check(override)


@pytest.mark.slow
def test_a_fused_head_whose_entropies_nobody_tried():
    fused, kernel = (
        "actor_rollout_ref.model.use_fused_kernels",
        "actor_rollout_ref.model.fused_kernel_options.impl_backend",
    )
    attention = "actor_rollout_ref.model.override_config.attn_implementation=sdpa"
    given = [ON, f"{fused}=true", attention, "algorithm.info_gain_scorer=rows"]
    check(*given)
    error = refused(*given, f"{kernel}=triton")
    assert (error.key, error.value, error.beside) == (kernel, "triton", (fused, "probe.every"))


@pytest.mark.slow
def test_more_groups_than_prompts_are_refused():
    error = refused(ON, "probe.groups=17")
    assert (error.key, error.value, error.beside) == ("probe.groups", 17, ("data.train_batch_size",))
    check(ON, "probe.groups=16")
    check("probe.groups=17")


@pytest.mark.parametrize("every, steps, said", [(5, 5, 1), (5, 6, 0), (0, 5, 0)])
def test_a_probe_that_never_measures_is_named(every, steps, said):
    config = check(f"probe.every={every}", f"trainer.total_training_steps={steps}")
    assert len([line for line in without_effect(config) if line.startswith(f"probe.every={every}: ")]) == said
