"""Every shipped recipe, with every hardware, model and preset it can be given: composed, validated, read by verl."""

import ast
import importlib.util
import sys
import types
import typing
from importlib.resources import files
from itertools import cycle
from pathlib import Path

import pytest

from kit.recipes import check, refused
from verl_credit.errors import ConfigError
from verl_credit.host.process.launch import check_with_verl
from verl_credit.recipe.plan.model_shape import shape_of
from verl_credit.recipe.recipe_files import RECIPES
from verl_credit.recipe.unread import warnings_of

GPU = ("multihop_qwen3_4b", "spark_qwen3_4b", "math_sepa")
HF = "actor_rollout_ref.rollout.name=hf"
SINGLE = "singlehop_qwen3_4b"  # the multi-hop recipe under another name
REAL = ("real_cpu", "real_math_cpu")
GIVEN = ["data.train_files=train.parquet", "data.val_files=val.parquet", "search.url=http://127.0.0.1:8000"]

pytestmark = pytest.mark.slow  # Hydra composes every combination


# The published response does not hold all turns at full length; ours do.
PUBLISHED = "multihop_qwen3_4b"
ROOM = "data.max_response_length=6192 does not hold all turns at full length"

# The laptop's engine takes whole weights.
WITHOUT_ADAPTERS = {"laptop": ["actor_rollout_ref.model.lora_rank=0"]}


def options(group: str) -> list[str]:
    return sorted(
        e.name.removesuffix(".yaml") for e in (files(RECIPES) / group).iterdir() if e.name.endswith(".yaml")
    )


PAIRS = list(zip(options("model"), cycle(options("hardware")), strict=False))


def checked(name, *overrides):
    return check(*GIVEN, *overrides, recipe=name)


VLLM_ROLLOUT = "verl.workers.rollout.vllm_rollout"


@pytest.fixture
def vllm_ranks(monkeypatch):
    """verl's own check of LoRA ranks, out of a package that cannot be imported without vllm; the ranks it was asked for."""
    spec = importlib.util.find_spec("verl.workers.rollout")
    source = Path(spec.submodule_search_locations[0], "vllm_rollout", "utils.py").read_text()
    (function,) = (
        node
        for node in ast.parse(source).body
        if isinstance(node, ast.FunctionDef) and node.name == "get_vllm_max_lora_rank"
    )
    scope, asked = {"Literal": typing.Literal, "get_args": typing.get_args}, []
    exec(compile(ast.Module([function], []), "verl", "exec"), scope)
    package, module = types.ModuleType(VLLM_ROLLOUT), types.ModuleType(f"{VLLM_ROLLOUT}.utils")
    module.get_vllm_max_lora_rank = lambda rank: asked.append(rank) or scope[function.name](rank)
    monkeypatch.setitem(sys.modules, VLLM_ROLLOUT, package)
    monkeypatch.setitem(sys.modules, f"{VLLM_ROLLOUT}.utils", module)
    return asked


@pytest.mark.parametrize("name", REAL)
def test_a_recipe_with_trained_weights_is_valid_and_verl_accepts_it(name, tmp_path):
    config = check(f"real.dir={tmp_path}", "real.questions=questions.json", recipe=name)
    assert len(warnings_of(config)) == (name == "real_cpu")  # verl's clip range, with ratios of turns
    check_with_verl(config)


@pytest.mark.parametrize("name", GPU)
def test_a_recipe_is_valid_and_verl_accepts_it(name, vllm_ranks):
    config = checked(name)
    assert [line.partition(":")[0] for line in warnings_of(config)] == ([ROOM] if name == PUBLISHED else [])
    check_with_verl(config)
    assert config.actor_rollout_ref.rollout.name == "vllm"
    assert vllm_ranks == {"spark_qwen3_4b": [32], "math_sepa": [64]}.get(name, [])


def test_a_lora_rank_that_vllm_does_not_take_is_refused(vllm_ranks):
    config = checked("math_sepa", "actor_rollout_ref.model.lora_rank=1024")
    with pytest.raises(ConfigError, match="lora_rank must be less than or equal to 512"):
        check_with_verl(config)


