"""A step's continuations by verl's trainer: what agent loops are asked for, what is left out, and the step's rows."""

import json
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict
from verl.utils import tensordict_utils as tu

from kit.byte_world import make_tokenizer
from kit.fake_store import FakeStore
from kit.recipes import load_config
from kit.stored_step import PROMPTS, put
from kit.turn_rows import Row, turn_batch
from verl_credit.config.settings import CreditSettings
from verl_credit.errors import IntegrityError
from verl_credit.host.rollout.agent_manager import RolloutWatch
from verl_credit.host.rollout.engine_client import DRAW, REPLAY
from verl_credit.host.step import store
from verl_credit.host.step.continuations import Continuations
from verl_credit.names import ROW_RECORD, TURN_IDS
from verl_credit.turns.book import RowRecord

C = "algorithm.turn_continuations"
GIVEN = [
    "algorithm.info_gain_norm_mode=turn_gae",
    "algorithm.turn_values=monte_carlo",
    f"{C}.states=2",
    f"{C}.count=3",
]
ROWS = [
    Row(("ask", "page", "again", "other", "done")),
    Row(("ask", "page", "done")),
    Row(("look", "map", "done"), "Where?"),
    Row(("done",), "Where?"),
]
END = 90
"""The token of a continuation's only turn."""


class Loops:
    """Agent loops, and the buffer in which their rollouts arrive: every continuation is a turn of one token more, and the
    first ends right. ``change``: (context's number, rollout's number, fields) -> the row's fields."""

    def __init__(self, kept, turns, change=lambda number, rollout, row: row):
        self.kept, self.turns, self.change, self.asked = kept, turns, change, []

    def generate_sequences(self, batch):
        self.asked.append(batch)
        for number in range(len(batch)):
            given = {
                name: tu.get(batch, name)[number] for name in ("uid", "raw_prompt", "__rollout_n__", REPLAY)
            }
            texts = json.loads(given[REPLAY])
            for rollout in range(given["__rollout_n__"]):
                row = self.change(number, rollout, self._row(given["raw_prompt"], texts, float(rollout == 0)))
                if row is not None:
                    self._put(f"{given['uid']}_{rollout}_0", row)

    def sample(self, *, partition_id, **_):
        tags = self.kept.kv_list(partition_id)[partition_id]
        keys = [key for key, tag in tags.items() if not tag.get("is_prompt")]
        self.kept.kv_clear([key for key, tag in tags.items() if tag.get("is_prompt")], partition_id)
        return SimpleNamespace(keys=keys, tags=[{}] * len(keys), partition_id=partition_id), {}

    def _row(self, prompt, texts, reward):
        ids, stands = self._before(prompt, texts)
        record = RowRecord(replayed=len(texts)).as_dict()
        return {
            "prompt": prompt,
            "ids": [*ids, END],
            "turns": [*stands, len(texts)],
            "reward": reward,
            "record": record,
        }

    def _before(self, prompt, texts):
        for row, ids in enumerate(self.turns.response_ids):
            turn_ids = self.turns.turn_ids_B_T[row, : len(ids)].tolist()
            own = [
                [i for i, turn in zip(ids, turn_ids, strict=True) if turn == n] for n in range(len(texts) + 1)
            ]
            if self.turns.prompt_ids[row] == prompt and own[:-1] == texts and own[-1]:
                first = turn_ids.index(len(texts))
                return ids[:first], turn_ids[:first]
        raise AssertionError(f"no row has {texts} after {prompt}")

    def _put(self, key, row):
        def nested(values):
            return torch.nested.as_nested_tensor([torch.as_tensor(values)], layout=torch.jagged)

        fields = {
            "prompts": nested(row["prompt"]),
            "responses": nested(row["ids"]),
            "response_mask": nested([int(turn >= 0) for turn in row["turns"]]),
            TURN_IDS: nested([*row["turns"]]).short(),
            "rm_scores": nested([row["reward"]]),
            "extra_fields": NonTensorStack(NonTensorData({ROW_RECORD: row["record"]})),
            "reward_model": NonTensorStack(NonTensorData({"ground_truth": "Paris"})),
            "extra_info": NonTensorStack(NonTensorData({})),
        }
        self.kept.kv_batch_put([key], "val", TensorDict(fields, batch_size=1), [{"status": "success"}])


