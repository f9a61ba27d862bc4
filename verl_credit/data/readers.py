"""From a published record to a ``Record``: one function per data set, and the forms that several share."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping

from verl_credit.data.records import (
    NO_ANSWER,
    NO_QUESTION,
    OTHER_SET,
    UNANSWERABLE,
    UNKNOWN_FORM,
    Record,
    Rejected,
)

ANSWER_SPLIT = "<|answer_split|>"


def first(raw: Mapping, *names: str):
    """The value of the first of these fields that the record has; None where it has none."""
    return next((raw[name] for name in names if name in raw), None)


def as_list(value) -> list:
    """One answer or several, as a list; None is none."""
    if value is None:
        return []
    if isinstance(value, (list, tuple)):
        return list(value)
    return [value]


def question_of(raw: Mapping, *names: str) -> str:
    """Raises Rejected where the field is missing altogether, and where it holds nothing."""
    if not any(name in raw for name in names):
        fields = ", ".join(map(str, raw)) or "none"
        raise Rejected(UNKNOWN_FORM, f"no field {' or '.join(names)}; the record has {fields}")
    value = first(raw, *names)
    if not isinstance(value, str) or not value.strip():
        raise Rejected(NO_QUESTION, repr(value)[:80])
    return value.strip()


def id_of(raw: Mapping, *names: str) -> str:
    value = first(raw, *names)
    return "" if value is None else str(value)


# --- forms that several data sets come in ---


def read_flashrag(raw: Mapping, between: str = "") -> Record:
    """FlashRAG: ``id, question, golden_answers, metadata``. The metadata of multi-hop sets may hold the paragraphs.

    ``between``: as in `titled_sentences`.
    """
    metadata = raw.get("metadata")
    context = metadata.get("context") if isinstance(metadata, Mapping) else None
    return Record(
        question=question_of(raw, "question"),
        answers=as_list(raw["golden_answers"]),
        id=id_of(raw, "id"),
        paragraphs=titled_sentences(context, between),
    )


def read_joined(raw: Mapping, names: tuple[str, ...]) -> Record:
    """``data_source, question, ground_truth``, several answers joined by ``<|answer_split|>``; sets may be mixed."""
    source = str(raw.get("data_source", names[0]))
    if source.lower() not in names:
        raise Rejected(OTHER_SET, source)
    truth = raw["ground_truth"]
    answers = truth.split(ANSWER_SPLIT) if isinstance(truth, str) else as_list(truth)
    return Record(question=question_of(raw, "question"), answers=answers, id=id_of(raw, "id"))


# --- one per data set ---


def read_hotpotqa(raw: Mapping) -> Record:
    """``_id, question, answer, supporting_facts, context``; on the hub ``id`` and context as columns."""
    return Record(
        question=question_of(raw, "question"),
        answers=as_list(raw.get("answer")),
        id=id_of(raw, "_id", "id"),
        paragraphs=titled_sentences(raw.get("context")),
    )


def read_2wiki(raw: Mapping, aliases: Mapping[str, list[str]] | None = None) -> Record:
    """As HotpotQA; ``answer_id`` names an entity whose other names stand in the release's ``id_aliases.json``."""
    record = Record(
        question=question_of(raw, "question"),
        answers=as_list(raw.get("answer")),
        id=id_of(raw, "_id", "id"),
        paragraphs=titled_sentences(raw.get("context"), between=" "),
    )
    if record.answers and aliases:
        record.answers += aliases.get(raw.get("answer_id"), [])
    return record


def read_musique(raw: Mapping) -> Record:
    """``id, question, answer, answer_aliases, paragraphs, answerable``."""
    if raw.get("answerable") is False:
        raise Rejected(UNANSWERABLE)
    paragraphs = [
        (p.get("title"), p.get("paragraph_text"))
        for p in raw.get("paragraphs") or []
        if isinstance(p, Mapping)
    ]
    return Record(
        question=question_of(raw, "question"),
        answers=as_list(raw.get("answer")) + as_list(raw.get("answer_aliases")),
        id=id_of(raw, "id"),
        paragraphs=paragraphs,
    )


def read_nq(raw: Mapping) -> Record:
    """NQ-open: ``question, answer: [..]``."""
    return Record(
        question=question_of(raw, "question"), answers=as_list(raw.get("answer")), id=id_of(raw, "id")
    )


def read_triviaqa(raw: Mapping) -> Record:
    """``question, question_id, answer{value, aliases, normalized_aliases}``, in the release with capitals.

    The test set's answer is "<unk>".
    """
    question = question_of(raw, "question", "Question")
    answer = first(raw, "answer", "Answer")
    if not isinstance(answer, Mapping):
        raise Rejected(NO_ANSWER, repr(answer)[:80])
    written = [
        *as_list(first(answer, "value", "Value")),
        *as_list(first(answer, "aliases", "Aliases")),
        *as_list(first(answer, "human_answers", "HumanAnswers")),
    ]
    derived = as_list(first(answer, "normalized_aliases", "NormalizedAliases"))
    return Record(
        question=question,
        answers=[a for a in written if a != "<unk>"],
        derived=[a for a in derived if a != "unk"],
        id=id_of(raw, "question_id", "QuestionId"),
    )


def read_popqa(raw: Mapping) -> Record:
    """``id, question, possible_answers``: a JSON list in a string."""
    question = question_of(raw, "question")
    answers = raw.get("possible_answers")
    if isinstance(answers, str):
        try:
            answers = json.loads(answers)
        except ValueError as error:
            raise Rejected(UNKNOWN_FORM, f"possible_answers is no JSON list: {error}") from None
    return Record(question=question, answers=as_list(answers), id=id_of(raw, "id"))


def read_bamboogle(raw: Mapping) -> Record:
    """``Question, Answer``."""
    return Record(
        question=question_of(raw, "Question", "question"),
        answers=as_list(first(raw, "Answer", "answer")),
        id=id_of(raw, "id"),
    )


def read_gsm8k(raw: Mapping) -> Record:
    """``question, answer``: the solution, and behind the last "####" its number."""
    return Record(
        question=question_of(raw, "question"),
        answers=[final_number(a) for a in as_list(raw.get("answer"))],
        id=id_of(raw, "id"),
    )


def read_qa(raw: Mapping) -> Record:
    """Questions of your own: ``question`` and ``answers`` (a list) or ``answer``."""
    return Record(
        question=question_of(raw, "question"),
        answers=as_list(first(raw, "answers", "answer")),
        id=id_of(raw, "id", "_id"),
    )


# --- parts ---


def final_number(answer):
    """What stands behind the last "####", or all of it where there is none."""
    return answer.rpartition("####")[2] if isinstance(answer, str) else answer


def titled_sentences(context, between: str = "") -> list[tuple[str, str]]:
    """Paragraphs as (title, text) from ``[[title, [sentence, ..]], ..]`` or columns ``{"title", "sentences"}``.

    Sentences of HotpotQA bring their own spaces; those of other sets need one ``between`` them. A context that is
    JSON in a string, as some copies on the hub have it, is read. Anything else is no paragraph.
    """
    if isinstance(context, str):
        try:
            context = json.loads(context)
        except ValueError:
            return []
    if isinstance(context, Mapping):
        sentences = first(context, "sentences", "content")
        pairs: Iterable = zip(context.get("title") or [], sentences or [], strict=False)
    else:
        pairs = (p for p in as_list(context) if isinstance(p, (list, tuple)) and len(p) == 2)
    return [(title, between.join(map(str, as_list(text)))) for title, text in pairs]
