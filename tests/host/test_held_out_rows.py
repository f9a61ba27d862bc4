"""The rows of held-out trajectories, as they are read from verl's queue."""

import json
from types import SimpleNamespace

import pytest
import torch
from tensordict import NonTensorStack, TensorDict
from transfer_queue import KVBatchMeta

from kit.fake_store import FakeStore
from verl_credit.errors import IntegrityError
from verl_credit.host.rollout.agent_manager import RolloutWatch
from verl_credit.host.step.held_out import held_out_rows
from verl_credit.names import ROW_RECORD, TURN_IDS
from verl_credit.study.evaluation import measure
from verl_credit.turns.rollout.book import RowRecord

KEYS = ["p_0_0", "p_1_0", "q_0_0"]


class Tokenizer:
    def decode(self, ids):
        return " ".join(map(str, ids))


def nested(*rows):
    return torch.nested.as_nested_tensor([torch.tensor(row) for row in rows], layout=torch.jagged)


def stored(monkeypatch, keys=KEYS, **more):
    """Two samples of one question and one of another, whose search failed."""
    search = RowRecord("answer", n_searches=1, searches=[{"turn": 0, "query": "x", "pages": ["7"]}])
    records = [search, RowRecord("no_answer"), RowRecord("tool_fault", tool_fault="connect")]
    infos = [{"em": 1.0, "f1": 1.0, "note": "text"}, {"em": 0.0, "f1": 0.5}, {"em": 0.0, "f1": 0.0}]
    fields = {
        "prompts": nested([1], [1], [2]),
        "responses": nested([5, 6, 7, 8], [5], [5]),
        "response_mask": nested([1, 1, 0, 1], [1], [0]),
        TURN_IDS: nested([0, 0, -1, 1], [0], [-1]),
        "rm_scores": nested([0.0, 0.0, 0.0, 1.0], [-0.5], [0.0]),
        "extra_fields": NonTensorStack(
            *(
                {ROW_RECORD: record.as_dict(), "reward_extra_info": info}
                for record, info in zip(records, infos, strict=True)
            )
        ),
        "reward_model": NonTensorStack(*({"ground_truth": {"target": [gold]}} for gold in "aab")),
        "extra_info": NonTensorStack({"question": "P?"}, {"question": "P?"}, {"index": 3}),
        "raw_prompt": NonTensorStack(*([{"role": "user", "content": text}] for text in ("P", "P", "Q"))),
        "data_source": NonTensorStack("nq", "nq", "lab"),
    } | more
    store = FakeStore().install(monkeypatch)
    tensors = {name: value for name, value in fields.items() if value is not None}
    store.kv_batch_put(keys, "val", TensorDict(tensors, batch_size=3), tags=[{}] * 3)
    return KVBatchMeta(keys=keys, tags=[{}] * 3, partition_id="val")


def test_a_row_has_the_texts_and_the_scores_of_a_trajectory(monkeypatch):
    first, second, third = held_out_rows(stored(monkeypatch), "sampled", Tokenizer())
    assert first["turns"] == [{"text": "5 6", "observation": "7"}, {"text": "8", "observation": ""}]
    assert (first["question"], first["golds"], first["source"]) == ("P?", ["a"], "nq")
    assert (first["outcome"], first["scores"]) == (1.0, {"em": 1.0, "f1": 1.0})  # text is no score
    assert (first["mode"], first["calls"], first["searches"][0]["query"]) == ("sampled", 1, "x")
    assert (second["outcome"], second["stop_reason"]) == (-0.5, "no_answer")
    assert (third["question"], third["tool_fault"], third["turns"]) == ("Q", "connect", [])
    assert first["id"] == second["id"] != third["id"]
    json.dumps([first, second, third], allow_nan=False)


def test_a_rollout_of_several_outputs_is_one_row_with_all_its_turns(monkeypatch):
    """Outcome, scores and stop reason are the last output's; calls are those of all."""
    row, other = held_out_rows(stored(monkeypatch, ["p_0_0", "p_0_1", "q_0_0"]), "greedy", Tokenizer())
    assert [tuple(turn.values()) for turn in row["turns"]] == [
        ("5 6", "7"),
        ("8", "[another context] 1"),
        ("5", ""),
    ]
    assert (row["outcome"], row["scores"], row["stop_reason"]) == (-0.5, {"em": 0.0, "f1": 0.5}, "no_answer")
    assert (row["calls"], len(row["searches"]), other["tool_fault"]) == (1, 1, "connect")


def test_a_score_named_steps_makes_no_environment(monkeypatch):
    """What the agent loop recorded does: then a trajectory has no answer."""
    record = {"score": 1.0, "success": 1.0, "return": 0.5, "last": 1.0, "steps": 3.0, "cut": 0}
    measures = []
    for environment in ({}, record):
        known = RowRecord("answer", environment=environment).as_dict()
        given = {"em": 1.0, "return": 0.5, "steps": 3.0}
        extra = NonTensorStack(*[{ROW_RECORD: known, "reward_extra_info": given}] * 3)
        rows = held_out_rows(stored(monkeypatch, extra_fields=extra), "greedy", Tokenizer())
        measures.append({one.name: one.mean.value for one in measure(rows) if one.source == "nq"})
    assert measures[0]["answered"] == 1.0 and "answered" not in measures[1]
    assert {name: measures[1][name] for name in ("em", "return", "steps")} == given


def test_the_same_prompt_of_another_source_is_another_question(monkeypatch):
    other = NonTensorStack("nq", "hotpot", "lab")
    first, second, _ = held_out_rows(stored(monkeypatch, data_source=other), "greedy", Tokenizer())
    assert first["id"] != second["id"]


@pytest.mark.slow
def test_rows_of_one_prompt_are_questions_of_their_own_where_their_extra_info_differs(monkeypatch):
    """An environment's 8 rows have one prompt and one gold answer, and their seeds make 8 questions, in every mode."""
    rows = []
    for mode in ("greedy", "sampled"):
        for seed in range(8):
            known = NonTensorStack({"index": seed}, {"index": seed}, {"index": 8})
            rows += held_out_rows(stored(monkeypatch, extra_info=known), mode, Tokenizer())[:2]
    (reward,) = (one for one in measure(rows) if (one.mode, one.name) == ("greedy", "reward"))
    assert len(reward.by_question) == 8 and reward.mean.value == 0.25
    assert len({row["id"] for row in rows}) == 8


def test_turns_follow_the_key_of_turn_ids(monkeypatch):
    with pytest.raises(RuntimeError, match="algorithm.turn_ids=loop"):
        held_out_rows(stored(monkeypatch, **{TURN_IDS: None}), "greedy", Tokenizer(), "loop")


def test_rows_without_a_score_stop_the_run(monkeypatch):
    with pytest.raises(IntegrityError, match="keep_trajectories=true: the held-out rows have no score"):
        held_out_rows(stored(monkeypatch, rm_scores=None), "greedy", Tokenizer())


def test_a_sampled_batch_is_seen_while_its_rows_are_stored():
    watch, asked = RolloutWatch(0.0), []
    buffer = SimpleNamespace(_wait_for_next_poll=None, sample=lambda: (SimpleNamespace(keys=["a"]), {}))
    watch.attach(buffer)
    watch.seen = asked.append
    (batch, _) = buffer.sample()
    assert asked == [batch]
