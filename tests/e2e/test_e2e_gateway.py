"""A program that speaks to an endpoint, behind the gateway of uni-agent: `make test-gateway UNI_AGENT=PATH`."""

import asyncio
import os
from pathlib import Path

import numpy as np
import pytest
import transfer_queue
from omegaconf import OmegaConf
from transfer_queue import KVBatchMeta
from verl.utils import tensordict_utils as tu
from verl.workers.rollout.replica import TokenOutput

from kit.byte_world import make_tokenizer
from kit.fake_store import FakeStore
from kit.train_run import train
from kit.turn_rows import estimate, step_inputs
from verl_credit.host.step.store import fetch_turn_batch, prompt_ids
from verl_credit.records.run.files import EVENTS, METRICS, read_json_lines
from verl_credit.records.run.table_files import TURNS, read_table, table_path
from verl_credit.turns.rollout.sessions import joined
from verl_credit.turns.step.signals.signal import turn_texts

CHECKOUT = os.environ.get("UNI_AGENT")
pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(not CHECKOUT, reason="UNI_AGENT names no checkout of verl-project/uni-agent"),
]
ROLLOUT = "actor_rollout_ref.rollout"
GATEWAY = f"+{ROLLOUT}.custom.agent_framework"
SETTINGS = (
    "--config-name", "lab", "lab.size=tiny", "search.max_searches=0", "data.train_batch_size=2", f"{ROLLOUT}.n=4",
    "actor_rollout_ref.actor.ppo_mini_batch_size=1", "data.max_response_length=64", "trainer.total_training_steps=2",
    "trainer.test_freq=-1", "trainer.val_before_train=false", "trainer.save_freq=-1",
    f"{ROLLOUT}.agent.agent_loop_manager_class=uni_agent.framework.entry.AgentFrameworkRolloutAdapter",
    f"{GATEWAY}.gateway_count=1", f"{GATEWAY}.agent_runners.mine.runner_fqn=kit.endpoint_agent.run",
    f"{GATEWAY}.use_reward_loop_worker=false", f"{GATEWAY}.log_dir=null",
    "algorithm.info_gain_norm_mode=turn_gae", "algorithm.turn_values=group", "algorithm.turn_signal=none",
)  # fmt: skip


ANSWERS = {
    "So far:": ("Rome", "Paris"),
    "It says:": ("so", "so"),
    "Help.": ("page", "page"),
    "Where?": ("look", "look"),
}
"""What the scripted engine answers in the first and in the second rollout, by what it reads."""


class Engine:
    def __init__(self, tokenizer):
        self.tokenizer = tokenizer

    async def generate(self, request_id, *, prompt_ids, sampling_params, **_):
        read = self.tokenizer.decode(prompt_ids)
        answer = next(answers for seen, answers in ANSWERS.items() if seen in read)["rollout-1" in request_id]
        ids = self.tokenizer(f"{answer}<|im_end|>", add_special_tokens=False)["input_ids"]
        versions = {"min_global_steps": 0, "max_global_steps": 0}
        return TokenOutput(
            token_ids=ids, log_probs=[-1.0] * len(ids), stop_reason="completed", extra_fields=versions
        )


