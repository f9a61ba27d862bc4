"""The keys that depend on the policy's family: what `auto` chooses, what is refused before Ray, and what is said."""

import json

import pytest
from omegaconf import OmegaConf

from kit.recipes import OWN, check, load_config, refused
from verl_credit.cli import main
from verl_credit.config.settings import CreditSettings
from verl_credit.errors import ConfigError, PreflightError
from verl_credit.policy.families import ATTENTION, PACKED, SCORER, Keys
from verl_credit.recipe.doctor import inputs
from verl_credit.recipe.doctor.context import Context
from verl_credit.recipe.doctor.inputs import ADAPTER, check_family
from verl_credit.recipe.doctor.status import Status
from verl_credit.recipe.family import OVERRIDE, family_line
from verl_credit.recipe.rules.known import handed_on
from verl_credit.recipe.unread import unused

MODEL = "actor_rollout_ref.model.path"
ENGINE = "actor_rollout_ref.rollout.name"
QWEN3_NEXT = {"model_type": "qwen3_next", "linear_num_key_heads": 4}
BAMBA = {"model_type": "bamba", "mamba_d_state": 8}
GEMMA2 = {"model_type": "gemma2", "attn_logit_softcapping": 50.0}
SEED = {"model_type": "seed_oss"}
PHI4 = {"model_type": "phi3", "rope_scaling": {"type": "longrope"}, "original_max_position_embeddings": 464}
ROW = 48 + 416  # of the lab


@pytest.fixture
def of(tmp_path):
    """Overrides of a recipe whose policy has this config.json."""

    def write(values):
        (tmp_path / "config.json").write_text(json.dumps(values))
        return f"{MODEL}={tmp_path}"

    return write


def keys_of(config):
    return Keys(*(OmegaConf.select(config, key) for key in (ATTENTION, PACKED, SCORER)))


