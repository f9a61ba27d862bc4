"""A file of a checkpoint that is damaged in its middle is named before Ray."""

import json
import os
import random

import pytest
import torch
from omegaconf import OmegaConf

from kit.checkpoints import save_step, saved_run
from kit.recipes import load_config
from verl_credit.errors import PreflightError
from verl_credit.names import COLOCATE_MODE
from verl_credit.recipe.doctor.context import Context
from verl_credit.recipe.doctor.inputs import check_resume
from verl_credit.records.run.files import STATE
from verl_credit.records.run.resume import resumes_from
from verl_credit.records.run.state import MODE
from verl_credit.records.run.whole import changed, cut

WEIGHTS = "actor/model_world_size_1_rank_0.pt"


@pytest.fixture
def lab(tmp_path):
    return load_config("lab", [f"run_dir={tmp_path}", "trainer.total_training_steps=20"])


def flip(path, place, bit=1):
    """Changes one bit; returns the file's bytes before."""
    before = path.read_bytes()
    path.write_bytes(before[:place] + bytes([before[place] ^ bit]) + before[place + 1 :])
    return before


def middle(path):
    """Changes the middle of the largest tensor, as a disk does, and leaves the size as it is."""
    flip(path, path.read_bytes().index(torch.ones(64).numpy().tobytes()) + 100)


@pytest.mark.parametrize(
    "name", [WEIGHTS, WEIGHTS.replace("model", "optim"), WEIGHTS.replace("model", "extra_state")]
)
def test_a_file_that_is_damaged_in_its_middle_is_named_and_the_whole_step_before_it_goes_on(
    tmp_path, lab, name
):
    folder = saved_run(tmp_path, 5, 10, 15)
    for step in (10, 15):
        middle(folder / f"global_step_{step}" / name)
    assert torch.load(folder / "global_step_15" / name)  # torch's reader takes it
    with pytest.raises(PreflightError) as refused:
        check_resume(Context(facts=None, config=lab))
    assert f"{folder}/global_step_15/{name} (" in str(refused.value)
    assert "is damaged: " in str(refused.value) and "in it is not what was saved" in str(refused.value)
    assert f"trainer.resume_from_path={folder}/global_step_5;" in str(refused.value)  # 10 is damaged, too


def test_the_order_of_the_data_is_compared_too(tmp_path, lab):
    folder = saved_run(tmp_path, 5)
    place = folder / "global_step_5/data.pt"
    torch.save({"x": torch.ones(64)}, place)
    assert check_resume(Context(facts=None, config=lab)).found == f"goes on from {folder}/global_step_5"
    middle(place)
    with pytest.raises(PreflightError, match=r"data\.pt .* is damaged"):
        check_resume(Context(facts=None, config=lab))


def test_a_file_that_the_run_does_not_load_may_be_damaged(tmp_path, lab):
    OmegaConf.update(lab, "actor_rollout_ref.actor.checkpoint.load_contents", ["model", "extra"])
    folder = saved_run(tmp_path, 5)
    middle(folder / "global_step_5" / WEIGHTS.replace("model", "optim"))
    assert check_resume(Context(facts=None, config=lab)).found == f"goes on from {folder}/global_step_5"


def test_a_changed_bit_is_seen_or_changes_nothing_that_torch_reads(tmp_path):
    """In every part of a file: tensors, their description, headers, the list of contents."""
    path, saved = tmp_path / "a.pt", {"x": torch.arange(40.0), "y": torch.ones(3, dtype=torch.int64)}
    torch.save(saved, path)
    whole, draw = path.read_bytes(), random.Random(0)
    tensor, contents = whole.index(saved["x"].numpy().tobytes()), whole.index(b"PK\x01\x02")
    inside = range(tensor, tensor + 160, 8)
    for place in (*inside, *draw.sample(range(len(whole)), 400)):
        flip(path, place, 1 << draw.randrange(8))
        found = cut(path) or changed([path])[0]
        assert str(path) in found if found else place not in inside, place
        try:
            assert found or all(torch.equal(read, saved[name]) for name, read in torch.load(path).items()), (
                place
            )
        except RuntimeError:  # torch reads a few fields of the list of contents that nothing else does
            assert place >= contents
        path.write_bytes(whole)
    assert changed([path]) == (None, 0)


