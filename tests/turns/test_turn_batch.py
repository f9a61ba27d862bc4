"""What the credit step reads of a batch: whose tokens are whose turn, and which rows count."""

from types import SimpleNamespace

import pytest
import torch
from tensordict import TensorDict
from tensordict.tensorclass import NonTensorData, NonTensorStack
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.padding_utils import construct_minimal_padding_template
from verl.utils.dataset.rl_dataset import collate_fn
from verl.utils.tensordict_utils import get_tensordict

from verl_credit.host.step.store import fetch_turn_batch
from verl_credit.names import ROW_RECORD, TURN_IDS
from verl_credit.turns.rollout.book import RowRecord

EOS = 9
RECORD = RowRecord(stop_reason="answer", n_searches=1, final_text="x").as_dict()


def sample(prompt, response, turn_ids, *, record=RECORD, **extra_fields):
    """One row as an agent loop leaves it in TransferQueue."""
    if record is not None:
        extra_fields[ROW_RECORD] = record
    mask = [int(turn >= 0) for turn in turn_ids]
    return {
        "prompts": torch.tensor(prompt),
        "responses": torch.tensor(response),
        "response_mask": torch.tensor(mask),
        TURN_IDS: torch.tensor(turn_ids),
        "extra_fields": extra_fields,
        "reward_model": {"ground_truth": {"target": [f"gold {prompt[0]}"]}},
        "extra_info": {"question": f"question {prompt[0]}"},
    }


SEARCHED = sample(
    [1, 1, 1], [5, 6, 7, 8, 5, 6], [0, 0, -1, -1, 1, 1], reward_extra_info={"em": 1.0, "f1": 1.0}
)
ANSWERED = sample([2], [5, 6], [0, 0])
FAULTY = sample(
    [3, 3], [5, 6, 7], [-1, -1, -1], record=RowRecord("tool_fault", tool_fault="connect").as_dict()
)


def padding():
    """verl's own padding row: made from the batch's first row, whose turn ids it still carries."""
    row, _ = construct_minimal_padding_template(SEARCHED, {}, EOS)
    assert len(row[TURN_IDS]) > len(row["responses"])
    return row


def as_list(values):
    return values


def as_stack(values):
    return NonTensorStack(*values)


def as_wrapped(values):
    return [NonTensorData(value) for value in values]


class Queue:
    """TransferQueue's read: every tensor column nested, columns that no row has left out."""

    def __init__(self, rows, objects=as_stack, outputs=1):
        self.rows = {f"row_{n // outputs}_{n % outputs}": row for n, row in enumerate(rows)}
        self.objects, self.reads = objects, []

    def kv_batch_get(self, keys, partition_id, select_fields):
        self.reads.append(partition_id)
        rows = [self.rows[key] for key in keys]
        columns = {}
        for name in select_fields:
            values = [row[name] for row in rows if name in row]
            if values and isinstance(values[0], torch.Tensor):
                columns[name] = torch.nested.as_nested_tensor(values, layout=torch.jagged)
            elif values:
                columns[name] = self.objects(values)
        return TensorDict(columns, batch_size=len(rows)) if self.objects is as_stack else columns


@pytest.fixture
def fetch(monkeypatch):
    def run(*rows, is_padding=(), order=None, objects=as_stack, columns=(), ids="auto", outputs=1):
        queue = Queue(rows, objects, outputs)
        keys = [list(queue.rows)[place] for place in order or range(len(rows))]
        tags = [{"is_padding": True} if int(key.split("_")[1]) in is_padding else {} for key in keys]
        fake = SimpleNamespace(kv_batch_get=queue.kv_batch_get)
        monkeypatch.setattr("verl_credit.host.step.store.tq", fake)
        turns = fetch_turn_batch(KVBatchMeta(keys=keys, tags=tags, partition_id="train"), columns, ids)
        assert queue.reads == ["train"]
        return turns

    return run


