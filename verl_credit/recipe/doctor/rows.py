"""What shows in all rows together: rows that stand there more than once, answers that look like something else, and prompts
that ask the policy to write what the run does not read.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from verl_credit.config.keys import AUTO
from verl_credit.errors import PreflightError
from verl_credit.names import AGENTS
from verl_credit.recipe.agent_loops import FORMAT
from verl_credit.recipe.doctor.asked import READ, SHOWN, asked
from verl_credit.recipe.doctor.data import Reads, Row
from verl_credit.turns.rollout.reward.golds import doubt, gold_answers
from verl_credit.turns.rollout.reward.qa import BOXED, answer_form, stated_form


class Finding(NamedTuple):
    rows: list[Row]
    says: str
    """Of the first of these rows."""
    lost: bool = False
    """These rows' rewards would be 0, whatever the policy knows."""


def look_at(rows: Sequence[Row], key: str, reads: Reads) -> list[str]:
    """Lines about the rows of a key. Raises PreflightError where half of the rows or more are lost."""
    lines, asked_for = [], [row for row in rows if row.task is None]
    for found in (_repeated(rows), _doubted(asked_for), *_unread(asked_for, reads)):
        if not found.rows:
            continue
        share = f"{len(found.rows)} of {len(rows)} rows ({len(found.rows) / len(rows):.0%})"
        lines.append(f"{key}: {share}, first {found.rows[0].where}: {found.says}")
        if found.lost and 2 * len(found.rows) >= len(rows):
            raise PreflightError(lines[-1])
    return lines


def _repeated(rows: Iterable[Row]) -> Finding:
    firsts: dict[bytes, Row] = {}
    found, others, says = [], 0, ""
    for row in rows:
        text = json.dumps([row.prompt, row.task], sort_keys=True, default=repr)
        first = firsts.setdefault(
            hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=16).digest(), row
        )
        if first is not row:
            says = says or f"the prompt of {first.where} stands here again; a run expects a question once"
            others += row.task is None and gold_answers(first.truth) != gold_answers(row.truth)
            found.append(row)
    return Finding(found, says + (f" ({others} of them have other gold answers)" if others else ""))


def _doubted(rows: Iterable[Row]) -> Finding:
    found, says = [], ""
    for row in rows:
        golds, number = gold_answers(row.truth), answer_form(row.truth) == BOXED
        looks = ((gold, what) for gold in golds if (what := doubt(gold, number=number)))
        if (one := next(looks, None)) is not None:
            says = says or f"the gold answer {one[0]!r:.80} looks like {one[1]}, and is compared as it stands"
            found.append(row)
    return Finding(found, f"{says}; several answers are a list")


def _unread(rows: Iterable[Row], reads: Reads) -> Iterator[Finding]:
    calls, answers, unasked = [], [], []
    read = READ.keys() if reads.format == AUTO else READ.keys() & {reads.format}
    for row in rows:
        asks, form = asked(row.prompt), answer_form(row.truth)
        known = read and (row.agent or reads.default_loop) in AGENTS
        if asks.calls and not (reads.calls and (not known or asks.calls.keys() & read)):
            calls.append(row)
        if reads.our_reward and form not in asks.answers and asks.answers:
            answers.append(row)
        if reads.our_reward and not asks.answers and stated_form(row.truth) is None:
            unasked.append(row)
    if calls:
        yield Finding(calls, _lost_calls(asked(calls[0].prompt).calls, reads), lost=reads.calls)
    if answers:
        form, (shown, *_) = answer_form(answers[0].truth), asked(answers[0].prompt).answers.values()
        yield Finding(
            answers,
            f"the prompt asks for an answer as {shown!r}, and the reward reads {SHOWN[form]} "
            f"(reward_model.ground_truth.form={form!r}): it would be 0. Ask for that form in the prompt, as `verl-credit "
            "prepare` does, or give the row the form that the prompt asks for (tag or boxed)",
            lost=True,
        )
    if unasked:
        yield Finding(
            unasked,
            f"the prompt does not say how an answer is written, and the reward reads {SHOWN[answer_form(unasked[0].truth)]} "
            "alone; say it there, or give the rows a form (reward_model.ground_truth.form)",
        )


def _lost_calls(asks: Mapping[str, str], reads: Reads) -> str:
    form, shown = next(iter(asks.items()))
    if not reads.calls:
        return f"the prompt asks for calls as {shown!r}, and the run has no tool (search.max_searches=0)"
    way = (
        f"set {FORMAT}={form}"
        if form in READ
        else "write the prompt without them, as `verl-credit prepare qa --source FILE --out DIR` does: the chat template "
        f"adds the search tool and how it is called; or name a parser of your own in {FORMAT}"
    )
    whose = (
        "no parser reads those"
        if reads.format == AUTO
        else f"the run's loop reads those of {FORMAT}={reads.format}"
    )
    return f"the prompt asks for calls as {shown!r}, and {whose}: every call would be lost; {way}"
