"""Files of a run survive kills and resumes; progress and evaluation read what was written."""

import json

import numpy as np
import pytest
import torch

from kit.recipes import load_config
from verl_credit.credit.token.sepa_controller import SepaController
from verl_credit.records.run.files import (
    METRICS,
    VALIDATION,
    DamagedFile,
    GrowingFile,
    append_json,
    read_json_lines,
    rewind,
)
from verl_credit.records.run.progress_line import Progress, evaluation_line, step_line
from verl_credit.records.run.state import CONTENTS, describe_resume, save_state

OWN = ["data.train_files=x", "data.val_files=x", "actor_rollout_ref.model.path=x", "search.url=http://x"]


def test_lines_round_trip_and_a_cut_last_line_is_left_out(tmp_path):
    path = tmp_path / METRICS
    values = {"a": np.float64(0.5), "b": torch.tensor(2), "c": float("nan"), "d": [np.int64(3)]}
    append_json(path, {"step": 1} | values)
    with path.open("a") as file:
        file.write('{"step": 2, "a"')
    assert read_json_lines(path) == [{"step": 1, "a": 0.5, "b": 2, "c": None, "d": [3]}]


def test_a_row_after_a_cut_line_stands_on_its_own(tmp_path):
    path = tmp_path / METRICS
    for cut in ('{"step": 2, "a"', '{"step"'):
        append_json(path, {"step": 1})
        with path.open("a") as file:
            file.write(cut)
    append_json(path, {"step": 3})
    assert [row["step"] for row in read_json_lines(path)] == [1, 1, 3]


@pytest.mark.parametrize("text", ["\u2028", "\x85", "\ud800", "Zürich", '"\n\\'])
def test_any_text_survives(tmp_path, text):
    append_json(tmp_path / METRICS, {"step": 1, "text": text})
    assert read_json_lines(tmp_path / METRICS) == [{"step": 1, "text": text}]


def test_damage_before_the_last_line_is_an_error(tmp_path):
    (tmp_path / METRICS).write_text('{"step": 1\n{"step": 2}\n')
    with pytest.raises(ValueError, match=r"metrics.jsonl line 1 is not JSON"):
        read_json_lines(tmp_path / METRICS)


def test_a_resume_moves_later_steps_aside_and_loses_none(tmp_path):
    path = tmp_path / METRICS
    for step in (1, 2, 3, 4):
        append_json(path, {"step": step})
    assert rewind(path, 2) == 2
    assert [row["step"] for row in read_json_lines(path)] == [1, 2]
    assert [row["step"] for row in read_json_lines(path.with_suffix(".superseded.jsonl"))] == [3, 4]
    assert rewind(path, 2) == 0 and rewind(tmp_path / "absent.jsonl", 0) == 0


def test_of_a_file_that_grows_only_what_was_added_is_read(tmp_path):
    """The display looks twice a second: reading all of it each time would fill a core after some thousand steps."""
    path = tmp_path / METRICS
    file = GrowingFile(path)
    assert file.new_rows() == []
    append_json(path, {"step": 1})
    append_json(path, {"step": 2})
    assert file.new_rows() == [{"step": 1}, {"step": 2}] and file.new_rows() == []
    with path.open("r+b") as damaged:
        damaged.write(b"?")
    with path.open("a") as cut:
        cut.write('{"step": 3')
    assert file.new_rows() == []
    append_json(path, {"step": 4})  # in place of the line that was cut
    assert file.new_rows() == [{"step": 4}]
    with path.open("a") as damaged:
        damaged.write("[]\n")
    for _ in range(2):
        with pytest.raises(DamagedFile, match="line 4 is not a JSON object"):
            file.new_rows()


def test_rows_that_a_resume_leaves_are_no_news_and_those_after_them_are(tmp_path):
    path = tmp_path / METRICS
    for step in (1, 2, 3, 4):
        append_json(path, {"step": step})
    file = GrowingFile(path)
    assert len(file.new_rows()) == 4
    rewind(path, 2)
    assert file.new_rows() == []
    append_json(path, {"step": 3})
    assert file.new_rows() == [{"step": 3}]


def test_a_blank_line_is_no_row_and_stays_counted(tmp_path):
    """An editor leaves one; a report does not end there."""
    path = tmp_path / METRICS
    path.write_text('{"step": 1}\n\n  \n{"step": 2}\n')
    file = GrowingFile(path)
    assert file.new_rows() == read_json_lines(path) == [{"step": 1}, {"step": 2}]
    append_json(path, {"step": 3})
    assert file.new_rows() == [{"step": 3}]
    with path.open("a") as more:
        more.write("\n?\n")
    with pytest.raises(DamagedFile, match="line 7 is not JSON"):
        file.new_rows()
    assert rewind(tmp_path / "none.jsonl", 1) == 0
    path.write_text('{"step": 1}\n\n{"step": 2}\n')
    file = GrowingFile(path)
    assert len(file.new_rows()) == 2
    assert rewind(path, 1) == 1 and read_json_lines(path) == [{"step": 1}]


