"""The rollout server, a Ray actor that generates with transformers for agent loops, and the replica that starts it."""

import asyncio
import copy
from collections.abc import Mapping
from typing import Any

import ray
import torch
from transformers import AutoModelForCausalLM
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.torch_dtypes import PrecisionType
from verl.workers.config import HFModelConfig, RolloutConfig
from verl.workers.rollout.replica import RolloutReplica, TokenOutput

from verl_credit.host.hf_rollout.batcher import RequestBatcher, RequestRejected
from verl_credit.host.hf_rollout.sync import WeightError, WeightSink, server_name
from verl_credit.policy.generation import BatchGenerator
from verl_credit.policy.sampling import SamplingParams


class HFServer:
    """Holds one model, batches concurrent `generate` calls, and loads new weights between batches.

    With `rollout.load_format=dummy` (verl's default) the model starts with random weights and refuses to generate until the
    first weight update; any other value loads the files of `model.path`.
    """

    def __init__(self, config: RolloutConfig, model_config: HFModelConfig, replica_rank: int):
        self.config: RolloutConfig = omega_conf_to_dataclass(config)
        self.model_config: HFModelConfig = omega_conf_to_dataclass(model_config, dataclass_type=HFModelConfig)
        if self.config.full_determinism:
            raise ValueError(
                "rollout.full_determinism=True is not supported by rollout.name=hf: seed each request"
            )
        self.replica_rank = replica_rank
        self.global_steps: int | None = None
        num_threads, quiet_seconds = engine_options(self.config.engine_kwargs)
        torch.set_num_threads(num_threads)
        self._model = build_model(self.model_config, self.config)
        self._max_model_len = max_model_len(self._model.config, self.config.max_model_len)
        self._eos_token_ids = eos_token_ids(self.model_config)
        tokenizer = self.model_config.tokenizer
        pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else self._eos_token_ids[0]
        self._generator = BatchGenerator(self._model, pad_token_id=pad, sampled_vocab_size=len(tokenizer))
        self._batcher = RequestBatcher(
            self._generate, max_batch_size=self.config.max_num_seqs, quiet_seconds=quiet_seconds
        )
        self._sink: WeightSink | None = None
        self._checksum: str | None = None
        self._why_not_ready = "no weights have arrived yet" if self.config.load_format == "dummy" else None

    async def launch_server(self) -> str:
        """The address that verl shows."""
        return f"hf-rollout-{self.replica_rank}"

    def _generate(self, prompts, params):
        if self._why_not_ready:
            raise WeightError(f"the rollout server cannot generate: {self._why_not_ready}")
        return self._generator.generate(prompts, params)

    async def generate(
        self,
        prompt_ids: list[int],
        sampling_params: dict[str, Any],
        request_id: str,
        image_data: list[Any] | None = None,
        video_data: list[Any] | None = None,
        **unused: Any,
    ) -> TokenOutput:
        """Answers one request, token ids in and out, as verl's servers define it.

        `log_probs` are those of the temperature-scaled distribution before top-k and top-p. Raises ValueError for a bad
        sampling parameter or prompt, and the engine's exceptions.
        """
        if image_data or video_data or any(value is not None and value != 0 for value in unused.values()):
            raise ValueError(
                "rollout.name=hf generates from text only: images, video, audio are not supported"
            )
        prompt = [int(token) for token in prompt_ids]
        if sampling_params.get("prompt_logprobs") is not None:
            return await self._score(prompt, sampling_params["prompt_logprobs"])
        limits = self.config, self._max_model_len, self._eos_token_ids
        params = read_sampling_params(sampling_params, len(prompt), *limits)
        self._generator.check(prompt, params)
        fields = {"global_steps": self.global_steps}
        try:
            output = await self._batcher.submit(prompt, params)
        except RequestRejected:
            return TokenOutput(token_ids=[], stop_reason="aborted", extra_fields=fields)
        ids, log_probs = (
            output.token_ids,
            output.log_probs if sampling_params.get("logprobs", False) else None,
        )
        fields = {"global_steps": self.global_steps, "finish_reason": output.finish_reason}
        return TokenOutput(token_ids=ids, log_probs=log_probs, stop_reason="completed", extra_fields=fields)

    async def _score(self, prompt: list[int], wanted: int) -> TokenOutput:
        """Log-probs of a prompt's own tokens at temperature 1, in the form of verl's vLLM server."""
        if wanted != 0:
            raise ValueError(
                f"prompt_logprobs={wanted}: rollout.name=hf gives those of the prompt's own tokens (0)"
            )
        if not 2 <= len(prompt) <= self._max_model_len:
            raise ValueError(f"a prompt of {len(prompt)} tokens; expected 2 to {self._max_model_len}")
        values = await self._batcher.exclusive(self._generator.prompt_log_probs, prompt)
        fields = {
            "global_steps": self.global_steps,
            "num_cached_tokens": 0,
            "prompt_ids": [[token] for token in prompt[1:]] + [[0]],
            "prompt_logprobs": [[value] for value in values] + [[0.0]],
        }
        return TokenOutput(token_ids=[], log_probs=[], stop_reason="completed", extra_fields=fields)

    # --- weights: begin, any number of buckets, finish ---

    async def begin_weight_update(self) -> None:
        """Refuse to generate until `finish_weight_update` succeeds."""

        def begin() -> None:
            self._why_not_ready = "a weight update has begun and not finished"
            self._sink, self._checksum = WeightSink(self._model), None

        await self._batcher.exclusive(begin)

    async def load_weight_bucket(self, bucket: bytes) -> None:
        """Copy one safetensors document into the model."""
        await self._batcher.exclusive(self._sink.load, bucket)

    async def finish_weight_update(self, global_steps: int | None) -> str:
        """Checksum of the updated model; raises WeightError when a weight is missing."""
        checksum = await self._batcher.exclusive(self._sink.finish)
        if global_steps is not None:
            self.global_steps = global_steps
        self._sink, self._checksum, self._why_not_ready = None, checksum, None
        return checksum

    async def weights_checksum(self) -> str | None:
        """Checksum after the last complete update; None before the first."""
        return self._checksum

    async def set_global_steps(self, global_steps: int) -> None:
        self.global_steps = global_steps

    # --- methods that verl calls on every server ---

    async def abort_all_requests(self, reject_request: bool = False) -> dict[str, Any]:
        """Start no further batch; the running one finishes, and waiting requests stay or are rejected."""
        await self._batcher.pause(reject=reject_request)
        return {"aborted_count": 0, "request_ids": []}

    async def resume_generation(self) -> None:
        self._batcher.resume()

    async def wait_for_requests_to_drain(self) -> None:
        await self._batcher.drain()

    async def _nothing(self, *args: Any, **kwargs: Any) -> None:
        """Does nothing: the weights stay in memory, no cache outlives a batch, and the server has no profiler."""

    wake_up = sleep = clear_kv_cache = release_kv_cache = resume_kv_cache = _nothing
    start_profile = stop_profile = _nothing


