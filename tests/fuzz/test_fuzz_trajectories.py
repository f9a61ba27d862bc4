"""Scripted policies that write anything, against a search that answers anything: a row is always a whole row."""

from __future__ import annotations

import random
from pathlib import Path

from kit.fuzz import checker_of, cuts, told, try_all
from kit.played import play
from verl_credit.worlds.lab.protocol import TURN_END, answer_turn, search_turn

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


@checker_of
def checker(folder: Path, seed: int) -> str:
    case = make(seed)
    with told(case):
        return play(**case)


@cuts(40)
def test_a_row_is_whole_whatever_the_policy_writes_and_the_search_finds(seeds, tmp_path):
    with checker(tmp_path) as check:
        try_all(check, seeds)
