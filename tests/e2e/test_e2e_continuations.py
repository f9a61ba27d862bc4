"""Values by continuations on verl's trainer: made in every second step, on the step's own engine, and no row of the step."""

import pytest

from kit.train_run import train
from verl_credit.records.run.files import METRICS, VALUES, read_json_lines
from verl_credit.records.run.tables import TURNS, read_table, table_path

pytestmark = [pytest.mark.e2e, pytest.mark.nightly]

REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    return float(len(solution_str) % 2)
"""
"""Every row of the tiny lab fails, so that outcomes have to differ by something else."""
STATES, COUNT, CONTINUATIONS = 6, 3, "algorithm.turn_continuations"
SETTINGS = (
    "trainer.total_training_steps=3", "trainer.val_before_train=false", "trainer.test_freq=-1", "trainer.save_freq=3",
    "data.train_batch_size=4", "actor_rollout_ref.rollout.n=4", "actor_rollout_ref.actor.ppo_mini_batch_size=4",
    "algorithm.info_gain_norm_mode=turn_gae", "algorithm.turn_values=monte_carlo", "algorithm.lam=0",
    "algorithm.transform_mode=none", f"{CONTINUATIONS}.states={STATES}", f"{CONTINUATIONS}.count={COUNT}",
    f"{CONTINUATIONS}.every=2", f"{CONTINUATIONS}.choose=uncertainty",
)  # fmt: skip


def test_every_second_step_measures_values_of_a_few_states(tiny_lab, tmp_path):
    run_dir, reward = tmp_path / "run", tmp_path / "reward.py"
    reward.write_text(REWARD)
    settings = [
        "--config-name",
        "lab",
        "lab.size=tiny",
        f"lab.dir={tiny_lab.root}",
        f"run_dir={run_dir}",
        *SETTINGS,
        f"reward.custom_reward_function.path={reward}",
    ]
    code, output = train(tmp_path / "log", *settings)
    assert code == 0, output
    assert f"values=monte_carlo states={STATES} count={COUNT} every=2 choose=uncertainty" in output
    steps = read_json_lines(run_dir / METRICS)
    assert [row["step"] for row in steps] == [1, 2, 3]
    for row in steps:
        made = {
            name: row.get(f"credit/continuations/{name}")
            for name in ("states", "count", "left_out", "tokens")
        }
        table = read_table(table_path(run_dir, TURNS, row["step"])).columns
        assert len(set(table["row"])) == 16 and row["credit/rollouts_failed"] == 0
        if row["step"] == 2:
            assert set(made.values()) == {None} and "timing_s/continuations" not in row
        else:
            assert made["states"] == STATES and made["count"] == STATES * COUNT and made["left_out"] == 0
            assert made["tokens"] >= STATES * COUNT
            assert row["timing_s/continuations"] == pytest.approx(row["credit/continuations/seconds"])
            assert 0 < row["timing_s/gen"] < row["timing_s/step"] - row["timing_s/continuations"]
        moved = credits_of(table)
        assert any(changes for changes in moved) is (row["step"] != 2)
        assert row["actor/grad_norm"] > 0
    assert (run_dir / "checkpoints" / "global_step_3" / VALUES).exists()


def credits_of(table) -> list[bool]:
    """Of every turn but a row's last: V changed after it. With lam=0 its credit is that change."""
    lines = list(
        zip(table["row"], table["turn"], table["value"], table["advantage"], table["outcome"], strict=True)
    )
    value = {(row, turn): v for row, turn, v, _, _ in lines}
    changed = []
    for row, turn, v, advantage, outcome in lines:
        after = value.get((row, turn + 1))
        assert advantage == pytest.approx((outcome if after is None else after) - v, abs=1e-6)
        if after is not None:
            changed.append(after != v)
            assert after == v or after * COUNT == pytest.approx(round(after * COUNT))
    return changed
