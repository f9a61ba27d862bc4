"""What a configuration sets to no purpose, and what its author may not have meant: said at the start, with key and value."""

import pytest

from kit.idle import idle_lines, unused, without_effect
from kit.recipes import load_config
from verl_credit.config.keys import Algorithm
from verl_credit.recipe.unread import warnings_of

LOSS = "actor_rollout_ref.actor.policy_loss"
ROLLOUT = "actor_rollout_ref.rollout"
ALGORITHM = tuple(Algorithm.model_fields)


def lab(*overrides):
    """``algorithm.`` may be left out."""
    return load_config("lab", [f"algorithm.{o}" if o.startswith(ALGORITHM) else o for o in overrides])


def mine(name):
    return f"my_module.{name}"  # what only reads the keys does not import it


ALONE = ("info_gain_norm_mode=none", f"{LOSS}.dynamic_clip=false")  # no turn mode
ENTROPY = "uncertainty_kind=shannon_entropy"
CANON = ("transform_mode=gtpo_canonical", ENTROPY, *ALONE)
GRPO_S = ("transform_mode=grpo_s", ENTROPY, *ALONE)
VERLS = ("adv_estimator=gae", f"{LOSS}.dynamic_clip=false")
GRPO, HICRA, SEPA = ("transform_mode=gtpo",), ("transform_mode=gtpo_hicra",), ("transform_mode=gtpo_sepa",)
OF_GAINS = (
    "gamma=0.9",
    "info_gain_type=log_prob_diff",
    "info_gain_template='So {answer}'",
    "info_gain_prefix='So '",
)
# fmt: off
UNUSED = [  # (override, a pipeline that does not read it, pipelines that do)
    ("gtpo.beta=0.5", (), (GRPO, ("transform_mode=entropy_mask",))),
    ("hicra.alpha=0.5", GRPO, (HICRA,)),
    ("entropy_mask.rho=0.5", GRPO, (("transform_mode=entropy_mask",),)),
    (ENTROPY, (), (GRPO, GRPO_S)),
    (f"planning.detector={mine('own_detector')}", GRPO, (SEPA,)),
    ("strategic_grams='hold on'", GRPO, (HICRA,)),
    ("sepa.delay_steps=7", HICRA, (("transform_mode=gtpo_sepa_amp",),)),
    *((override, pipeline, ((),)) for override in OF_GAINS for pipeline in (ALONE, ("credit=grpo",))),
    ("canonical.population=joint", GRPO_S, (CANON,)),
    ("canonical.alpha_1=2", (), (CANON,)),
    ("canonical.entropy_clip=[0.0,1.0]", GRPO, (GRPO_S, CANON)),
    ("+algorithm.advantage_params.a=1", ("advantage_mode=maxrl",), ((f"advantage_mode={mine('own_outcome')}",),)),
    ("+algorithm.transform_params.a=1", GRPO, ((f"transform_mode={mine('by_parts')}",),)),
    ("+algorithm.algorithm_params.a=1", (), ((f"algorithm_mode={mine('own_algorithm')}", *ALONE),)),
    ("norm_adv_by_std_in_grpo=false", ("credit=maxrl",), (("credit=grpo",),)),
    (f"{LOSS}.clip_beta=0.1", (f"{LOSS}.dynamic_clip=false",), ((),)),
    (f"{LOSS}.ratio_level=token", (f"{LOSS}.loss_mode=vanilla",), ((),)),
    ("search.topk=5", ("credit=grpo", "search.max_searches=0", "search.max_page_chars=1000"), ((),)),
]
# fmt: on


@pytest.mark.parametrize("override, without, readers", UNUSED, ids=lambda x: x if isinstance(x, str) else "")
def test_a_key_that_nothing_reads_is_named(override, without, readers):
    key = override.partition("=")[0].removeprefix("+").removeprefix("algorithm.").partition("_params.")[0]
    (said,) = unused(lab(*without, override))
    assert said.removeprefix("algorithm.").startswith(key)
    for overrides in readers:
        assert unused(lab(*overrides, override)) == []


@pytest.mark.parametrize(
    "overrides", [(), ("+model=qwen3_4b", "credit=grpo"), ("uncertainty_kind=nll",), (*VERLS, "gamma=0.9")]
)
def test_a_default_under_another_name_or_what_a_model_needs_is_not_said(overrides):
    assert unused(lab(*overrides)) == []


def test_every_unread_key_is_said_in_the_order_of_the_declarations():
    found = unused(lab("credit=grpo", "search.max_searches=0", "search.topk=5"))
    assert found == ["search.topk=5", "search.max_page_chars=64"]