def test_rows_are_read_as_the_agent_loop_wrote_them(fetch):
    turns = fetch(SEARCHED, ANSWERED)
    assert turns.prompt_ids == [[1, 1, 1], [2]]
    assert turns.response_ids == [[5, 6, 7, 8, 5, 6], [5, 6]]
    assert turns.turn_ids_B_T.tolist() == [[0, 0, -1, -1, 1, 1], [0, 0, -1, -1, -1, -1]]
    assert turns.response_mask_B_T.tolist() == [[1, 1, 0, 0, 1, 1], [1, 1, 0, 0, 0, 0]]
    assert turns.n_turns_B.tolist() == [2, 1]
    assert turns.row_valid_B.tolist() == [True, True] and turns.is_padding == [False, False]
    assert turns.ground_truths == [{"target": ["gold 1"]}, {"target": ["gold 2"]}]
    assert turns.extra_infos == [{"question": "question 1"}, {"question": "question 2"}]
    assert turns.records == [RECORD, RECORD]
    assert turns.scores == [{"em": 1.0, "f1": 1.0}, {}]


def test_rows_of_a_manager_that_writes_no_extra_fields(fetch):
    bare = {name: value for name, value in SEARCHED.items() if name not in ("extra_fields", "turn_ids")}
    turns = fetch(bare | {"reward_extra_info": {"em": 0.5}}, bare | {"reward_extra_info": {}})
    assert turns.scores == [{"em": 0.5}, {}] and turns.turn_rewards == [[None], [None]]
    assert turns.n_turns_B.tolist() == [2, 2] and turns.ids_from_mask == 2 and turns.row_valid_B.all()
    assert fetch(bare).scores == [{}]


@pytest.mark.parametrize("outputs", [1, 2])
def test_the_last_turn_of_an_output_may_have_a_reward_where_the_rollout_has_others(fetch, outputs):
    row = SEARCHED | {"extra_fields": {"turn_rewards": [0.5, 0.25]}}
    assert fetch(row, row, outputs=outputs).turn_rewards == [[0.5, 0.25][:outputs]] * 2


@pytest.mark.parametrize("objects", [as_list, as_stack, as_wrapped])
def test_the_data_files_columns_are_read_as_verl_hands_them_on(fetch, objects):
    """verl's data loader packs the columns, its agent loops put each row's beside the trajectory."""
    steps = [[0.5, None, 0.25], None, []]
    packed = get_tensordict(collate_fn([{"steps": values} for values in steps])).get("steps")
    rows = [SEARCHED | {"steps": packed[place].data} for place in range(3)]
    turns = fetch(*rows, objects=objects, columns=("steps", "elsewhere", "responses"))
    assert turns.columns == [
        {"steps": values} for values in steps
    ]  # `responses` are verl's tokens, no column
    assert turns.records == [RECORD] * 3 and turns.extra_infos[2] == {"question": "question 1"}
    assert fetch(*rows).columns == [{}, {}, {}]


@pytest.mark.parametrize(
    ("rows", "is_padding", "stored"),
    [
        ([SEARCHED, ANSWERED], (), True),
        ([SEARCHED, ANSWERED, padding()], (2,), False),  # with the ids of another row
        ([SEARCHED | {"extra_fields": {TURN_IDS: [0, 0, -1, -1, 1, 1]}}, ANSWERED], (), False),
    ],
)
def test_ids_have_to_be_written_unless_every_row_has_its_own(fetch, rows, is_padding, stored):
    assert fetch(*rows, is_padding=is_padding).ids_stored is stored


def test_a_padding_row_has_no_turns_and_does_not_count(fetch):
    turns = fetch(SEARCHED, ANSWERED, FAULTY, padding(), is_padding={3})
    assert turns.is_padding == [False, False, False, True]
    assert turns.row_valid_B.tolist() == [True, True, False, False]  # nor does a row that a tool's fault lost
    assert (turns.turn_ids_B_T[2:] == -1).all() and not turns.response_mask_B_T[2:].any()
    assert turns.n_turns_B.tolist() == [2, 1, 0, 0]


