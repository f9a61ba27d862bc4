"""Fresh rollouts from a checkpoint, up to the start of the step: what it would run, and what is refused."""

import sys
from functools import partial

import pytest
from omegaconf import OmegaConf

from kit.recipes import load_config
from kit.stored_rollouts import stored
from verl_credit.cli import another_run
from verl_credit.cli.another_run import RECIPE, collect
from verl_credit.cli.saved_run import saved_step
from verl_credit.config.resolved import flat_values
from verl_credit.errors import ConfigError, ExitCode, PreflightError
from verl_credit.records.run.lock import run_lock
from verl_credit.records.run.table_files import ROLLOUTS, table_path

STEP = 11  # the file that stored() writes is of step 12


def make_run(folder, *overrides):
    """A run with steps 5 (emptied), 10, 11 and, half written, 15; with the address of a search server that is gone."""
    config = load_config("lab", ["trainer.total_training_steps=20", f"run_dir={folder}", *overrides])
    config.search.url = "http://127.0.0.1:1"
    config.trainer.del_local_ckpt_after_load, config.max_hours = True, 5.0
    config.trainer.default_hdfs_dir = "/h"
    for step in (5, 10, STEP, 15):
        saved = folder / "checkpoints" / f"global_step_{step}"
        (saved / ("actor" if step > 5 else "")).mkdir(parents=True)
        (saved / "data.pt").write_text("order")
        (saved / "verl_credit_state.json").write_text("{}")
    (folder / "checkpoints" / "latest_checkpointed_iteration.txt").write_text(str(STEP))
    OmegaConf.save(config, folder / "config.yaml", resolve=True)
    return folder


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("run") / "r", "data.train_max_samples=20")


@pytest.fixture
def started(monkeypatch):
    """In place of the child: the configurations that it would have had."""
    configs = []

    def run(folder, overrides):
        configs.append(load_config(RECIPE, overrides, str(folder)))
        stored(folder)

    monkeypatch.setattr(another_run, "run_alone", lambda folder, overrides, _: run(folder, overrides))
    return configs


def contents(folder):
    return {path: path.read_bytes() if path.is_file() else None for path in sorted(folder.rglob("*"))}


@pytest.mark.slow
def test_one_more_step_of_the_run_in_a_folder_of_its_own(run_dir, started, tmp_path):
    before, folder = contents(run_dir), tmp_path / "fresh"
    overrides = ["search.url=http://127.0.0.1:2", "data.seed=7"]
    path = collect(run_dir / f"global_step_{STEP}", folder, prompts=12, overrides=overrides, save=True)
    assert path == table_path(folder, ROLLOUTS, 12) and contents(run_dir) == before
    was, now = flat_values(OmegaConf.load(run_dir / "config.yaml")), flat_values(started[0])
    changed = {key for key in {*was, *now} if was.get(key) != now.get(key)}
    of_trainer = (
        "default_local_dir default_hdfs_dir resume_mode resume_from_path del_local_ckpt_after_load save_freq"
    )
    of_trainer += " total_training_steps total_epochs max_actor_ckpt_to_keep test_freq val_before_train"
    mini = ("actor_rollout_ref.actor.ppo_mini_batch_size", "critic.ppo_mini_batch_size")
    batch = ("data.train_batch_size", *mini)
    own = (
        "run_dir",
        "keep_rollouts.steps",
        "keep_rollouts.groups",
        "lineage.dir",
        "search.url",
        "max_hours",
        "data.seed",
    )
    assert changed == {*own, *batch, *(f"trainer.{name}" for name in of_trainer.split())}
    assert [now[key] for key in batch] == [12, 12, 12]
    assert (now["trainer.total_training_steps"], now["trainer.save_freq"]) == (12, 1)
    assert (now["search.url"], now["data.seed"]) == ("http://127.0.0.1:2", 7)
    assert {key for key in changed if str(run_dir) in str(now[key])} == set()
    linked = folder / "from" / f"global_step_{STEP}"
    assert now["trainer.resume_from_path"] == str(linked)
    assert {file.name for file in linked.iterdir()} == {"actor", "verl_credit_state.json"}
    assert (linked / "actor").resolve() == (run_dir / "checkpoints" / linked.name / "actor").resolve()


@pytest.mark.slow
def test_a_curriculum_has_the_weights_of_that_step_of_the_whole_run(started, tmp_path):
    """20 steps, the first is the curriculum's: step 12 is 11 / 19 of the way."""
    curriculum = "algorithm.info_gain_curriculum={gain:[2,1],outcome:[1,1]}"
    run = make_run(tmp_path / "r", "algorithm.info_gain_norm_mode=separate", curriculum)
    collect(run / f"global_step_{STEP}", tmp_path / "fresh", prompts=2)
    found = started[0].algorithm.info_gain_curriculum
    assert list(found.gain) == [pytest.approx(2 - 11 / 19)] * 2 and list(found.outcome) == [1, 1]


