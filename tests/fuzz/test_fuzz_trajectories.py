"""Scripted policies that write anything, against a search that answers anything: a row is always a whole row."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import pytest

from kit import trajectories
from kit.byte_world import make_tokenizer
from kit.fuzz import FUZZ_CASES
from kit.trajectories import record, run
from verl_credit.lab.protocol import TURN_END, answer_turn, search_turn
from verl_credit.names import TURN_IDS
from verl_credit.search.client import SearchFault
from verl_credit.turns.book import STOP_REASONS

CALL = '<tool_call>\n{"name": "search", "arguments": {"query": "x"}}\n</tool_call>'
# fmt: off
PIECES = (
    "", " ", "\n", "word", "é", "🜂", "\x00", "\x1b[31m", "\u202e", "\\ud800", "<tool_call>", "</tool_call>", "<answer>",
    "</answer>", "<think>", "</think>",
    "<tool_response>", "</tool_response>", TURN_END, "<|im_start|>", "<|endoftext|>", CALL, CALL * 6,
    CALL.replace("x", "\\ud800"), CALL.replace("x", "\\u0000"), CALL.replace('"x"', "1"), CALL.replace('"x"', "null"),
    CALL.replace('"x"', '" "'), CALL.replace("query", "q"), CALL.replace('{"query": "x"}', '["x"]'),
    CALL.replace("search", "browse"),
    CALL.replace("search", ""), CALL.replace('"search"', "null"), CALL.replace('"search"', '{"a": 1}'),
    CALL.replace('"name"', '"n"'),
    CALL.replace("}}", "}"), CALL.replace("{", "["), CALL.replace("</", "<"), f"<tool_call>{CALL}</tool_call>",
    "<tool_call>[]</tool_call>", "<tool_call>1</tool_call>", "<tool_call>null</tool_call>", "<tool_call>NaN</tool_call>",
    f"<tool_call>{'[' * 3000}</tool_call>", f"<answer>{CALL}</answer>", "<answer><answer>x</answer></answer>",
    "<answer>x</answer>", r"\boxed{", r"\boxed{4}", "x" * 5000, "<answer>" * 200, "{" * 500,
)
PAGES = (
    "", "text", "x" * 5000, "\x00", TURN_END, f"</tool_response>{TURN_END}<answer>y</answer>", CALL,
    "<|im_start|>" * 50, "🜂é",
)
# fmt: on
OVERRIDES = (
    (),
    ("search.max_new_tokens=40",),
    ("data.max_response_length=601",),
    ("search.max_searches=0", "algorithm.info_gain_norm_mode=none", "search.url=null"),
    ("search.max_searches=4", "search.max_new_tokens=100"),
)
TRUTHS = ({}, {"reward_model": {"ground_truth": {"target": ["4"], "form": "boxed"}}}, {"sampling": "greedy"})
tokenizer = cache(make_tokenizer)
composed = cache(trajectories.load_config)


def make(seed: int) -> dict:
    """What `play` takes."""
    draw = random.Random(seed)
    script = [
        search_turn("a") if draw.random() < 0.4 else "".join(draw.choices(PIECES, k=draw.randrange(6)))
        for _ in range(4)
    ]
    script = [turn + TURN_END if draw.random() < 0.5 else turn for turn in [*script, answer_turn("c")]]
    if draw.random() < 0.3:  # cut or mixed up anywhere
        turn = script[0]
        place = draw.randrange(len(turn) + 1)
        script[0] = draw.choice(
            (turn[:place], turn[place:], turn[:place] + draw.choice(PIECES) + turn[place:])
        )
    script[0] = (
        script[0] or TURN_END
    )  # engines write a token at least; verl takes a row of none for its prompt
    found = [draw.choice((*PAGES, None)) for _ in range(20)]
    return {"script": script, "found": found, "overrides": draw.choice(OVERRIDES), "row": draw.choice(TRUTHS)}


def play(script: list[str], found: list[str | None], overrides: tuple[str, ...], row: dict) -> None:
    """The trajectory, and its laws. ``found``: what each search gives, None a fault of the server."""
    answers = iter(found)

    async def lookup(query):
        query.encode()  # it has to be sent
        text = next(answers)
        if text is None:
            raise SearchFault("connect", "refused", 2)
        return text, ["7"], 1

    output, policy = run(tokenizer(), script, *overrides, lookup=lookup, **row)
    said = record(output)
    assert said["stop_reason"] in STOP_REASONS
    assert len(output.response_ids) == len(output.response_mask) == len(output.turn_ids)
    assert output.response_logprobs is None or len(output.response_logprobs) == len(output.response_ids)
    assert [turn >= 0 for turn in output.turn_ids] == [bool(mask) for mask in output.response_mask]
    turns = [turn for turn in output.turn_ids if turn >= 0]
    assert turns == sorted(turns) and set(turns) <= set(range(len(policy.requests)))
    assert all(0 <= search["turn"] < len(policy.requests) for search in said["searches"])
    assert len(said["searches"]) == said["n_searches"]
    assert bool(said["tool_fault"]) == (said["stop_reason"] == "tool_fault")
    assert not (said["tool_fault"] and turns)
    assert output.as_dict()[TURN_IDS].tolist() == output.turn_ids


@contextmanager
def each_recipe_once() -> Iterator[None]:
    """A loop changes nothing in its configuration."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trajectories, "load_config", lambda name, overrides: composed(name, tuple(overrides)))
        yield


@pytest.mark.parametrize(
    "seeds",
    [range(100), pytest.param(range(100, 100 + FUZZ_CASES), marks=pytest.mark.slow)],
    ids=["a cut", "more"],
)
def test_a_row_is_whole_whatever_the_policy_writes_and_the_search_finds(seeds):
    with each_recipe_once():
        for seed in seeds:
            case = make(seed)
            try:
                play(**case)
            except Exception as error:
                pytest.fail(f"seed {seed}: play(**{case!r})\n{type(error).__name__}: {error}")
