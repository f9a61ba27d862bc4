"""What generation does on a device, looked at without one: where the host waits, where tensors are, what memory is taken."""

import pytest
import torch
from torch.overrides import TorchFunctionMode
from transformers import AutoModelForCausalLM, Qwen3Config

from verl_credit.policy import generation
from verl_credit.policy.generation import BatchGenerator
from verl_credit.policy.sampling import SamplingParams, inverse_cdf

SHAPE = {
    "vocab_size": 300, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 256, "initializer_range": 0.3,
    "tie_word_embeddings": True, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
PROMPTS = [[5, 6, 7], [8], [9] * 35, [5, 6, 7]]
KINDS = [
    SamplingParams(30, seed=1),
    SamplingParams(30, 0.0),
    SamplingParams(30, 0.7, top_p=0.9, seed=2),
    SamplingParams(30, seed=3),
]


def model_on(device, dtype=torch.float32):
    torch.manual_seed(0)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(
            Qwen3Config(**SHAPE), attn_implementation="sdpa", dtype=dtype
        ).eval()


@pytest.fixture(scope="module")
def model():
    return model_on("cpu")


class Waits(TorchFunctionMode):
    """Counts what makes a host wait for its device: values that it reads, and shapes that depend on values."""

    READS = ("item", "tolist", "cpu", "numpy", "nonzero", "masked_select", "unique", "equal")
    READS += ("__int__", "__bool__", "__float__", "__index__")

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name = getattr(func, "__name__", "")
        index = args[1] if name in ("__getitem__", "__setitem__") else ()
        index = index if isinstance(index, tuple) else (index,)
        by_mask = any(isinstance(one, torch.Tensor) and one.dtype == torch.bool for one in index)
        self.count += name in self.READS or by_mask
        return func(*args, **(kwargs or {}))


def waits_of(model, tokens):
    params = [SamplingParams(tokens, p.temperature, p.top_p, seed=p.seed) for p in KINDS]
    with Waits() as waits:
        outputs = BatchGenerator(model, pad_token_id=0).generate(PROMPTS, params)
    assert [len(output.token_ids) for output in outputs] == [tokens] * 4
    return waits.count


def test_the_host_waits_once_per_token(model):
    assert waits_of(model, 25) - waits_of(model, 5) == 20


@pytest.mark.parametrize("prompt", PROMPTS[:3])
def test_prompts_in_parts_are_the_whole_prompts(model, prompt, monkeypatch):
    monkeypatch.setattr(generation, "SCORED_TOKENS", 9)
    params, sizes = [SamplingParams(20, 0.0)] * 4, []
    whole, parts = (BatchGenerator(model, pad_token_id=0, prefill_tokens=most) for most in (None, 21))
    expected = whole.generate([*PROMPTS[:3], [*PROMPTS[2], *prompt]], params)
    hook = model.register_forward_pre_hook(
        lambda module, args, kwargs: sizes.append(kwargs["input_ids"].numel()), with_kwargs=True
    )
    found = parts.generate([*PROMPTS[:3], [*PROMPTS[2], *prompt]], params)
    values = torch.tensor(parts.prompt_log_probs(PROMPTS[2]))
    hook.remove()
    assert max(sizes) <= 21
    assert values == pytest.approx(torch.tensor(whole.prompt_log_probs(PROMPTS[2])), abs=1e-5)
    for one, other in zip(expected, found, strict=True):
        assert one.token_ids == other.token_ids
        assert torch.tensor(one.log_probs) == pytest.approx(torch.tensor(other.log_probs), abs=1e-5)


@pytest.mark.parametrize("vocabulary", [7, 128, 129, 5000, 151_936])
def test_a_draw_in_two_steps_is_the_draw_in_one(vocabulary):
    torch.manual_seed(vocabulary)
    rows = min(20_000, 2_000_000 // vocabulary)
    weight = torch.log_softmax(3 * torch.randn(rows, vocabulary), dim=-1).exp()
    weight[:, 1::3] = 0.0
    for uniform in (
        torch.rand(rows).double(),
        torch.zeros(rows).double(),
        torch.full((rows,), 1 - 2.0**-53).double(),
    ):
        drawn = inverse_cdf(weight, uniform[:, None])
        cdf = weight.cumsum(dim=-1, dtype=torch.float64)
        below = torch.nextafter(cdf[:, -1:], torch.zeros(1).double())
        target = torch.minimum(uniform[:, None] * cdf[:, -1:], below)
        assert torch.equal(drawn, torch.searchsorted(cdf, target, right=True))
        assert (weight.gather(1, drawn) > 0).all()


def test_every_tensor_of_a_batch_is_on_the_models_device(monkeypatch):
    """Tensors on `meta` refuse to meet those of the host, as on a GPU."""
    monkeypatch.setattr(generation._Batch, "_left", lambda batch: batch.steps_left.pop())
    monkeypatch.setattr(generation._Batch, "steps_left", [0, 4, 4], raising=False)
    meta = model_on("meta", torch.bfloat16)
    # Its results cannot be read.
    with pytest.raises((NotImplementedError, RuntimeError), match="[Cc]annot copy out of meta tensor"):
        BatchGenerator(meta, pad_token_id=0, prefill_tokens=16).generate(PROMPTS, KINDS)
    assert generation._Batch.steps_left == []
