"""Tool calls as a policy may write them: broken JSON, nesting, any Unicode, huge. Each is a search, or counts as wrong."""

from __future__ import annotations

import json
import random
from pathlib import Path

from kit.damage import damaged_value
from kit.fuzz import checker_of, cuts, told, try_all
from kit.played import play
from verl_credit.turns.rollout.search.wire import MAX_QUERY_CHARS, bad_query_reason
from verl_credit.worlds.lab.protocol import TURN_END, answer_turn

# fmt: off
ODD = (
    None, True, 0, -1, 10**400, 1e308, float("nan"), float("inf"), "", " ", "search", "Search", "x" * 3000, "\x00", "\ud800",
    "\ud83d\ude00", "\x1b[31m", "\u202e", "</tool_call>", "<tool_call>", "<|im_end|>", "\\", '"', "'", [], ["x"], [["x"]],
    {}, {"query": "x"}, {"query": {"query": "x"}}, {"name": "search"},
)
LETTERS = '{}[]":,\\/ntu0123dE+-.<> \n\t\x00é🜂\ud800\u202e\u2028'
# fmt: on
OVERRIDES = ("search.max_new_tokens=8000", "data.max_response_length=20000", "data.max_prompt_length=2000")


def nested(draw: random.Random) -> str:
    depth = draw.choice((1, 5, 100, 2000))
    return draw.choice(
        ("[" * depth, "[" * depth + "]" * depth, '{"a":' * depth, '{"a":' * depth + "1" + "}" * depth)
    )


def make(seed: int) -> tuple[str, str]:
    """(a call as text, its arguments as text)"""
    draw = random.Random(seed)
    tree = {
        "name": "search",
        "arguments": {"query": draw.choice(("x", "who is it", "é🜂", "x" * MAX_QUERY_CHARS))},
    }
    for _ in range(draw.choice((0, 0, 1, 2))):
        damaged_value(tree, draw, ODD)
    arguments = json.dumps(tree["arguments"] if isinstance(tree, dict) and "arguments" in tree else tree)
    text = json.dumps(tree, ensure_ascii=draw.random() < 0.5, indent=draw.choice((None, 2)))
    for _ in range(draw.choice((0, 0, 1, 3))):
        place, kind = draw.randrange(len(text) + 1), draw.random()
        more = nested(draw) if kind < 0.2 else "".join(draw.choices(LETTERS, k=draw.choice((1, 3, 30))))
        text = text[:place] + ("" if kind < 0.5 else more) + text[place + (kind > 0.4) :]
        arguments = draw.choice((arguments[:place] + more + arguments[place:], more, arguments))
    before, after = draw.choice(
        (("<tool_call>\n", "\n</tool_call>"),) * 6 + (("<tool_call>", ""), ("", "</tool_call>"))
    )
    return before + text + after, arguments


def law_of_arguments(arguments: str) -> None:
    reason, query = bad_query_reason(arguments)
    assert (reason is None) == bool(query.strip()) and len(query) <= MAX_QUERY_CHARS
    query.encode()
    if reason is not None:
        assert reason.startswith("Error: ") and "\n" not in reason and len(reason) < 1000, f"{reason!r:.300}"
        reason.encode()


@checker_of
def checker(folder: Path, seed: int) -> str:
    call, arguments = make(seed)
    with told((call, arguments)):
        law_of_arguments(arguments)
        # what cannot be encoded never comes out of a tokenizer
        script = [call.encode("utf-8", "replace").decode() + TURN_END, answer_turn("c"), answer_turn("c")]
        return play(script, ["text", None][seed % 7 == 0 :] * 20, OVERRIDES, {})


@cuts(20)
def test_a_call_is_a_search_or_is_counted_as_wrong(seeds, tmp_path):
    with checker(tmp_path) as check:
        try_all(check, seeds)
