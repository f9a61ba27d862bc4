"""The rollout server, a Ray actor that generates with transformers for agent loops, and the replica that starts it."""

import asyncio
from typing import Any

import ray
import torch
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.config import HFModelConfig, RolloutConfig
from verl.workers.rollout.replica import RolloutReplica, TokenOutput

from verl_credit.host.hf_rollout.batcher import RequestBatcher, RequestRejected
from verl_credit.host.hf_rollout.options import EngineOptions, build_model, eos_token_ids, max_model_len
from verl_credit.host.hf_rollout.options import sampling_params as read_sampling_params
from verl_credit.host.hf_rollout.sync import WeightError, WeightSink, server_name
from verl_credit.policy.generation import BatchGenerator


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
        options = EngineOptions.read(dict(self.config.engine_kwargs))
        torch.set_num_threads(options.num_threads)
        self._model = build_model(self.model_config, self.config)
        self._max_model_len = max_model_len(self._model.config, self.config.max_model_len)
        self._eos_token_ids = eos_token_ids(self.model_config)
        tokenizer = self.model_config.tokenizer
        pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else self._eos_token_ids[0]
        self._generator = BatchGenerator(self._model, pad_token_id=pad, sampled_vocab_size=len(tokenizer))
        self._batcher: RequestBatcher | None = None
        self._quiet_seconds = options.quiet_ms / 1000
        self._sink: WeightSink | None = None
        self._checksum: str | None = None
        self._why_not_ready = "no weights have arrived yet" if self.config.load_format == "dummy" else None

    async def launch_server(self) -> str:
        """Make the batcher in the actor's event loop; returns the address that verl shows."""
        self._batcher = RequestBatcher(
            self._generate, max_batch_size=self.config.max_num_seqs, quiet_seconds=self._quiet_seconds
        )
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
        params = read_sampling_params(
            sampling_params,
            prompt_tokens=len(prompt),
            prompt_length=self.config.prompt_length,
            response_length=self.config.response_length,
            max_model_len=self._max_model_len,
            eos_token_ids=self._eos_token_ids,
        )
        self._generator.check(prompt, params)
        extra_fields = {"global_steps": self.global_steps}
        try:
            output = await self._batcher.submit(prompt, params)
        except RequestRejected:
            return TokenOutput(token_ids=[], stop_reason="aborted", extra_fields=extra_fields)
        log_probs = output.log_probs if sampling_params.get("logprobs", False) else None
        return TokenOutput(
            token_ids=output.token_ids,
            log_probs=log_probs,
            stop_reason="completed",
            extra_fields={"global_steps": self.global_steps, "finish_reason": output.finish_reason},
        )

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
        await self._batcher.exclusive(self._begin)

    def _begin(self) -> None:
        self._why_not_ready = "a weight update has begun and not finished"
        self._sink, self._checksum = WeightSink(self._model), None

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

    async def statistics(self) -> dict[str, int]:
        """Batches run and rows in them since the start."""
        return {"batches": self._batcher.batches, "rows": self._batcher.rows}

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


def _node_id(worker: object) -> str:
    return ray.get_runtime_context().get_node_id()


class HFReplica(RolloutReplica):
    """Starts one server for `tensor_model_parallel_size` training ranks. The model itself is not split."""

    async def launch_servers(self) -> None:
        if len(self.workers) != self.world_size:
            raise ValueError(
                f"replica {self.replica_rank} got {len(self.workers)} workers, but rollout."
                "tensor_model_parallel_size x data_parallel_size x pipeline_model_parallel_size is "
                f"{self.world_size}"
            )
        node_id = await self.workers[0].__ray_call__.remote(_node_id)
        kind = "reward_" if self.is_reward_model else "teacher_" if self.is_teacher_model else ""
        server = (
            ray.remote(HFServer)
            .options(
                name=server_name(self.replica_rank, kind, self.name_suffix),
                scheduling_strategy=ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(
                    node_id, soft=False
                ),
                max_concurrency=self.max_concurrency,
            )
            .remote(config=self.config, model_config=self.model_config, replica_rank=self.replica_rank)
        )
        self.servers.append(server)
        self._server_handle = server
        self._server_address = await server.launch_server.remote()

    async def sleep(self) -> None:
        await asyncio.gather(*[server.wait_for_requests_to_drain.remote() for server in self.servers])
        await super().sleep()
