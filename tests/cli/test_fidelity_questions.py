"""`verl-credit fidelity RUN` asks the questions that the run asked, or says by key why it cannot."""

import pyarrow
import pyarrow.parquet
import pytest
from omegaconf import OmegaConf

from kit.recipes import load_config
from verl_credit.cli import main
from verl_credit.cli.fidelity import policies
from verl_credit.cli.fidelity.by_run import why_by_run
from verl_credit.cli.fidelity.policies import policies_of
from verl_credit.study import bench


@pytest.fixture
def run(tmp_path):
    """A run of the lab that trained on another file of the lab's folder; its lab has no index."""
    lab, folder = tmp_path / "lab", tmp_path / "run"
    (lab / "policy").mkdir(parents=True)
    folder.mkdir()
    rows = [{"prompt": [{"role": "user", "content": "Who?"}], "reward_model": {"ground_truth": "She"}}]
    for name in ("train", "dev", "test", "hard", "easy"):
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), lab / f"{name}.parquet")
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([{"row": 1}]), lab / "rollouts.parquet")
    (lab / "questions.jsonl").write_text("{}\n")

    def make(*overrides):
        own = [f"data.train_files={lab}/hard.parquet", f"data.val_files={lab}/easy.parquet", *overrides]
        config = load_config("lab", [f"lab.dir={lab}", f"run_dir={folder}", *own])
        OmegaConf.save(config, folder / "config.yaml", resolve=True)
        return folder

    return make


@pytest.fixture
def asked(monkeypatch):
    found = []
    monkeypatch.setattr(policies, "load_policy", lambda folder: (None, None))
    monkeypatch.setattr(policies, "make_subject", lambda *_, questions, **__: found.append(questions))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("split, name", [("train", "hard"), ("test", "easy"), ("dev", "dev")])
def test_the_runs_own_files_are_asked(run, asked, tmp_path, split, name):
    (policy,) = policies_of(run(), [0], None)
    policy.load(lab=None, split=split, prompts=1)
    assert asked == [tmp_path / "lab" / f"{name}.parquet"]


@pytest.mark.slow
def test_they_move_with_the_lab(run, asked, tmp_path):
    folder, moved = run(), tmp_path / "moved"
    (tmp_path / "lab").rename(moved)
    (policy,) = policies_of(folder, [0], moved)
    policy.load(lab=moved, split="train", prompts=1)
    assert asked == [moved / "hard.parquet"]


@pytest.mark.slow
@pytest.mark.parametrize("split, key", [("train", "data.train_files"), ("test", "data.val_files")])
@pytest.mark.parametrize("name", ["rollouts.parquet", "questions.jsonl"])
def test_another_kind_of_file_is_refused_by_its_key(run, tmp_path, capsys, split, key, name):
    folder = run(f"{key}={tmp_path}/lab/{name}")
    code = main(["fidelity", str(folder), "--steps", "0", "--split", split, "--dir", str(tmp_path / "out")])
    said = capsys.readouterr().out.splitlines()
    assert (code, len(said)) == (4, 1)
    assert f"{key}={tmp_path}/lab/{name}: " in said[0] and "parquet file with the columns prompt" in said[0]


def test_questions_from_elsewhere_are_rolled_out_by_the_run_whichever_split_has_them(run, tmp_path):
    config = load_config("lab", [f"lab.dir={tmp_path}/lab", "data.val_files=mine.parquet"])
    assert why_by_run(config, "train") is None
    assert why_by_run(config, "dev") is None
    assert why_by_run(config, "test") == "data.val_files=mine.parquet"


def test_the_bench_asks_what_its_runs_train_on(tmp_path, monkeypatch):
    found = []
    config = load_config("lab", [f"lab.dir={tmp_path}", f"data.train_files={tmp_path}/hard.parquet"])
    monkeypatch.setattr(bench, "load_policy", lambda folder: (None, None))
    monkeypatch.setattr(bench, "make_subject", lambda *_, questions, **__: found.append(questions))
    bench._subject("", config, tmp_path, 1, 0)
    assert found == [tmp_path / "hard.parquet"]
