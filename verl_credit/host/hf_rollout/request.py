"""From verl's sampling parameters, a dict, to ours."""

from collections.abc import Mapping
from typing import Any

from verl_credit.generation.sampling import SamplingParams

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

    Without `max_tokens` (or `max_new_tokens`) a request may use what is left of prompt_length +
    response_length, at most response_length and at least one token, as verl's vLLM server does. The model's
    own context is a hard limit. End-of-sequence tokens stop a request unless `ignore_eos`; `stop_token_ids`
    add to them.

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
    room = max_model_len - prompt_tokens
    if room < 1:
        raise ValueError(
            f"the prompt has {prompt_tokens} tokens: rollout.max_model_len={max_model_len} leaves no room"
        )
    wanted = given.get("max_tokens", given.get("max_new_tokens"))
    if wanted is None:
        wanted = max(1, min(response_length, prompt_length + response_length - prompt_tokens))
    eos = () if given.get("ignore_eos", False) else eos_token_ids
    return SamplingParams(
        max_new_tokens=min(wanted, room) if isinstance(wanted, int) else wanted,
        temperature=given.get("temperature", 1.0),
        top_p=given.get("top_p", 1.0),
        top_k=given.get("top_k", -1),
        seed=given.get("seed"),
        stop_token_ids=(*eos, *(given.get("stop_token_ids") or ())),
    )
