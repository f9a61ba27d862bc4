"""turn_gae with values on verl's trainer: a run that is killed after a checkpoint goes on as if it had not been."""

import pytest

from kit.faults import SAVED, TRAINER, KillPoint, run_killed, run_straight
from verl_credit.records.run.files import METRICS, VALUES, read_json_lines
from verl_credit.records.run.table_files import TURNS, read_table, table_path

pytestmark = [pytest.mark.e2e, pytest.mark.nightly]

SETTINGS = (
    "algorithm.info_gain_norm_mode=turn_gae", "algorithm.turn_values=features", "algorithm.turn_signal=info_gain",
    "algorithm.turn_values_replay=2", "algorithm.lam=0.5", "+algorithm.turn_params.scale=rms",
    "algorithm.transform_mode=none", "algorithm.info_gain_warmup_steps=0",
)  # fmt: skip
CRITIC = (
    "algorithm.info_gain_norm_mode=turn_gae", "algorithm.turn_values=critic", "algorithm.turn_signal=info_gain",
    "algorithm.lam=0.5", "critic.enable=true", "critic.optim.lr=1e-3", "algorithm.transform_mode=none",
    "algorithm.info_gain_warmup_steps=0",
)  # fmt: skip
KILLED = KillPoint("update", f"{TRAINER}._update_actor", call=SAVED + 1)


def test_a_resumed_run_has_the_values_of_one_that_nothing_disturbed(tiny_lab, tmp_path):
    straight = run_straight(tmp_path / "straight", tiny_lab.root, *SETTINGS)
    outcome = run_killed(tmp_path / "killed", tiny_lab.root, KILLED, straight, *SETTINGS)
    assert outcome.lost == [] and outcome.resumed_from == SAVED, outcome
    run_dir = tmp_path / "killed" / "run"
    rows = read_json_lines(run_dir / METRICS)
    states = [len(read_table(table_path(run_dir, TURNS, row["step"])).columns["turn"]) for row in rows]
    # the step's states and those of two steps before it, also right after the resume
    wanted = [sum(states[max(step - 2, 0) : step + 1]) for step in range(len(states))]
    assert [row["credit/values/states"] for row in rows] == wanted
    assert all("credit/values/explained_variance" in row and row["actor/grad_norm"] > 0 for row in rows)
    assert (run_dir / "checkpoints" / "global_step_4" / VALUES).exists()


def test_a_resumed_run_has_the_critic_of_one_that_nothing_disturbed(tiny_lab, tmp_path):
    straight = run_straight(tmp_path / "straight", tiny_lab.root, *CRITIC)
    outcome = run_killed(tmp_path / "killed", tiny_lab.root, KILLED, straight, *CRITIC)
    assert outcome.lost == [] and outcome.resumed_from == SAVED, outcome
    rows = read_json_lines(tmp_path / "killed" / "run" / METRICS)
    assert rows[0]["critic/values/mean"] == 0 and all(row["critic/grad_norm"] > 0 for row in rows)
    assert all("credit/values/explained_variance" in row for row in rows)
    assert len({row["critic/values/mean"] for row in rows}) == len(rows)
    assert (tmp_path / "killed/run/checkpoints/global_step_4/critic").is_dir()
