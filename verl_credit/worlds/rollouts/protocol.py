"""The trainer's tool protocol without the trainer: what follows a turn of the policy.

It repeats what `host/rollout` and verl's tool agent loop do with the `hermes` format and a Qwen3 chat template:
which call a turn makes, what the tool answers, how the answer is tokenised, and what ends a trajectory.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from verl_credit.names import ROW_RECORD
from verl_credit.turns.rollout.reward.qa import compute_score
from verl_credit.turns.rollout.search.wire import (
    SCHEMA,
    Page,
    bad_query_reason,
    control_tokens,
    format_pages,
    without_markup,
)
from verl_credit.turns.rollout.thoughts import TurnReader
from verl_credit.worlds.rollouts.sampler import Ids

SEARCH = SCHEMA["function"]["name"]
Search = Callable[[Sequence[str]], list[list[dict]]]
"""Queries -> per query the best documents ({"id", "contents"}), best first; the same query gives the same documents."""

# A tool message is rendered after some turn that calls a tool; its tokens do not depend on that turn.
_BEFORE_TOOLS = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]
_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)


@dataclass(frozen=True)
class Limits:
    """Limits, read from the run's configuration."""

    max_searches: int
    max_parallel_calls: int
    max_new_tokens: int
    max_page_chars: int
    max_response_length: int
    include_reasoning: bool = False


@dataclass(frozen=True)
class State:
    """Everything before a turn of the policy. ``ids`` begins with a prompt of ``prompt_length`` tokens."""

    question: int
    prompt_length: int
    ids: Ids
    turn: int = 0
    """Turns written so far."""


@dataclass(frozen=True)
class Call:
    """An executed call. ``refused``: the text that the policy reads in place of pages."""

    query: str
    refused: str | None


@dataclass(frozen=True)
class Step:
    """A turn and its result: the next state, or the end with its reward."""

    state: State
    turn_ids: Ids
    next: State | None
    reward: float | None
    """1 or 0 at the end (exact match); None when the trajectory continues."""
    calls: tuple[Call, ...] = ()
    pages: tuple[tuple[str, ...], ...] = ()
    """The ids of the pages, in order, for each call."""


class Protocol:
    """``truths[question]`` is the data set's ``reward_model.ground_truth``."""

    def __init__(self, tokenizer, search: Search, limits: Limits, truths: Sequence):
        self._tokenizer, self._search, self.limits, self._truths = tokenizer, search, limits, truths
        self._control, self._reader = (
            control_tokens(tokenizer),
            TurnReader(tokenizer, limits.include_reasoning),
        )
        self._newline = tuple(tokenizer.encode("\n", add_special_tokens=False))
        self._turn_end = tokenizer.convert_tokens_to_ids("<|im_end|>")
        self._tool_ids_of: dict[tuple[str, ...], Ids] = {}
        self._before = tokenizer.apply_chat_template(_BEFORE_TOOLS, tokenize=False)

    def budget(self, state: State) -> int:
        """Tokens that the next turn may have."""
        return min(self.limits.max_new_tokens, self._room(state.ids, state))

    def steps(self, written: Sequence[tuple[State, Ids]]) -> list[Step]:
        """The step of each turn; all searches are made at once."""
        calls = [self._calls(state, ids) for state, ids in written]
        queries = [call.query for calls_of_turn in calls for call in calls_of_turn if call.refused is None]
        results = iter(self._search(queries) if queries else ())
        steps = []
        for (state, ids), calls_of_turn in zip(written, calls, strict=True):
            documents = [next(results) if call.refused is None else [] for call in calls_of_turn]
            texts = [
                self._message(some) if call.refused is None else call.refused
                for call, some in zip(calls_of_turn, documents, strict=True)
            ]
            after = self._after(state, ids, texts) if calls_of_turn else None
            reward = self._reward(state, ids) if after is None else None
            pages = tuple(tuple(str(document["id"]) for document in some) for some in documents)
            steps.append(Step(state, ids, after, reward, calls_of_turn, pages))
        return steps

    def _calls(self, state: State, ids: Ids) -> tuple[Call, ...]:
        """The turn's well-formed calls, as many as are executed; none where the trajectory ends with the turn."""
        full = self._room((*state.ids, *ids), state) <= 0
        if full or state.turn >= self.limits.max_searches:
            return ()
        checked = []
        for body in _CALL.findall(self._reader.after(state.ids).decode(ids)):
            try:
                call = json.loads(body)
                name, arguments = call["name"], json.dumps(call["arguments"], ensure_ascii=False)
            except (ValueError, KeyError, TypeError, RecursionError):
                continue
            if name == SEARCH:
                refused, query = bad_query_reason(arguments)
                checked.append(Call(query, refused))
            elif isinstance(name, str):
                written = without_markup(name.encode("utf-8", "replace").decode("utf-8"), self._control)
                refused = f"Error: there is no tool {written!r}; available: {SEARCH}."
                checked.append(Call("", refused))
        return tuple(checked[: self.limits.max_parallel_calls])

    def _message(self, documents: Sequence[dict]) -> str:
        pages = []
        for document in documents:
            title, _, text = document["contents"].partition("\n")
            pages.append(Page(str(document["id"]), title, text, 0.0))
        return without_markup(format_pages(pages, self.limits.max_page_chars), self._control)

    def _after(self, state: State, ids: Ids, texts: Sequence[str]) -> State | None:
        """The state after the tool's answers; None where they do not fit the row, which ends the trajectory."""
        # The agent loop puts the newline after <|im_end|> where the turn ended with it; after a turn that was cut, nothing.
        newline = self._newline if ids[-1] == self._turn_end else ()
        after = (*state.ids, *ids, *newline, *self._tool_ids(tuple(texts)))
        if self._room(after, state) <= 0:
            return None
        return State(state.question, state.prompt_length, after, state.turn + 1)

    def _tool_ids(self, texts: tuple[str, ...]) -> Ids:
        """Tokens of the tool messages and of the next turn's beginning."""
        if texts not in self._tool_ids_of:
            messages = [*_BEFORE_TOOLS, *({"role": "tool", "content": text} for text in texts)]
            whole = self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
            ids = self._tokenizer.encode(whole[len(self._before) :], add_special_tokens=False)
            self._tool_ids_of[texts] = tuple(ids)
        return self._tool_ids_of[texts]

    def _reward(self, state: State, ids: Ids) -> float:
        text = self._reader.after(state.ids).plain(ids)
        record = {ROW_RECORD: {"final_text": text, "tool_fault": ""}}
        truth, included = self._truths[state.question], self.limits.include_reasoning
        return compute_score("", "", truth, record, include_reasoning=included)["em"]

    def _room(self, ids: Ids, state: State) -> int:
        return self.limits.max_response_length - (len(ids) - state.prompt_length)