SHIPPED = [
    ("lab", "qwen2"), ("lab", "qwen3"), ("lab", "llama"), ("search_cpu", "llama"), ("multihop_qwen3_4b", "qwen3"),
    ("multihop_qwen3_4b", "qwen2"), ("spark_qwen3_4b", "qwen3"),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("recipe, family", SHIPPED)
def test_recipes_with_these_models_run_as_they_did_before_auto(recipe, family, of):
    given = [*([] if recipe == "lab" else OWN), of({"model_type": family})]
    config = check(*given, recipe=recipe)
    fixed = check(*given, f"{PACKED}=true", f"{SCORER}=branch", recipe=recipe)
    assert keys_of(config) == Keys("auto", True, "branch") and config == fixed


@pytest.mark.slow
@pytest.mark.parametrize(
    "values, keys",
    [
        (QWEN3_NEXT, Keys("auto", True, "rows")),
        (BAMBA, Keys("sdpa", False, "rows")),
        ({"model_type": "gpt_oss"}, Keys("eager", False, "rows")),
        ({"model_type": "granitemoehybrid", "layer_types": ["attention"] * 4}, Keys("auto", True, "branch")),
        ({"model_type": "nobody_knows"}, Keys("auto", True, "branch")),
    ],
    ids=lambda x: x["model_type"] if isinstance(x, dict) else "",
)
def test_a_recipe_gets_what_is_exact_without_a_key_of_the_users(values, keys, of):
    config = check(of(values))
    assert keys_of(config) == keys
    line = family_line(config)
    assert line.startswith(f"family: {values['model_type']}, {keys}: ")
    assert check_family(Context(None, config)).found == line
    plain = check(of(values), "credit=grpo")
    assert unused(plain, CreditSettings.from_config(plain)) == []


def test_without_the_config_the_proof_decides_and_that_is_said():
    config = check(f"{MODEL}=nobody/knows")
    assert keys_of(config) == Keys("auto", True, "branch")
    assert f"the config.json of {MODEL}=nobody/knows is not on this machine" in family_line(config)


REFUSED = [  # (config.json, overrides, the key and value that are refused, the keys that are exact)
    (BAMBA, [f"{ATTENTION}=sdpa", f"{PACKED}=true"], (PACKED, True), "sdpa false rows"),
    (BAMBA, [f"{ATTENTION}=eager", f"{PACKED}=true"], (PACKED, True), "sdpa false rows"),
    (BAMBA, [f"{PACKED}=true"], (PACKED, True), "sdpa false rows"),
    (BAMBA, [f"{PACKED}=true", "credit=grpo"], (PACKED, True), "sdpa false rows"),
    (BAMBA, [f"{SCORER}=branch"], (SCORER, "branch"), "sdpa false rows"),
    (BAMBA, [f"{ATTENTION}=credit_sdpa"], (ATTENTION, "credit_sdpa"), "sdpa false rows"),
    (QWEN3_NEXT, [f"{ATTENTION}=sdpa", f"{PACKED}=true"], (PACKED, True), "auto true rows"),
    (QWEN3_NEXT, [f"{SCORER}=branch"], (SCORER, "branch"), "auto true rows"),
    ({"model_type": "gpt_oss"}, [f"{PACKED}=true"], (PACKED, True), "eager false rows"),
    ({"model_type": "gpt_oss"}, [f"{ATTENTION}=sdpa"], (ATTENTION, "sdpa"), "eager false rows"),
    (GEMMA2, [f"{ATTENTION}=sdpa"], (ATTENTION, "sdpa"), "auto true branch"),
    ({"model_type": "qwen3"}, [f"{ATTENTION}=sdpa", f"{SCORER}=branch"], (ATTENTION, "sdpa"), "auto true branch"),
]  # fmt: skip


def test_a_model_that_hf_does_not_decode_is_refused_with_another_engine(of):
    values = {"model_type": "minimax", "attn_type_list": [0, 1]}
    error = refused(of(values))
    assert (error.key, error.value) == (ENGINE, "hf") and f"{ENGINE}=vllm" in error.accepted


@pytest.mark.parametrize("values, overrides, wrong, exact", REFUSED)
def test_keys_that_give_wrong_numbers_are_refused_by_the_config_alone(values, overrides, wrong, exact, of):
    error, (attention, packed, scorer) = refused(of(values), *overrides), exact.split()
    assert (error.key, error.value) == wrong
    assert error.accepted.startswith(f"{values['model_type']}: ")
    assert error.accepted.endswith(
        f"; exact are {ATTENTION}={attention}, {PACKED}={packed} and {SCORER}={scorer}"
    )


@pytest.mark.parametrize(
    "values, why",
    [
        ({"model_type": "nemotron_h"}, "depend on padding too"),
        ({"model_type": "glm_moe_dsa"}, "depends on padding"),
        ({"model_type": "phimoe"}, "draws experts at random"),
        ({"model_type": "qwen2_5_vl", "vision_config": {"depth": 2}}, "reads images or sound"),
    ],
)
def test_a_model_without_an_exact_way_is_refused_with_its_reason(values, why, of):
    error = refused(path := of(values))
    assert (
        f"{error.key}={error.value}" == path
        and why in error.accepted
        and "no keys change that" in error.accepted
    )


def test_a_run_is_refused_by_one_line_before_anything_starts(of, capsys):
    assert main(["train", "--config-name", "lab", of(BAMBA), f"{PACKED}=true", "run_dir=x"]) == 4
    said = capsys.readouterr().out.strip()
    assert "\n" not in said and said.startswith(
        f"verl-credit train: {PACKED}=true with {ATTENTION}=sdpa: bamba: its layers of"
    )


@pytest.mark.slow
def test_rows_within_the_border_of_a_rotary_embedding_run_and_longer_ones_are_refused(of):
    assert keys_of(check(of(PHI4))) == Keys("auto", True, "branch")
    for overrides, key, value in (
        (["data.max_response_length=417"], "data.max_response_length", 417),
        (["actor_rollout_ref.rollout.max_model_len=465"], "actor_rollout_ref.rollout.max_model_len", 465),
        (
            ["actor_rollout_ref.rollout.max_model_len=null", "actor_rollout_ref.rollout.name=vllm",
             "+actor_rollout_ref.rollout.engine_kwargs.vllm.worker_extension_cls=x"],
            "actor_rollout_ref.rollout.max_model_len", None,
        ),
    ):  # fmt: skip
        error = refused(of(PHI4), *overrides)
        assert (error.key, error.value) == (key, value) and f"more than {ROW} tokens" in error.accepted


@pytest.mark.slow
def test_dropout_of_the_model_is_set_to_0_and_said(of):
    config = check(of(SEED))
    dropouts = ("attention_dropout", "residual_dropout")
    assert [OmegaConf.select(config, f"{OVERRIDE}.{name}") for name in dropouts] == [0.0, 0.0]
    assert "attention_dropout, residual_dropout of the model set to 0 (old_log_probs" in family_line(config)
    assert handed_on(config) == []
    text = {**QWEN3_NEXT, "attention_dropout": 0.1}
    nested = {"model_type": "qwen3_5", "text_config": text, "vision_config": {"a": 1}}
    assert OmegaConf.select(check(of(nested)), f"{OVERRIDE}.text_config.attention_dropout") == 0
    error = refused(of(SEED), f"+{OVERRIDE}.attention_dropout=0.1")
    assert (error.key, error.value) == (
        f"{OVERRIDE}.attention_dropout",
        0.1,
    ) and "set it to 0" in error.accepted


def test_an_override_of_the_models_config_is_a_fact_like_the_others(of):
    neox = of({"model_type": "gpt_neox", "rope_scaling": None})
    config = check(neox, f"+{OVERRIDE}.layer_types=[mamba,full_attention]")
    assert keys_of(config) == Keys("sdpa", False, "rows")


@pytest.mark.slow
def test_a_model_that_was_built_after_the_recipe_was_composed_is_still_checked(of):
    config = check(f"{MODEL}=later", f"{SCORER}=branch")
    OmegaConf.update(config, MODEL, of(BAMBA).partition("=")[2])
    with pytest.raises(ConfigError, match="bamba: its layers"):
        check_family(Context(None, config))
    of(SEED)
    with pytest.raises(ConfigError, match="attention_dropout=0.1: old_log_probs .* set it to 0"):
        check_family(Context(None, config))


@pytest.mark.parametrize("installed, refused", [("5.22.2", False), ("5.23.0", True)])
def test_a_model_that_verl_cannot_patch_with_this_transformers_is_refused(
    installed, refused, of, monkeypatch
):
    monkeypatch.setattr(inputs, "version", {"transformers": installed}.get)
    text = {**QWEN3_NEXT, "model_type": "qwen3_5_text"}
    context = Context(None, check(of({"model_type": "qwen3_5", "text_config": text})))
    if refused:
        with pytest.raises(PreflightError, match="transformers 5.23.0: .*qwen3_5 .*'transformers<5.23'"):
            check_family(context)
    else:
        assert check_family(context).status is Status.PASS


@pytest.mark.parametrize("dropout", [0.0, 0.05])
def test_an_adapter_that_was_saved_with_dropout_is_refused(dropout, of, tmp_path):
    (tmp_path / "adapter_config.json").write_text(json.dumps({"lora_dropout": dropout}))
    context = Context(None, load_config("lab", [of({"model_type": "qwen3"}), f"+{ADAPTER}={tmp_path}"]))
    if dropout:
        with pytest.raises(PreflightError, match="lora_dropout=0.05 in its adapter_config.json"):
            check_family(context)
    else:
        assert check_family(context).status is Status.PASS


@pytest.mark.slow
def test_a_departure_from_a_preset_is_the_users_and_not_what_auto_chose(of):
    assert check(of(BAMBA), "credit=paper").credit_overrides == []
