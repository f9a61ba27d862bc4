"""What the policy reads and writes on a lake, and the lab's tokenizer for it."""

from __future__ import annotations

from transformers import PreTrainedTokenizerFast

from lakes.lakes import DIRECTIONS, ROWS
from verl_credit.worlds.lab.protocol import (
    TURN_END,
    answer_turn,
    make_tokenizer,
    observation_text,
    prompt_text,
)

HORIZON = 10
"""Moves of an episode."""
SIDE = 4
CALL_HEAD = '<tool_call>\n{"name": "move", "arguments": {"direction": "'
CALL_TAIL = '"}}\n</tool_call>'
STOP = answer_turn("stop")
"""The turn of somebody who gives up: no call, so the episode ends with 0."""


def call(move: int) -> str:
    """The turn that moves."""
    return f"{CALL_HEAD}{DIRECTIONS[move]}{CALL_TAIL}{TURN_END}"


def place(cell: int) -> str:
    return f"row {cell // SIDE + 1}, column {cell % SIDE + 1}"


def moves_left(moves: int) -> str:
    return f", moves left: {moves}"


def prompt(lake: str, cell: int, moves: int) -> str:
    return prompt_text(f"{lake}, {place(cell)}{moves_left(moves)}")


def observation(cell: int, moves: int) -> str:
    """What the tool answers, up to the next turn."""
    return observation_text(f"{place(cell)}{moves_left(moves)}")


def grid_tokenizer(lakes: int = len(ROWS), horizon: int = HORIZON) -> PreTrainedTokenizerFast:
    """A lake, a place, a count, a call's beginning and each of its ends are one token each: turns and answers are short."""
    pieces = [CALL_HEAD, *(f"{direction}{CALL_TAIL}" for direction in DIRECTIONS)]
    pieces += [STOP.removesuffix(TURN_END), *observation_text("|").split("|")]
    pieces += [f"lake {number}, " for number in range(1, lakes + 1)]
    pieces += [place(cell) for cell in range(SIDE * SIDE)] + [moves_left(n) for n in range(horizon + 1)]
    return make_tokenizer((), pieces=pieces)