class HFReplica(RolloutReplica):
    """Starts one server for `tensor_model_parallel_size` training ranks. The model itself is not split."""

    async def launch_servers(self) -> None:
        if len(self.workers) != self.world_size:
            raise ValueError(
                f"replica {self.replica_rank} got {len(self.workers)} workers, but rollout."
                "tensor_model_parallel_size x data_parallel_size x pipeline_model_parallel_size is "
                f"{self.world_size}"
            )
        node_id = await self.workers[0].__ray_call__.remote(
            lambda worker: ray.get_runtime_context().get_node_id()
        )
        kind = "reward_" if self.is_reward_model else "teacher_" if self.is_teacher_model else ""
        there = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node_id, soft=False)
        name = server_name(self.replica_rank, kind, self.name_suffix)
        options = {"name": name, "scheduling_strategy": there, "max_concurrency": self.max_concurrency}
        given = {"config": self.config, "model_config": self.model_config, "replica_rank": self.replica_rank}
        server = ray.remote(HFServer).options(**options).remote(**given)
        self.servers.append(server)
        self._server_handle = server
        self._server_address = await server.launch_server.remote()

    async def sleep(self) -> None:
        await asyncio.gather(*[server.wait_for_requests_to_drain.remote() for server in self.servers])
        await super().sleep()


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
        wanted = max(
            1, min(config.response_length, config.prompt_length + config.response_length - prompt_tokens)
        )
    eos = () if given.get("ignore_eos", False) else eos_token_ids
    return SamplingParams(
        max_new_tokens=min(wanted, left) if isinstance(wanted, int) else wanted,
        temperature=given.get("temperature", 1.0),
        top_p=given.get("top_p", 1.0),
        top_k=given.get("top_k", -1),
        seed=given.get("seed"),
        stop_token_ids=(*eos, *(given.get("stop_token_ids") or ())),
    )


def engine_options(engine_kwargs: Mapping[str, Any]) -> tuple[int, float]:
    """`rollout.engine_kwargs.hf`: torch's threads in the server process, and the seconds (from `quiet_ms`) without a new
    request after which a batch starts. Raises ValueError for any other key."""
    options: dict[str, Any] = {"num_threads": 1, "quiet_ms": 10.0}
    given = {key: value for key, value in (engine_kwargs.get("hf") or {}).items() if value is not None}
    unknown = sorted(given.keys() - options.keys())
    if unknown:
        raise ValueError(
            f"rollout.engine_kwargs.hf.{unknown[0]} is not known: accepted are {', '.join(options)}"
        )
    num_threads, quiet_ms = (options | given).values()
    if not isinstance(num_threads, int) or num_threads < 1:
        raise ValueError(f"rollout.engine_kwargs.hf.num_threads={num_threads!r}: expected an integer >= 1")
    if not 0 <= quiet_ms <= 1000:
        raise ValueError(f"rollout.engine_kwargs.hf.quiet_ms={quiet_ms!r}: expected 0 to 1000")
    return num_threads, quiet_ms / 1000


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
