"""`model.lora.merge=true`: verl streams an adapted policy to the engine `hf` as whole weights, with the adapters in them."""

import asyncio

import pytest
import torch
from transformers import AutoModelForCausalLM

from kit.tiny_engine import build_engine, single_rank
from kit.tiny_models import log_probs, tiny_model
from verl_credit.host.hf_rollout.sync import WeightSink, checksum, weight_buckets

ROW = list(range(3, 40))
RANK, ALPHA = 4, 16


def whole(weight):
    return weight.full_tensor() if hasattr(weight, "full_tensor") else weight


@pytest.mark.slow
def test_merged_weights_arrive_and_are_the_adapted_policys(tmp_path):
    tiny_model("qwen3", attention="sdpa", tie_word_embeddings=True).save_pretrained(tmp_path)
    rollout = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="sdpa", dtype=torch.bfloat16)
    before = {name: weight.clone() for name, weight in rollout.state_dict().items()}
    base = AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    adapters = {
        "lora_rank": RANK,
        "lora_alpha": ALPHA,
        "target_modules": "all-linear",
        "lora": {"merge": True},
    }
    with single_rank(), torch.no_grad():
        engine = build_engine(str(tmp_path), attention="sdpa", training=True, **adapters)
        engine.module.eval()
        adapted = log_probs(engine.module, ROW)
        low = {
            name.removeprefix("base_model.model."): whole(weight)
            for name, weight in engine.module.named_parameters()
            if "lora_" in name
        }
        weights, peft_config = engine.get_per_tensor_param(base_sync_done=True)
        assert peft_config is None  # the engine refuses adapters
        digests, sink = {}, WeightSink(rollout)

        async def sync():
            async for bucket in weight_buckets(weights, digests, dtype=torch.bfloat16, bucket_bytes=10_000):
                sink.load(bucket)

        asyncio.run(sync())
        assert sink.finish() == checksum(digests)
        assert torch.equal(log_probs(engine.module, ROW), adapted)  # the actor keeps its adapters apart
    moved = 0
    for name, weight in rollout.state_dict().items():
        expected, module = base[name], name.removesuffix(".weight")
        if f"{module}.lora_A.default.weight" in low:
            a, b = (low[f"{module}.lora_{one}.default.weight"] for one in "AB")
            expected = expected + ALPHA / RANK * b @ a
            moved += not torch.equal(weight, before[name])
        # verl rounds what it merged to bfloat16
        torch.testing.assert_close(weight.float(), expected, rtol=2**-8, atol=1e-6)
    assert moved == 2 * 7  # seven linear modules in each of two layers