def test_padding_rows_change_nothing_of_the_others_wherever_they_stand(fetch):
    """verl reorders the batch when it balances its length over the workers."""
    alone = fetch(SEARCHED, FAULTY, ANSWERED)
    mixed = fetch(SEARCHED, FAULTY, ANSWERED, padding(), is_padding={3}, order=[3, 2, 0, 1])
    back = [2, 3, 1]
    for name in ("turn_ids_B_T", "response_mask_B_T", "row_valid_B", "n_turns_B"):
        assert torch.equal(getattr(mixed, name)[back], getattr(alone, name)), name
    for name in ("prompt_ids", "response_ids", "records", "scores", "ground_truths", "extra_infos"):
        assert [getattr(mixed, name)[row] for row in back] == getattr(alone, name), name


def test_a_row_without_a_record_reads_the_default(fetch):
    turns = fetch(SEARCHED, sample([2], [5], [0], record=None))
    assert turns.records == [RECORD, RowRecord().as_dict()]
    assert turns.row_valid_B.tolist() == [True, True] and turns.scores[1] == {}


def foreign(prompt, response, turn_ids, mask=None, **extra_fields):
    """A row of somebody else's agent loop: turn ids among its extra fields, no record."""
    mask = [int(turn >= 0) for turn in turn_ids] if mask is None else mask
    row = sample(prompt, response, mask, record=None) | {"response_mask": torch.tensor(mask)}
    row["extra_fields"] = {TURN_IDS: turn_ids, **extra_fields}
    return {name: value for name, value in row.items() if name != TURN_IDS}


CALLED = foreign([1, 1], [5, 6, 7, 8], [0, 0, -1, 1])


def test_turn_ids_of_other_loops_are_read_from_their_extra_fields(fetch):
    turns = fetch(CALLED, foreign([2], [5], [0]))
    assert turns.turn_ids_B_T.tolist() == [[0, 0, -1, 1], [0, -1, -1, -1]]
    assert turns.n_turns_B.tolist() == [2, 1] and turns.row_valid_B.all()
    assert turns.records[0] == RowRecord().as_dict() and turns.turn_rewards == [[None], []]


def test_a_batch_may_mix_our_loops_with_others(fetch, monkeypatch):
    """A field comes back only where every row that is asked for has it."""
    get = Queue.kv_batch_get

    def common(self, keys, partition_id, select_fields):
        shared = [name for name in select_fields if all(name in self.rows[key] for key in keys)]
        found = get(self, keys, partition_id, shared)
        self.reads = self.reads[:1]
        return found

    monkeypatch.setattr(Queue, "kv_batch_get", common)
    turns = fetch(CALLED, SEARCHED, foreign([2], [5], [0]), ANSWERED, padding(), is_padding={4})
    assert turns.turn_ids_B_T[:, :6].tolist() == [
        [0, 0, -1, 1, -1, -1], [0, 0, -1, -1, 1, 1], [0, -1, -1, -1, -1, -1], [0, 0, -1, -1, -1, -1], [-1] * 6,
    ]  # fmt: skip
    bare = {name: value for name, value in SEARCHED.items() if name != TURN_IDS}
    with pytest.raises(
        RuntimeError,
        match="row 1: rollouts carry no 'turn_ids'.*turn_ids=loop.*'search_agent' or 'turn_agent'",
    ):
        fetch(CALLED, bare, ids="loop")


@pytest.mark.parametrize("ids", ["auto", "mask"])
def test_without_turn_ids_a_turn_is_a_run_of_the_policys_tokens(fetch, ids):
    """As verl's own loops write rows: the mask alone says where an observation stands."""
    bare = [
        {name: value for name, value in row.items() if name != TURN_IDS}
        for row in (SEARCHED, ANSWERED, FAULTY)
    ]
    turns = fetch(*bare, ids=ids)
    assert turns.turn_ids_B_T.tolist() == [[0, 0, -1, -1, 1, 1], [0, 0, -1, -1, -1, -1], [-1] * 6]
    assert (turns.n_turns_B.tolist(), turns.ids_from_mask, turns.ids_stored) == ([2, 1, 0], 3, False)