def test_a_run_that_was_moved_is_found(run_dir, tmp_path):
    moved = tmp_path / "elsewhere"
    moved.mkdir()
    (moved / "config.yaml").write_bytes((run_dir / "config.yaml").read_bytes())
    (moved / "checkpoints" / f"global_step_{STEP}" / "actor").mkdir(parents=True)
    saved = saved_step(moved / f"global_step_{STEP}")
    assert saved.folder == moved / "checkpoints" / f"global_step_{STEP}" and saved.step == STEP


@pytest.mark.parametrize(
    "name, said",
    [
        ("global_step_5", "step 5 is not saved; RUN/checkpoints has 10, 11"),
        ("checkpoints/global_step_5", "step 5 is not saved; RUN/checkpoints has 10, 11"),
        ("global_step_15", "step 15 is not saved; RUN/checkpoints has 10, 11"),
        ("checkpoints", "RUN/checkpoints; expected RUN/global_step_N of a run"),
        (
            "a/b/global_step_5",
            "neither RUN/a/b nor the folder above it has a config.yaml; expected RUN/global_step_N",
        ),
    ],
)
def test_a_step_that_is_not_there_is_refused_with_those_that_are(run_dir, started, tmp_path, name, said):
    with pytest.raises(PreflightError) as raised:
        collect(run_dir / name, tmp_path / "fresh", prompts=2)
    assert said in str(raised.value).replace(str(run_dir), "RUN")
    assert not started and not (tmp_path / "fresh").exists()


@pytest.mark.parametrize(
    "changes, error, said",
    [
        ({"folder": "RUN/probe"}, PreflightError, "RUN/probe belongs to the run in RUN, which stays as it is"),
        ({"folder": "RUN"}, PreflightError, "RUN belongs to the run in RUN"),
        ({"folder": "full"}, PreflightError, "full is not empty; give a new folder"),
        ({"prompts": 0}, ConfigError, "prompts=0: "),
        ({"prompts": 21}, ConfigError, "prompts=21 with data.train_max_samples=20: "),
        ({"overrides": ["trainer.save_freq=1"]}, ConfigError, "trainer.save_freq is set by this command"),
        ({"overrides": ["+trainer={a:1}"]}, ConfigError, "trainer.default_local_dir is set by this command"),
        ({"overrides": ["data.sed=1"]}, ConfigError, "unknown key data.sed=1 (did you mean data.seed?)"),
    ],
)  # fmt: skip
def test_what_cannot_be_asked_for_is_refused(run_dir, started, tmp_path, changes, error, said):
    (tmp_path / "full" / "x").mkdir(parents=True)
    before = contents(run_dir)
    folder = changes.get("folder", "fresh").replace("RUN", str(run_dir))
    with pytest.raises(error) as raised:
        collect(run_dir / f"global_step_{STEP}", **{"prompts": 2, **changes, "folder": tmp_path / folder})
    assert said in str(raised.value).replace(str(run_dir), "RUN")
    assert not started and contents(run_dir) == before and not (tmp_path / "fresh").exists()


@pytest.mark.slow
def test_a_folder_in_which_an_earlier_try_failed_may_be_taken_again(run_dir, started, monkeypatch, tmp_path):
    """But not while a process holds it, and not once it has rollouts."""
    folder = tmp_path / "fresh"
    again = partial(collect, run_dir / f"global_step_{STEP}", folder, prompts=2)
    with monkeypatch.context() as patch:
        patch.setattr(another_run, "run_alone", lambda folder, *_: run_lock(folder).__enter__())
        with pytest.raises(RuntimeError, match="step 12 left no rollout that counts"):
            again()
    with pytest.raises(PreflightError, match="is not empty"):
        again()
    monkeypatch.setattr(another_run, "holder_is_gone", lambda _: True)
    assert again().exists() and len(started) == 1
    with pytest.raises(PreflightError, match="is not empty"):
        again()


@pytest.mark.slow
@pytest.mark.parametrize(
    "code, error, said",
    [
        (ExitCode.PREFLIGHT, PreflightError, "exit code 4 (LOG):\nholds 3 rows$"),
        (ExitCode.FAILED, RuntimeError, "exit code 1 (LOG):\nsaid first\nholds 3 rows$"),
        (ExitCode.INTERRUPTED, KeyboardInterrupt, "^$"),
        (ExitCode.DONE, None, ""),
    ],
)
def test_how_the_step_ended_is_told(monkeypatch, tmp_path, code, error, said):
    script = f"print('said first\\n\\nholds 3 rows'); exit({int(code)})"
    monkeypatch.setattr(another_run, "run_command", lambda *_: [sys.executable, "-c", script])
    if error is None:
        return another_run.run_alone(tmp_path, [], "no rollouts")
    with pytest.raises(error) as raised:
        another_run.run_alone(tmp_path, [], "no rollouts")
    shown = f"^{raised.value}$".replace(str(tmp_path / "train.log"), "LOG")
    assert said in shown
