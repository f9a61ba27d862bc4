"""What the rollout server reads: the sampling parameters of a request, and `rollout.engine_kwargs.hf`."""

from collections.abc import Mapping
from typing import Any

from verl.workers.config import RolloutConfig

from verl_credit.policy.sampling import SamplingParams

_ACCEPTED = (
    "temperature", "top_p", "top_k", "seed", "max_tokens", "max_new_tokens", "stop_token_ids", "ignore_eos",
    "logprobs", "repetition_penalty",
)  # fmt: skip


def read_sampling_params(
    given: Mapping[str, Any],
    prompt_tokens: int,
    config: RolloutConfig,
    max_model_len: int,
    eos_token_ids: tuple[int, ...],
) -> SamplingParams:
    """The parameters of one request. Raises ValueError naming the parameter, its value and what would be accepted.

    Without `max_tokens` (or `max_new_tokens`) a request may use the rest of prompt_length + response_length, at most
    response_length and at least one token, as in verl's vLLM server. The model's context is a hard limit. End-of-sequence
    tokens stop a request unless `ignore_eos` is set, and so do `stop_token_ids`.
    """
    if unknown := sorted(set(given) - set(_ACCEPTED)):
        raise ValueError(
            f"sampling parameter {unknown[0]!r} is not known: accepted are {', '.join(_ACCEPTED)}"
        )
    penalty = given.get("repetition_penalty", 1.0)
    if penalty != 1.0:
        raise ValueError(f"sampling parameter repetition_penalty={penalty!r}: only 1.0 is supported")
    left = max_model_len - prompt_tokens
    if left < 1:
        raise ValueError(
            f"a prompt of {prompt_tokens} tokens: rollout.max_model_len={max_model_len} leaves no room"
        )
    wanted = given.get("max_tokens", given.get("max_new_tokens"))
    if wanted is None:
        rest = config.prompt_length + config.response_length - prompt_tokens
        wanted = max(1, min(config.response_length, rest))
    eos = () if given.get("ignore_eos", False) else eos_token_ids
    return SamplingParams(
        max_new_tokens=min(wanted, left) if isinstance(wanted, int) else wanted,
        stop_token_ids=(*eos, *(given.get("stop_token_ids") or ())),
        **{name: given[name] for name in ("temperature", "top_p", "top_k", "seed") if name in given},
    )


def num_threads(engine_kwargs: Mapping[str, Any]) -> int:
    """`rollout.engine_kwargs.hf.num_threads`, torch's threads in the server process. Raises ValueError for other keys."""
    given = {key: value for key, value in (engine_kwargs.get("hf") or {}).items() if value is not None}
    threads = given.pop("num_threads", 1)
    if given:
        raise ValueError(
            f"rollout.engine_kwargs.hf.{next(iter(given))} is not known: accepted is num_threads"
        )
    if not isinstance(threads, int) or threads < 1:
        raise ValueError(f"rollout.engine_kwargs.hf.num_threads={threads!r}: expected an integer >= 1")
    return threads
