"""The rollout server's model, its length and its end-of-sequence ids, from verl's configuration."""

import copy
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from verl.utils.torch_dtypes import PrecisionType
from verl.workers.config import HFModelConfig, RolloutConfig


def build_model(model_config: HFModelConfig, config: RolloutConfig) -> torch.nn.Module:
    """The causal language model in `rollout.dtype`; `rollout.load_format=dummy` gives random weights."""
    dtype = PrecisionType.to_dtype(config.dtype)
    hf_config = copy.deepcopy(model_config.hf_config)
    hf_config._attn_implementation = "sdpa"  # the trainer's attention works only on packed rows
    options = {"trust_remote_code": model_config.trust_remote_code, "attn_implementation": "sdpa"}
    if config.load_format == "dummy":
        model = AutoModelForCausalLM.from_config(hf_config, dtype=dtype, **options)
    else:
        model = AutoModelForCausalLM.from_pretrained(
            model_config.local_path, config=hf_config, dtype=dtype, **options
        )
    return model.eval()


def max_model_len(hf_config: Any, configured: int | None) -> int:
    """`rollout.max_model_len`, by default all positions of the model; raises ValueError for more."""
    positions = hf_config.get_text_config().max_position_embeddings
    if configured is None:
        return positions
    if configured > positions:
        raise ValueError(f"rollout.max_model_len={configured}: the model has only {positions} positions")
    return configured


def eos_token_ids(model_config: HFModelConfig) -> tuple[int, ...]:
    """The ids of generation config and tokenizer that end a request; raises ValueError without any."""
    of_model = getattr(model_config.generation_config, "eos_token_id", None)
    found = [*(of_model if isinstance(of_model, list) else [of_model]), model_config.tokenizer.eos_token_id]
    flat = [token for token in found if token is not None]
    if not flat:
        raise ValueError(
            f"model.path={model_config.path}: neither its generation config nor tokenizer has an eos"
        )
    return tuple(dict.fromkeys(flat))
