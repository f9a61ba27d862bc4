"""Memory: numbers by hand, laws that any change of the plan must keep."""

from dataclasses import replace

import pytest

from verl_credit.errors import ConfigError
from verl_credit.policy.attention.pack import KEY_TOKENS, MASK_NUMBERS
from verl_credit.recipe.machine import Memory
from verl_credit.recipe.plan import hardware
from verl_credit.recipe.plan.activations import (
    answers_attention,
    answers_masks,
    forward_only,
    layer,
    log_prob_loss,
    loss,
)
from verl_credit.recipe.plan.assumptions import Assumptions
from verl_credit.recipe.plan.hardware import GIB, Index, find_hardware, find_index
from verl_credit.recipe.plan.job import Job, read_job
from verl_credit.recipe.plan.memory import engine_memory, phases
from verl_credit.recipe.plan.model_shape import shape_of
from verl_credit.recipe.plan.update import KEPT, actor_peak, log_prob_parts, state, update_parts

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


def test_bf16_weights_bring_bf16_moments():
    assert sum(state(SHAPE, replace(JOB, weight_bytes=2)).values()) * 2 == sum(state(SHAPE, JOB).values())


def test_adapter_state_by_hand():
    """Rank 32 on seven linears of 36 layers: q 2560+4096, k and v 2560+1024, o 4096+2560, three of 2560+9728."""
    adapters = 32 * 36 * (2 * (2560 + 4096) + 2 * (2560 + 1024) + 3 * (2560 + 9728))
    held = state(SHAPE, replace(JOB, lora_rank=32, shards=1))
    assert held["gradients"] == adapters * 4
    assert held["optimizer"] == adapters * 8
    assert held["weights"] == (4_022_468_096 + adapters) * 4


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
    few = forward_only(SHAPE, sdpa, tokens=8192, answers=8)
    assert few == forward_only(SHAPE, sdpa, tokens=8192)  # the MLP is wider


@pytest.mark.parametrize(
    ("name", "flash_attn", "device", "expected"),
    [
        ("auto", True, "cuda", "flash"),
        ("auto", False, "cuda", "sdpa"),
        ("credit_varlen", True, "cuda", "flash"),
        ("credit_flex", False, "cuda", "flash"),
        ("credit_sdpa", True, "cuda", "sdpa"),
        ("auto", True, "cpu", "sdpa"),
    ],
)
def test_the_kernel_that_is_planned_is_the_one_that_would_run(name, flash_attn, device, expected):
    """``auto`` on a GPU without flash-attn takes SDPA (`PREFERENCE`)."""
    model = {"override_config": {"attn_implementation": name}}
    actor = {"use_dynamic_bsz": True}
    config = {
        "trainer": {"device": device},
        "actor_rollout_ref": {"model": model, "actor": actor, "rollout": {"log_prob_use_dynamic_bsz": True}},
    }
    assert read_job(config, flash_attn=flash_attn).attention == expected


def test_logits_by_hand():
    """16,384 tokens x 151,936 in bf16: flash-attn's loss writes over them."""
    logits = 16384 * 151936
    assert loss(SHAPE, JOB) == 2 * logits
    assert loss(SHAPE, replace(JOB, unit_temperature=False)) == 4 * logits
    chunk = 2048 * 151936
    assert log_prob_loss(SHAPE, JOB, tokens=16384) == 2 * logits + 8 * chunk
    assert log_prob_loss(SHAPE, replace(JOB, entropy="eager"), tokens=16384) == 10 * logits
    assert loss(SHAPE, replace(JOB, update_entropy=True)) == 6 * logits + 8 * chunk
    assert loss(SHAPE, replace(JOB, log_prob_path="fused")) == 12 * 512 * 151936


def test_our_log_probs_hold_a_chunk_beside_the_logits():
    """110 tokens x 151,936, twice in fp32; neither temperature nor entropy adds to it."""
    logits, chunk = 16384 * 151936, 110 * 151936
    ours = replace(JOB, log_prob_path="ours", unit_temperature=False, update_entropy=True, entropy="eager")
    assert loss(SHAPE, ours) == 2 * logits + 8 * chunk
    assert loss(SHAPE, replace(ours, compute_bytes=4)) == 4 * logits + 8 * chunk
    in_fp32 = replace(JOB, log_prob_path="ours", compute_bytes=4)  # at temperature 1 a chunk is no copy
    assert loss(SHAPE, in_fp32) == log_prob_loss(SHAPE, in_fp32, tokens=16384) == 4 * logits + 4 * chunk
    assert log_prob_loss(SHAPE, ours, tokens=16384) == 2 * logits + 8 * chunk
    assert log_prob_loss(SHAPE, ours, tokens=50) == 2 * 50 * 151936 + 8 * 50 * 151936
    assert loss(SHAPE, replace(ours, device_type="cpu")) == 2 * logits + 8 * 6 * 151936


