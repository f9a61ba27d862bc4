"""Trajectories of two searches about a question, written by hand, as the batch that information gain is planned from.

A row: the prompt that `verl-credit prepare` writes, in the model's own chat template; then twice a search for the question's
text and a result with one page, in the form of Hermes; then the answer. The query is always the question, so that a gain is
the page's alone.
"""

from __future__ import annotations

import json
from itertools import chain
from typing import NamedTuple

import torch
from questions70 import Question

from verl_credit.config.keys import Algorithm, Search
from verl_credit.config.settings import CreditSettings
from verl_credit.credit.turn.turns import turn_table
from verl_credit.data.rows import PROMPTS
from verl_credit.lab.protocol import answer_turn, observation_text, search_turn
from verl_credit.reward.qa import TAG
from verl_credit.search.pages import Page, format_pages
from verl_credit.turns.batch import TurnBatch
from verl_credit.turns.book import RowRecord

ANSWER, BRIDGE, DISTRACTOR = "answer", "bridge", "distractor"
"""The two supporting pages; where the answer's text is in both or in none, ANSWER is the first of them."""
SETTINGS = CreditSettings(algorithm=Algorithm())


class Rollouts(NamedTuple):
    """Per row the roles of its two pages, and the rows as a batch."""

    roles: list[tuple[str, str]]
    pages: dict[str, Page]
    turns: TurnBatch


def rollouts(question: Question, tokenizer) -> Rollouts:
    """Seven rows: both orders of the supporting pages, of each of them and a distractor, and two distractors.

    Distractors are the question's first four without the answer; a question with fewer gets the first two rows only.
    """
    answer, bridge = question.answer_page_and_other
    others = [page for page in question.distractors if not question.has_answer(page)][:4]
    pages = {ANSWER: answer, BRIDGE: bridge} | {f"{DISTRACTOR} {n}": page for n, page in enumerate(others, 1)}
    roles = [(ANSWER, BRIDGE), (BRIDGE, ANSWER)]
    if len(others) == 4:
        one, two, three, four = list(pages)[2:]
        roles += [(ANSWER, one), (one, ANSWER), (BRIDGE, two), (two, BRIDGE), (three, four)]
    return Rollouts(
        roles, pages, _batch(question, [[pages[role] for role in row] for row in roles], tokenizer)
    )


def _batch(question: Question, rows: list[list[Page]], tokenizer) -> TurnBatch:
    def ids(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    message = {"role": "user", "content": PROMPTS[TAG].format(question=question.text)}
    prompt = ids(tokenizer.apply_chat_template([message], add_generation_prompt=True, tokenize=False))
    call = ids(search_turn(json.dumps(question.text, ensure_ascii=False)[1:-1]))
    responses, turn_ids = [], []
    for pages in rows:
        shown = [ids(observation_text(format_pages([page], Search().max_page_chars))) for page in pages]
        parts = [*chain.from_iterable((call, page) for page in shown), ids(answer_turn(question.answer))]
        responses.append(list(chain.from_iterable(parts)))
        turns = [[place // 2 if place % 2 == 0 else -1] * len(part) for place, part in enumerate(parts)]
        turn_ids.append(list(chain.from_iterable(turns)))
    width, count = max(map(len, turn_ids)), len(rows)
    turn_ids_B_T = torch.tensor([row + [-1] * (width - len(row)) for row in turn_ids])
    mask_B_T = (turn_ids_B_T >= 0).long()
    return TurnBatch(
        prompt_ids=[prompt] * count,
        response_ids=responses,
        turn_ids_B_T=turn_ids_B_T,
        response_mask_B_T=mask_B_T,
        records=[RowRecord(stop_reason="answer").as_dict()] * count,
        scores=[{}] * count,
        ground_truths=[{"target": [question.answer], "form": TAG}] * count,
        extra_infos=[{"question": question.text}] * count,
        columns=[{}] * count,
        is_padding=[False] * count,
        row_valid_B=torch.ones(count, dtype=torch.bool),
        n_turns_B=turn_table(turn_ids_B_T, mask_B_T).n_turns_B,
        turn_rewards=[[None, None]] * count,
    )
