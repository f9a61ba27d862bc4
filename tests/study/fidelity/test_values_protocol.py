"""The protocol without a trainer against verl's own agent loop, turn by turn on the same texts."""

import json

import pytest

from kit.byte_world import make_tokenizer
from kit.trajectories import record, run
from verl_credit.names import ROW_RECORD
from verl_credit.turns.rollout.reward.qa import compute_score
from verl_credit.worlds.lab.protocol import TURN_END, answer_turn, search_turn
from verl_credit.worlds.rollouts.protocol import Limits, Protocol, State

TRUTH = {"target": ["Ada"]}


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


def trajectory(tokenizer, script, lookup, **limits):
    """(response ids, turn ids, reward) of a policy that writes ``script``."""
    given = {"max_searches": 2, "max_parallel_calls": 4, "max_new_tokens": 200, "max_page_chars": 1000}
    protocol = Protocol(
        tokenizer,
        lambda queries: [lookup(query) for query in queries],
        Limits(**given | {"max_response_length": 2048} | limits),
        [TRUTH],
    )
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Who?"}], tokenize=False, add_generation_prompt=True
    )
    prompt = tuple(tokenizer.encode(text, add_special_tokens=False))
    state, turn_ids = State(0, len(prompt), prompt), []
    for turn, written in enumerate(script):
        ids = tuple(tokenizer.encode(written, add_special_tokens=False))[: protocol.budget(state)]
        (step,) = protocol.steps([(state, ids)])
        turn_ids += [-1] * (len(state.ids) - len(prompt) - len(turn_ids)) + [turn] * len(ids)
        if step.next is None:
            return [*state.ids, *ids][len(prompt) :], turn_ids, step.reward
        state = step.next
    raise AssertionError("the script ended before the trajectory")


def documents(query):
    return [
        {"id": "7", "contents": f"about {query}\ntext of </tool_response> it"},
        {"id": 8, "contents": "Ada"},
    ]


def pages(query):
    """What the search tool makes of them (`search.pages`, `without_markup` is the agent's)."""
    return f"Page 1: about {query}\ntext of </tool_response> it\nPage 2: Ada"


def same_as_verl(tokenizer, script, *overrides, **limits):
    async def lookup(query):
        return pages(query), ["7", "8"], 0

    output, _ = run(tokenizer, script, "data.max_response_length=2048", *overrides, lookup=lookup)
    ids, turns, reward = trajectory(tokenizer, script, documents, **limits)
    assert tokenizer.decode(ids) == tokenizer.decode(output.response_ids)
    assert (ids, turns) == (output.response_ids, output.turn_ids)
    kwargs = {"include_reasoning": limits.get("include_reasoning", False)}
    assert reward == compute_score("", "", TRUTH, {ROW_RECORD: record(output)}, **kwargs)["em"]
    return reward


CUT = search_turn("a").removesuffix(TURN_END)


def call(body):
    return f"<tool_call>\n{body}\n</tool_call>{TURN_END}"


@pytest.mark.parametrize(
    "script",
    [
        [search_turn("a"), search_turn("b"), answer_turn(" Ada")],
        [answer_turn("Ada", thought="why")],
        [f"I do not know{TURN_END}"],
        [search_turn("a"), search_turn("b"), search_turn("c")],
        [f"<answer>Ada</answer>{search_turn('a')}", f"no{TURN_END}"],
        [f"<answer>Ada</answer><tool_call>{{broken{TURN_END}"],
        [call("{broken"), answer_turn("Ada")],
        [CUT + "\n" + search_turn("b"), answer_turn("Ada")],
        [CUT + "\n<tool_call>\n{broken\n</tool_call>" + TURN_END, answer_turn("Ada")],
        ["\n".join([CUT] * 4 + [search_turn("b")]), answer_turn("Ada")],
        [call('["search"]'), answer_turn("Ada")],
        [call('{"name": 3, "arguments": {}}'), answer_turn("Ada")],
        [call('{"name": "browse", "arguments": {"query": "x"}}'), answer_turn("Ada")],
        [call('{"name": "\\ud800", "arguments": {}}'), answer_turn("Ada")],
        [call('{"name": "</tool_response>", "arguments": {}}'), answer_turn("Ada")],
        [call('{"name": "search", "arguments": {"q": "x"}}'), answer_turn("Ada")],
        [call('{"name": "search", "arguments": {"query": "\\ud800"}}'), answer_turn("Ada")],
        [call('{"name": "search", "arguments": ["x"]}'), answer_turn("Ada")],
        [search_turn(json.dumps("ü\n")[1:-1]), f"<answer>Eve</answer>{TURN_END}"],
    ],
)
def test_a_trajectory_is_verls(tokenizer, script):
    same_as_verl(tokenizer, script)


@pytest.mark.parametrize(
    "script, reward",
    [
        ([f"<think>{CUT}<answer>Eve</answer></think><answer>Ada</answer>{TURN_END}"], 1.0),
        ([f"<think>{CUT}</think>{search_turn('b')}", f"<think><answer>Ada</answer>{TURN_END}"], 0.0),
        ([f"{CUT}<answer>Ada</answer></think>no{TURN_END}"], 0.0),
    ],
)
def test_a_trajectory_with_thoughts_is_ours(tokenizer, script, reward):
    assert same_as_verl(tokenizer, script) == reward
    script = [*script, answer_turn("Ada")]
    assert same_as_verl(tokenizer, script, "search.include_reasoning=true", include_reasoning=True) == 1.0


@pytest.mark.parametrize(
    "script",
    [[CUT + "y" * 60, answer_turn("Ada")], ["<answer>Ada</answer>" + "x" * 60], ["<think>" + "x" * 60]],
)
def test_a_turn_that_is_cut_at_its_budget(tokenizer, script):
    same_as_verl(tokenizer, script, "search.max_new_tokens=40", max_new_tokens=40)


@pytest.mark.slow
def test_answers_of_the_tool_that_do_not_fit_end_the_trajectory(tokenizer):
    script = [search_turn("a"), f"<answer>Ada</answer>{TURN_END}"]
    ids, turns, _ = trajectory(tokenizer, script, documents)
    observed = turns.index(1)  # a row of so many tokens is full behind the observation
    ends = {
        length: same_as_verl(
            tokenizer, script, f"data.max_response_length={length}", max_response_length=length
        )
        for length in (
            20,
            observed - 1,
            observed,
            observed + 1,
            len(ids) - 2,
            len(ids) - 1,
            len(ids),
            len(ids) + 1,
        )
    }
    assert {length for length, reward in ends.items() if reward} == {len(ids) - 1, len(ids), len(ids) + 1}


def test_pages_are_cut_and_searches_are_none(tokenizer):
    ids, _, _ = trajectory(tokenizer, [search_turn("a"), answer_turn("b")], documents, max_page_chars=5)
    assert "Page 1: about\ntext \nPage 2: Ada\n" in tokenizer.decode(ids)
    assert trajectory(tokenizer, [search_turn("a")], documents, max_searches=0)[2] == 0.0
