"""Rollouts that an older version left in the queue have turn ids of int64, beside which no int16 can be written."""

from types import SimpleNamespace

import pytest
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict

from kit.fake_store import FakeStore
from kit.recipes import load_config
from verl_credit.host.engine.log_prob_engine import nested
from verl_credit.host.step.ahead import RolloutsAhead
from verl_credit.host.step.async_trainers import CreditColocateAsync
from verl_credit.host.step.store import announce_prompts, narrow_turn_ids
from verl_credit.names import TURN_IDS
from verl_credit.records.run.files import EVENTS, read_json_lines

IDS = {"a": [0, 0, -1, 1], "b": [0, -1], "c": [0]}


@pytest.fixture
def store(monkeypatch):
    return FakeStore().install(monkeypatch)


def put(store, key, dtype, **more):
    text = NonTensorStack(NonTensorData({"credit": key}))
    fields = {TURN_IDS: nested([torch.tensor(IDS[key], dtype=dtype)]), "extra_fields": text, **more}
    row = TensorDict(fields, batch_size=1)
    return store.kv_batch_put([key], "train", fields=row, tags=[{"status": "success", "name": key}])


def test_rows_of_an_older_version_are_written_anew_with_all_that_they_had(store):
    put(store, "a", torch.int64, rm_scores=nested([torch.ones(4)]))
    put(store, "b", torch.int64)  # it has fewer fields
    announce_prompts(["p"], "train", 3)
    before = {place: dict(row) for place, row in store.rows.items()}
    with pytest.raises(AssertionError, match=TURN_IDS):
        put(store, "c", torch.int16)
    store.kv_clear(["c"], "train")
    assert narrow_turn_ids("train") == 2
    put(store, "c", torch.int16)
    for key in "ab":
        row, was = store.rows["train", key], before["train", key]
        assert row[TURN_IDS].dtype == torch.int16 and row[TURN_IDS].tolist() == IDS[key]
        assert row.keys() == was.keys() and row["extra_fields"] == was["extra_fields"]
        assert store.tags["train", key] == {"status": "success", "name": key}
    assert torch.equal(store.rows["train", "a"]["rm_scores"], torch.ones(4))
    assert store.tags["train", "p"]["is_prompt"]


def test_rows_of_this_version_and_rows_without_the_field_stay_as_they_are(store):
    put(store, "a", torch.int16)
    other = TensorDict({"extra_fields": NonTensorStack(NonTensorData({TURN_IDS: [0]}))}, batch_size=1)
    store.kv_batch_put(["other"], "train", fields=other, tags=[{"status": "success"}])
    announce_prompts(["p"], "train", 3)
    written = len([call for call in store.calls if call[0] == "written"])
    assert narrow_turn_ids("train") == 0 == narrow_turn_ids("empty")
    assert len([call for call in store.calls if call[0] == "written"]) == written


def test_an_asynchronous_trainer_does_so_once_verl_has_loaded_its_checkpoint(store, monkeypatch, tmp_path):
    verls = CreditColocateAsync.__mro__[2]
    monkeypatch.setattr(verls, "_load_checkpoint", lambda self: put(store, "a", torch.int64), raising=False)
    trainer, recorder = object.__new__(CreditColocateAsync), SimpleNamespace(resumed=lambda step: None)
    config = load_config("lab", [f"run_dir={tmp_path}"])
    trainer.ahead, trainer.recorder = RolloutsAhead(config, "colocate_async", "branch"), recorder
    trainer.global_steps, trainer.credit = 0, SimpleNamespace(stage=None, values=None)
    trainer._load_checkpoint()
    assert store.rows["train", "a"][TURN_IDS].dtype == torch.int16
    [note] = read_json_lines(tmp_path / EVENTS)
    assert "1 rollouts" in note["text"]
