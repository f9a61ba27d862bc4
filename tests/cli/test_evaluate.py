"""`verl-credit evaluate` up to the start of the trainer: what it would run, what is refused, and what it writes."""

import json
import re
import shutil

import pytest
from omegaconf import OmegaConf

from kit.recipes import load_config as composed
from verl_credit.cli import another_run, main
from verl_credit.cli.another_run import RECIPE
from verl_credit.cli.command import ChildFailed
from verl_credit.cli.evaluate import run as evaluation
from verl_credit.cli.evaluate.policy import find_policy
from verl_credit.cli.saved_run import run_config
from verl_credit.errors import ExitCode, PreflightError
from verl_credit.recipe.compose import load_config
from verl_credit.records.run.validation import write_held_out

QUESTION = "Who founded <script>alert(1)</script>?"


def row(place, mode, em, fault=""):
    return {
        "id": str(place), "source": "lab", "mode": mode, "question": QUESTION, "golds": ["a"], "outcome": em,
        "scores": {"em": em, "f1": em, "format_ok": 1.0}, "stop_reason": "answer", "tool_fault": fault, "calls": 2,
        "searches": [], "turns": [{"text": "<think>hm", "observation": "page"}, {"text": "answer", "observation": ""}],
    }  # fmt: skip


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    """A run with steps 1 and 2, and step 3 half written."""
    folder = tmp_path_factory.mktemp("run") / "r"
    config = composed("lab", [f"run_dir={folder}", "probe.every=1"])
    config.search.url, config.max_hours = "http://127.0.0.1:1", 5.0
    for step in (1, 2, 3):
        (folder / "checkpoints" / f"global_step_{step}" / "actor").mkdir(parents=True)
    (folder / "checkpoints" / "latest_checkpointed_iteration.txt").write_text("2")
    OmegaConf.save(config, folder / "config.yaml", resolve=True)
    return folder


@pytest.fixture
def data(tmp_path):
    file = tmp_path / "questions.parquet"
    file.write_text("")
    return file


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "policy"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return folder


@pytest.fixture
def started(monkeypatch):
    """In place of the child: the configurations that it would have had. Even questions are right in both modes."""
    configs = []

    def run_alone(folder, overrides, _):
        configs.append(config := load_config(RECIPE, overrides, str(folder)))
        samples = {"greedy": 1, "sampled": config.actor_rollout_ref.rollout.val_kwargs.n}
        rows = [
            row(place, mode, float(place % 2 == 0), "connect" if place == 150 else "")
            for place in range(151)
            for mode in config.evaluation.modes
            for _ in range(samples[mode])
        ]
        write_held_out(folder, config.trainer.total_training_steps - 1, rows)

    monkeypatch.setattr(evaluation, "run_alone", run_alone)
    return configs


def contents(folder):
    return {path: path.read_bytes() if path.is_file() else None for path in sorted(folder.rglob("*"))}


@pytest.mark.slow
def test_the_last_whole_step_of_a_run_on_other_questions(run_dir, data, started, tmp_path, capsys):
    before, out = contents(run_dir), tmp_path / "e"
    code = main(["evaluate", str(run_dir), "--data", str(data), "--samples", "4", "--out", str(out)])
    said = capsys.readouterr()
    assert code == ExitCode.DONE, said
    assert contents(run_dir) == before
    (config,) = started
    trainer, rollout = config.trainer, config.actor_rollout_ref.rollout
    assert trainer.val_only and trainer.val_before_train and config.evaluation.keep_trajectories
    assert trainer.resume_from_path == str(out / "from" / "global_step_2")
    assert (rollout.val_kwargs.n, list(config.evaluation.modes)) == (4, ["greedy", "sampled"])
    assert list(config.data.val_files) == list(config.data.train_files) == [str(data)]
    assert config.data.val_max_samples == -1 and config.max_hours is None and config.search.url is None
    assert config.data.val_batch_size == 256  # 1,024 rows of 4 samples
    assert config.data.train_batch_size == 1 and config.probe.every == 0
    assert str(run_dir) not in str([config.run_dir, trainer.default_local_dir, config.lineage.dir])
    result = json.loads((out / "evaluation.json").read_text())
    assert (result["step"], result["samples"], result["left_out"]) == (2, 4, 5)
    measures = {(one["mode"], one["measure"]): one for one in result["measures"]}
    assert measures["greedy", "em"]["mean"] == 0.5 and measures["greedy", "em"]["questions"] == 150
    assert measures["sampled", "pass@4"]["mean"] == 0.5 and ("greedy", "pass@4") not in measures
    assert "50.0 %" in said.out and str(out / "evaluation.html") in said.out
    page = (out / "evaluation.html").read_text()
    assert "5 trajectories with a fault" in page and "questions 101 to 151" in page
    first, second = sorted(out.glob("trajectories_*.html"))
    assert first.read_text().count("<details>") == 5 * 100 and second.read_text().count("<details>") == 5 * 51
    assert "<script" not in first.read_text() and "&lt;script&gt;alert(1)" in first.read_text()
    assert main(["evaluate", str(run_dir), "--data", str(data), "--out", str(out)]) == ExitCode.PREFLIGHT
    assert "is not empty; give a new folder" in capsys.readouterr().out


