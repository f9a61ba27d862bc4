"""Turns a published record into a ``Record``: forms that several data sets share, and one function per other set."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import replace

from verl_credit.worlds.data.records import (
    NO_ANSWER,
    NO_QUESTION,
    OTHER_SET,
    UNANSWERABLE,
    UNKNOWN_FORM,
    Record,
    Rejected,
    is_text,
)

ANSWER_SPLIT = "<|answer_split|>"


def first(raw: Mapping, *names: str):
    """The value of the first of these fields that the record has, else None."""
    return next((raw[name] for name in names if name in raw), None)


def as_list(value) -> list:
    """Returns one or more answers as a list; None gives an empty list."""
    if value is None:
        return []
    return list(value) if isinstance(value, (list, tuple)) else [value]


def question_of(raw: Mapping, *names: str) -> str:
    """The question in one of these fields. Raises Rejected when there is no such field or it is empty."""
    if not any(name in raw for name in names):
        fields = ", ".join(map(str, raw)) or "none"
        raise Rejected(UNKNOWN_FORM, f"no field {' or '.join(names)}; the record has {fields}")
    value = first(raw, *names)
    if not isinstance(value, str) or not value.strip():
        raise Rejected(NO_QUESTION, repr(value)[:80])
    return value.strip()


def id_of(raw: Mapping, *names: str) -> str:
    """The id as text; "" where there is none, or none that a file can hold."""
    value = first(raw, *names)
    text = "" if value is None else str(value)
    return text if is_text(text) else ""


def read_fields(raw: Mapping) -> Record:
    """``question`` (or ``Question``), ``answers``, ``answer`` or ``Answer`` (one or a list), and ``id`` or ``_id``."""
    return Record(
        question=question_of(raw, "question", "Question"),
        answers=as_list(first(raw, "answers", "answer", "Answer")),
        id=id_of(raw, "_id", "id"),
    )


def read_flashrag(raw: Mapping, between: str = "") -> Record:
    """FlashRAG: ``id, question, golden_answers, metadata``; multi-hop sets may have the paragraphs in the metadata."""
    metadata = raw.get("metadata")
    context = metadata.get("context") if isinstance(metadata, Mapping) else None
    return Record(
        question=question_of(raw, "question"),
        answers=as_list(raw["golden_answers"]),
        id=id_of(raw, "id"),
        paragraphs=titled_sentences(context, between),
    )


def read_joined(raw: Mapping, names: tuple[str, ...]) -> Record:
    """``data_source, question, ground_truth`` with answers joined by ``<|answer_split|>``; a file may mix data sets."""
    source = str(raw.get("data_source", names[0]))
    if source.lower() not in names:
        raise Rejected(OTHER_SET, source)
    truth = raw["ground_truth"]
    answers = truth.split(ANSWER_SPLIT) if isinstance(truth, str) else as_list(truth)
    return Record(question=question_of(raw, "question"), answers=answers, id=id_of(raw, "id"))


def read_hotpotqa(raw: Mapping, between: str = "") -> Record:
    """``_id, question, answer, supporting_facts, context``; on the hub ``id`` and context as columns."""
    return replace(
        read_fields(raw),
        paragraphs=titled_sentences(raw.get("context"), between),
        supporting=titles_of(raw.get("supporting_facts")),
    )


def read_2wiki(raw: Mapping, aliases: Mapping[str, list[str]] | None = None) -> Record:
    """HotpotQA's fields; ``aliases`` are the other names of the entity ``answer_id``, from ``id_aliases.json``."""
    record = read_hotpotqa(raw, between=" ")
    if record.answers and aliases and isinstance(entity := raw.get("answer_id"), str):
        record.answers += aliases.get(entity, [])
    return record


def read_musique(raw: Mapping) -> Record:
    """``id, question, answer, answer_aliases, paragraphs, answerable``."""
    if raw.get("answerable") is False:
        raise Rejected(UNANSWERABLE)
    paragraphs = [
        (p.get("title"), p.get("paragraph_text"))
        for p in as_list(raw.get("paragraphs"))
        if isinstance(p, Mapping)
    ]
    record = read_fields(raw)
    return replace(record, answers=record.answers + as_list(raw.get("answer_aliases")), paragraphs=paragraphs)


def read_triviaqa(raw: Mapping) -> Record:
    """``question, question_id, answer{value, aliases, normalized_aliases}``, capitalised in the release.

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
    record, answers = read_fields(raw), raw.get("possible_answers")
    if isinstance(answers, str):
        try:
            answers = json.loads(answers)
        except (ValueError, RecursionError) as error:
            raise Rejected(UNKNOWN_FORM, f"possible_answers is not a JSON list: {error}") from None
    return replace(record, answers=as_list(answers))


def titles_of(facts) -> list[str]:
    """Titles from ``[[title, sentence], ..]`` or columns ``{"title", "sent_id"}``, each once; any other form gives none."""
    if isinstance(facts, Mapping):
        titles = as_list(facts.get("title"))
    else:
        titles = [fact[0] for fact in as_list(facts) if isinstance(fact, (list, tuple)) and fact]
    return list(dict.fromkeys(title for title in titles if isinstance(title, str) and is_text(title)))


def final_number(answer):
    """The text after the last "####", or all of the answer without one."""
    return answer.rpartition("####")[2] if isinstance(answer, str) else answer


def titled_sentences(context, between: str = "") -> list[tuple[str, str]]:
    """Paragraphs as (title, text) from ``[[title, [sentence, ..]], ..]`` or columns ``{"title", "sentences"}``.

    Sentences of HotpotQA contain their spaces; those of other sets need one ``between`` them. Some copies on the hub
    have the context as JSON in a string. Any other context gives no paragraphs.
    """
    if isinstance(context, str):
        try:
            context = json.loads(context)
        except (ValueError, RecursionError):
            return []
    if isinstance(context, Mapping):
        sentences = first(context, "sentences", "content")
        pairs: Iterable = zip(as_list(context.get("title")), as_list(sentences), strict=False)
    else:
        pairs = (p for p in as_list(context) if isinstance(p, (list, tuple)) and len(p) == 2)
    return [(title, between.join(map(str, as_list(text)))) for title, text in pairs]
