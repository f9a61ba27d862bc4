"""Where a start goes on is looked at before Ray: what is damaged or does not lead on is refused, with what goes on."""

import json
import os
import shutil

import pytest
from omegaconf import OmegaConf

from kit.checkpoints import save_step, saved_run, write_actor
from kit.lab_run import launches, run
from kit.recipes import check, load_config
from verl_credit.cli.recipe.stages import goes_on
from verl_credit.errors import ConfigError, ExitCode, PreflightError
from verl_credit.recipe.doctor.context import Context
from verl_credit.recipe.doctor.inputs import check_resume
from verl_credit.recipe.doctor.status import Status
from verl_credit.records.run import events
from verl_credit.records.run.files import METRICS, STATE, append_json, write_text
from verl_credit.records.run.resume import delete_old, resumes_from, saved_steps
from verl_credit.records.run.state import TRACKER, describe_resume, save_state

WEIGHTS = "actor/model_world_size_1_rank_0.pt"
ACTOR = "actor_rollout_ref__"
PARTS = ("model", "optim", "extra_state")


@pytest.fixture
def of(tmp_path):
    """The configuration of a run in tmp_path; the lab's checkpoints are of one rank, every fifth step."""
    lab = load_config("lab", [f"run_dir={tmp_path}", "trainer.total_training_steps=20"])

    def changed(**keys):
        config = lab.copy()
        for key, value in keys.items():
            OmegaConf.update(config, key.replace("__", "."), value, force_add=True)
        return config

    return changed