def test_the_mask_may_be_asked_for_where_a_loop_says_the_turns(fetch):
    one = {**ANSWERED, TURN_IDS: torch.tensor([0, 1])}  # two turns without an observation between them
    for ids, number in (("auto", 2), ("loop", 2), ("mask", 1)):
        turns = fetch(one, ids=ids)
        assert turns.n_turns_B.tolist() == [number] and turns.ids_stored == (ids != "mask")


@pytest.mark.parametrize(
    "ids, said",
    [
        ([0, 0, -1], r"row 1: extra_fields\['turn_ids'\] has 3 entries; .*: 4"),
        ("0011", r"row 1: extra_fields\['turn_ids'\]='0011'; expected a list of whole numbers"),
        ([0, 0.5, -1, 1], r"row 1: extra_fields\['turn_ids'\]\[1\]=0.5; expected the number of its turn"),
        ([0, None, -1, 1], r"row 1: .*\[1\]=None;"),
        ([0, 0, -1, 2], "row 1, policy token at position 3: turn 2; expected 0 or 1"),
        ([1, 1, -1, 1], "row 1, policy token at position 0: turn 1; expected 0"),
        ([0, -1, -1, 1], "row 1, policy token at position 1: turn -1; expected 0 or 1"),
    ],
)
def test_turn_ids_that_cannot_be_right_name_the_row(fetch, ids, said):
    bad = foreign([2, 2], [5, 6, 7, 8], ids, mask=[1, 1, 0, 1])
    with pytest.raises(ValueError, match=said):
        fetch(CALLED, bad)


@pytest.mark.parametrize("given, read", [
    ([0.5], [0.5]), ([0.5, 2], [0.5]), ([None], [None]), ((0, None), [0.0]), (torch.tensor([0.25]), [0.25]), (None, [None]),
])  # fmt: skip
def test_turn_rewards_have_an_entry_per_turn_with_or_without_the_answer(fetch, given, read):
    row = foreign([1, 1], [5, 6, 7, 8], [0, 0, -1, 1], turn_rewards=given)
    assert fetch(row).turn_rewards == [read]


@pytest.mark.parametrize(
    "given, said",
    [
        ([], r"row 1: extra_fields\['turn_rewards'\] has 0 entries; expected 2, one per turn, or 1 without"),
        ([1, 2, 3], "row 1: .* has 3 entries; expected 2"),
        ([float("nan")], r"row 1: extra_fields\['turn_rewards'\], turn 0 is nan; expected a finite number"),
        ([1, "0.5"], "row 1: .*, turn 1 is '0.5'; expected a finite number"),
        (0.5, r"row 1: extra_fields\['turn_rewards'\]=0.5; expected a list with a number or None per turn"),
        ({"0": 1}, "row 1: .*expected a list"),
    ],
)
def test_turn_rewards_that_cannot_be_right_name_row_and_turn(fetch, given, said):
    with pytest.raises(ValueError, match=said):
        fetch(CALLED, foreign([2, 2], [5, 6, 7, 8], [0, 0, -1, 1], turn_rewards=given))


def test_a_row_without_policy_tokens_has_no_turn_rewards(fetch):
    masked = foreign([2, 2], [5, 6], [0, 0], mask=[0, 0], turn_rewards=[])
    assert fetch(CALLED, masked).turn_rewards == [[None], []]
    with pytest.raises(ValueError, match="row 1: .* has 1 entries; expected 0: "):
        fetch(CALLED, foreign([2, 2], [5, 6], [0, 0], mask=[0, 0], turn_rewards=[1.0]))
