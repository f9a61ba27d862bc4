"""`verl-credit plan`: configuration to plan, time by hand, tables, JSON, exit codes."""

import json
from pathlib import Path

import pytest

from verl_credit.cli import main
from verl_credit.cli.recipe.plan import _load as load_plan
from verl_credit.errors import ConfigError
from verl_credit.recipe.plan import printed as output
from verl_credit.recipe.plan.assumptions import Assumptions
from verl_credit.recipe.plan.compute import (  # fmt: skip
    checkpoint_bytes,
    decode_seconds,
    disk_bytes,
    forward_flops,
    run_steps,
    step,
    update_flops,
)
from verl_credit.recipe.plan.hardware import GIB, find_hardware
from verl_credit.recipe.plan.job import Job, read_job
from verl_credit.recipe.plan.memory import engine_memory
from verl_credit.recipe.plan.model_shape import shape_of
from verl_credit.recipe.plan.plan import assumptions, make_plan

SHAPE, H100 = shape_of("Qwen/Qwen3-4B"), find_hardware("h100")
CONFIG = {
    "trainer": {
        "nnodes": 1, "n_gpus_per_node": 8, "device": "cuda",
        "total_training_steps": 100, "save_freq": 10, "max_actor_ckpt_to_keep": 2,
    },
    "data": {"train_batch_size": 64, "max_prompt_length": 2000, "max_response_length": 6192},
    "hardware": {"name": "h100"},
    "search": {"max_searches": 6},
    "algorithm": {"info_gain_norm_mode": "turn-group-v1d", "info_gain_scorer": "branch"},
    "actor_rollout_ref": {
        "model": {"path": "Qwen/Qwen3-4B", "enable_gradient_checkpointing": True},
        "actor": {
            "ppo_mini_batch_size": 8, "use_dynamic_bsz": True, "ppo_max_token_len_per_gpu": 16640,
            "fsdp_config": {"model_dtype": "fp32"},
        },
        "rollout": {
            "name": "vllm", "n": 16, "gpu_memory_utilization": 0.6, "tensor_model_parallel_size": 1, "dtype": "bfloat16",
            "max_model_len": 8192,
            "log_prob_use_dynamic_bsz": True, "log_prob_max_token_len_per_gpu": 16640, "multi_turn": {"enable": True},
        },
    },
}  # fmt: skip


def changed(key, value):
    config = json.loads(json.dumps(CONFIG))
    *path, last = key.split(".")
    node = config
    for part in path:
        node = node.setdefault(part, {})
    node[last] = value
    return config


def test_the_configuration_is_read():
    job = read_job(CONFIG, flash_attn=True)
    assert (job.devices, job.shards, job.rows, job.longest_row, job.max_turns) == (8, 8, 1024, 8192, 7)
    assert (job.update_tokens, job.log_prob_tokens, job.branches) == (16640, 16640, True)
    assert (job.weight_bytes, job.compute_bytes) == (4, 2)
    assert job.model_len == 8192
    assert not read_job(changed("algorithm.info_gain_norm_mode", "gigpo"), flash_attn=True).branches
    assert read_job(changed("actor_rollout_ref.rollout.max_model_len", None), flash_attn=True).model_len == 0


ACTOR = "actor_rollout_ref.actor"
SPLIT = "actor_rollout_ref.rollout.tensor_model_parallel_size"


@pytest.mark.parametrize(
    "key, value, named, message",
    [
        (f"{ACTOR}.fsdp_config.model_dtype", "int3", None, "bf16"),
        ("actor_rollout_ref.model.path", None, None, "give a model folder or name, or plan.model"),
        ("actor_rollout_ref.rollout.max_num_seqs", "many", None, "expected a number above 0"),
        (SPLIT, 0, None, "expected a number above 0"),
        (SPLIT, 3, None, "tensor_model_parallel_size=3 does not divide"),
        (f"{ACTOR}.use_dynamic_bsz", False, f"{ACTOR}.ppo_micro_batch_size_per_gpu", "=null: set it, or "),
        ("plan.host_cores", 0, None, "expected a number above 0"),
        ("plan.mfu", "high", None, "expected a number, 0 or more"),
        ("plan.encoder_core_seconds", 3, None, "write plan.search_core_seconds=SECONDS"),
        ("plan.speed", 3, None, "unknown key plan.speed=3: accepted below plan are model, "),
        ("hardware.devices", 4, "", "hardware.devices=4 but "),
    ],
)
def test_what_is_wrong_is_named(key, value, named, message):
    with pytest.raises(ConfigError, match=message) as caught:
        make_plan(changed(key, value))
    assert caught.value.key == (key if named is None else named)


def test_forward_flops_by_hand():
    """36 layers: 4 projections and 3 MLP matrices; the head; causal attention 2 L² per layer and query number."""
    weights = 36 * (2560 * (2 * 4096 + 2 * 1024) + 3 * 2560 * 9728) + 151936 * 2560
    assert SHAPE.matmul_per_token == weights
    assert forward_flops(SHAPE, 1000) == 2 * weights * 1000 + 2 * 36 * 4096 * 1000**2


