"""Drawn turns of policies that think, with every parser of verl, against what was written: which calls, which answer."""

from __future__ import annotations

import random
from pathlib import Path

from kit.fuzz import ACCEPTED, REFUSED, checker_of, cuts, told, try_all
from kit.thinking import CALLS, FORM, call_in, ended, thinking_tokenizer
from kit.trajectories import policy_text, record, run
from verl_credit.turns.rollout.reward.qa import extract_answer
from verl_credit.turns.rollout.thoughts import FORMS

FILLER = ("", " ", "\n", "word ", "é", "🜂", "<", "</", "think", "[", "|>", "<|im_start|>", "I search first. ")
OVERRIDES = ("search.max_searches=4", "search.max_new_tokens=4000", "data.max_response_length=20000")


class Turn:
    """A drawn turn, with the queries and the answer that count in it.

    The marks of other forms are text inside a thought, and so is the form's own opening mark; its closing mark is, too,
    as long as the thought goes on without an opening one.
    """

    def __init__(self, draw: random.Random, parser: str, opened: str, number: int):
        self._draw, self._call, self._number = draw, call_in(parser), number
        self.text, self.queries, self.answer = "", [], None
        pieces, closed = draw.randrange(5), True
        if opened:
            closed = self._thought(opened)
        while closed and pieces:
            pieces -= 1
            if draw.random() < 0.5:
                form = draw.choice(list(FORMS))
                self.text += form
                closed = self._thought(form)
            else:
                self._piece(counts=True)

    def _thought(self, form: str) -> bool:
        """Writes what follows the opening mark. Was the thought closed?"""
        draw, close, closed = self._draw, FORMS[form], self._draw.random() < 0.9
        mentions = draw.choice([list(FORMS), [close] if closed and close != "<|end|>" else []])
        for _ in range(draw.randrange(5)):
            if mentions and draw.random() < 0.4:
                self.text += draw.choice(mentions)
            else:
                self._piece(counts=False)
        self.text += close * closed
        return closed

    def _piece(self, *, counts: bool) -> None:
        kind, name = self._draw.random(), f"n{self._number}x{len(self.text)}"
        if kind < 0.3:
            self.text += self._call(name)
            self.queries += [name] * counts
        elif kind < 0.6:
            self.text += f"<answer>{name}</answer>"
            self.answer = name if counts else self.answer
        else:
            self.text += "".join(self._draw.choices(FILLER, k=3))


def make(seed: int) -> tuple[str, str, bool, list[Turn]]:
    """(parser, the mark that the template writes, are the marks special tokens, turns)"""
    draw = random.Random(seed)
    parser, special = draw.choice(list(CALLS)), draw.random() < 0.5
    opened = draw.choice([*FORMS, "", "", "", ""])
    turns = [Turn(draw, parser, opened, number) for number in range(3)]
    return parser, opened, special, turns


@checker_of
def checker(folder: Path, seed: int) -> str:
    parser, opened, special, turns = make(seed)
    with told((parser, opened, [turn.text for turn in turns])):
        return _check(parser, thinking_tokenizer(opened, special=special), turns)


def _check(parser: str, tokenizer, turns: list[Turn]) -> str:
    script = [ended(turn.text) for turn in turns]
    output, policy = run(tokenizer, [*script, ended("no")], *OVERRIDES, FORM.format(parser))
    said = record(output)
    expected, last = [], None
    for number, turn in enumerate(turns):
        expected += [(number, query) for query in turn.queries[:4]]  # max_parallel_calls
        last = turn
        if not turn.queries:
            break
    else:
        last = None
    assert [(search["turn"], search["query"]) for search in said["searches"]] == expected
    assert said["n_searches"] == len(expected)
    n_turns = len(policy.requests)
    assert [policy_text(tokenizer, output, turn) for turn in range(n_turns)] == policy.script[:n_turns]
    assert [turn >= 0 for turn in output.turn_ids] == [bool(mask) for mask in output.response_mask]
    if last is not None:
        assert extract_answer(said["final_text"]) == last.answer
        assert said["stop_reason"] == ("answer" if last.answer else "no_answer")
    return ACCEPTED if last is not None and last.answer else REFUSED


@cuts(15, share=2)
def test_calls_and_answers_are_those_outside_the_thoughts(seeds, tmp_path):
    with checker(tmp_path) as check:
        try_all(check, seeds)