STEPS = "trainer.total_training_steps=30"
AUTO = (*SEPA, "sepa.schedule=auto")
WITHOUT_EFFECT = [
    ((), ""),
    ((*GRPO, "gtpo.beta=0"), "algorithm.gtpo.beta=0"),
    ((*HICRA, "hicra.alpha=0"), "algorithm.hicra.alpha=0"),
    (("transform_mode=entropy_mask", "entropy_mask.rho=1"), "algorithm.entropy_mask.rho=1"),
    (SEPA, f"lambda is 0 until step 51, and {STEPS}"),
    ((*SEPA, "sepa.delay_steps=29"), ""),
    ((*SEPA, "sepa.delay_steps=30"), "until step 31"),
    ((*AUTO, "sepa.warmup=5", "sepa.ema_decay=0.5"), ""),
    ((*AUTO, "sepa.steps=0", "sepa.warmup=60"), "until step 222"),
    (("info_gain_warmup_steps=30",), f"no gain is measured in {STEPS}"),
    (("info_gain_warmup_steps=29",), ""),
    (("info_gain_every=29",), ""),
    (("info_gain_every=30",), f"in step 1 alone of {STEPS}"),
    (("info_gain_every=28", "info_gain_warmup_steps=2"), "in step 3 alone"),
    (("info_gain_warmup_steps=30", "trainer.total_training_steps=null"), ""),
    (("adv_rescale_alpha=0",), "the clip range only"),
    ((f"{LOSS}.clip_beta=0",), "clip_beta=0"),
]


@pytest.mark.parametrize(
    "overrides, said", WITHOUT_EFFECT, ids=lambda x: " ".join(x) if isinstance(x, tuple) else ""
)
def test_a_part_without_effect_is_said(overrides, said):
    found = without_effect(lab(*overrides))
    assert len(found) == bool(said) and all(said in line for line in found)


MINI_BATCH = "actor_rollout_ref.actor.ppo_mini_batch_size=16"
DOUBTS = [
    ((MINI_BATCH,), "one update a step"),
    ((f"{ROLLOUT}.top_p=0.9",), "top_p=0.9: rollouts are drawn from a truncated distribution"),
    ((f"{ROLLOUT}.top_k=20", f"{ROLLOUT}.top_p=0.95"), "top_p=0.95, top_k=20"),
    (("search.max_page_chars=1000",), "does not hold all turns at full length"),
    (("data.max_response_length=391",), "about 192 more"),
    # 5 turns of 40 tokens, 4 results of 3 pages of 64 characters: all turns fit
    (("data.max_response_length=392",), ""),
    (("search.max_page_chars=1000", "search.max_searches=0"), ""),
    ((MINI_BATCH, "actor_rollout_ref.actor.ppo_epochs=2"), ""),  # two updates
    ((), ""),
]


@pytest.mark.parametrize("overrides, said", DOUBTS, ids=lambda x: " ".join(x) if isinstance(x, tuple) else "")
def test_each_doubt_is_said_with_key_and_value(overrides, said):
    found = warnings_of(lab(*overrides))
    assert len(found) == bool(said) and all(said in line for line in found)


@pytest.mark.slow
def test_the_search_recipe_gives_no_reason_to_doubt_and_verls_clip_range_does():
    assert warnings_of(load_config("search_cpu")) == []
    (clip,) = warnings_of(load_config("real_cpu", ["real.questions=q.json"]))
    assert "clip_ratio_low=0.2, clip_ratio_high=0.2: " in clip and "ratio_level=turn" in clip
    level = "actor_rollout_ref.actor.policy_loss.ratio_level=token"
    assert warnings_of(load_config("real_cpu", ["real.questions=q.json", level])) == []


def test_all_of_it_is_among_the_notes_of_a_run():
    lines = idle_lines(lab(MINI_BATCH, "gtpo.beta=0.5", "adv_rescale_alpha=0"))
    assert [line.partition(": ")[0] for line in lines] == ["unused keys", "without effect", "warning"]
    assert lines[2].startswith("warning: the clip can never act")


def test_the_length_of_an_answer_is_read_where_there_are_tools(tmp_path):
    key = "actor_rollout_ref.rollout.multi_turn.max_tool_response_length"
    tools = f"actor_rollout_ref.rollout.multi_turn.tool_config_path={tmp_path}/t.yaml"
    assert [line for line in without_effect(lab(f"{key}=50")) if line.startswith(f"{key}=50: ")]
    assert not [line for line in without_effect(lab(f"{key}=50", tools)) if key in line]


@pytest.mark.parametrize(
    "name, value", [("temperature", 0.6), ("top_p", 0.7), ("top_k", 20), ("do_sample", True)]
)
def test_verls_sampling_of_held_out_answers_has_no_effect(name, value):
    key = f"actor_rollout_ref.rollout.val_kwargs.{name}"
    assert [line for line in without_effect(lab(f"{key}={value}")) if line.startswith(f"{key}={value}: ")]
    assert not [line for line in without_effect(lab()) if "val_kwargs" in line]
