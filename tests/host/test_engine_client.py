"""A rollout behind turns that stand already: the engine is not asked for them, and their tools are called again."""

import asyncio

import pytest

from kit.byte_world import make_tokenizer
from kit.trajectories import policy_text, record, run
from verl_credit.host.rollout.engine_client import DRAW, REPLAY, RowClient, replay_column
from verl_credit.turns.rollout.book import RowRecord
from verl_credit.turns.score.requests import turn_spans
from verl_credit.worlds.lab.protocol import answer_turn, search_turn

SCRIPT = [search_turn("a"), search_turn("b"), answer_turn("c")]


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


@pytest.fixture(scope="module")
def whole(tokenizer):
    return run(tokenizer, SCRIPT)[0]


def texts_of(output):
    return [output.response_ids[first:end] for first, end in turn_spans(output.turn_ids)]


@pytest.mark.parametrize("stand", [0, 1, 2])
def test_it_goes_on_where_the_turns_end(tokenizer, whole, stand):
    """Tokens, turn ids, what the record says and what the engine is asked for are those of the whole trajectory."""
    column = {REPLAY: replay_column(texts_of(whole)[:stand]), "sampling": "sampled"}
    output, policy = run(tokenizer, SCRIPT[stand:], **column)
    assert output.response_ids == whole.response_ids and output.prompt_ids == whole.prompt_ids
    assert output.turn_ids == whole.turn_ids and output.response_mask == whole.response_mask
    assert record(output)["searches"] == record(whole)["searches"]
    assert len(policy.requests) == len(SCRIPT) - stand
    first, _ = turn_spans(whole.turn_ids)[stand]
    assert policy.requests[0][0] == [*whole.prompt_ids, *whole.response_ids[:first]]


def test_tools_are_called_again(tokenizer, whole):
    asked = []

    async def lookup(query):
        asked.append(query)
        return f"Page 1: other words about {query}\ntext", ["8"], 0

    column = {REPLAY: replay_column(texts_of(whole)[:2]), "sampling": "sampled"}
    output, _ = run(tokenizer, SCRIPT[2:], lookup=lookup, **column)
    assert asked == ["a", "b"] and record(output)["n_searches"] == 2
    assert texts_of(output) == texts_of(whole) and output.response_ids != whole.response_ids


def test_a_rollout_that_ends_on_the_way_asks_the_engine_for_nothing(tokenizer, whole):
    column = {REPLAY: replay_column(texts_of(whole)[:2]), "sampling": "sampled"}
    output, policy = run(tokenizer, [], "search.max_searches=1", **column)
    assert record(output)["stop_reason"] == "max_turns" and not policy.requests
    assert policy_text(tokenizer, output, 1) == SCRIPT[1]


def test_seeds_follow_from_what_the_rollout_is_drawn_for(tokenizer):
    def seeds(**column):
        _, policy = run(tokenizer, SCRIPT, sampling="sampled", **column)
        return [params["seed"] for _, params in policy.requests]

    one, other = seeds(**{DRAW: "0/value/a"}), seeds(**{DRAW: "0/value/b"})
    assert one == seeds(**{DRAW: "0/value/a"})
    assert len({*one, *other, *seeds()}) == 9


@pytest.mark.parametrize("wanted, told", [(True, [0.0, 0.0, 0.0]), (False, None)])
def test_turns_that_stand_have_a_number_per_token_where_log_probs_are_asked_for(wanted, told):
    client = RowClient(None, RowRecord(), replay_column([(5, 6, 7)]))
    output = asyncio.run(
        client.generate(request_id="r", prompt_ids=[1], sampling_params={"logprobs": wanted})
    )
    assert output.token_ids == [5, 6, 7] and output.log_probs == told