def test_verls_loop_keeps_a_log_softmax():
    logits, loop = 16384 * 151936, replace(JOB, log_prob_path="loop")
    assert loss(SHAPE, loop) == 6 * logits
    assert loss(SHAPE, replace(loop, softmax_bytes=2)) == 4 * logits  # autocast on a CPU
    assert loss(SHAPE, replace(loop, compute_bytes=4)) == 12 * logits


def test_what_fsdp_gathers():
    """In bf16: the tied embedding, a layer, and the all-gather's output of the next; one rank sends nothing."""
    embedding, one = 2 * 151936 * 2560, 2 * SHAPE.largest_layer

    def gathered(**changes):
        parts = log_prob_parts(SHAPE, replace(JOB, log_prob_path="fused", **changes), tokens=16384)
        assert parts["activations"] > 0
        return parts["gathered weights"]

    assert gathered() == embedding + 2 * one
    assert gathered(shards=1) == gathered(shards=1, weight_bytes=2) == embedding + one
    assert gathered(reshard=False) == 2 * SHAPE.parameters + one
    assert gathered(fsdp=False) == 0


def test_the_tied_heads_gradient_waits_for_the_embeddings():
    """Short micro-batches peak where the embedding has two bf16 gradients, or they become a reduce-scatter's fp32 input."""
    embedding, layer = 151936 * 2560, SHAPE.largest_layer
    short = replace(JOB, update_tokens=8, max_prompt=4, max_response=4, mini_batch=1, rollouts=8)
    parts = update_parts(SHAPE, short)["backward"]
    assert parts["whole gradients"] == 2 * 2 * embedding
    assert parts["gathered weights"] == 2 * embedding
    assert parts["reduce-scatter"] == 4 * layer
    alone = update_parts(SHAPE, replace(short, shards=1))["backward"]
    assert alone["reduce-scatter"] == (4 + 4) * embedding and not alone["whole gradients"]
    adapter = update_parts(SHAPE, replace(short, lora_rank=32))["backward"]
    assert adapter["whole gradients"] + adapter["reduce-scatter"] < 0.01 * 2 * embedding


def test_the_probe_keeps_a_second_copy_of_what_is_trained():
    n, job = 4_022_468_096, replace(JOB, probes=5)
    plain, probed = by_name(phases(SHAPE, JOB, H100, ASSUMED)), by_name(phases(SHAPE, job, H100, ASSUMED))
    assert set(probed) - set(plain) == {"entropy probe"}
    for name in (
        "rollout",
        "weight sync",
        "log-prob",
        "update: loss",
        "update: backward",
        "update: optimizer step",
    ):
        assert probed[name].live_bytes - plain[name].live_bytes == pytest.approx(n * 4 / 8)
    assert probed["entropy probe"].live_bytes >= probed["update: backward"].live_bytes
    assert probed["host"].total == plain["host"].total
    away = by_name(phases(SHAPE, replace(job, offload_weights=True), H100, ASSUMED))
    assert KEPT not in away["rollout"].parts and away["host"].parts[KEPT] == pytest.approx(n * 4)
    assert KEPT not in away["entropy probe"].parts
    loaded = replace(job, offload_weights=True, offload_optimizer=True)
    assert KEPT in by_name(phases(SHAPE, loaded, H100, ASSUMED))["entropy probe"].parts


def test_sleep_does_not_free_cuda_graphs():
    eager, graphs = (by_name(phases(SHAPE, replace(JOB, graphs=n), H100, ASSUMED)) for n in (0, 51))
    for name in ("log-prob", "update: loss", "asleep"):
        assert graphs[name].total - eager[name].total == pytest.approx(51 * 40 * 2**20)
    assert graphs["rollout"].total == eager["rollout"].total  # inside the engine's share
    one = eager["asleep"]  # the actor has its state, and the engine one GiB
    assert one.live == ("weights", "optimizer")
    held = 1.05 * one.live_bytes + (1 + 2 * ASSUMED.context_gib) * GIB
    assert one.total == pytest.approx(held)


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