def cut(path):
    os.truncate(path, path.stat().st_size // 2)


def test_a_folder_without_steps_begins_and_one_with_a_whole_step_goes_on(tmp_path, of):
    assert resumes_from(of()) is None and goes_on(of()) == []
    folder = saved_run(tmp_path, 5, 10)
    assert resumes_from(of()) == folder / "global_step_10"
    assert goes_on(of()) == [f"goes on from {folder}/global_step_10"]
    assert resumes_from(of(trainer__resume_mode="disable")) is None


STALE = {
    "99": "says '99', and there is no such step",
    "seven": "says 'seven', and there is no such step",
    "-5": "says '-5'",
    "": "is empty, and step 10 was saved",
    "absent": "is missing, and step 10 was saved",
}


@pytest.mark.parametrize("tracker", STALE)
def test_a_tracker_that_does_not_lead_to_the_steps_is_refused(tmp_path, of, tracker):
    """verl would begin at step 1, or end in int('')."""
    folder = saved_run(tmp_path, 5, 10, tracker=tracker)
    with pytest.raises(PreflightError) as refused:
        resumes_from(of())
    said = str(refused.value)
    assert f"{folder / TRACKER} {STALE[tracker]}" in said
    assert f"trainer.resume_from_path={folder}/global_step_10; trainer.resume_mode=disable" in said
    again = of(trainer__resume_mode="resume_path", trainer__resume_from_path=str(folder / "global_step_10"))
    assert resumes_from(again) == folder / "global_step_10"  # the override that the message gives


def test_a_tracker_that_names_an_earlier_step_is_refused_unless_it_was_taken_back(tmp_path, of):
    folder = saved_run(tmp_path, 5, 10, tracker="5")
    with pytest.raises(PreflightError, match="names step 5, and step 10 was saved later; .*global_step_10;"):
        resumes_from(of())
    five = of(trainer__resume_mode="resume_path", trainer__resume_from_path=f"{folder}/global_step_5")
    assert resumes_from(five) == folder / "global_step_5"
    (tmp_path / METRICS).write_text('{"step": 5}\n{"step": 6}\n')  # that start takes the later rows away
    assert resumes_from(of()) == folder / "global_step_5"


@pytest.mark.parametrize("name", [*(WEIGHTS.replace("model", part) for part in PARTS), "data.pt"])
@pytest.mark.parametrize("damage, said", [(cut, "is damaged: its end is missing"), (os.remove, "is missing")])
def test_a_file_that_is_cut_or_missing_is_named_with_the_whole_step(tmp_path, of, name, damage, said):
    folder = saved_run(tmp_path, 5, 10)
    damage(folder / "global_step_10" / name)
    with pytest.raises(PreflightError) as refused:
        resumes_from(of())
    told = str(refused.value)
    assert f"names step 10: {folder}/global_step_10/{name}" in told and said in told
    assert f"trainer.resume_mode=resume_path trainer.resume_from_path={folder}/global_step_5;" in told


def test_a_part_that_the_run_does_not_load_need_not_be_there(tmp_path, of):
    folder = saved_run(tmp_path, 10)
    os.remove(folder / "global_step_10" / WEIGHTS.replace("model", "optim"))
    assert resumes_from(of(**{f"{ACTOR}actor__checkpoint__load_contents": ["model", "extra"]})) is not None


def test_a_saved_policy_that_is_cut_is_named(tmp_path, of):
    folder = saved_run(tmp_path, 10)
    (folder / "global_step_10/actor/huggingface").mkdir()
    (folder / "global_step_10/actor/huggingface/model.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0{")
    with pytest.raises(PreflightError, match="model.safetensors .* is damaged"):
        resumes_from(of())


def test_every_rank_has_its_files_and_another_number_of_ranks_is_refused(tmp_path, of):
    folder = saved_run(tmp_path, 5)
    with pytest.raises(PreflightError, match="by 1 ranks, and trainer.nnodes x trainer.n_gpus_per_node is 2"):
        resumes_from(of(trainer__n_gpus_per_node=2))
    shutil.rmtree(folder / "global_step_5/actor")
    write_actor(folder / "global_step_5/actor", ranks=2)
    assert resumes_from(of(trainer__n_gpus_per_node=2)) == folder / "global_step_5"
    os.remove(folder / "global_step_5/actor/optim_world_size_2_rank_1.pt")
    with pytest.raises(PreflightError, match="optim_world_size_2_rank_1.pt is missing"):
        resumes_from(of(trainer__n_gpus_per_node=2))


def test_a_run_with_a_critic_goes_on_from_a_checkpoint_that_has_one(tmp_path, of):
    folder, critic = saved_run(tmp_path, 5), of(critic__enable=True)
    assert resumes_from(of()) is not None
    with pytest.raises(PreflightError, match="global_step_5/critic has no weights"):
        resumes_from(critic)
    write_actor(folder / "global_step_5/critic")
    assert resumes_from(critic) is not None
    os.remove(folder / "global_step_5/critic/optim_world_size_1_rank_0.pt")
    with pytest.raises(PreflightError, match="critic/optim_world_size_1_rank_0.pt is missing"):
        resumes_from(critic)


@pytest.mark.slow
def test_another_key_of_the_critic_is_no_exact_resume_where_there_is_a_critic(tmp_path, of):
    for enabled in (False, True):
        folder = tmp_path / "checkpoints/global_step_5"
        folder.mkdir(parents=True, exist_ok=True)
        save_state(folder, of(critic__enable=enabled), 5, {})
        (folder / "data.pt").touch()
        said = describe_resume(of(critic__enable=enabled, critic__optim__lr=0.5), 5)[0]
        assert said.startswith("resume: exact") != enabled and ("critic.optim.lr was" in said) == enabled


@pytest.mark.parametrize(
    "keys, said",
    [
        ({f"{ACTOR}model__lora_rank": 8}, "with actor_rollout_ref.model.lora_rank=0, and this run has 8"),
        (
            {f"{ACTOR}actor__strategy": "fsdp"},
            "actor_rollout_ref.actor.strategy=fsdp2, and this run has fsdp",
        ),
        (
            {"algorithm__turn_values": "features"},
            "with algorithm.turn_values=group, and this run has features: ",
        ),
        ({f"{ACTOR}model__override_config__hidden_size": 32}, "is of a model with hidden_size=64, and "),
    ],
)
def test_a_checkpoint_that_does_not_fit_the_run_is_refused(tmp_path, of, keys, said):
    folder = saved_run(tmp_path, 5)
    before = {"actor_rollout_ref.model.lora_rank": "0", "actor_rollout_ref.actor.strategy": "fsdp2"}
    before["algorithm.turn_values"] = "group"
    write_text(folder / "global_step_5" / STATE, json.dumps({"config": before}))
    write_text(folder / "global_step_5/actor/huggingface/config.json", json.dumps({"hidden_size": 64}))
    right = {f"{ACTOR}actor__strategy": "fsdp2", f"{ACTOR}model__override_config__hidden_size": 64}
    assert resumes_from(of(**right)) is not None
    with pytest.raises(PreflightError) as refused:
        resumes_from(of(**right | keys))
    assert said in str(refused.value)


def test_a_stranded_run_goes_on_with_the_weights_that_are_left(tmp_path, of):
    """An earlier version lost step 5's weights before step 10 had its data."""
    folder = saved_run(tmp_path, 5, 10, tracker="5", done=9)
    shutil.rmtree(folder / "global_step_5/actor")
    os.remove(folder / "global_step_10/data.pt")
    with pytest.raises(PreflightError) as refused:
        resumes_from(of())
    said = str(refused.value)
    assert f"names step 5: {folder}/global_step_5/actor has no weights; " in said and "data.pt" in said
    ten = of(trainer__resume_mode="resume_path", trainer__resume_from_path=f"{folder}/global_step_10")
    assert resumes_from(ten) == folder / "global_step_10"


@pytest.mark.parametrize("tracker", ["", "absent"])
def test_a_save_that_was_killed_before_its_tracker_is_refused_with_the_way_on(tmp_path, of, tracker):
    """Its step is not recorded yet. verl empties the tracker before it writes the number."""
    folder = saved_run(tmp_path, 5, tracker=tracker, done=4)
    with pytest.raises(PreflightError) as refused:
        resumes_from(of())
    assert f"trainer.resume_from_path={folder}/global_step_5;" in str(refused.value)


def test_a_first_save_that_was_killed_begins_again_and_says_so(tmp_path, of):
    folder = saved_run(tmp_path, 5, tracker="absent", done=4)
    cut(folder / "global_step_5" / WEIGHTS)
    assert resumes_from(of()) is None
    found = check_resume(Context(facts=None, config=of())).found
    assert found == f"begins at step 1, and makes the 4 steps in {tmp_path} again: none of them was saved"
    asked = check_resume(Context(facts=None, config=of(trainer__resume_mode="disable")))
    assert asked.status is Status.WARN and asked.found.endswith("again: trainer.resume_mode=disable")


def test_recorded_steps_whose_checkpoints_are_gone_are_not_written_over(tmp_path, of):
    saved_run(tmp_path, tracker="absent", done=4)
    assert resumes_from(of()) is None  # a start that was killed before its first save
    append_json(tmp_path / METRICS, {"step": 5})
    with pytest.raises(
        PreflightError, match="5 steps, and .* no checkpoint of them; .*resume_mode=disable begins"
    ):
        resumes_from(of())
    never = of(trainer__save_freq=-1)
    assert resumes_from(never) is None
    events.end(tmp_path, ExitCode.DONE, "", 5)
    with pytest.raises(PreflightError, match="has 5 steps, and .* no checkpoint of them"):
        resumes_from(never)


@pytest.mark.parametrize("path", [None, "false", "''", "/nowhere", "/nowhere/global_step_x", "x/step_5"])
def test_a_path_that_names_no_step_is_refused_with_the_configuration(path):
    given = () if path is None else (f"trainer.resume_from_path={path}",)
    with pytest.raises(ConfigError, match="expected the folder of a saved step") as error:
        check("trainer.resume_mode=resume_path", *given)
    assert error.value.key == "trainer.resume_from_path"


@pytest.mark.parametrize("name", [STATE, "actor/huggingface/config.json"])
def test_json_that_is_damaged_is_named(tmp_path, of, name):
    path = saved_run(tmp_path, 5) / "global_step_5" / name
    path.parent.mkdir(exist_ok=True)
    path.write_text('{"a": ')
    with pytest.raises(PreflightError, match=r"json \(6 bytes\) is damaged"):
        resumes_from(of())


@pytest.mark.slow
def test_a_path_beside_another_mode_is_refused_or_said():
    with pytest.raises(ConfigError, match="resume_from_path=/x with trainer.resume_mode=auto: "):
        check("trainer.resume_from_path=/x")
    check("trainer.resume_from_path=false")  # what older versions of verl wrote for none
    from kit.idle import without_effect

    config = load_config("lab", ["trainer.resume_from_path=/x", "trainer.resume_mode=disable"])
    assert any(line.startswith("trainer.resume_from_path=/x: with") for line in without_effect(config))


@pytest.mark.slow
def test_a_path_that_is_not_there_is_refused_by_train_and_said_by_explain(tmp_path, of, capsys, monkeypatch):
    launches(monkeypatch)
    folder = saved_run(tmp_path, 5)
    given = [f"trainer.resume_from_path={folder}/global_step_6", "trainer.resume_mode=resume_path"]
    code, lines = run(capsys, tmp_path, *given)
    assert code == ExitCode.PREFLIGHT and len(lines) == 1
    assert "global_step_6: there is no such folder; the newest step that is whole goes on with" in lines[0]
    (line,) = goes_on(load_config("lab", [f"run_dir={tmp_path}", *given]))
    assert line.startswith("refused before the start: trainer.resume_from_path=")


@pytest.mark.slow
def test_train_goes_on_from_a_relative_path_with_a_slash(tmp_path, capsys, monkeypatch):
    ends_with, seen = launches(monkeypatch), []
    ends_with()
    folder = saved_run(tmp_path / "other", 5)
    monkeypatch.chdir(tmp_path)
    done = ExitCode.DONE, ""
    launch = lambda config, say: seen.append(config.trainer.resume_from_path) or done  # noqa: E731
    monkeypatch.setattr("verl_credit.cli.train.start._launch", launch)
    given = "trainer.resume_from_path=other/checkpoints/global_step_5/"
    assert run(capsys, tmp_path / "new", "trainer.resume_mode=resume_path", given)[0] == 0
    assert seen == [str(folder / "global_step_5")]  # verl reads the number after the last global_step_


# --- which are deleted --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "there, most, named, left",
    [
        ((5, 10, 15), 1, [], [15]),
        ((5, 10, 15), 2, [], [10, 15]),
        ((5, 10, 15), None, [], [5, 10, 15]),
        ((5, 10, 15), 1, [5], [5, 15]),
        ((5, 10, 15), 1, [15], [10, 15]),  # the limit counts the others
        ((5, 10, 15, 20), 1, [], [15, 20]),  # 20 is of a run that was taken back to 10
    ],
)
def test_the_newest_stay_however_many_starts_wrote_them(tmp_path, of, there, most, named, left):
    folder = saved_run(tmp_path, *there)
    deleted = delete_old(of(trainer__max_actor_ckpt_to_keep=most, keep_checkpoints=named), 15)
    assert saved_steps(folder) == left and len(deleted) == len(there) - len(left)
    assert (folder / "global_step_5/data.pt").exists()  # as verl: the weights alone go