@pytest.mark.slow
def test_a_model_has_the_tools_and_the_engine_of_a_recipe(model, data, started, tmp_path, capsys):
    out = tmp_path / "e"
    command = ["evaluate", str(model), "--config-name", "lab", "search.topk=2", "--data", str(data), "--json"]
    assert main([*command, "--out", str(out)]) == ExitCode.DONE
    result = json.loads(capsys.readouterr().out)
    (config,) = started
    assert config.actor_rollout_ref.model.path == str(model) == result["policy"]
    assert (config.trainer.resume_mode, config.search.topk) == ("disable", 2)
    assert list(config.evaluation.modes) == ["greedy"] and result["samples"] == 0


def test_step_0_is_the_model_that_a_run_starts_from(run_dir):
    policy = find_policy(str(run_dir), 0, None, None, [])
    assert (policy.step, policy.checkpoint, policy.name) == (0, None, "r-step-0")
    folder = run_dir.parent / "evaluations" / "r-step-0"
    assert policy.folder == folder
    folder.mkdir(parents=True)
    (folder / "evaluation.json").touch()
    assert policy.folder == folder.with_name("r-step-0-2")  # an evaluation on other data stands beside it
    shutil.rmtree(folder)
    assert find_policy(str(run_dir / "checkpoints" / "global_step_1"), None, None, None, []).step == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments, said",
    [
        (["RUN", "--step", "3"], "step 3 is not saved; RUN/checkpoints has 0, 1, 2"),
        (["RUN/checkpoints/global_step_3"], "step 3 is not saved; RUN/checkpoints has 1, 2"),
        (["RUN/checkpoints/global_step_1", "--step", "1"], "--step 1: expected with the folder of the run"),
        (["RUN", "--config-name", "lab"], "--config-name lab: expected with a model"),
        (["RUN", "--data", "no.parquet"], "no.parquet: no such file; `verl-credit prepare` writes one"),
        (["RUN", "--out", "RUN/e"], "RUN/e belongs to the run in RUN, which stays as it is"),
        (["RUN", "trainer.save_freq=1"], "trainer.save_freq is set by this command and cannot be overridden"),
        (["RUN", "search.tpk=1"], "unknown key search.tpk=1 (did you mean search.topk?)"),
        (["RUN/.."], "expected a run (config.yaml), its checkpoint, or a model's folder"),
        (["./nowhere"], "no such folder; expected a run's, a model's, or a model's name on the hub"),
        (["MODEL", "--config-name", "multihop_qwen3_4b"], "no value for search.url (a server"),
        (["a/model"], "a model needs --config-name RECIPE"),
        (["a/model", "--config-name", "lab", "--step", "1"], "--step 1: expected with a run's folder"),
    ],
)
def test_what_is_refused(run_dir, model, data, started, tmp_path, capsys, arguments, said):
    before = contents(run_dir)
    names = {"RUN": str(run_dir), "MODEL": str(model)}
    given = [re.sub("RUN|MODEL", lambda name: names[name[0]], argument) for argument in arguments]
    given += [] if "--data" in given else ["--data", str(data)]
    given += [] if "--out" in given else ["--out", str(tmp_path / "e")]
    assert main(["evaluate", *given]) == ExitCode.PREFLIGHT
    assert said in capsys.readouterr().out.replace(str(run_dir), "RUN")
    assert not started and contents(run_dir) == before and not (tmp_path / "e").exists()


