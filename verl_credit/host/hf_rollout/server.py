"""The rollout server, a Ray actor that generates with transformers for agent loops."""

from typing import Any

import torch
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.config import HFModelConfig, RolloutConfig
from verl.workers.rollout.replica import TokenOutput

from verl_credit.host.hf_rollout.batcher import RequestBatcher, RequestRejected
from verl_credit.host.hf_rollout.loaded_model import build_model, eos_token_ids, max_model_len
from verl_credit.host.hf_rollout.options import num_threads, read_sampling_params
from verl_credit.host.hf_rollout.sync import WeightError, WeightSink
from verl_credit.policy.decoding_proof import prove_decoding
from verl_credit.policy.generation import BatchGenerator

QUIET_SECONDS = 0.01


class HFServer:
    """Holds one model, batches concurrent `generate` calls, and loads new weights between batches.

    With `rollout.load_format=dummy` (verl's default) the model starts with random weights and refuses to generate until the
    first weight update.
    """

    _proved = False

    def __init__(self, config: RolloutConfig, model_config: HFModelConfig, replica_rank: int):
        self.config: RolloutConfig = omega_conf_to_dataclass(config)
        self.model_config: HFModelConfig = omega_conf_to_dataclass(model_config, dataclass_type=HFModelConfig)
        if self.config.full_determinism:
            raise ValueError(
                "rollout.full_determinism=True: rollout.name=hf does not support it; seed each request"
            )
        self.replica_rank = replica_rank
        self.global_steps: int | None = None
        torch.set_num_threads(num_threads(self.config.engine_kwargs))
        self._model = build_model(self.model_config, self.config)
        self._max_model_len = max_model_len(self._model.config, self.config.max_model_len)
        self._eos_token_ids = eos_token_ids(self.model_config)
        tokenizer = self.model_config.tokenizer
        pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else self._eos_token_ids[0]
        self._generator = BatchGenerator(self._model, pad_token_id=pad, sampled_vocab_size=len(tokenizer))
        most = self.config.max_num_seqs
        self._batcher = RequestBatcher(self._generate, quiet_seconds=QUIET_SECONDS, max_batch_size=most)
        self._sink: WeightSink | None = None
        self._checksum: str | None = None
        self._why_not_ready = "no weights have arrived yet" if self.config.load_format == "dummy" else None
        if self._why_not_ready is None:
            self._prove_once()

    async def launch_server(self) -> str:
        """The address that verl shows."""
        return f"hf-rollout-{self.replica_rank}"

    async def start_line(self) -> str:
        """Where the server generates, and how many rows at a time."""
        most = f"at most {self.config.max_num_seqs} rows at a time (rollout.max_num_seqs)"
        return f"rollouts: transformers on cpu, {most}"

    def _generate(self, prompts, params):
        self._require_weights()
        return self._generator.generate(prompts, params)

    def _prove_once(self) -> None:
        """The first weights decide, because random ones of `load_format=dummy` would hide a wrong mask."""
        if not self._proved:
            prove_decoding(self._generator)
            self._proved = True

    def _require_weights(self) -> None:
        if self._why_not_ready:
            raise WeightError(f"the rollout server cannot generate: {self._why_not_ready}")

    async def generate(
        self,
        prompt_ids: list[int],
        sampling_params: dict[str, Any],
        request_id: str,
        image_data: list[Any] | None = None,
        video_data: list[Any] | None = None,
        **unused: Any,
    ) -> TokenOutput:
        """Answers one request, token ids in and out, as verl's servers define it. Raises ValueError for a bad sampling
        parameter or prompt, and the engine's exceptions."""
        if image_data or video_data or any(value is not None and value != 0 for value in unused.values()):
            raise ValueError(
                "rollout.name=hf generates from text only: images, video, audio are not supported"
            )
        prompt = [int(token) for token in prompt_ids]
        limits = self.config, self._max_model_len, self._eos_token_ids
        params = read_sampling_params(sampling_params, len(prompt), *limits)
        self._generator.check(prompt, params)
        fields = {"global_steps": self.global_steps}
        try:
            output = await self._batcher.submit(prompt, params)
        except RequestRejected:
            return TokenOutput(token_ids=[], stop_reason="aborted", extra_fields=fields)
        log_probs = output.log_probs if sampling_params.get("logprobs", False) else None
        given = {"token_ids": output.token_ids, "log_probs": log_probs, "stop_reason": "completed"}
        fields = {"global_steps": self.global_steps, "finish_reason": output.finish_reason}
        return TokenOutput(**given, extra_fields=fields)

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
        """Checksum of the model. Raises WeightError when a weight is missing, RuntimeError when the first decode wrongly."""
        checksum = await self._batcher.exclusive(self._sink.finish)
        await self._batcher.exclusive(self._prove_once)
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
        """Does nothing: no cache outlives a batch, a CPU has no memory to hand over, and the server has no profiler."""

    clear_kv_cache = release_kv_cache = resume_kv_cache = _nothing
    sleep = wake_up = start_profile = stop_profile = _nothing
