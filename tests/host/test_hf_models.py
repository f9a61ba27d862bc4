"""The rollout server's model: of the class that verl trains, with its family's attention, or refused with the reason."""

import asyncio
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoConfig
from verl.utils.model import get_hf_auto_model_class

from kit.families import family_config, family_model, since
from kit.hf_server import server_of, update
from kit.tiny_models import log_probs
from verl_credit.host.hf_rollout.loaded_model import build_model
from verl_credit.host.hf_rollout.sync import WeightError
from verl_credit.policy import families
from verl_credit.policy.sampling import SamplingParams

# Three layers of the delta rule round by more than the test allows.
DELTA = {"layer_types": ["linear_attention", "full_attention"] * 2}
VISION = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32}


def config_for(family, architecture):
    if family == "qwen3_5":
        text = family_config("qwen3_5_text", **DELTA).to_dict()
        config = AutoConfig.for_model("qwen3_5", text_config=text, vision_config=VISION)
    else:
        config = family_config(family, **(DELTA if family == "qwen3_5_text" else {}))
    config.architectures = [architecture]
    return config


def server_with(config):
    """With random weights."""
    given = SimpleNamespace(hf_config=config, trust_remote_code=False)
    rollout = SimpleNamespace(dtype="float32", load_format="dummy")
    return server_of(build_model(given, rollout))


async def answers(server, trained, prompt):
    await update(server, trained)
    sampled = await server._batcher.submit(prompt, SamplingParams(12, seed=1))
    return sampled


@pytest.mark.slow
@pytest.mark.parametrize(("family", "architecture"), [
    ("gpt_oss", "GptOssForCausalLM"), ("gemma2", "Gemma2ForCausalLM"), ("qwen3_5", "Qwen3_5ForConditionalGeneration"),
    ("qwen3_5_text", "Qwen3_5ForCausalLM"), ("mistral_swa", "MistralForCausalLM"),
])  # fmt: skip
def test_a_server_samples_as_the_trained_model_does(family, architecture):
    config = config_for(family, architecture)
    trained = family_model(config_for(family, architecture), "eager")
    assert type(trained).__name__ == architecture
    assert type(trained) in get_hf_auto_model_class(config)._model_mapping.values()
    server, prompt = server_with(config), [5, 6, 7, *range(20, 45)]
    assert type(server._model) is type(trained)
    sampled = asyncio.run(answers(server, trained, prompt))
    expected = log_probs(trained, [*prompt, *sampled.token_ids])[len(prompt) - 1 :]
    assert torch.tensor(sampled.log_probs) == pytest.approx(expected, abs=1e-5)


@pytest.mark.slow
@pytest.mark.skipif(since("5.19"), reason="transformers decodes it rightly")
def test_a_server_whose_first_weights_decode_wrongly_takes_no_requests(monkeypatch):
    monkeypatch.setattr(families, "NOT_DECODED", ())
    server = server_with(config_for("doge", "DogeForCausalLM"))

    async def update_and_ask():
        with pytest.raises(RuntimeError, match="model_type=doge samples differ"):
            await update(server, family_model(family_config("doge"), "eager"))
        with pytest.raises(WeightError, match="a weight update has begun and not finished"):
            await server._batcher.submit([5, 6], SamplingParams(2))

    asyncio.run(update_and_ask())