def test_an_unfinished_step_does_not_count_and_goes(tmp_path, of):
    folder = saved_run(tmp_path, 5, 10, 15)
    cut(folder / "global_step_10" / WEIGHTS)
    delete_old(of(trainer__max_actor_ckpt_to_keep=2), 15)
    assert saved_steps(folder) == [5, 15]


@pytest.mark.slow
def test_a_step_that_was_named_when_it_was_saved_stays_in_later_starts(tmp_path, of):
    folder = saved_run(tmp_path, 5, 10)
    save_state(folder / "global_step_5", of(keep_checkpoints=[5]), 5, {})
    save_state(folder / "global_step_10", of(keep_checkpoints=[5]), 10, {})
    save_step(folder, 15)
    (deleted,) = delete_old(of(trainer__max_actor_ckpt_to_keep=1), 15)
    assert deleted.parent.name == "global_step_10"
    assert saved_steps(folder) == [5, 15]


def test_the_step_that_was_just_saved_stays_whatever_stands_in_it(tmp_path, of):
    folder = saved_run(tmp_path, 5, 10)
    cut(folder / "global_step_10" / WEIGHTS)
    delete_old(of(trainer__max_actor_ckpt_to_keep=1), 10)
    assert saved_steps(folder) == [10]


def test_each_role_has_its_own_limit(tmp_path, of):
    folder = saved_run(tmp_path, 5, 10)
    for step in (5, 10):
        write_actor(folder / f"global_step_{step}" / "critic")
    delete_old(of(trainer__max_critic_ckpt_to_keep=1), 10)
    assert saved_steps(folder) == [5, 10]
    assert not (folder / "global_step_5/critic").exists() and (folder / "global_step_10/critic").exists()
