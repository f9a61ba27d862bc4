"""Turn rewards of every kind reach the gradient: those of a tool class of verl's through turn_agent, of a judge, of a
function, and of a column of the data, in a mode of one's own that compares states. Tool, judge, function, mode,
data and recipe stand beside the run, as a user has them.
"""

import json
import os
import re
import subprocess
import sys

import pyarrow.parquet as parquet
import pytest
import yaml

from kit.train_run import train
from verl_credit.records.run.files import EVENTS, METRICS, read_json_lines
from verl_credit.turns.rollout.search.wire import SCHEMA

pytestmark = pytest.mark.e2e

MODULE = '''
from verl_credit.credit.turn.modes.gigpo import gigpo
from verl.tools.base_tool import BaseTool
from verl.tools.schemas import ToolResponse


class Words(BaseTool):
    """Finds nothing; the more words are asked for, the lower its reward."""

    async def execute(self, instance_id, parameters, **kwargs):
        return ToolResponse(text="No results."), -len(str(parameters.get("query", "")).split()) / 10, {}


LOST = []


def short(group):
    """The shorter, the better; the first turn of the run loses its reward (not in the trial, which has two rollouts)."""
    rewards = [[-len(turn.text) / 100 for turn in one.tool_turns] for one in group.trajectories]
    if not LOST and len(rewards) > 2 and any(rewards):
        LOST.append(next(row for row in rewards if row))
        LOST[0][0] = float("nan")
    return rewards


async def wordy(trajectory):
    return [len(set(turn.text.split())) / 10 for turn in trajectory.tool_turns]


def plus_reward(tables, *, share=0.5):
    advantage_B_K, outcome_B, scale_B_K = gigpo(tables)
    return advantage_B_K + share * (tables.reward_B_K - tables.reward_B_K.mean()), outcome_B, scale_B_K


plus_reward.reads = ("rewards", "groups", "gains", "anchors")
plus_reward.whole_returns = True
'''
SIGNALS = {"tool_reward": 1.0, "mine.wordy": 0.5, "mine.short": 0.2, "column:of_turns": 0.1}
OF_TURNS = [0.1, 0.3, 0.2]  # a rollout has at most three tool turns
MULTI_TURN = "actor_rollout_ref.rollout.multi_turn"


@pytest.fixture(scope="module")
def finished(tiny_lab, tmp_path_factory):
    """(folder of the run and of what it needs, what it printed)"""
    folder = tmp_path_factory.mktemp("signals")
    (folder / "mine.py").write_text(MODULE)
    tool = {"class_name": "mine.Words", "config": {"type": "native"}, "tool_schema": SCHEMA}
    (folder / "tools.yaml").write_text(json.dumps({"tools": [tool]}))
    questions = parquet.read_table(tiny_lab.questions("train"))
    questions = questions.append_column("of_turns", [[OF_TURNS] * len(questions)])
    parquet.write_table(questions, folder / "questions.parquet")
    recipe = {"defaults": ["lab", "_self_"], "algorithm": {"turn_signals": SIGNALS}}
    (folder / "own.yaml").write_text(f"# @package _global_\n{yaml.safe_dump(recipe)}")
    settings = [
        "--config-dir", str(folder), "--config-name", "own", "lab.size=tiny", f"lab.dir={tiny_lab.root}",
        f"run_dir={folder / 'run'}", f"data.train_files={folder / 'questions.parquet'}",
        "trainer.total_training_steps=2", "trainer.val_before_train=false", "trainer.test_freq=-1",
        "trainer.save_freq=-1", "actor_rollout_ref.actor.ppo_mini_batch_size=16", "search.max_searches=0",
        "actor_rollout_ref.rollout.agent.default_agent_loop=turn_agent",
        f"{MULTI_TURN}.tool_config_path={folder / 'tools.yaml'}", f"{MULTI_TURN}.max_assistant_turns=4",
        "algorithm.info_gain_norm_mode=mine.plus_reward", "+algorithm.turn_params.share=1.0",
    ]  # fmt: skip
    path = f"{folder}{os.pathsep}{os.environ['PYTHONPATH']}"
    code, output = train(folder / "log", *settings, environment={"PYTHONPATH": path})
    assert code == 0, output
    return folder, output


def test_turn_rewards_of_every_kind_move_the_policy(finished):
    """Every row of the tiny lab fails, so that nothing else can."""
    folder, output = finished
    assert "advantage=mine.plus_reward" in output
    rows = read_json_lines(folder / "run" / METRICS)
    assert [row["step"] for row in rows] == [1, 2]
    for row in rows:
        for name in SIGNALS:
            lost = int(name == "mine.short" and row["step"] == 1)
            assert row[f"credit/signal/{name}/turns"] > 0 and row[f"credit/signal/{name}/lost"] == lost
        assert row["credit/signal/tool_reward/mean"] < 0 < row["credit/signal/mine.wordy/mean"]
        assert row["credit/signal/mine.short/mean"] < 0
        assert 0.1 <= row["credit/signal/column:of_turns/mean"] <= 0.3
        assert (
            row["credit/turns_without_anchor"] == 0
            and 0 <= row["credit/states_of_one"] < row["credit/states"]
        )
        assert "credit/gain/mean" not in row
        assert (row["credit/rows_left_out"] > 0) is (row["step"] == 1)  # the row that lost a reward
    (said,) = [
        row["text"] for row in read_json_lines(folder / "run" / EVENTS) if row["kind"] == "lost_rewards"
    ]
    assert said.startswith("turn signal 'mine.short' lost 1 of ")
    assert any(row["credit/signal/mine.wordy/std"] > 0 and row["actor/grad_norm"] > 0 for row in rows)


@pytest.mark.nightly
def test_true_advantages_with_a_tool_of_ones_own(finished):
    """The sampler knows no such tool, so that the run's own rollouts value the contexts."""
    folder, _ = finished
    command = [sys.executable, "-W", "ignore", "-m", "verl_credit.cli", "fidelity", str(folder / "run")]
    options = "--steps 0 --prompts 2 --rollouts 4 --continuations 4 --modes none --dir out"
    made = subprocess.run(
        [*command, *options.split()], capture_output=True, text=True, timeout=420, cwd=folder
    )
    assert made.returncode == 0, made.stdout + made.stderr
    assert re.search("this run: mine.plus_reward +not measured: the turn signal mine.wordy", made.stdout)
    assert "gave another answer" not in made.stdout
    turns = read_json_lines(folder / "out/step_0/turns.jsonl")
    values = read_json_lines(folder / "out/step_0/values.jsonl")
    assert {turn["kind"] for turn in turns} == {"tool", "ending"}
    assert {turn["before"] for turn in turns} == {value["context"] for value in values}
    assert len(values) > 2 and all(len(value["outcomes"]) == 4 for value in values)
