"""What a run's files say of its trial: the metric that decides, and means over its steps."""

import subprocess

import pytest
from omegaconf import OmegaConf

from verl_credit.cli.train.trial_numbers import held_out_metric, of_steps, read_steps
from verl_credit.records.run.files import METRICS, VALIDATION, append_json
from verl_credit.records.run.versions import code_version


def config(metric=None, train="train.parquet", val="val.parquet"):
    return OmegaConf.create({"data": {"train_files": train, "val_files": val}, "lineage": {"metric": metric}})


def evaluation(step, **shares):
    """``source_mode=(exact match, questions)``"""
    row = {"step": step, "val-core/reward": 0.7}
    for name, (share, questions) in shares.items():
        name = name.replace("_", "-")
        row |= {f"val-aux/{name}/em/mean@1": share, f"val-aux/{name}/questions": questions}
    return row


@pytest.fixture
def metric_of(tmp_path):
    def found(*rows, **keys):
        append_json(tmp_path / METRICS, {"step": 1})
        for row in rows:
            append_json(tmp_path / VALIDATION, row)
        return held_out_metric(config(**keys), read_steps(tmp_path))

    return found


def test_exact_match_is_greedy_and_over_all_questions(metric_of):
    last = evaluation(2, nq_greedy=(0.5, 30), hotpotqa_greedy=(0.2, 10), nq_sampled=(0.9, 30))
    found = metric_of(evaluation(0, nq_greedy=(0.9, 30)), last)
    assert (found.name, found.domain, found.step, found.n) == ("exact match, greedy", "hotpotqa, nq", 2, 40)
    assert found.value == pytest.approx((0.5 * 30 + 0.2 * 10) / 40)
    # Wilson by hand: p = 17/40, z² = 3.841459; (p + z²/80 ± z √(p(1-p)/40 + z²/6400)) / (1 + z²/40)
    assert found.interval == pytest.approx((0.285094, 0.578049), abs=1e-6)


def test_sampled_counts_where_nothing_is_greedy_and_the_last_evaluation_where_there_are_several(metric_of):
    found = metric_of(evaluation(1, lab_sampled=(0.5, 4)), evaluation(3, lab_sampled=(0.25, 4)))
    assert (found.name, found.value, found.step) == ("exact match, sampled", 0.25, 3)


def test_a_metric_of_your_own(metric_of):
    assert metric_of(evaluation(0), evaluation(2), metric="val-core/reward")[:3] == (
        "val-core/reward",
        0.7,
        2,
    )
    missing = metric_of(metric="val-core/f1")
    assert (
        missing.value is None and "validation.jsonl has no val-core/f1 after a training step" in missing.why
    )


def test_an_evaluation_before_the_first_step_is_none_of_the_trial_s(metric_of):
    found = metric_of(evaluation(0, lab_greedy=(0.9, 30)))
    assert found.value is None and "no exact match was evaluated after a training step" in found.why


def test_the_training_pool_is_never_the_metric(metric_of, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pool = metric_of(
        evaluation(2, nq_greedy=(0.9, 30)), train=["a.parquet", "b.parquet"], val=f"{tmp_path}/b.parquet"
    )
    assert pool.value is None and "b.parquet is in data.val_files and in data.train_files" in pool.why


def test_means_are_over_the_trial_s_own_steps(tmp_path):
    for step in range(1, 5):
        append_json(
            tmp_path / METRICS,
            {
                "step": step,
                "credit/clip_scale/mean": 1.0 + step,
                "credit/gain/turn_0": step / 10,
                **({"credit/gain/turn_10": 0.5} if step == 4 else {}),
                "timing_s/step": 2.0,
            },
        )
    assert of_steps(read_steps(tmp_path), after=2) == {
        "steps": 2,
        "clip_scale_mean": 4.5,
        "clip_scale_std": None,
        "gain_by_turn": {0: pytest.approx(0.35), 10: 0.5},
        "token_entropy": None,
        "train_s": 4.0,
        "absent": ["clip_scale_std", "token_entropy"],
    }
    assert of_steps(None, after=0)["steps"] == 0 and read_steps(tmp_path / "none") is None


def git(folder, *arguments):
    who = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
    subprocess.run(["git", "-C", folder, *who, *arguments], check=True, capture_output=True)


def test_the_code_is_a_commit_and_a_hash_of_what_is_not_committed(tmp_path):
    package = tmp_path / "package"
    package.mkdir()
    assert code_version(package) == {"commit": None, "changes": None}
    (package / "__init__.py").write_text("")
    git(tmp_path, "init")
    assert code_version(package)["commit"] is None  # in a repository that does not have it
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-m", "first")
    clean = code_version(package)
    assert len(clean["commit"]) == 40 and clean["changes"] is None
    seen = set()
    for text in ("x = 1", "x = 2"):
        (package / "__init__.py").write_text(text)
        seen.add(code_version(package)["changes"])
    (package / "new.py").write_text("")
    seen.add(code_version(package)["changes"])
    (package / "new.py").write_text("y")
    seen.add(code_version(package)["changes"])
    assert len(seen) == 4 and None not in seen and code_version(package)["commit"] == clean["commit"]