@pytest.fixture
def step(monkeypatch):
    """Of a step with these overrides: (its continuations, turns, agent loops, watch, store)."""

    def step(*overrides, number=1, change=lambda number, rollout, row: row):
        kept, turns = FakeStore().install(monkeypatch), turn_batch(ROWS, make_tokenizer())
        batch, config = put(kept, turns), load_config("lab", [*GIVEN, *overrides])
        watch, loops = RolloutWatch(0.0), Loops(kept, turns, change)
        watch.drain = lambda: []
        watch.begin(4)
        again = Continuations(config, CreditSettings.from_config(config), watch)
        prompts = dict(zip(PROMPTS, turns.prompt_ids, strict=True))
        asked = {"uid": [*prompts], "raw_prompt": [*prompts.values()], "index": [7, 8]}
        given = tu.get_tensordict(
            {name: NonTensorStack(*map(NonTensorData, of)) for name, of in asked.items()}
        )
        assert again.asked(given) is given
        again.begin(number)
        watch.seen(batch)
        return again.made(loops, loops), turns, loops, watch, kept

    return step


def test_agent_loops_go_on_from_the_states_of_the_rollouts(step):
    made, turns, loops, _, _ = step(f"{C}.states=9")
    (batch,) = loops.asked
    columns = "index", "sampling", "__rollout_n__", REPLAY
    rows = [[tu.get(batch, name)[row] for name in columns] for row in range(len(batch))]

    def ids(*texts):
        return json.dumps([make_tokenizer()(text, add_special_tokens=False)["input_ids"] for text in texts])

    assert sorted(map(str, rows)) == sorted(
        str([index, "sampled", 3, texts])
        for index, texts in ((7, ids("ask")), (7, ids("ask", "again")), (8, ids("look")))
    )
    assert tu.get_non_tensor_data(batch, "validate", None) is True
    assert len({tu.get(batch, DRAW)[row] for row in range(3)}) == 3
    measured = made.measured(turns, PROMPTS)
    third = pytest.approx(1 / 3)
    assert [measured[row, turn].item() for row, turn in ((0, 1), (0, 2), (1, 1), (2, 1))] == [third] * 4
    assert int(measured.isfinite().sum()) == 4 and not measured[:, 0].isfinite().any()
    found = made.metrics()
    assert found["credit/continuations/states"] == 3 and found["credit/continuations/tokens"] == 9


def test_the_steps_rows_and_its_count_of_failures_see_nothing_of_it(step):
    _, _, _, watch, kept = step()
    assert {partition for partition, _ in kept.rows} == {"train"} and len(kept.rows) == 4
    assert watch.expected == 4 and watch.errors == [] and watch.seen is None and watch.settle(4) == 0


def test_every_n_steps(step):
    made, _, loops, _, _ = step(f"{C}.every=2", number=2)
    assert made is None and not loops.asked
    assert step(f"{C}.every=2", number=3)[0] is not None


def test_a_continuation_of_another_state_or_with_a_fault_is_left_out(step):
    """The first context: a tool answers otherwise in the first rollout, fails in the second. The second: all of them."""

    def change(number, rollout, row):
        if number == 1 or rollout == 1:
            record = {**row["record"], "tool_fault": "deadline"}
            return row | {"turns": [-1] * len(row["ids"]), "record": record}
        if rollout == 0:
            tool = row["turns"].index(-1)
            return row | {"ids": [5 if place == tool else i for place, i in enumerate(row["ids"])]}
        return row

    made, turns, _, _, _ = step(change=change)
    assert [*made.outcomes.values()] == [[0.0], []] and made.left_out == 5
    measured = made.measured(turns, PROMPTS)
    assert set(measured[measured.isfinite()].tolist()) == {0.0}
    assert made.metrics()["credit/continuations/states"] == 1


def test_a_loop_that_does_not_repeat_the_turns_ends_the_run(step):
    def change(number, rollout, row):
        return row | {"record": RowRecord().as_dict()}

    with pytest.raises(IntegrityError, match="did not begin with the turns that it was given"):
        step(change=change)


def test_a_rollout_that_raised_is_one_of_the_failures_that_are_tolerated(step):
    with pytest.raises(IntegrityError, match=r"1 of 6 rollouts raised .*max_failed_rollouts=0"):
        step(change=lambda number, rollout, row: row if (number, rollout) != (0, 0) else None)


def test_uncertainty_is_the_engines(step):
    """Of the turns before a state the one with the lowest mean log-prob decides."""
    tokens = [len(ids) for ids in turn_batch(ROWS, make_tokenizer()).response_ids]
    low = torch.full((tokens[2],), -3.0)

    def written(batch, *names, rows=None, read=None):
        found = read(batch, *names, rows=rows)
        if "rollout_log_probs" in names:
            rows = [torch.full((n,), -0.5) for n in tokens]
            rows[2] = low
            found = {"rollout_log_probs": torch.nested.as_nested_tensor(rows, layout=torch.jagged)}
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store, "read", partial(written, read=store.read))
        made, turns, *_ = step(f"{C}.states=1", f"{C}.choose=uncertainty")
    (state,) = made.outcomes
    first = turns.turn_ids_B_T[2].tolist().index(1)
    assert state == ("b", (*turns.prompt_ids[2], *turns.response_ids[2][:first]))