def test_what_the_actors_process_holds_is_said_apart():
    """Live tensors: neither the engine, nor contexts, the index or the allocator's fragmentation."""
    found = by_name(phases(SHAPE, JOB, H100, ASSUMED))
    names = {
        "rollout",
        "weight sync",
        "log-prob",
        "update: loss",
        "update: backward",
        "update: optimizer step",
        "asleep",
    }
    assert names <= set(found)
    for moment, parts in update_parts(SHAPE, JOB).items():
        assert found[f"update: {moment}"].live_bytes == pytest.approx(sum(parts.values()))
    for phase in found.values():
        if phase.where == "device":
            rest = (
                phase.total - phase.live_bytes * (1 + ASSUMED.fragmentation) - 2 * ASSUMED.context_gib * GIB
            )
            assert rest == pytest.approx(sum(v for k, v in phase.parts.items() if k.startswith("engine")))


def test_the_engines_cache_by_hand():
    runner = engine_memory(SHAPE, JOB, H100, ASSUMED)
    left = 0.6 * 79.1 * GIB - 2 * 4_022_468_096 - 2 * GIB
    assert runner.kv_tokens == pytest.approx(left / 147456)
    assert not runner.problems


def test_an_engine_that_cannot_hold_a_row_is_a_problem():
    runner = engine_memory(SHAPE, replace(JOB, utilization=0.1), H100, ASSUMED)
    assert "one row of 8192 tokens" in runner.problems[0]
    assert not by_name(phases(SHAPE, replace(JOB, utilization=0.1), H100, ASSUMED))["rollout"].fits


def test_without_a_length_the_engine_keeps_cache_for_all_positions_of_the_model():
    """36 GiB for the 262,144 of Qwen3-4B-Instruct-2507: half an H100 holds the weights and 30 GiB."""
    shape = shape_of("Qwen/Qwen3-4B-Instruct-2507")
    unbounded = replace(JOB, utilization=0.5, model_len=0)
    (said,) = engine_memory(shape, unbounded, H100, ASSUMED).problems
    assert (
        "one row of 262144 tokens (actor_rollout_ref.rollout.max_model_len=null" in said
        and "needs 36.0 GiB" in said
    )
    assert not engine_memory(SHAPE, unbounded, H100, ASSUMED).problems  # its 40,960 take 5.6
    assert engine_memory(shape, replace(unbounded, model_len=8192), H100, ASSUMED).problems == ()


@pytest.mark.parametrize(
    "length, said",
    [(8191, "cannot hold the longest row, 8192 tokens"), (40961, "has 40960 positions"), (40960, None)],
)
def test_a_length_that_the_engine_would_refuse_is_a_problem(length, said):
    problems = engine_memory(SHAPE, replace(JOB, model_len=length), H100, ASSUMED).problems
    assert problems == () if said is None else said in problems[0]


def test_wiki_18_takes_64_6_gb():
    rows = {"rows": 21_015_324, "dim": 768}
    assert find_index({"index": rows}).bytes == 21_015_324 * 768 * 4 == 64_559_075_328
    assert find_index({"index": {**rows, "kind": "sq8"}}).bytes * 4 == find_index({"index": rows}).bytes


# Laws


@pytest.mark.parametrize("engine_name", ["vllm", "hf"])
@pytest.mark.parametrize("lora", [0, 32])
@pytest.mark.parametrize("checkpointing", [True, False])
def test_more_devices_never_need_more_each(engine_name, lora, checkpointing):
    def on(devices):
        return replace(
            JOB,
            per_node=devices,
            shards=devices,
            engine=engine_name,
            lora_rank=lora,
            checkpointing=checkpointing,
        )

    # One device that computes in bf16 from fp32 weights gathers as well: 1 is in the law.
    peaks = [actor_peak(SHAPE, on(devices)) for devices in (1, 2, 4, 8, 16)]
    assert peaks == sorted(peaks, reverse=True)
    whole = [peak(on(devices)) for devices in (1, 2, 4, 8, 16)]
    assert whole == sorted(whole, reverse=True)


