"""The rollout engine `hf` on a device, without one: its weights leave and come back, and its batches fit the device."""

import asyncio
from types import SimpleNamespace

import pytest
import torch
from verl.workers.rollout.replica import RolloutMode

from kit.hf_server import server_of, update
from kit.tiny_models import tiny_config, tiny_model
from verl_credit.host.hf_rollout import sync
from verl_credit.host.hf_rollout.loaded_model import batch_bound
from verl_credit.host.hf_rollout.sync import WeightError
from verl_credit.policy.generation import BatchGenerator
from verl_credit.policy.sampling import SamplingParams
from verl_credit.recipe.plan.assumptions import Assumptions
from verl_credit.recipe.plan.hardware import GIB, find_hardware
from verl_credit.recipe.plan.job import Job
from verl_credit.recipe.plan.memory import engine_memory
from verl_credit.recipe.plan.model_shape import shape_of

PARAMS = SamplingParams(8, 0.0)


def policy(seed):
    return tiny_model("qwen3", "sdpa", seed=seed, tie_word_embeddings=True)


def bytes_of(model):
    storages = {t.untyped_storage() for t in model.state_dict().values()}
    return sum(storage.nbytes() for storage in storages)


async def answer(server):
    return (await server._batcher.submit([5, 6, 7], PARAMS)).token_ids


def alone(model):
    return BatchGenerator(model, pad_token_id=0).generate([[5, 6, 7]], [PARAMS])[0].token_ids


@pytest.mark.slow
def test_a_server_sleeps_without_weights_until_the_next_update(monkeypatch):
    # A digest reads a copy of what is on a device; NumPy would hold on to the memory of what is on the host.
    digest = sync.tensor_digest
    monkeypatch.setattr(sync, "tensor_digest", lambda tensor: digest(tensor.clone()))
    old, new = policy(0), policy(1)
    expected = alone(new)
    assert expected != alone(old)

    async def scenario():
        server = server_of(old, device="cuda")
        await server.sleep()
        assert bytes_of(old) == 0
        await server.sleep()  # again changes nothing
        for asked in (answer(server), server._score([5, 6, 7], 0)):
            with pytest.raises(
                WeightError, match="it sleeps .rollout.free_cache_engine=true.*woken or updated"
            ):
                await asked
        await update(server, new)
        assert await answer(server) == expected
        await server.sleep()
        await server.wake_up()  # its memory alone
        with pytest.raises(WeightError, match="slept without its weights, and no new ones have arrived"):
            await answer(server)
        await update(server, new)
        assert await answer(server) == expected

    asyncio.run(scenario())


def test_a_server_that_gets_no_updates_keeps_its_weights_on_the_host():
    model = policy(0)
    expected = alone(model)

    async def scenario():
        server = server_of(model, device="cuda", mode=RolloutMode.COLOCATED)
        await server.sleep()
        assert bytes_of(model) == 0
        with pytest.raises(WeightError, match="it sleeps"):
            await answer(server)
        await server.wake_up()
        return await answer(server)

    assert asyncio.run(scenario()) == expected


@pytest.mark.parametrize(
    "where", [{"device": "cpu"}, {"mode": RolloutMode.STANDALONE}, {"free": False}], ids=str
)
def test_on_a_cpu_on_its_own_device_and_without_free_cache_engine_a_server_stays_awake(where):
    model = policy(0)
    size = bytes_of(model)

    async def scenario():
        server = server_of(model, **{"device": "cuda"} | where)
        await server.sleep()
        assert bytes_of(model) == size
        return await answer(server)

    assert asyncio.run(scenario()) == alone(model)


# --- the bound of a batch ---

H100 = find_hardware("h100")
QWEN3_4B = dict(
    vocab_size=151_936, hidden_size=2560, intermediate_size=9728, num_hidden_layers=36, num_attention_heads=32,
    num_key_value_heads=8, head_dim=128, max_position_embeddings=40_960, tie_word_embeddings=True,
)  # fmt: skip
CUDA = torch.device("cuda")


def rollout(share=0.5, seqs=256, prompt=1024, response=2048):
    return SimpleNamespace(
        max_num_seqs=seqs, gpu_memory_utilization=share, prompt_length=prompt, response_length=response, dtype="bfloat16",
    )  # fmt: skip


def test_the_rows_of_qwen3_4b_on_an_h100_by_hand():
    """Of half of 79.1 GiB: 4,022,468,096 weights; 16,384 prompt tokens; then rows of 3,072 tokens."""
    weights = 2 * 4_022_468_096
    forward = 16_384 * (2 * (4 * 9728 + 2 * 2560) + 4 * 3072)
    row = 3072 * (36 * 2 * 1024 * 2 + 2 * 4096 * 2) + 60 * 151_936
    rows = int((79.1 * GIB / 2 - weights - forward) // row)
    bound = batch_bound(tiny_config("qwen3", **QWEN3_4B), rollout(), CUDA, H100.memory)
    assert bound.rows == rows == 63 and bound.tokens == rows * 3072 and bound.prefill_tokens == 16_384
    assert "at most 63 rows at a time (actor_rollout_ref.rollout.gpu_memory_utilization=0.5; " in bound.line
    assert "rollout.max_num_seqs=256" in bound.line


@pytest.mark.parametrize("share", [0.2, 0.5, 0.9])
@pytest.mark.parametrize("seqs", [4, 256])
def test_the_plan_counts_the_rows_that_the_engine_takes(share, seqs):
    bound = batch_bound(tiny_config("qwen3", **QWEN3_4B), rollout(share, seqs), CUDA, H100.memory)
    job = Job(
        engine="hf",
        max_prompt=1024,
        max_response=2048,
        utilization=share,
        max_seqs=seqs,
        prompts=64,
        rollouts=8,
    )
    planned = engine_memory(shape_of("Qwen/Qwen3-4B"), job, H100, Assumptions())
    assert planned.rows == bound.rows and not planned.problems
    assert planned.share <= share * H100.memory


def test_a_share_without_a_row_is_refused_with_what_would_be_enough():
    shape = tiny_config("qwen3", **QWEN3_4B)
    with pytest.raises(
        ValueError, match="gpu_memory_utilization=0.11 of 79.1 GiB: .* hence at least "
    ) as caught:
        batch_bound(shape, rollout(0.11), CUDA, H100.memory)
    least = float(str(caught.value).rsplit(" ", 1)[1])
    assert batch_bound(shape, rollout(least), CUDA, H100.memory).rows >= 1
    with pytest.raises(ValueError, match="hence at least"):
        batch_bound(shape, rollout(least - 0.01), CUDA, H100.memory)
    with pytest.raises(ValueError, match="more than the device has"):
        batch_bound(shape, rollout(0.9), CUDA, 8 * GIB)


def test_a_request_longer_than_the_cache_is_refused():
    server = server_of(policy(0))
    server._max_tokens = 100
    server._require_cache(100)
    with pytest.raises(
        ValueError, match="request of 101 tokens.*gpu_memory_utilization=0.5 leaves a cache of 100"
    ):
        server._require_cache(101)
