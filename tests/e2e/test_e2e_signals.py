"""Turn rewards of others reach the gradient: a tool class of verl's through turn_agent, compared by gigpo, and a judge in a
mode of one's own.

Both runs share one tiny lab; the tool and the judge are modules beside the run, as a user has them.
"""

import json

import pytest

from kit.train_run import train
from verl_credit.run.files import METRICS, read_json_lines

pytestmark = pytest.mark.e2e

MODULE = '''
from verl.tools.base_tool import BaseTool
from verl.tools.schemas import ToolResponse


class Words(BaseTool):
    """Finds nothing; the more words are asked for, the lower its reward."""

    async def execute(self, instance_id, parameters, **kwargs):
        return ToolResponse(text="No results."), -len(str(parameters.get("query", "")).split()) / 10, {}


async def found(trajectory):
    return [float(trajectory.golds[0].lower() in turn.observation.lower()) for turn in trajectory.tool_turns]


def plus_reward(tables, *, share=0.5):
    outcome_B = tables.outcome_advantage("grpo")
    reward_B_K = tables.reward_B_K - tables.reward_B_K.mean()
    return outcome_B[:, None] + share * reward_B_K, outcome_B, tables.ones()
'''
SCHEMA = {
    "type": "function",
    "function": {
        "name": "search",
        "description": "Search.",
        "parameters": {
            "type": "object",
            "properties": {"query": {"type": "string", "description": "words"}},
            "required": ["query"],
        },
    },
}
MULTI_TURN = "actor_rollout_ref.rollout.multi_turn"


@pytest.fixture(scope="module")
def started(tmp_path_factory):
    root = tmp_path_factory.mktemp("signals")
    (root / "mine.py").write_text(MODULE)
    tool = {"class_name": "mine.Words", "config": {"type": "native"}, "tool_schema": SCHEMA}
    (root / "tools.yaml").write_text(json.dumps({"tools": [tool]}))
    settings = [
        "--config-name", "lab", "lab.size=tiny", f"lab.dir={root / 'lab'}", "trainer.total_training_steps=2",
        "actor_rollout_ref.actor.ppo_mini_batch_size=16", "trainer.val_before_train=false", "trainer.test_freq=-1",
        "trainer.save_freq=-1",
    ]  # fmt: skip

    def start(name, *overrides):
        run_dir = root / name
        environment = {"PYTHONPATH": str(root)}
        code, output = train(
            root / f"{name}.log", *settings, f"run_dir={run_dir}", *overrides, environment=environment
        )
        assert code == 0, output
        return read_json_lines(run_dir / METRICS), output

    start.root = root
    return start


def test_what_a_tool_of_verl_returns_is_the_turns_reward(started):
    rows, _output = started(
        "tool",
        "search.max_searches=0",
        "actor_rollout_ref.rollout.agent.default_agent_loop=turn_agent",
        f"{MULTI_TURN}.tool_config_path={started.root / 'tools.yaml'}",
        f"{MULTI_TURN}.max_assistant_turns=4",
        "algorithm.turn_signal=tool_reward",
        "algorithm.info_gain_norm_mode=gigpo",
    )
    for row in rows:
        assert row["credit/signal/tool_reward/turns"] > 0 and row["credit/signal/tool_reward/lost"] == 0
        assert row["credit/signal/tool_reward/mean"] < 0 and row["credit/turns_without_anchor"] == 0
        assert 0 <= row["credit/states_of_one"] < row["credit/states"]
        assert "credit/gain/mean" not in row and row["actor/grad_norm"] > 0


def test_a_judge_and_a_mode_of_ones_own(started):
    """Every row of the tiny lab fails, so that only the judge's rewards can move the policy."""
    rows, output = started(
        "judge",
        "algorithm.info_gain_norm_mode=mine.plus_reward",
        "algorithm.turn_signal=mine.found",
        "+algorithm.turn_params.share=1.0",
    )
    assert "advantage=mine.plus_reward" in output
    for row in rows:
        assert row["credit/signal/mine.found/turns"] > 0 and row["credit/signal/mine.found/lost"] == 0
        assert "credit/gain/mean" not in row
    assert any(row["credit/signal/mine.found/std"] > 0 and row["actor/grad_norm"] > 0 for row in rows)
