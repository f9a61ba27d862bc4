"""Memory: numbers by hand, laws that any change of the plan must keep."""

from dataclasses import replace

import pytest

from verl_credit.errors import ConfigError
from verl_credit.policy.attention.pack import KEY_TOKENS, MASK_NUMBERS
from verl_credit.recipe.plan import hardware
from verl_credit.recipe.plan.activations import answers_attention, answers_masks, layer, loss
from verl_credit.recipe.plan.assumptions import Assumptions
from verl_credit.recipe.plan.hardware import GIB, Index, find_hardware, find_index
from verl_credit.recipe.plan.job import Job, read_job
from verl_credit.recipe.plan.memory import engine_memory, phases
from verl_credit.recipe.plan.model_shape import shape_of
from verl_credit.recipe.plan.update_memory import actor_peak, state
from verl_credit.recipe.this_machine import Memory

SHAPE = shape_of("Qwen/Qwen3-4B")
H100, SPARK = find_hardware("h100"), find_hardware("spark")
JOB = Job(
    per_node=8, shards=8, prompts=64, rollouts=16, mini_batch=8, max_prompt=2000, max_response=6192, max_turns=7,
    update_tokens=16384, log_prob_tokens=16384, entropy="chunked", utilization=0.6, bucket_bytes=2**31, model_len=8192,
)  # fmt: skip
ASSUMED = Assumptions(mean_prompt_tokens=500, mean_response_tokens=3096, mean_turns=3.5, host_gib=32)


def peak(job, hw=H100, **index):
    return max(p.total for p in phases(SHAPE, job, hw, ASSUMED, Index(**index)) if p.where == "device")


def by_name(found):
    return {phase.name: phase for phase in found}


def test_sharded_state_by_hand():
    """fp32 weights are the master copy: 4 bytes, gradients 4, two moments 8, over eight devices."""
    n = 4_022_468_096
    assert state(SHAPE, JOB) == {"weights": n * 4 / 8, "gradients": n * 4 / 8, "optimizer": n * 8 / 8}


def test_a_layer_in_bf16_by_hand():
    """Two norms 8h each; q and k: fp32 copy and normalised 6, turned 2; v 2, output 2; statistics; four MLP widths of 2."""
    h, q, k, f, heads = 2560, 4096, 1024, 9728, 32
    expected = 16 * h + 6 * (q + k) + 2 * (q + 2 * k + q) + 4 * heads + 8 * f
    assert layer(SHAPE, 2, "flash") == expected
    assert (
        layer(SHAPE, 2, "sdpa") == expected + 2 * q
    )  # the output in pieces, and whole; keys and values are not repeated


def test_attention_of_scored_answers_by_hand():
    """100 answers of 12 tokens behind each of 7 contexts of a row: varlen would gather gigabytes, SDPA mask 139 million."""
    answers, row, k, job = 8400, 8192, 1024, replace(JOB, log_prob_tokens=8192)
    assert answers_attention(SHAPE, job, answers=answers) == KEY_TOKENS * 2 * k * 2 == 2**28
    assert answers_attention(SHAPE, replace(job, max_response=2**17), answers=1) == (2000 + 2**17) * 2 * k * 2
    assert answers_attention(SHAPE, job, answers=3) == 3 * row * 2 * k * 2
    sdpa, piece = replace(job, attention="sdpa"), 1696
    assert piece * (row + piece) <= MASK_NUMBERS < (piece + 1) * (row + piece + 1)
    gathered, mask = (row + piece) * 2 * k * 2, piece * (row + piece)
    assert answers_attention(SHAPE, sdpa, answers=answers) == gathered + 2 * 2 * mask
    assert answers_masks(sdpa, answers=answers) == answers * (row + piece)
    assert answers_masks(job, answers=answers) == answers_attention(SHAPE, sdpa, answers=0) == 0


def test_verls_loop_keeps_a_log_softmax():
    logits, loop = 16384 * 151936, replace(JOB, log_prob_path="loop")
    assert loss(SHAPE, loop) == 6 * logits
    assert loss(SHAPE, replace(loop, device_type="cpu")) == 4 * logits  # autocast on a CPU
    assert loss(SHAPE, replace(loop, compute_bytes=4)) == 12 * logits


@pytest.mark.parametrize(
    "rollout, count",
    [
        ({}, 51),
        ({"max_num_seqs": 64}, 19),
        ({"enforce_eager": True}, 0),
        ({"cudagraph_capture_sizes": [1, 2, 4]}, 3),
        ({"name": "hf"}, 0),
    ],
)
def test_captured_graphs(rollout, count):
    """1, 2, 4, then 8 to 256 by 8, 272 to 512 by 16, at most twice max_num_seqs."""
    config = {
        "trainer": {"device": "cuda"},
        "actor_rollout_ref": {
            "actor": {"use_dynamic_bsz": True},
            "rollout": {"log_prob_use_dynamic_bsz": True, **rollout},
        },
    }
    assert read_job(config, flash_attn=True).graphs == count


def test_an_engine_that_cannot_hold_a_row_is_a_problem():
    """36 GiB for the 262,144 positions of Qwen3-4B-Instruct-2507: half an H100 holds the weights and 30 GiB."""
    assert not by_name(phases(SHAPE, replace(JOB, utilization=0.1), H100, ASSUMED))["rollout"].fits
    shape, unbounded = shape_of("Qwen/Qwen3-4B-Instruct-2507"), replace(JOB, utilization=0.5, model_len=0)
    (said,) = engine_memory(shape, unbounded, H100, ASSUMED).problems
    assert "one row of 262144 tokens (actor_rollout_ref.rollout.max_model_len=null" in said
    assert "needs 36.0 GiB" in said
    assert not engine_memory(SHAPE, unbounded, H100, ASSUMED).problems  # its 40,960 take 5.6