def test_what_there_was_no_time_to_read_is_said(tmp_path, lab, monkeypatch):
    folder = saved_run(tmp_path, 5)
    middle(folder / "global_step_5" / WEIGHTS)
    place = folder / "global_step_5" / WEIGHTS
    ticks = iter(range(100))
    none_read, unread = changed([place], limit_s=0.5, clock=lambda: next(ticks))
    assert none_read is None and unread > 256
    monkeypatch.setattr("verl_credit.records.run.resume.changed", lambda paths: (None, 84_000_000_000))
    found = check_resume(Context(facts=None, config=lab)).found
    assert found.endswith(
        "global_step_5 (84.0 GB of it were not compared with their checksums: 60 s are over)"
    )


def test_files_without_checksums_are_taken_as_they_are(tmp_path):
    """torch.serialization.set_crc32_options(False) writes 0 for every tensor."""
    path = tmp_path / "a.pt"
    torch.serialization.set_crc32_options(False)
    try:
        torch.save({"x": torch.ones(64)}, path)
    finally:
        torch.serialization.set_crc32_options(True)
    assert (cut(path), changed([path])) == (None, (None, 0))


def write_queue(checkpoint):
    """What TransferQueue's `save_checkpoint` writes."""
    units = checkpoint / "transfer_queue/simple_storage"
    units.mkdir(parents=True)
    for name in ("controller_state.pkl", "simple_storage/su_0.pkl"):
        (checkpoint / "transfer_queue" / name).write_bytes(b"\x80\x05K\x01.")
    (checkpoint / "transfer_queue/metadata.json").write_text('{"storage_saved": true}')
    (units / "storage_unit_info.json").write_text("[]")


@pytest.mark.parametrize("name", ["metadata.json", "controller_state.pkl", "simple_storage/su_0.pkl"])
def test_the_queue_of_an_asynchronous_run_is_looked_at(tmp_path, lab, name):
    folder = saved_run(tmp_path, 5, 10)
    for step in (5, 10):
        write_queue(folder / f"global_step_{step}")
    queue = folder / "global_step_10/transfer_queue"
    os.truncate(queue / name, 3)
    assert resumes_from(lab) == folder / "global_step_10"  # the synchronous mode does not load it
    OmegaConf.update(lab, MODE, COLOCATE_MODE)
    with pytest.raises(PreflightError) as refused:
        resumes_from(lab)
    assert f"{queue / name} (3 bytes) is damaged" in str(refused.value)
    assert f"resume_from_path={folder}/global_step_5;" in str(refused.value)


def test_a_queue_that_was_saved_and_is_not_there_is_missing(tmp_path, lab):
    OmegaConf.update(lab, MODE, COLOCATE_MODE)
    place = save_step(tmp_path / "checkpoints", 5)
    (tmp_path / "checkpoints/latest_checkpointed_iteration.txt").write_text("5")
    assert resumes_from(lab) == place  # of a synchronous run, or of an older version
    (place / STATE).write_text(json.dumps({"config": {MODE: COLOCATE_MODE}}))
    with pytest.raises(PreflightError, match=r"transfer_queue/metadata.json is missing"):
        resumes_from(lab)


@pytest.mark.parametrize("name", [STATE, "actor/huggingface/config.json"])
def test_json_that_is_damaged_is_named(tmp_path, lab, name):
    path = saved_run(tmp_path, 5) / "global_step_5" / name
    path.parent.mkdir(exist_ok=True)
    path.write_text('{"a": ')
    with pytest.raises(PreflightError, match=r"json \(6 bytes\) is damaged: it is no JSON"):
        resumes_from(lab)
