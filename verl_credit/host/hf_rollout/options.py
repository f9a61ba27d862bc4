"""The rollout server reads its model, its lengths, its own options and the parameters of a request from verl."""

import copy
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from verl.utils.torch_dtypes import PrecisionType
from verl.workers.config import HFModelConfig, RolloutConfig

from verl_credit.policy.sampling import SamplingParams

_ACCEPTED = (
    "temperature", "top_p", "top_k", "seed", "max_tokens", "max_new_tokens", "stop_token_ids", "ignore_eos",
    "logprobs", "repetition_penalty",
)  # fmt: skip


def sampling_params(
    given: Mapping[str, Any],
    *,
    prompt_tokens: int,
    prompt_length: int,
    response_length: int,
    max_model_len: int,
    eos_token_ids: tuple[int, ...],
) -> SamplingParams:
    """The parameters of one request.

    Without `max_tokens` (or `max_new_tokens`) a request may use the rest of prompt_length + response_length, at most
    response_length and at least one token, as in verl's vLLM server. The model's context is a hard limit. End-of-sequence
    tokens stop a request unless `ignore_eos` is set, and so do `stop_token_ids`.

    Raises ValueError naming the parameter, its value and what would be accepted.
    """
    unknown = sorted(set(given) - set(_ACCEPTED))
    if unknown:
        raise ValueError(
            f"sampling parameter {unknown[0]!r} is not known: accepted are {', '.join(_ACCEPTED)}"
        )
    penalty = given.get("repetition_penalty", 1.0)
    if penalty != 1.0:
        raise ValueError(f"sampling parameter repetition_penalty={penalty!r}: only 1.0 is supported")
    left = max_model_len - prompt_tokens
    if left < 1:
        raise ValueError(
            f"the prompt has {prompt_tokens} tokens: rollout.max_model_len={max_model_len} leaves no room"
        )
    wanted = given.get("max_tokens", given.get("max_new_tokens"))
    if wanted is None:
        wanted = max(1, min(response_length, prompt_length + response_length - prompt_tokens))
    eos = () if given.get("ignore_eos", False) else eos_token_ids
    return SamplingParams(
        max_new_tokens=min(wanted, left) if isinstance(wanted, int) else wanted,
        temperature=given.get("temperature", 1.0),
        top_p=given.get("top_p", 1.0),
        top_k=given.get("top_k", -1),
        seed=given.get("seed"),
        stop_token_ids=(*eos, *(given.get("stop_token_ids") or ())),
    )


@dataclass(frozen=True)
class EngineOptions:
    """`rollout.engine_kwargs.hf`: threads of the server, and how long it waits for a batch to fill."""

    num_threads: int = 1
    """Threads of torch in the server process."""
    quiet_ms: float = 10.0
    """A batch starts when no request has arrived for this many milliseconds."""

    def __post_init__(self) -> None:
        if not isinstance(self.num_threads, int) or self.num_threads < 1:
            raise ValueError(
                f"rollout.engine_kwargs.hf.num_threads={self.num_threads!r}: expected an integer >= 1"
            )
        if not 0 <= self.quiet_ms <= 1000:
            raise ValueError(f"rollout.engine_kwargs.hf.quiet_ms={self.quiet_ms!r}: expected 0 to 1000")

    @classmethod
    def read(cls, engine_kwargs: dict[str, Any]) -> "EngineOptions":
        """Raises ValueError for a key that is not one of the fields."""
        given = {key: value for key, value in (engine_kwargs.get("hf") or {}).items() if value is not None}
        known = [field.name for field in fields(cls)]
        unknown = sorted(set(given) - set(known))
        if unknown:
            raise ValueError(
                f"rollout.engine_kwargs.hf.{unknown[0]} is not known: accepted are {', '.join(known)}"
            )
        return cls(**given)


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
    ids = [*(of_model if isinstance(of_model, list) else [of_model]), model_config.tokenizer.eos_token_id]
    flat = [token for token in ids if token is not None]
    if not flat:
        raise ValueError(
            f"model.path={model_config.path}: neither its generation config nor tokenizer has an eos"
        )
    return tuple(dict.fromkeys(flat))
