"""Which tokens' hidden states stand before the turns of a step, and the way from rows to the table of states."""

import pytest
import torch
from transfer_queue import KVBatchMeta

from kit.byte_world import make_tokenizer
from kit.fake_store import FakeStore
from kit.recipes import load_config
from kit.tiny_models import tiny_model
from kit.turn_rows import Row, lost_row, padding_row, turn_batch
from verl_credit.errors import ConfigError
from verl_credit.host.step.v1_host import V1Host
from verl_credit.names import HIDDEN_SPANS, HIDDEN_STATES, READ_HIDDEN
from verl_credit.policy.hidden import hidden_states
from verl_credit.policy.packed import PackedPolicy
from verl_credit.study.forward import PackedRows
from verl_credit.turns.hidden import encode_spans, hidden_table, needs, since_last_turns

ROWS = [Row(("ask", "page", "again", "page two", "done")), Row(("ask", "pages", "done")), Row(("ask",))]
BATCH = [*ROWS, lost_row("connect"), padding_row(ROWS[0])]
KEY = "algorithm.turn_anchor"
ULYSSES = "actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size"


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


@pytest.fixture(scope="module")
def turns(tokenizer):
    return turn_batch(BATCH, tokenizer)


def texts(turns, tokenizer, spans):
    rows = [prompt + response for prompt, response in zip(turns.prompt_ids, turns.response_ids, strict=True)]
    return [[tokenizer.decode(ids[at : at + n]) for at, n in of] for ids, of in zip(rows, spans, strict=True)]


def test_what_was_read_since_the_last_turn_is_the_prompt_and_then_what_the_tool_returned(turns, tokenizer):
    spans = since_last_turns(turns)
    assert texts(turns, tokenizer, spans) == [
        ["Who?", "page", "page two"],
        ["Who?", "pages"],
        ["Who?"],
        [],
        [],
    ]
    bare = turn_batch([Row(("ask", "", "again"))], tokenizer)  # a tool that returned nothing
    assert texts(bare, tokenizer, since_last_turns(bare)) == [["Who?", "k"]]


def test_the_twins_states_are_those_of_rows_alone(turns):
    """The rows share their prompt, so that they are one packed row; of a span the mean."""
    model = tiny_model("qwen3", vocab_size=300).eval()
    policy = PackedPolicy(model)
    for layer, spans in ((-1, since_last_turns(turns)), (-2, [[(0, 4), (7, 3)], [(6, 2)], [(1, 1)], [], []])):
        with policy.packing():
            forward = PackedRows(policy)
            forward.read_hidden(turns, spans, layer)
            table = hidden_table(forward, spans)
        model.set_attn_implementation("sdpa")
        for row, of_row in enumerate(spans):
            ids = torch.tensor([turns.prompt_ids[row] + turns.response_ids[row]])
            with torch.no_grad():
                hidden_N_D = model(ids, output_hidden_states=True).hidden_states[layer][0]
            for k, (at, n) in enumerate(of_row):
                torch.testing.assert_close(
                    table[row, k], hidden_N_D[at : at + n].mean(0), atol=2e-5, rtol=1e-4
                )
            assert table[row, len(of_row) :].isnan().all()


def test_a_layer_that_the_policy_lacks_is_refused_with_those_that_it_has():
    model = tiny_model("qwen3", vocab_size=300)
    layers = model.config.num_hidden_layers
    with hidden_states(model, -layers):
        pass
    with (
        pytest.raises(ValueError, match=f"turn_anchor_layer=-{layers + 1}: expected -{layers} to -1"),
        hidden_states(model, -layers - 1),
    ):
        pass


def test_through_the_store(turns, monkeypatch):
    """The flag is on the rows' handle for this forward alone."""
    kept = FakeStore().install(monkeypatch)
    keys, spans = [str(row) for row in range(len(BATCH))], since_last_turns(turns)
    batch = KVBatchMeta(keys=keys, tags=[{} for _ in keys], partition_id="train", fields=[])
    forward = V1Host(load_config("lab"), lambda batch, metrics: batch, None)
    forward.enter(batch, {}, step=1, last_step=1, workers=None)
    forward.read_hidden(turns, spans, -2)
    assert forward.batch.extra_info[READ_HIDDEN] == -2
    given = kept.kv_batch_get(keys, "train", [HIDDEN_SPANS])[HIDDEN_SPANS]
    assert torch.equal(given.values(), encode_spans(spans).values())
    states = [100 * row + torch.arange(3.0 * max(1, len(of))) for row, of in enumerate(spans)]
    for key, state in zip(keys, states, strict=True):
        kept.rows["train", key][HIDDEN_STATES] = state.bfloat16()
    forward.log_probs()
    table = hidden_table(forward, spans)
    assert READ_HIDDEN not in forward.batch.extra_info and table.dtype == torch.bfloat16
    assert table[1].float().nan_to_num(-1).tolist() == [[100, 101, 102], [103, 104, 105], [-1, -1, -1]]
    assert table[3:].isnan().all()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("algorithm.rollout_correction.bypass_mode", "true"),
        ("actor_rollout_ref.model.use_remove_padding", "false"),
        (ULYSSES, "2"),
        (ULYSSES.replace("fsdp_config.", ""), "2"),
    ],
)
def test_forwards_that_have_none_are_refused_by_key(key, value):
    config = load_config("lab", [f"{KEY}=hidden", f"++{key}={value}"])
    with pytest.raises(ConfigError) as refused:
        needs(config, KEY)
    assert key in str(refused.value) and KEY in str(refused.value)