@pytest.mark.slow
def test_resume_says_what_differs(tmp_path):
    config = load_config("search_cpu", [*OWN, f"run_dir={tmp_path}"])
    folder = tmp_path / "checkpoints" / "global_step_3"
    said, saved, sepa = describe_resume(config, 3)
    assert "not exact" in said and "is missing" in said and saved == {} and sepa is None
    save_state(folder, config, 3, {"credit/outcome/em": np.float64(0.5)})
    (folder / "data.pt").write_bytes(b"")
    assert describe_resume(config, 3) == ("resume: exact, from step 3", {"credit/outcome/em": 0.5}, None)
    elsewhere = [*OWN, f"run_dir={tmp_path}", "trainer.total_training_steps=99", "search.url=http://y"]
    elsewhere += ["search.token_env=TOKEN", "search.max_retries=9", "algorithm.turn_judge.retries=9"]
    assert describe_resume(load_config("search_cpu", elsewhere), 3)[0] == "resume: exact, from step 3"
    fingerprint, clip = "search.index_fingerprint=ab12", "actor_rollout_ref.actor.clip_ratio_high=0.3"
    for change in ("search.topk=4", fingerprint, clip, "seed=2"):
        said, *_ = describe_resume(load_config("search_cpu", [*OWN, f"run_dir={tmp_path}", change]), 3)
        assert "not exact" in said and change.partition("=")[0] in said
    state = json.loads((folder / "verl_credit_state.json").read_text())
    gone = {"algorithm.turn_continuations.states": "16", "algorithm.turn_anchor_layer": "-1"}
    (folder / "verl_credit_state.json").write_text(json.dumps(state | {"config": gone | state["config"]}))
    assert describe_resume(config, 3)[0].endswith(f"not exact: nothing reads {', '.join(gone)} any more")
    mode = "trainer.v1.trainer_mode=credit_colocate_async"
    colocate = load_config("search_cpu", [*OWN, f"run_dir={tmp_path}", mode])
    assert "trainer_mode was credit, is credit_colocate_async" in describe_resume(colocate, 3)[0]
    save_state(folder, colocate, 3, {})
    newer = "rollouts that were under way begin again, by newer weights"
    assert describe_resume(colocate, 3)[0].endswith(f"not exact: {mode}: {newer}")
    back = describe_resume(config, 3)[0]
    assert "\n" not in back and "trainer_mode was credit_colocate_async, is credit; " in back
    assert back.endswith(f"{mode}: rollouts ahead of the step are left out")
    with pytest.raises(ValueError, match="step 3; expected 1, 4"):
        folder.rename(folder.with_name("global_step_4"))
        describe_resume(config, 4)


@pytest.mark.slow
def test_a_learning_rate_that_the_checkpoint_overrules_is_not_silent(tmp_path):
    """verl restores the rate with the optimizer's state, unless only the model is loaded."""
    own = [*OWN, f"run_dir={tmp_path}"]
    save_state(tmp_path / "checkpoints" / "global_step_3", load_config("search_cpu", own), 3, {})
    rate, contents = "actor_rollout_ref.actor.optim.lr=0.5", f"{CONTENTS}=[model]"
    said = describe_resume(load_config("search_cpu", [*own, rate]), 3)[0]
    assert "optim.lr was" in said and "is 0.5, but the checkpoint's value holds" in said and contents in said
    said = describe_resume(load_config("search_cpu", [*own, rate, contents]), 3)[0]
    assert "is 0.5;" in said and "value holds" not in said


@pytest.mark.slow
def test_the_state_of_sepa_travels_with_the_checkpoint(tmp_path):
    config = load_config("search_cpu", [*OWN, f"run_dir={tmp_path}"])
    before, after = SepaController(correct_rate_gate=0.5), SepaController(correct_rate_gate=0.5)
    before.observe(3, 0.6, torch.tensor([0.1, 0.4, 0.2]))
    save_state(tmp_path / "checkpoints" / "global_step_3", config, 3, {}, before.state_dict())
    for config.trainer.total_training_steps in (None, 99):  # a key that may change
        _, _, sepa = describe_resume(config, 3)
        after.load_state_dict(sepa)
        assert after.gate_open and after.state_dict() == before.state_dict() == sepa
    config.algorithm.gamma = 0.5  # an inexact resume keeps the state too
    assert describe_resume(config, 3)[2] == before.state_dict()


def test_progress_shows_news_once_and_not_what_stood_there_before(tmp_path):
    append_json(tmp_path / METRICS, {"step": 1, "credit/outcome/em": 0.1})
    said = []
    with Progress(tmp_path, 3, write=said.append, interval_s=60.0) as progress:
        with (tmp_path / METRICS).open("r+b") as damaged:
            damaged.write(b"?")  # it is not read a second time
        append_json(tmp_path / METRICS, {"step": 2, "credit/outcome/em": 0.5, "credit/gain/mean": 0.25})
        append_json(tmp_path / VALIDATION, {"step": 2, "val-aux/lab-greedy/em/mean@1": 0.4})
        progress._show()
        progress.note("network", "a note")
    assert len(said) == 3 and said.pop().endswith("  a note")
    assert "held-out EM after step 2: lab-greedy 0.400" in said[0]
    assert "step   2/3  EM 0.500 (running 0.500)  gain +0.2500" in said[1]


def test_the_reward_stands_where_a_reward_function_of_ones_own_gives_no_exact_match():
    """verl writes `reward` beside every score; of several samples the largest n counts."""
    row = {"step": 2, "val-core/a/b-greedy/reward/mean@1": 0.25, "val-core/a/b-sampled/reward/mean@4": 0.5}
    row |= {"val-aux/a/b-sampled/reward/std@4": 0.1, "val-aux/a/b-greedy/questions": 8}
    assert evaluation_line(row) == "held-out reward after step 2: a/b-greedy 0.250, a/b-sampled 0.500"
    row |= {"val-aux/nq-greedy/em/mean@1": 1.0, "val-core/nq-greedy/reward/mean@1": 0.9}
    ems, rewards = evaluation_line(row).split("; ")
    assert ems == "held-out EM after step 2: nq-greedy 1.000" and "nq" not in rewards
    assert evaluation_line({"step": 2}) == "evaluated after step 2"
    assert "reward 0.125" in step_line({"step": 1, "critic/score/mean": 0.125}, 3, None)