@pytest.mark.parametrize("devices", [1, 8])
def test_less_is_less(devices):
    job = replace(JOB, per_node=devices, shards=devices, checkpointing=False)
    full = actor_peak(SHAPE, job)
    for change in (
        {"lora_rank": 32},
        {"checkpointing": True},
        {"update_tokens": 8192},
        {"log_prob_path": "fused"},
    ):
        assert actor_peak(SHAPE, replace(job, **change)) < full, change


def test_a_longer_micro_batch_needs_more():
    peaks = [actor_peak(SHAPE, replace(JOB, update_tokens=n)) for n in (8192, 16384, 32768)]
    assert peaks == sorted(set(peaks))


def test_gradients_meet_the_loss_only_when_they_accumulate():
    once = replace(JOB, update_tokens=JOB.mini_batch * JOB.rollouts // 8 * JOB.longest_row)
    assert update_parts(SHAPE, once)["loss"]["gradients"] == 0
    assert update_parts(SHAPE, JOB)["loss"]["gradients"] > 0


def test_offloading_moves_bytes_from_the_device_to_the_host():
    plain = by_name(phases(SHAPE, JOB, H100, ASSUMED))
    moved = by_name(phases(SHAPE, replace(JOB, offload_weights=True, offload_optimizer=True), H100, ASSUMED))
    held = state(SHAPE, JOB)
    gone = held["weights"] + held["optimizer"]
    assert plain["rollout"].total - moved["rollout"].total == pytest.approx(
        gone * (1 + ASSUMED.fragmentation)
    )
    assert moved["host"].total - plain["host"].total == pytest.approx(8 * gone)
    # They come back for the update.
    assert moved["update: backward"].total == plain["update: backward"].total


def test_offloading_saves_nothing_on_unified_memory():
    job = replace(JOB, per_node=1, shards=1)
    assert peak(job, SPARK) == peak(replace(job, offload_weights=True, offload_optimizer=True), SPARK)


def test_the_index_counts_where_memory_is_shared():
    job, size = replace(JOB, per_node=1, shards=1), 10 * GIB
    assert peak(job, SPARK, bytes=size) - peak(job, SPARK) == pytest.approx(size)
    assert peak(job, H100, bytes=size) == peak(job, H100)
    assert peak(job, H100, bytes=size, place="device") - peak(job, H100) == pytest.approx(size)
    host = by_name(phases(SHAPE, job, H100, ASSUMED, Index(size)))["host"]
    assert host.parts["index"] == size


def test_an_engine_that_does_not_sleep_stays_for_the_update():
    awake = by_name(phases(SHAPE, replace(JOB, sleeps=False), H100, ASSUMED))["update: loss"]
    assert awake.parts["engine asleep"] == pytest.approx(0.6 * H100.memory)


def test_the_reference_is_counted_only_when_it_is_asked_for():
    names = by_name(phases(SHAPE, JOB, H100, ASSUMED))
    asked = by_name(phases(SHAPE, replace(JOB, reference=True), H100, ASSUMED))
    assert "reference" not in names
    assert asked["host"].parts["reference model"] == 4_022_468_096 * 4
    # With an adapter the actor without it is the reference.
    assert "reference" not in by_name(phases(SHAPE, replace(JOB, reference=True, lora_rank=8), H100, ASSUMED))


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


@pytest.mark.parametrize("missing", OWN_CARD)
def test_a_card_of_ones_own_without_a_figure_is_refused_with_all_three(missing):
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


def test_a_sleeping_engines_weights_are_not_counted_while_it_is_awake():
    """Level 1 of sleep (LoRA) keeps them on the host, which on unified memory is the device."""
    found = by_name(phases(SHAPE, replace(JOB, per_node=1, shards=1, lora_rank=32), SPARK, ASSUMED))
    part = "host: engine weights asleep"
    assert found["update: loss"].parts[part] == 2 * 4_022_468_096
    assert part not in found["rollout"].parts and part not in found["weight sync"].parts


def test_this_machine_has_what_its_control_group_leaves(monkeypatch):
    for limit, expected in ((None, 8 * GIB), (3 * GIB, 3 * GIB), (9 * GIB, 8 * GIB)):
        monkeypatch.setattr(hardware, "memory", lambda limit=limit: Memory(8 * GIB, 5 * GIB, limit))
        assert hardware.this_cpu().memory == expected
