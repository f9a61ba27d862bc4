"""A run of the twin on the tiny lab: its files, and the same again with the same seed."""

import pytest

from verl_credit.recipe.compose import load_config
from verl_credit.records.run.files import METRICS, VALIDATION, read_json_lines
from verl_credit.study.fidelity.subject import load_checkpoint, load_policy
from verl_credit.study.twin import Twin

pytestmark = pytest.mark.slow
SMALL = (
    "data.train_batch_size=4", "actor_rollout_ref.rollout.n=4", "actor_rollout_ref.actor.ppo_mini_batch_size=2",
    "data.val_max_samples=8", "trainer.total_training_steps=2", "trainer.test_freq=2", "algorithm.transform_mode=gtpo",
    "keep_checkpoints=[1]",
)  # fmt: skip


def run(lab, folder):
    folder.mkdir()
    said = []
    Twin(
        load_config("lab", [f"lab.dir={lab.policy.parent}", f"run_dir={folder}", *SMALL]), folder, said.append
    ).run()
    rows = read_json_lines(folder / METRICS)
    return [{k: v for k, v in row.items() if not k.startswith("timing_s/")} for row in rows], said


def test_a_run_and_the_same_again(tiny_lab, tmp_path):
    (first, said), (second, _) = (run(tiny_lab, tmp_path / name) for name in ("a", "b"))
    assert first == second and [row["step"] for row in first] == [1, 2]
    for row in first:
        assert (
            0 <= row["credit/outcome/em"] <= 1 and row["actor/grad_norm"] > 0 and row["num_turns/mean"] >= 1
        )
        assert row["credit/gain/scored"] == 1
    assert first[0]["actor/loss"] != first[1]["actor/loss"]
    tested = read_json_lines(tmp_path / "a" / VALIDATION)
    assert [row["step"] for row in tested] == [0, 2] and all(
        "val-aux/lab-greedy/em/mean@1" in row for row in tested
    )
    checkpoints = tmp_path / "a" / "checkpoints"
    assert [folder.name for folder in checkpoints.iterdir()] == ["global_step_1"]
    kept, start = load_checkpoint(checkpoints / "global_step_1")[0], load_policy(tiny_lab.policy)[0]
    moved = [(a - b).abs().max() for a, b in zip(kept.parameters(), start.parameters(), strict=True)]
    assert 0 < max(moved) < 0.01  # two updates of AdamW
    assert [line.partition(" EM")[0] for line in said[1:3]] == ["step   1/2 ", "step   2/2 "]
