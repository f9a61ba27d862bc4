"""verl's own SGLang server over a scripted engine: SGLang cannot be installed where there is no GPU.

Stand-ins have the names of SGLang that verl imports. `ScriptedEngine` answers as SGLang's tokenizer manager does: output ids
with the token that ended them, the reason, and log-probs as (value, id, text).
"""

from __future__ import annotations

import asyncio
import importlib
import sys
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace

# The fields that a caller may set in SGLang 0.5.12's SamplingParams; it raises TypeError for another name.
SAMPLING = {
    "max_new_tokens", "stop", "stop_token_ids", "stop_regex", "temperature", "top_p", "top_k", "min_p",
    "frequency_penalty", "presence_penalty", "repetition_penalty", "min_new_tokens", "n", "json_schema", "regex", "ebnf",
    "structural_tag", "ignore_eos", "skip_special_tokens", "spaces_between_special_tokens", "no_stop_trim",
    "custom_params", "stream_interval", "logit_bias", "sampling_seed",
}  # fmt: skip
STAND_INS = (
    "sglang", "sglang.srt", "sglang.srt.entrypoints", "sglang.srt.entrypoints.engine", "sglang.srt.entrypoints.http_server",
    "sglang.srt.entrypoints.EngineBase", "sglang.srt.managers", "sglang.srt.managers.io_struct",
    "sglang.srt.managers.tokenizer_manager", "sglang.srt.server_args", "sglang.srt.utils", "sglang.srt.weight_sync",
    "sglang.srt.weight_sync.utils",
)  # fmt: skip


@dataclass
class GenerateReqInput:
    """The fields of SGLang's that verl sets."""

    rid: str
    input_ids: list[int]
    sampling_params: dict
    return_logprob: bool
    image_data: list | None
    video_data: list | None
    lora_path: str | None = None


@dataclass
class PauseGenerationReqInput:
    mode: str


@dataclass
class ScriptedEngine:
    """Answer k is ``script[k]``: ids, or an exception. An answer is cut at its budget, and one that is empty was aborted."""

    script: list
    requests: list[GenerateReqInput] = field(default_factory=list)
    log_prob_of = staticmethod(lambda place: -0.25 * (place + 1))
    lost_log_probs: int = 0
    paused: list[str] = field(default_factory=list)

    async def generate_request(self, request, _):
        if unknown := set(request.sampling_params) - SAMPLING:
            raise TypeError(f"Unexpected keyword argument {sorted(unknown)}")
        self.requests.append(request)
        ids, most = list(self.script[len(self.requests) - 1]), request.sampling_params["max_new_tokens"]
        reason = "length" if len(ids) > most else "stop" if ids else "abort"
        ids = ids[:most]
        values = [(self.log_prob_of(place), token, None) for place, token in enumerate(ids)]
        said = {"output_token_logprobs": values[self.lost_log_probs :]} if request.return_logprob else {}
        yield {"output_ids": ids, "meta_info": {"finish_reason": {"type": reason}, **said}}

    async def pause_generation(self, request):
        self.paused.append(request.mode)


def verls_sglang(patch):
    """verl's module of the SGLang server. ``patch``: pytest's monkeypatch, which takes the stand-ins away."""
    for name in STAND_INS:
        module = ModuleType(name)
        module.__getattr__ = _named
        patch.setitem(sys.modules, name, module)
        parent, _, leaf = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], leaf, module)
    sys.modules["sglang"].__version__ = "0.5.12"
    requests = sys.modules["sglang.srt.managers.io_struct"]
    requests.GenerateReqInput, requests.PauseGenerationReqInput = GenerateReqInput, PauseGenerationReqInput
    for name in [name for name in sys.modules if name.startswith("verl.workers.rollout.sglang_rollout")]:
        patch.delitem(sys.modules, name)
    return importlib.import_module("verl.workers.rollout.sglang_rollout.async_sglang_server")


def _named(name: str) -> type:
    """Any class or function of a stand-in that verl imports and these tests do not use."""
    if name.startswith("__"):
        raise AttributeError(name)
    return type(name, (), {})


class SGLangClient:
    """verl's client of its servers, with one SGLang server and neither Ray nor a load balancer."""

    def __init__(self, patch, config, script):
        from verl.workers.rollout.llm_server import LLMServerClient

        module = verls_sglang(patch)
        self.engine = ScriptedEngine(script)
        self.server = object.__new__(module.SGLangHttpServer)
        rollout = config.actor_rollout_ref.rollout
        self.server.__dict__.update(
            config=SimpleNamespace(
                max_model_len=rollout.max_model_len, response_length=config.data.max_response_length,
                prompt_length=config.data.max_prompt_length, enable_rollout_routing_replay=False, mtp=None,
            ),
            model_config=SimpleNamespace(lora_rank=0, lora={}), _disaggregation_role="null", _pd_decode_peers=[],
            tokenizer_manager=self.engine, replica_rank=0, node_rank=0, global_steps=7,
        )  # fmt: skip
        self._client = LLMServerClient(config)
        handle = SimpleNamespace(generate=SimpleNamespace(remote=self.server.generate))

        async def acquire(request_id, **_):
            return "0", handle

        self._client._acquire_server = acquire
        self._client._release_server = lambda *_, **__: None

    async def generate(self, request_id, **request):
        return await self._client.generate(request_id, **request)

    def ask(self, **request):
        return asyncio.run(self.generate("r", **request))
