"""Rollouts of several outputs on verl's trainer: resets and sub-agents, a kill after a checkpoint, and the same again."""

import json
import os
from pathlib import Path

import pytest

from kit.faults import NOT_COMPARED, TRAINER, KillPoint, planted
from kit.session_loop import NAME
from kit.train_run import train
from verl_credit.cli import main
from verl_credit.host.step.watch import CONTEXT
from verl_credit.records.run.files import METRICS, VALIDATION, read_json_lines
from verl_credit.records.run.table_files import TURNS, read_table, table_path
from verl_credit.records.run.validation import EVALUATION, read_held_out

pytestmark = pytest.mark.e2e

ROLLOUT = "actor_rollout_ref.rollout"
SETTINGS = (
    "--config-name", "lab", "lab.size=tiny", "search.max_searches=0", f"{ROLLOUT}.agent.default_agent_loop={NAME}",
    "data.train_batch_size=4", "actor_rollout_ref.actor.ppo_mini_batch_size=2", f"{ROLLOUT}.n=4",
    "data.max_response_length=64", "data.val_max_samples=8", "trainer.val_before_train=false", "trainer.test_freq=2",
    "trainer.save_freq=2", "algorithm.info_gain_norm_mode=turn_gae", "algorithm.turn_values=features", "algorithm.lam=0.5",
    "algorithm.turn_signal=tool_reward", "algorithm.turn_values_replay=2", "algorithm.transform_mode=gtpo",
    "keep_rollouts.steps=1",
)  # fmt: skip


TOTAL = "trainer.total_training_steps"
HERE = {"PYTHONPATH": str(Path(__file__).parents[1])}


@pytest.fixture
def given(tiny_lab, tmp_path):
    (tmp_path / "loops.yaml").write_text(f"- {{name: {NAME}, _target_: kit.session_loop.ForgetfulLoop}}")
    loops = f"{ROLLOUT}.agent.agent_loop_config_path={tmp_path}/loops.yaml"
    return *SETTINGS, loops, f"lab.dir={tiny_lab.root}", f"run_dir={tmp_path / 'run'}"


def steps_of(run_dir):
    """The rows of three steps of sessions, each of which counts once."""
    rows = read_json_lines(run_dir / METRICS)
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert rows[2]["actor/grad_norm"] > 0 and rows[2]["credit/values/explained_variance"] != 0
    assert all(row["credit/rows_trained"] == 16 and row["credit/rollouts_failed"] == 0 for row in rows)
    assert all((16 * row["critic/score/mean"]) % 1 == 0 for row in rows), "a mean over outputs"
    columns = read_table(table_path(run_dir, TURNS, 3)).columns
    turns = [columns["turn"].count(turn) for turn in range(4)]
    assert {*columns["row"]} == {*range(16)} and turns[0] == turns[1] == 16 > turns[2] > turns[3] > 0
    held_out = read_json_lines(run_dir / VALIDATION)
    assert [(row["step"], row["val-aux/lab-sampled/questions"]) for row in held_out] == [(2, 8), (3, 8)]
    assert CONTEXT.strip() in (run_dir / "report.html").read_text()
    return rows


def test_three_steps_of_sessions(given, tmp_path):
    code, output = train(tmp_path / "log", *given, f"{TOTAL}=3", environment=HERE)
    assert code == 0, output
    steps_of(tmp_path / "run")


@pytest.mark.nightly
def test_a_resumed_run_of_sessions_is_the_run_that_was_not_killed(given, tmp_path):
    """The killed run makes steps 1 to 3, and the resumed one, which goes on from step 2, makes step 3 again."""
    fault = planted(KillPoint("update", f"{TRAINER}._update_actor", call=4), fired := tmp_path / "fired")
    fault["PYTHONPATH"] += os.pathsep + HERE["PYTHONPATH"]
    code, output = train(tmp_path / "first.log", *given, f"{TOTAL}=9", environment=fault)
    assert fired.exists() and code, output
    before = read_json_lines(tmp_path / "run" / METRICS)
    code, output = train(tmp_path / "second.log", *given, f"{TOTAL}=3", environment=HERE)
    assert code == 0 and "resume: exact, from step 2" in output, output
    assert [row["step"] for row in before] == [1, 2, 3]
    one, other = (
        # The resumed run evaluates after step 3, which is its last one.
        {n: v for n, v in rows[2].items() if not (NOT_COMPARED.search(n) or n.startswith("val-"))}
        for rows in (before, steps_of(tmp_path / "run"))
    )
    assert one == other


@pytest.mark.nightly
def test_a_loop_of_somebody_else_is_evaluated_by_rollouts(given, tiny_lab, tmp_path, monkeypatch):
    """Greedily, and by four drawn rollouts of a question, each of one or several outputs."""
    monkeypatch.setenv("PYTHONPATH", HERE["PYTHONPATH"])
    *named_and_settings, _ = given
    asked = ("--out", str(out := tmp_path / "evaluated"), "--samples", "4")
    assert main(["evaluate", str(tiny_lab.policy), *named_and_settings, *asked]) == 0
    result = json.loads((out / EVALUATION).read_text())
    rows = read_held_out(out, result["step"])
    turns = [[turn["text"] for turn in row["turns"]] for row in rows]
    drawn = [
        (row["id"], *map(str, texts))
        for row, texts in zip(rows, turns, strict=True)
        if row["mode"] == "sampled"
    ]
    assert result["left_out"] == 0 and len(rows) == 24 * 5 and len(drawn) == len({*drawn}) == 24 * 4
    assert {len(texts) for texts in turns} == {2, 3, 4}, "the turns of all outputs"
    assert {row["outcome"] for row in rows} == {0.0, 1.0}
    # The loop gives a score of its own, and no reward function is asked for an exact match.
    assert all("have none from the reward function" in why for why in result["not_measured"])
    counts = {(one["mode"], one["measure"]): one["questions"] for one in result["measures"]}
    assert counts["greedy", "reward"] == counts["sampled", "reward"] == counts["sampled", "pass@4"] == 24
