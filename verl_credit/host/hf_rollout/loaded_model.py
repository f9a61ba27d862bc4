"""The rollout server's model, from files or a configuration."""

import copy
from typing import Any

import torch
from verl.utils.model import get_hf_auto_model_class
from verl.utils.torch_dtypes import PrecisionType
from verl.workers.config import HFModelConfig, RolloutConfig

from verl_credit.policy.families import family_of, positions, why_not_decoded


def build_model(model_config: HFModelConfig, config: RolloutConfig) -> torch.nn.Module:
    """The model in `rollout.dtype`, of the class that verl trains; `rollout.load_format=dummy` gives random weights. Raises
    ValueError for a family that cannot be decoded."""
    dtype = PrecisionType.to_dtype(config.dtype)
    hf_config = copy.deepcopy(model_config.hf_config)
    if why := why_not_decoded(hf_config.to_dict()):
        raise ValueError(why)
    # The trainer's attention works only on packed rows. transformers 5.21 and later have no sdpa for a model with a softcap.
    attention = family_of(hf_config).stock[0]
    hf_config._attn_implementation = attention
    options = {"trust_remote_code": model_config.trust_remote_code, "attn_implementation": attention}
    auto_class = get_hf_auto_model_class(hf_config)
    if config.load_format == "dummy":
        model = auto_class.from_config(hf_config, dtype=dtype, **options)
    else:
        model = auto_class.from_pretrained(model_config.local_path, config=hf_config, dtype=dtype, **options)
    return model.eval()


def max_model_len(hf_config: Any, configured: int | None) -> int:
    """`rollout.max_model_len`, by default all positions of the model; raises ValueError for more."""
    most = positions(hf_config)
    if configured is None:
        return most
    if configured > most:
        raise ValueError(f"rollout.max_model_len={configured}: the model has only {most} positions")
    return configured


def eos_token_ids(model_config: HFModelConfig) -> tuple[int, ...]:
    """The ids of generation config and tokenizer that end a request; raises ValueError without any."""
    of_model = getattr(model_config.generation_config, "eos_token_id", None)
    ids = [*(of_model if isinstance(of_model, list) else [of_model]), model_config.tokenizer.eos_token_id]
    found = tuple(dict.fromkeys(token for token in ids if token is not None))
    if not found:
        raise ValueError(
            f"model.path={model_config.path}: neither generation config nor tokenizer has an eos"
        )
    return found