def test_an_update_is_three_forwards_or_nearly_four():
    job, forward = Job(checkpointing=False), forward_flops(SHAPE, 1000)
    assert update_flops(SHAPE, job, 1000) == 3 * forward
    again = update_flops(SHAPE, Job(checkpointing=True), 1000)
    assert 3.8 * forward < again < 4 * forward  # the head is not computed again
    assert update_flops(SHAPE, Job(checkpointing=False, lora_rank=8), 1000) == 2 * forward


def test_decoding_by_hand():
    """One row at a time: weights and half a row of cache at half of 3.35 TB/s, and 5 ms; 100 tokens, the longest 200."""
    job = Job(prompts=1, rollouts=1, engine="vllm", utilization=0.6, max_prompt=100, max_response=100)
    assumed = Assumptions(
        mean_prompt_tokens=100, mean_response_tokens=100, mean_generated_tokens=100, mfu=0.35
    )
    runner = engine_memory(SHAPE, job, H100, assumed)
    reading = (4_022_468_096 * 2 + 100 * 147456) / (3.35e12 / 2)
    assert decode_seconds(SHAPE, job, H100, assumed, runner) == pytest.approx(200 * (reading + 0.005))


def test_a_step_by_hand():
    job = read_job(CONFIG, flash_attn=True)
    given = {"mean_prompt_tokens": 500, "mean_response_tokens": 1500}
    assumed = assumptions(given, job, H100)
    found = step(SHAPE, job, H100, assumed, engine_memory(SHAPE, job, H100, assumed))
    assert found.tokens["trained"] == 1024 * 2000
    assert found.flops["log-prob"] == 1024 * forward_flops(SHAPE, 2000)
    assert found.seconds["log-prob"] == pytest.approx(found.flops["log-prob"] / (8 * 989e12 * 0.35))
    assert "reference" not in found.flops
    assert 0 < found.flops["branches"] < found.flops["log-prob"] / 10
    assert found.seconds["branches: kernels"] == pytest.approx(0.06 * found.seconds["log-prob"])
    assert found.seconds["branches: driver"] == pytest.approx(1024 * (assumed.mean_turns + 1) * 0.15e-3)
    assert found.seconds["branches: store"] == pytest.approx(1024 * 2000 * 16 / 0.4e9)


def indexed(prompts=64, core_seconds=0.45, **index):
    config = changed("data.train_batch_size", prompts)
    config["hardware"]["index"] = {"rows": 21015324, "dim": 768, "kind": "flat", **index}
    return {**config, "plan": {"search_core_seconds": core_seconds}}


@pytest.mark.parametrize("prompts", [16, 512])
def test_searching_takes_as_long_as_all_queries_take_on_the_cores(prompts):
    """16 rollouts a prompt, 2.5 searches each: 640 queries for 16 prompts, 0.45 core-seconds each, 64 cores."""
    found = make_plan(indexed(prompts)).step.seconds["search"]
    assert found == pytest.approx(2.5 * 0.5 + prompts * 16 * 2.5 * 0.45 / 64)


def test_a_run_is_its_steps_evaluations_and_checkpoints():
    config = indexed()
    config["trainer"] |= {"test_freq": 21, "val_before_train": True}
    unknown = make_plan(config)
    assert unknown.run.evaluations == 6 and unknown.run.evaluation is None
    config["data"]["val_max_samples"], config["evaluation"] = 1024, {"modes": ["greedy", "sampled"]}
    run, step_ = make_plan(config).run, unknown.step
    once = sum(step_.seconds[name] for name in ("prefill", "decode", "search"))
    assert run.evaluation == pytest.approx(2 * once)  # as many rows as a step has, in each mode
    assert (run.saves, run.save) == (10, pytest.approx(48.27, rel=1e-3))
    assert run.total == pytest.approx(100 * step_.total_seconds + 6 * run.evaluation + 10 * run.save)


def test_runs_and_disk():
    job = read_job(CONFIG, flash_attn=True)
    assert checkpoint_bytes(SHAPE, job) == 4_022_468_096 * 12
    assert disk_bytes(SHAPE, job, 100) == 3 * checkpoint_bytes(SHAPE, job)  # two kept, one being written
    assert disk_bytes(SHAPE, job, 10) == checkpoint_bytes(SHAPE, job)
    endless = read_job(changed("trainer.total_training_steps", None), flash_attn=True)
    assert run_steps(endless, Assumptions()) is None
    assert run_steps(endless, Assumptions(train_rows=6400)) == 100


def run(capsys, *arguments):
    code = main(["plan", *arguments])
    return code, capsys.readouterr().out


SEARCH_CPU = ("--config-name", "search_cpu")
MODEL = "actor_rollout_ref.model.path=Qwen/Qwen3-0.6B"


@pytest.mark.slow
def test_json_of_a_recipe(capsys):
    code, out = run(capsys, *SEARCH_CPU, "--json", MODEL, "hardware.memory_gib=500")
    found = json.loads(out)
    assert code == 0 and found["fits"] and found["model"]["parameters"] == 596_049_920
    assert found["hardware"]["name"] == "cpu"
    phase = next(p for p in found["phases"] if p["name"] == "update: loss")
    assert phase["total"] == pytest.approx(sum(phase["parts"].values()))


