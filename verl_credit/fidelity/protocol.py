"""The trainer's tool protocol without the trainer: what follows a turn of the policy.

It repeats what `host/rollout` and verl's tool agent loop do with the `hermes` format and a Qwen3 chat template:
which call a turn makes, what the tool answers, how the answer is tokenised, and what ends a trajectory.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from verl_credit.fidelity.sampler import Ids
from verl_credit.names import ROW_RECORD
from verl_credit.reward.qa import compute_score
from verl_credit.search.pages import Page, format_pages
from verl_credit.search.protocol import SCHEMA, bad_query_reason, control_tokens, without_markup

SEARCH = SCHEMA["function"]["name"]
Search = Callable[[Sequence[str]], list[list[dict]]]
"""Queries -> per query the best documents ({"id", "contents"}), best first; the same query gives the same documents."""

_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)


@dataclass(frozen=True)
class Limits:
    """The run's, by their keys."""

    max_searches: int
    max_new_tokens: int
    max_page_chars: int
    max_response_length: int


@dataclass(frozen=True)
class State:
    """Everything before a turn of the policy. ``ids`` begins with a prompt of ``prompt_length`` tokens."""

    question: int
    prompt_length: int
    ids: Ids
    turn: int = 0
    """Turns written so far."""


@dataclass(frozen=True)
class Step:
    """A turn and what followed it: another state, or the end with its reward."""

    state: State
    turn_ids: Ids
    next: State | None
    reward: float | None
    """1 or 0 at the end (exact match); None where the trajectory goes on."""
    call: tuple[str, str] | None = None
    """The executed call: name and arguments."""
    pages: tuple[str, ...] = field(default=())
    """Ids of the pages shown, in order."""


class Protocol:
    """``truths[question]`` is the data set's ``reward_model.ground_truth``."""

    def __init__(self, tokenizer, search: Search, limits: Limits, truths: Sequence):
        self._tokenizer, self._search, self.limits, self._truths = tokenizer, search, limits, truths
        self._control = control_tokens(tokenizer)
        self._newline = self._encode("\n")
        self._turn_end = tokenizer.convert_tokens_to_ids("<|im_end|>")

    def budget(self, state: State) -> int:
        """Tokens that the next turn may have."""
        return min(self.limits.max_new_tokens, self._room(state.ids, state))

    def steps(self, written: Sequence[tuple[State, Ids]]) -> list[Step]:
        """What follows each turn; all searches are made at once."""
        calls = [self._call(state, ids) for state, ids in written]
        asked = [self._query(call) for call in calls]
        queries = [query for refused, query in asked if refused is None and query]
        found = iter(self._search(queries)) if queries else iter(())
        steps = []
        for (state, ids), call, (refused, query) in zip(written, calls, asked, strict=True):
            documents = next(found) if refused is None and query else []
            shown = self._shown(documents) if refused is None else refused
            after = None if call is None else self._after(state, ids, shown)
            steps.append(
                Step(
                    state,
                    ids,
                    after,
                    self._reward(state, ids) if after is None else None,
                    call,
                    tuple(str(document["id"]) for document in documents),
                )
            )
        return steps

    def _call(self, state: State, ids: Ids) -> tuple[str, str] | None:
        """The turn's first well-formed call; None where the trajectory ends before any is looked for."""
        full = self._room((*state.ids, *ids), state) <= 0
        if full or state.turn >= self.limits.max_searches:
            return None
        for body in _CALL.findall(self._tokenizer.decode(ids)):
            try:
                call = json.loads(body)
                name, arguments = call["name"], json.dumps(call["arguments"], ensure_ascii=False)
            except (ValueError, KeyError, TypeError, RecursionError):
                continue
            if isinstance(name, str):
                return name, arguments
        return None

    def _query(self, call: tuple[str, str] | None) -> tuple[str | None, str]:
        """(an error for the policy or None, the query)."""
        if call is None:
            return None, ""
        name, arguments = call
        if name != SEARCH:
            shown = without_markup(name.encode("utf-8", "replace").decode("utf-8"), self._control)
            return f"Error: there is no tool {shown!r}; available: {SEARCH}.", ""
        return bad_query_reason(arguments)

    def _shown(self, documents: Sequence[dict]) -> str:
        pages = []
        for document in documents:
            title, _, text = document["contents"].partition("\n")
            pages.append(Page(str(document["id"]), title, text, 0.0))
        return without_markup(format_pages(pages, self.limits.max_page_chars), self._control)

    def _after(self, state: State, ids: Ids, shown: str) -> State | None:
        """None where the answer of the tool does not fit the row: it is then not shown."""
        # verl puts the newline behind <|im_end|> where the turn ended with it, and nothing behind a turn that was cut.
        written = (*state.ids, *ids)
        joint = self._newline if ids[-1] == self._turn_end else ()
        message = (
            f"<|im_start|>user\n<tool_response>\n{shown}\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
        )
        after = (*written, *joint, *self._encode(message))
        if self._room(after, state) <= 0:
            return None
        return State(state.question, state.prompt_length, after, state.turn + 1)

    def _reward(self, state: State, ids: Ids) -> float:
        text = self._tokenizer.decode(ids, skip_special_tokens=True)
        record = {ROW_RECORD: {"final_text": text, "tool_fault": ""}}
        return compute_score("", "", self._truths[state.question], record)["em"]

    def _room(self, ids: Ids, state: State) -> int:
        return self.limits.max_response_length - (len(ids) - state.prompt_length)

    def _encode(self, text: str) -> Ids:
        return tuple(self._tokenizer.encode(text, add_special_tokens=False))
