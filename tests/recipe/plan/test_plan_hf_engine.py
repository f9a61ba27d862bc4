"""What the plan counts for the engine `hf` holds what its generator takes: real shapes, on tensors without memory."""

import weakref
from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig, AutoModelForCausalLM, masking_utils

from verl_credit.policy import generation
from verl_credit.policy.generation import BatchGenerator
from verl_credit.policy.sampling import SamplingParams
from verl_credit.recipe.plan.hf_engine import PREFILL_TOKENS, HFEngine
from verl_credit.recipe.plan.model_shape import PUBLISHED

LAYERS = 6  # of 28 to 36: the formula has their number, and a test has little time


class Live(TorchDispatchMode):
    """Counts the bytes of all tensors on `meta` that are alive, and the most at a time."""

    def __init__(self):
        super().__init__()
        self.sizes, self.peak = {}, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.device.type == "meta":
                storage = tensor.untyped_storage()
                if storage._cdata not in self.sizes:
                    self.sizes[storage._cdata] = storage.nbytes()
                    weakref.finalize(storage, self.sizes.pop, storage._cdata)
        self.peak = max(self.peak, sum(self.sizes.values()))
        return result


def fused_attention(query, key, value, *, attn_mask=None, **unused):
    """A GPU's kernel takes its output, and a mask as numbers; `meta` would take the one that holds all scores."""
    if attn_mask is not None and query.shape[2] > 1:
        _mask = torch.empty(attn_mask.shape, dtype=query.dtype, device=query.device)
    return torch.empty_like(query)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "rows", "prompt", "new", "sampling", "least"),
    [
        ("qwen3-4b", 27, 8000, 192, {}, 0.85),
        ("qwen3-0.6b", 100, 40, 24, {"top_p": 0.9}, 0.6),  # the logits are the most
        ("qwen2.5-7b", 20, 3000, 64, {}, 0.6),
    ],
)
def test_a_batch_takes_no_more_than_is_counted(name, rows, prompt, new, sampling, least, monkeypatch):
    shape = replace(PUBLISHED[name], layers=LAYERS)
    config = AutoConfig.for_model(
        shape.family, vocab_size=shape.vocabulary, hidden_size=shape.hidden, intermediate_size=shape.intermediate,
        num_hidden_layers=LAYERS, num_attention_heads=shape.heads, num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim, max_position_embeddings=40_960, tie_word_embeddings=shape.tied,
    )  # fmt: skip
    left = [0, rows, rows, rows]
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", fused_attention)
    monkeypatch.setattr(masking_utils, "_ignore_causal_mask_sdpa", lambda *args, **kwargs: False)
    monkeypatch.setattr(generation._Batch, "_left", lambda batch: left.pop())
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            config, attn_implementation="sdpa", dtype=torch.bfloat16
        ).eval()
    generator = BatchGenerator(model, pad_token_id=0, prefill_tokens=PREFILL_TOKENS)
    prompts = [[row] * (prompt - row % 7) for row in range(1, rows + 1)]  # nothing in common, padded
    with (
        Live() as live,
        pytest.raises(NotImplementedError, match="copy out of meta"),
    ):  # results cannot be read
        generator.generate(prompts, [SamplingParams(new, seed=1, **sampling)] * rows)
    engine = HFEngine(shape, 2, prompt + new)
    counted = engine.used(rows) - engine.weights
    assert least * counted < live.peak <= counted
    assert engine.weights == 2 * sum(weight.numel() for weight in model.parameters())