REFUSED, FAILED = PreflightError("no evaluation: x"), ChildFailed("x")


@pytest.mark.slow
@pytest.mark.parametrize("error, code", [(REFUSED, ExitCode.PREFLIGHT), (FAILED, ExitCode.FAILED)])
def test_a_trainer_that_ends_early_gives_its_exit_code(run_dir, data, monkeypatch, tmp_path, error, code):
    """A later call takes the folder again."""

    def run_alone(*_):
        raise error

    monkeypatch.setattr(evaluation, "run_alone", run_alone)
    command = ["evaluate", str(run_dir), "--step", "0", "--data", str(data), "--out", str(tmp_path / "e")]
    assert [main(command), main(command)] == [code, ExitCode.PREFLIGHT]  # a process may still hold the folder
    monkeypatch.setattr(another_run, "holder_is_gone", lambda _: True)
    assert main(command) == code
    assert not (tmp_path / "e" / "evaluation.json").exists()


def evaluated(folder, rights):
    """``rights``: of each question, whether it is right."""
    rows = [row(place, "greedy", float(right)) for place, right in enumerate(rights)]
    write_held_out(folder, 2, rows)
    (folder / "evaluation.json").write_text(json.dumps({"policy": folder.name, "step": 2}))
    return str(folder)


def test_two_evaluations_are_compared_by_question(tmp_path, capsys):
    a, b = evaluated(tmp_path / "a", [1, 1, 1, 0, 1]), evaluated(tmp_path / "b", [1, 0, 0, 1])
    assert main(["evaluate", "compare", a, b, "--json"]) == ExitCode.DONE
    result = json.loads(capsys.readouterr().out)
    em = next(one for one in result["measures"] if one["measure"] == "em")
    assert (result["only_a"], result["only_b"], em["questions"]) == (1, 0, 4)
    assert (em["a"], em["b"], em["difference"], em["a_higher"], em["b_higher"]) == (0.75, 0.5, 0.25, 2, 1)
    assert em["low"] < 0.25 < em["high"]
    assert main(["evaluate", "compare", a, b]) == ExitCode.DONE
    said = capsys.readouterr().out
    assert "A: a\nB: b\nleft out, because only A has them: 1 questions\n" in said
    assert "75.0 % -   50.0 % =   25.0 %" in said and "A higher in 2, B in 1" in said


def test_a_folder_without_an_evaluation_and_other_questions_are_refused(tmp_path, capsys):
    a, b = evaluated(tmp_path / "a", [1]), evaluated(tmp_path / "b", [1])
    write_held_out(tmp_path / "b", 2, [row("other", "greedy", 1.0)])
    assert main(["evaluate", "compare", a, b]) == ExitCode.PREFLIGHT
    assert "they have no question in common" in capsys.readouterr().out
    assert main(["evaluate", "compare", a, str(tmp_path)]) == ExitCode.PREFLIGHT
    assert "expected a folder that `verl-credit evaluate` wrote" in capsys.readouterr().out
    (tmp_path / "b" / "evaluation.json").write_text("{")
    assert main(["evaluate", "compare", a, b]) == ExitCode.PREFLIGHT
    assert "b cannot be read: JSONDecodeError" in capsys.readouterr().out


def test_the_configuration_of_an_earlier_version_is_read_without_the_keys_that_are_gone(tmp_path):
    (tmp_path / "config.yaml").write_text(
        "prompt_date: null\nseed: 1\nplan: {encoder_core_seconds: 1, mfu: 1}\n"
    )
    assert run_config(tmp_path) == {"seed": 1, "plan": {"mfu": 1}}