@pytest.mark.parametrize(
    "lengths, fits",
    [
        ({"model_len": 40961}, False),
        ({"model_len": 40960}, True),
        ({"model_len": 0, "max_response": 38961}, False),
    ],
)
def test_a_length_above_the_models_positions_is_a_problem(lengths, fits):
    problems = engine_memory(SHAPE, replace(JOB, **lengths), H100, ASSUMED).problems
    assert any("has 40960 positions" in problem for problem in problems) is not fits


def test_wiki_18_takes_64_6_gb():
    rows = {"rows": 21_015_324, "dim": 768}
    assert find_index({"index": rows}).bytes == 21_015_324 * 768 * 4 == 64_559_075_328
    assert find_index({"index": {**rows, "kind": "sq8"}}).bytes * 4 == find_index({"index": rows}).bytes


# Laws


@pytest.mark.parametrize("engine", ["vllm", "hf"])
@pytest.mark.parametrize("lora", [0, 32])
def test_more_devices_never_need_more_each(engine, lora):
    job = replace(JOB, engine=engine, lora_rank=lora)
    # One device that computes in bf16 from fp32 weights gathers as well: 1 is in the law.
    jobs = [replace(job, per_node=devices, shards=devices) for devices in (1, 2, 4, 8, 16)]
    for sizes in ([actor_peak(SHAPE, job) for job in jobs], [peak(job) for job in jobs]):
        assert sizes == sorted(sizes, reverse=True)


@pytest.mark.parametrize("devices", [1, 8])
@pytest.mark.parametrize(
    "change",
    [{"lora_rank": 32}, {"checkpointing": True}, {"update_tokens": 8192}, {"log_prob_path": "fused"}],
)
def test_less_is_less(devices, change):
    job = replace(JOB, per_node=devices, shards=devices, checkpointing=False)
    assert actor_peak(SHAPE, replace(job, **change)) < actor_peak(SHAPE, job)


def test_offloading_saves_nothing_on_unified_memory():
    job = replace(JOB, per_node=1, shards=1)
    assert peak(job, SPARK) == peak(replace(job, offload_weights=True, offload_optimizer=True), SPARK)


# Hardware


def test_figures_of_a_row_can_be_replaced():
    row = find_hardware("h100", {"memory_gib": 40, "mfu": 0.5, "peak_tflops": 500})
    assert (row.memory, row.mfu, row.peak_bf16) == (40 * GIB, 0.5, 500e12)
    assert row.source.endswith("; given: peak_tflops=500, memory_gib=40, mfu=0.5")


OWN_CARD = {"memory_gib": 23.5, "peak_tflops": 165, "bandwidth_gb_s": 1008}


def test_a_card_of_ones_own_has_three_figures_and_no_data_sheet():
    row = find_hardware("RTX4090", OWN_CARD)
    assert (row.name, row.device, row.memory, row.bandwidth) == ("rtx4090", "cuda", 23.5 * GIB, 1008e9)
    assert row.peak_bf16 == row.peak_fp32 == 165e12
    assert row.source == "given: peak_tflops=165, memory_gib=23.5, bandwidth_gb_s=1008"
    for missing in OWN_CARD:
        with pytest.raises(ConfigError, match="hardware.name=rtx4090") as caught:
            find_hardware("rtx4090", {key: value for key, value in OWN_CARD.items() if key != missing})
        assert all(f"hardware.{key}=" in str(caught.value) for key in OWN_CARD)


@pytest.mark.parametrize(
    "name, block, key, value, accepted",
    [
        ("h1000", {}, "hardware.name", "h1000", "h100"),
        ("h100", {"memorygib": 1}, "hardware.memorygib", None, "memory_gib"),
        ("h100", {"memory_gib": -1}, "hardware.memory_gib", -1, "expected a number above 0"),
        ("h100", {"mfu": "fast"}, "hardware.mfu", "fast", "expected a number above 0"),
    ],
)
def test_wrong_hardware_is_named(name, block, key, value, accepted):
    with pytest.raises(ConfigError) as caught:
        find_hardware(name, block)
    assert (caught.value.key, caught.value.value) == (key, value)
    assert accepted in caught.value.accepted


@pytest.mark.parametrize(
    "index, key, value",
    [
        ({"rows": 5}, "hardware.index.dim", None),
        ({"rows": 5, "dim": 2, "kind": "magic"}, "hardware.index.kind", "magic"),
        (5, "hardware.index", 5),
    ],
)
def test_a_wrong_index_is_named(index, key, value):
    with pytest.raises(ConfigError) as caught:
        find_index({"index": index})
    assert (caught.value.key, caught.value.value) == (key, value) and caught.value.accepted


def test_this_machine_has_what_its_control_group_leaves(monkeypatch):
    for limit, expected in ((None, 8 * GIB), (3 * GIB, 3 * GIB), (9 * GIB, 8 * GIB)):
        monkeypatch.setattr(hardware, "memory", lambda limit=limit: Memory(8 * GIB, 5 * GIB, limit))
        assert hardware.this_cpu().memory == expected


@pytest.mark.parametrize(("name", "block", "mfu"), [
    ("h100", {}, 0.35), ("h100", {"flash_attn": False}, 0.175), ("h100", {"flash_attn": False, "mfu": 0.3}, 0.3),
    ("gb10", {"flash_attn": False}, 0.30),
])  # fmt: skip
def test_without_flash_attn_half_of_the_mfu_is_assumed_unless_it_is_given(name, block, mfu):
    """A GB10's is for SDPA already: it has no wheel of flash-attn."""
    assert find_hardware(name, block).mfu == pytest.approx(mfu)
