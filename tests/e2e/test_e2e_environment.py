"""An environment on verl's trainer: rows by `prepare env`, two steps, an evaluation, and what the records say."""

import json
from pathlib import Path

import pytest

from kit.environments import CORRIDOR
from kit.faults import TRAINER, KillPoint, differences, planted
from kit.train_run import TrainRun, train
from verl_credit.cli import main
from verl_credit.records.run.files import METRICS, VALIDATION, read_json_lines
from verl_credit.records.run.table_files import TURNS, read_table, table_path
from verl_credit.records.run.validation import EVALUATION, read_held_out

pytestmark = pytest.mark.e2e

PRINTED = f"environment {CORRIDOR}: 2 actions, rewards, names of states, progress, success"
SAVED = (
    "trainer.save_freq=1",
    "trainer.val_before_train=false",
)  # a run that goes on evaluates before its first step, too
TESTS = str(Path(__file__).parents[1])
ACTION = "environment.action=kit.environments.either"
SETTINGS = (
    "--config-name", "doorkey", f"environment.path={CORRIDOR}", "~environment.kwargs", "+environment.kwargs.length=3",
    "environment.max_steps=6", "environment.processes=1", ACTION, "data.train_batch_size=4",
    "actor_rollout_ref.actor.ppo_mini_batch_size=2", "actor_rollout_ref.rollout.n=4", "data.max_response_length=320",
    "trainer.total_training_steps=2", "trainer.test_freq=2", "trainer.save_freq=-1",
)  # fmt: skip


@pytest.fixture(scope="module")
def given(tiny_lab, tmp_path_factory):
    """The files and the model of a run."""
    tmp_path = tmp_path_factory.mktemp("corridor")
    (tmp_path / "prompt.txt").write_text("Walk.")
    rows = ("--seeds", "0:8", "--held-out", "8:12", "--prompt", str(tmp_path / "prompt.txt"))
    out = ("--out", str(tmp_path / "data"), "--path", CORRIDOR)
    assert main(["prepare", "env", *out, *rows, "environment.kwargs.length=3", ACTION]) == 0
    files = [f"data.{name}_files={tmp_path}/data/{name}.parquet" for name in ("train", "val")]
    return *SETTINGS, *files, f"actor_rollout_ref.model.path={tiny_lab.root}/policy"


def trained(run_dir, *given):
    here = {"PYTHONPATH": TESTS}
    code, output = train(run_dir.with_suffix(".txt"), *given, f"run_dir={run_dir}", environment=here)
    assert code == 0, output
    return output


@pytest.fixture(scope="module")
def straight(given, tmp_path_factory):
    """(folder, what it printed) of a run without windows that nothing disturbs."""
    run_dir = tmp_path_factory.mktemp("straight") / "run"
    return run_dir, trained(run_dir, *given, *SAVED)


@pytest.mark.nightly
def test_two_steps_in_a_corridor(straight):
    run_dir, output = straight
    assert PRINTED in output
    first, second = read_json_lines(run_dir / METRICS)
    assert 0 < first["credit/env/success"] < 1 and first["credit/outcome/em"] == first["credit/env/success"]
    assert first["credit/stop/done"] == first["credit/env/success"] and first["credit/tool/fault_rows"] == 0
    assert first["credit/turns_per_row"] == first["credit/env/steps"] > 3
    assert first["actor/grad_norm"] > 0 and second["credit/values/states"] > first["credit/values/states"]
    assert any("/em/" in name for name in read_json_lines(run_dir / VALIDATION)[-1])
    assert "room 1 of 3" in (run_dir / "report.html").read_text()


def test_two_steps_whose_turns_are_rows(given, tmp_path):
    """The record is the rollout's, however many rows it has."""
    windows = ("environment.window=1", "data.max_prompt_length=300", "data.max_response_length=24")
    run_dir = tmp_path / "run"
    assert PRINTED in trained(run_dir, *given, *windows)
    first, second = read_json_lines(run_dir / METRICS)
    turns = read_table(table_path(run_dir, TURNS, 1)).columns
    rollouts = dict(zip(turns["row"], turns["outcome"], strict=True))
    assert len(rollouts) == 16 and len(turns["row"]) == 16 * first["credit/turns_per_row"] > 48
    assert first["credit/env/success"] == sum(rollouts.values()) / 16 and first["credit/rollouts_failed"] == 0
    assert first["credit/outcome/em"] == first["credit/env/success"] and first["credit/tool/fault_rows"] == 0
    assert first["credit/turns_per_row"] == first["credit/env/steps"]
    assert first["credit/stop/done"] == first["credit/env/success"] and first["credit/stop/length"] == 0
    assert first["actor/grad_norm"] > 0 and second["credit/values/states"] > first["credit/values/states"]


@pytest.mark.nightly
def test_a_policy_is_evaluated_by_success_return_and_steps(given, tmp_path, monkeypatch):
    """With windows, whose trajectories have the turns of all their rows."""
    monkeypatch.setenv("PYTHONPATH", TESTS)
    *settings, model = given
    windows = ("environment.window=1", "data.max_prompt_length=300", "data.max_response_length=24")
    named = ("--config-name", "doorkey", "--out", str(tmp_path), "--samples", "2")
    assert main(["evaluate", model.partition("=")[2], *settings[2:], *windows, *named]) == 0
    result = json.loads((tmp_path / EVALUATION).read_text())
    rows = read_held_out(tmp_path, result["step"])
    assert len(rows) == 4 * 3 and result["left_out"] == 0 and not result["not_measured"]
    for row in rows:
        found = row["scores"]
        assert found["return"] == 1.125 * found["em"] - 0.125 * found["steps"]
        assert len(row["turns"]) == found["steps"] and row["outcome"] == found["em"]
    means = {(one["mode"], one["measure"]): one["mean"] for one in result["measures"]}
    for name in ("em", "return", "steps"):
        of_greedy = [row["scores"][name] for row in rows if row["mode"] == "greedy"]
        assert means["greedy", name] == pytest.approx(sum(of_greedy) / 4)
    assert not {"answered", "f1"} & {name for _, name in means}


@pytest.mark.nightly
def test_a_killed_run_goes_on_as_one_that_nothing_disturbed(given, straight, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", TESTS)
    saved, run_dir = (*given, *SAVED), tmp_path / "killed"
    point = KillPoint("update", f"{TRAINER}._update_actor", call=2)
    planted_here = planted(point, fired := tmp_path / "fired")
    TrainRun(tmp_path / "first.txt", *saved, f"run_dir={run_dir}", environment=planted_here).wait()
    assert fired.exists() and [row["step"] for row in read_json_lines(run_dir / METRICS)] == [1]
    assert "resume: exact, from step 1" in trained(run_dir, *saved)
    assert differences(straight[0], run_dir)[1] == []
