"""Trajectories of the search agent with a scripted policy and a scripted search server."""

from __future__ import annotations

import asyncio
from functools import lru_cache
from types import SimpleNamespace

from omegaconf import OmegaConf

from kit.recipes import load_config
from verl_credit.names import ROW_RECORD

REQUIRED = [
    "data.train_files=x",
    "data.val_files=x",
    "actor_rollout_ref.model.path=x",
    "search.url=http://127.0.0.1:9",
    "search.max_searches=2",
    "search.max_new_tokens=200",
    "actor_rollout_ref.rollout.multi_turn.format=hermes",  # as the start decides it by the lab's template
    "actor_rollout_ref.rollout.multi_turn.max_parallel_calls=4",
]


@lru_cache(maxsize=64)
def _composed(*overrides):
    """A loop changes nothing in its configuration."""
    config = load_config("search_cpu", [*REQUIRED, *overrides])
    OmegaConf.set_readonly(config, True)
    return config


def run(
    tokenizer,
    script,
    *overrides,
    agent="search_agent",
    lookup=None,
    step=1,
    tools=(),
    max_tokens=None,
    versions=(),
    model_type="qwen3",
    policy=None,
    params=None,
    question="Who?",
    **row,
):
    """(output, policy) of one trajectory; ``lookup`` replaces the search, ``tools`` are what the worker has loaded.

    ``policy``: another client of an engine. ``agent``: a name in verl's registry. ``max_tokens``: of a turn, for loops that
    set no budget. ``params``: further sampling parameters, which verl sends with every turn. ``model_type``: of the policy's
    config.json; by it verl chooses how it appends to the stream."""
    from verl.experimental.agent_loop.agent_loop import DictConfigWrap, ToolListWrap, _agent_loop_registry
    from verl.utils.dataset.rl_dataset import RLHFDataset

    from verl_credit.host.rollout import env_agent, search_agent  # noqa: F401  (the import registers the agents)
    from verl_credit.host.rollout.loop_maker import make_loop

    config = _composed(*overrides)
    policy = policy or ScriptedPolicy(tokenizer, script)
    policy.versions = versions

    async def found(query):
        return f"Page 1: about {query}\ntext", ["7"], 1

    async def trajectory():
        loop = make_loop(  # as a worker makes one
            _agent_loop_registry[agent],
            trainer_config=DictConfigWrap(config),
            server_manager=policy,
            tokenizer=tokenizer,
            processor=None,
            dataset_cls=RLHFDataset,
            data_config=DictConfigWrap(config.data),
            tools=ToolListWrap(list(tools)),
            hf_model_type=model_type,
        )
        policy.tools = [schema["function"]["name"] for schema in loop.tool_schemas]
        if getattr(loop, "search", None) is not None:
            loop.search.lookup = lookup or found
        sent = {"temperature": 1.0} | (params or {}) | ({"max_tokens": max_tokens} if max_tokens else {})
        prompt = [{"role": "user", "content": question}]
        return await loop.run(sent, raw_prompt=prompt, uid="u", session_id=0, global_steps=step, **row)

    return asyncio.run(trajectory()), policy


def record(output):
    return output.extra_fields[ROW_RECORD]


def policy_text(tokenizer, output, turn):
    ids = [t for t, k in zip(output.response_ids, output.turn_ids, strict=True) if k == turn]
    return tokenizer.decode(ids)


class ScriptedPolicy:
    """Stands in for the rollout engine: turn k of a trajectory is script[k]."""

    def __init__(self, tokenizer, script):
        self.tokenizer, self.script, self.requests = tokenizer, list(script), []

    versions = ()
    """(first, last) version of the weights behind each turn, as an asynchronous trainer's engine says them."""

    async def generate(self, request_id, *, prompt_ids, sampling_params, **_):
        self.request_ids = {*getattr(self, "request_ids", ()), request_id}
        self.requests.append((prompt_ids, sampling_params))
        ids = self.tokenizer(self.script[len(self.requests) - 1], add_special_tokens=False)["input_ids"]
        ids = ids[: sampling_params["max_tokens"]]
        return SimpleNamespace(
            token_ids=ids,
            stop_reason="completed" if ids else "aborted",
            log_probs=[-0.5] * len(ids),
            routed_experts=None,
            num_preempted=0,
            extra_fields={"global_steps": 1} | self._versions(len(self.requests) - 1),
        )

    def _versions(self, turn):
        names = "min_global_steps", "max_global_steps"
        return dict(zip(names, self.versions[turn], strict=True)) if turn < len(self.versions) else {}