def test_the_outputs_of_the_gateway_are_sessions_with_turn_credit(monkeypatch):
    """The framework, its endpoint over HTTP and the agent, with a scripted engine, in this process and without Ray."""
    monkeypatch.syspath_prepend(CHECKOUT)
    from uni_agent.framework.framework import OpenAICompatibleAgentFramework
    from uni_agent.gateway.config import GatewayActorConfig
    from uni_agent.gateway.gateway import _GatewayActor

    kept, tokenizer = FakeStore().install(monkeypatch), make_tokenizer()

    async def put(**given):
        return kept.kv_batch_put(**given)

    async def tag(**given):
        pass

    monkeypatch.setattr(transfer_queue, "async_kv_batch_put", put)
    monkeypatch.setattr(transfer_queue, "async_kv_put", tag)
    ours = {"n": 2, "temperature": 1.0, "top_p": 1.0, "top_k": -1, "calculate_log_probs": True}
    theirs = {"log_dir": None, "agent_runners": {"mine": {"runner_fqn": "kit.endpoint_agent.run"}}}
    rollout = OmegaConf.create(ours | {"custom": {"agent_framework": theirs}})

    async def roll():
        gateway = _GatewayActor(GatewayActorConfig(tokenizer=tokenizer), Engine(tokenizer))
        await gateway.start()
        framework = OpenAICompatibleAgentFramework.from_config(
            config=OmegaConf.create({"actor_rollout_ref": {"rollout": rollout}}), gateway_manager=gateway
        )
        row = {"uid": "q", "raw_prompt": [{"role": "user", "content": "Where?"}], "extra_info": {}}
        row |= {"reward_model": {"ground_truth": {"target": ["Paris"]}}}
        prompts = {name: np.empty(1, dtype=object) for name in row}
        for name, value in row.items():
            prompts[name][0] = value
        prompts = tu.get_tensordict(prompts, {"global_steps": 1})
        await framework.generate_sequences(prompts)
        await gateway.shutdown()

    asyncio.run(roll())
    keys = sorted(key for _, key in kept.rows)
    assert keys == [f"q_{session}_{output}" for session in range(2) for output in range(3)]
    batch = KVBatchMeta(keys=keys, tags=[kept.tags["train", key] for key in keys], partition_id="train")
    turns = fetch_turn_batch(batch)
    rollouts = joined(turns)
    for row, last in enumerate(("Rome", "Paris")):
        texts = turn_texts(
            rollouts.response_ids[row], rollouts.turn_ids_B_T[row].tolist(), 4, tokenizer.decode
        )
        assert [text.removesuffix("<|im_end|>") for text, _ in texts] == ["page", "look", "so", last]
    outcomes = [float(kept.rows["train", key]["rm_scores"].sum()) for key in keys]
    assert outcomes == [0.0] * 3 + [1.0] * 3
    given = {"info_gain_norm_mode": "turn_gae", "turn_values": "group"}
    step = estimate(step_inputs(rollouts, [[None] * 3] * 2, **given), turns, outcomes, prompt_ids(batch))
    own_B_T = turns.turn_ids_B_T >= 0
    signs = [step.advantage_B_T[row][own_B_T[row]].sign().unique().tolist() for row in range(6)]
    assert signs == [[-1.0]] * 3 + [[1.0]] * 3


def test_a_program_that_resets_its_context_and_asks_a_sub_agent_trains(tiny_lab, tmp_path):
    """Its four calls are three outputs of a session: the sub-agent's, the first context's two, that after the reset."""
    run_dir, paths = tmp_path / "run", [Path(__file__).parents[1], Path(CHECKOUT).resolve()]
    code, output = train(
        tmp_path / "log.txt", *SETTINGS, f"lab.dir={tiny_lab.root}", f"run_dir={run_dir}",
        environment={"PYTHONPATH": os.pathsep.join(map(str, paths))},
    )  # fmt: skip
    assert code == 0, output
    rows = read_json_lines(run_dir / METRICS)
    assert [row["step"] for row in rows] == [1, 2]
    for row in rows:
        assert (row["credit/rollouts_failed"], row["credit/rows_trained"], row["credit/turns_per_row"]) == (
            0,
            8,
            4,
        )
        assert (8 * row["critic/score/mean"]) % 1 == 0
    assert sum(row["actor/grad_norm"] for row in rows) > 0
    columns = read_table(table_path(run_dir, TURNS, 2)).columns
    assert [columns["turn"].count(turn) for turn in range(4)] == [8] * 4 and max(columns["tokens"]) <= 6
    noted = {row["kind"]: row["text"] for row in read_json_lines(run_dir / EVENTS)}
    assert "not watched" in noted["agent_loops"] and "runs of the response mask" in noted["turn_ids"]