@pytest.mark.slow
def test_exit_code_4_and_what_to_change(capsys):
    code, out = run(capsys, *SEARCH_CPU, MODEL, "hardware.memory_gib=16")
    assert code == 4 and "DOES NOT FIT" in out
    # the hf engine takes whole weights
    assert "enable_gradient_checkpointing=true" in out and "lora_rank" not in out
    code, out = run(capsys, *SEARCH_CPU, "--hardware", "abacus", MODEL)
    assert code == 4 and out.startswith("search_cpu: cannot be planned") and out.count("\n") == 1


@pytest.mark.slow
def test_all_recipes_as_a_table(capsys):
    from verl_credit.recipe.recipe_files import shipped_recipes

    run_code, out = run(capsys, "--all", "plan.model=Qwen/Qwen3-0.6B", "hardware.memory_gib=500")
    assert run_code == 0
    assert out.splitlines()[0].startswith("recipe")
    for name in shipped_recipes():
        (said,) = (line for line in out.splitlines() if line.startswith((f"{name} ", f"{name}: cannot")))
        if name == "verl":  # a launch gives it the rollouts of a prompt
            assert "actor_rollout_ref.rollout.n=1 with" in said
        else:
            assert said.endswith("fits"), name


@pytest.mark.slow
@pytest.mark.parametrize(
    ("path", "shape"), [("", 134_515_008), ("actor_rollout_ref.model.path=Qwen/Qwen3-0.6B", 596_049_920)]
)
def test_trained_weights_are_planned_before_they_are_made_and_another_model_by_its_own_shape(
    path, shape, tmp_path
):
    plan = load_plan("real_math_cpu", [f"real.dir={tmp_path}", *([path] if path else [])], None)
    assert make_plan(plan, recipe="real_math_cpu").shape.parameters == shape


def test_doorkeys_policy_is_planned_before_it_is_built(tmp_path):
    plan = load_plan("doorkey", [f"doorkey.dir={tmp_path}"], None)
    assert make_plan(plan, recipe="doorkey").shape.parameters == 526_016


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, devices, hardware, memory, lora",
    [
        ("multihop_qwen3_4b", 8, "h100", 79.1, 0),
        ("singlehop_qwen3_4b", 8, "h100", 79.1, 0),
        ("math_sepa", 1, "h100", 79.1, 64),
        ("spark_qwen3_4b", 1, "gb10", 112.7, 32),
    ],
)
def test_a_gpu_recipe_fits_its_own_hardware_as_shipped(name, devices, hardware, memory, lora):
    """Its own model, its own device; and the figures of docs/recipes.md are these."""
    plan = make_plan(load_plan(name, [], None), recipe=name)
    assert plan.shape.parameters == 4_022_468_096 and plan.job.lora_rank == lora
    assert (plan.job.devices, plan.hardware.name) == (devices, hardware)
    assert plan.hardware.memory / GIB == pytest.approx(memory, abs=0.05)
    assert plan.fits and 0.4 * memory < plan.peak.total / GIB < memory
    assert {"rollout", "log-prob", "update: loss", "update: backward"} <= {
        phase.name for phase in plan.phases
    }
    page = (Path(__file__).parents[3] / "docs" / "recipes.md").read_text()
    table = page[page.index("| " + " | ".join(output.HEADER[:-1])) :]
    (row,) = (line for line in table.splitlines() if line.startswith(f"| `{name}` |"))
    recipe, *cells = output.line(plan)
    assert row.startswith(f"| `{recipe}` | {' | '.join(cells)} |")


@pytest.mark.parametrize("size", ["full", "tiny"])
def test_a_lab_that_is_not_built_yet_is_planned_by_the_policy_that_it_will_have(size, tmp_path):
    from verl_credit.worlds.lab.config import SIZES
    from verl_credit.worlds.lab.encyclopedia import make_world
    from verl_credit.worlds.lab.protocol import make_tokenizer
    from verl_credit.worlds.lab.warm_start import make_policy

    lab = {"dir": str(tmp_path / "lab"), "world_seed": 3, "size": size}
    model = {"path": f"{lab['dir']}/policy"}
    config = {**CONFIG, "lab": lab, "actor_rollout_ref": {**CONFIG["actor_rollout_ref"], "model": model}}
    policy = make_policy(make_tokenizer(make_world(3, SIZES[size].world).names()), 3)
    built = policy.config.to_dict() | {"_name_or_path": "the lab's policy"}
    assert make_plan(config).shape == shape_of(built)
    (tmp_path / "lab" / "policy").mkdir(parents=True)  # one that is there is read
    with pytest.raises(ConfigError, match=r"no config\.json there"):
        make_plan(config)


@pytest.mark.parametrize("model", ["x" * 300, "\0", "~nobody_at_all/model"])
def test_a_model_that_no_file_system_takes_as_a_name_is_refused(model):
    with pytest.raises(ConfigError, match="no config.json there and not a known name"):
        shape_of(model)