@pytest.mark.parametrize("hardware", options("hardware"))
@pytest.mark.parametrize("name", GPU)
def test_every_recipe_composes_on_every_hardware(name, hardware, vllm_ranks):
    config = checked(name, f"hardware={hardware}", *WITHOUT_ADAPTERS.get(hardware, []))
    actor = config.actor_rollout_ref.actor
    row = config.data.max_prompt_length + config.data.max_response_length
    assert actor.ppo_max_token_len_per_gpu > row  # a row fits a micro-batch
    assert config.actor_rollout_ref.rollout.max_model_len == row  # and the engine's longest sequence is one
    if hardware != "laptop":  # and 24 gold answers of 12 tokens with it, as docs/recipes.md says
        room = config.actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu - row
        assert room >= (config.search.max_searches + 1) * 24 * 12
    assert config.trainer.device == ("cpu" if hardware == "laptop" else "cuda")
    assert config.actor_rollout_ref.rollout.name == ("hf" if hardware == "laptop" else "vllm")
    check_with_verl(config)


@pytest.mark.parametrize("name", ["spark_qwen3_4b", "math_sepa"])
def test_an_engine_that_takes_no_adapters_is_told_so_before_the_start(name):
    error = refused(*GIVEN, "hardware=laptop", recipe=name)
    assert error.key == "actor_rollout_ref.model.lora_rank" and error.value > 0
    assert error.beside == ("actor_rollout_ref.rollout.name",) and "lora.merge=true" in error.accepted


def test_a_gpu_takes_no_rollouts_with_transformers():
    error = refused(*GIVEN, HF, recipe="multihop_qwen3_4b")
    assert (error.key, error.value) == ("actor_rollout_ref.rollout.name", "hf")
    assert error.beside == ("trainer.device",)
    assert all(way in error.accepted for way in ("vllm or sglang", "trainer.device=cpu", "hardware=laptop"))


@pytest.mark.parametrize("model, hardware", PAIRS)
def test_the_multi_hop_recipe_composes_with_every_model(model, hardware):
    chosen = (f"model={model}", f"hardware={hardware}")
    actor = checked("multihop_qwen3_4b", *chosen).actor_rollout_ref
    path = actor.model.path
    assert 8192 == actor.rollout.max_model_len < shape_of(path).positions
    assert model.replace("_", "").replace("instruct", "") in path.lower().replace("-", "").replace(".", "")


def test_a_model_is_no_departure_from_a_preset():
    config = checked("multihop_qwen3_4b", "model=qwen2_5_7b", "credit=paper", "algorithm.gamma=0.9")
    assert config.credit_overrides == ["algorithm.gamma=0.9"]


def test_the_published_schedule():
    config = checked("multihop_qwen3_4b")
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    assert (config.data.train_batch_size, actor.ppo_mini_batch_size, rollout.n) == (64, 8, 16)
    assert (config.data.max_prompt_length, config.data.max_response_length) == (2000, 6192)
    assert (actor.optim.lr, actor.clip_ratio_low, actor.clip_ratio_high) == (1e-6, 3e-3, 4e-3)
    assert (config.algorithm.gamma, config.algorithm.adv_rescale_alpha) == (1.0, 0.3)
    assert (rollout.name, rollout.gpu_memory_utilization, config.search.max_searches) == ("vllm", 0.6, 6)
    assert (config.trainer.total_epochs, config.trainer.save_freq, config.trainer.test_freq) == (5, 60, 20)
    assert (config.trainer.nnodes, config.trainer.n_gpus_per_node) == (1, 8)
    assert actor.policy_loss.dynamic_clip is True and actor.use_kl_loss is False


def test_the_single_hop_recipe_differs_in_names_alone():
    multi, single = checked("multihop_qwen3_4b"), checked(SINGLE)
    for config in (multi, single):
        config.run_dir = config.trainer.experiment_name = config.trainer.default_local_dir = ""
    assert multi == single


def test_the_published_sepa_schedule():
    config = checked("math_sepa")
    rollout, actor, algorithm = (
        config.actor_rollout_ref.rollout,
        config.actor_rollout_ref.actor,
        config.algorithm,
    )
    assert (config.data.train_batch_size, rollout.n, rollout.temperature) == (16, 16, 0.7)
    assert (config.data.max_response_length, actor.optim.lr) == (2048, 5e-5)
    assert (algorithm.gtpo.beta, algorithm.hicra.alpha) == (0.1, 0.2)
    sepa = algorithm.sepa
    assert (sepa.steps, sepa.delay_steps, sepa.correct_rate_gate) == (100, 10, 0.1)
    assert (algorithm.advantage_mode, algorithm.transform_mode) == ("maxrl", "gtpo_sepa")


def test_several_machines_are_an_override():
    two = ["trainer.nnodes=2", "search.url=http://10.0.0.1:8000"]
    assert checked("multihop_qwen3_4b", *two).trainer.nnodes == 2
