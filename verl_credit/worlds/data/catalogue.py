"""The data sets that can be prepared, and how a published record of each becomes a ``Record``."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from verl_credit.errors import did_you_mean
from verl_credit.turns.reward.golds import decoded, of_mapping, texts_of
from verl_credit.turns.reward.qa import BOXED, TAG
from verl_credit.worlds.data.records import (
    NO_QUESTION,
    ODD_ANSWER,
    OTHER_SET,
    UNANSWERABLE,
    UNKNOWN_FORM,
    PrepareError,
    Record,
    Rejected,
    is_text,
)


def first(raw: Mapping, *names: str):
    """The value of the first of these fields that the record has, else None."""
    return next((raw[name] for name in names if name in raw), None)


def answers_in(value, read: Callable = texts_of):
    """The answers in a field, in any form that `reward.golds` reads. Raises Rejected for another one."""
    try:
        return read(value)
    except ValueError as error:
        raise Rejected(ODD_ANSWER, str(error)) from None


def as_list(value) -> list:
    """Returns one or more values as a list; None gives an empty list."""
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
    question = question_of(raw, "question", "Question")
    return Record(question, answers_in(first(raw, "answers", "answer", "Answer")), id=id_of(raw, "_id", "id"))


def read_flashrag(raw: Mapping, between: str = "") -> Record:
    """FlashRAG: ``id, question, golden_answers, metadata``; multi-hop sets may have the paragraphs in the metadata."""
    metadata = raw.get("metadata")
    context = metadata.get("context") if isinstance(metadata, Mapping) else None
    question, answers = question_of(raw, "question"), answers_in(raw["golden_answers"])
    return Record(question, answers, id=id_of(raw, "id"), paragraphs=titled_sentences(context, between))


def read_joined(raw: Mapping, names: tuple[str, ...]) -> Record:
    """``data_source, question, ground_truth`` with answers joined by ``<|answer_split|>``; a file may mix data sets."""
    source = str(raw.get("data_source", names[0]))
    if source.lower() not in names:
        raise Rejected(OTHER_SET, source)
    return Record(question_of(raw, "question"), answers_in(raw["ground_truth"]), id=id_of(raw, "id"))


def read_hotpotqa(raw: Mapping, between: str = "") -> Record:
    """``_id, question, answer, supporting_facts, context``; on the hub ``id`` and context as columns."""
    paragraphs = titled_sentences(raw.get("context"), between)
    return replace(read_fields(raw), paragraphs=paragraphs, supporting=titles_of(raw.get("supporting_facts")))


def read_2wiki(raw: Mapping, aliases: Mapping[str, list[str]] | None = None) -> Record:
    """HotpotQA's fields; ``aliases`` are the other names of the entity ``answer_id``, from ``id_aliases.json``."""
    record = read_hotpotqa(raw, between=" ")
    if record.answers and aliases and isinstance(entity := raw.get("answer_id"), str):
        record.answers += answers_in(aliases.get(entity))
    return record


def read_musique(raw: Mapping) -> Record:
    """``id, question, answer, answer_aliases, paragraphs, answerable``."""
    if raw.get("answerable") is False:
        raise Rejected(UNANSWERABLE)
    articles = [p for p in as_list(raw.get("paragraphs")) if isinstance(p, Mapping)]
    paragraphs = [(p.get("title"), p.get("paragraph_text")) for p in articles]
    record = read_fields(raw)
    return replace(
        record, answers=record.answers + answers_in(raw.get("answer_aliases")), paragraphs=paragraphs
    )


def read_triviaqa(raw: Mapping) -> Record:
    """``question, question_id, answer{value, aliases, normalized_aliases}``, capitalised in the release.
    The test set's answer is "<unk>"."""
    question = question_of(raw, "question", "Question")
    answer = answers_in(first(raw, "answer", "Answer"), decoded)
    written, derived = (
        answers_in(answer, of_mapping) if isinstance(answer, Mapping) else (answers_in(answer), [])
    )
    written, derived = [a for a in written if a != "<unk>"], [a for a in derived if a != "unk"]
    return Record(question, written, id=id_of(raw, "question_id", "QuestionId"), derived=derived)


def read_popqa(raw: Mapping) -> Record:
    """``id, question, possible_answers``: a list in a string."""
    record, answers = read_fields(raw), answers_in(raw.get("possible_answers"), decoded)
    if isinstance(answers, str):
        raise Rejected(UNKNOWN_FORM, f"possible_answers is not a JSON list: {answers!r:.80}")
    return replace(record, answers=answers_in(answers))


def titles_of(facts) -> list[str]:
    """Titles from ``[[title, sentence], ..]`` or columns ``{"title", "sent_id"}``, each once; any other form gives none."""
    if isinstance(facts, Mapping):
        titles = as_list(facts.get("title"))
    else:
        titles = [fact[0] for fact in as_list(facts) if isinstance(fact, (list, tuple)) and fact]
    return list(dict.fromkeys(title for title in titles if isinstance(title, str) and is_text(title)))


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


@dataclass(frozen=True)
class DataSet:
    """How the records of one data set are read, and how its questions are answered."""

    name: str
    reader: Callable[..., Record]
    fields: str
    """The fields of the release, for messages."""
    form: str = TAG
    """How the policy answers: in the answer tag, or in a box (``turns/reward/qa.py``)."""
    ability: str = "qa"
    other_names: tuple[str, ...] = ()
    """The set's other names in ``data_source`` and in hub configurations."""
    subsets: tuple[str, ...] = ()
    """Hub configurations to take by default, the best first."""
    split: str = "train"
    """The split of a file whose name contains none."""
    alias_file: str = ""
    """A file of the release with other names of the answers."""
    between: str = ""
    """The text between the sentences of a paragraph, in sets whose sentences contain no space between them."""

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name, *self.other_names)

    def read(self, raw, aliases: Mapping[str, list[str]] | None = None) -> Record:
        """Reads the release's form, FlashRAG's, or joined answers in ``ground_truth``. Raises Rejected."""
        if not isinstance(raw, Mapping):
            raise Rejected(UNKNOWN_FORM, f"not an object: {raw!r:.80}")
        if "golden_answers" in raw:
            record = read_flashrag(raw, self.between)
        elif "ground_truth" in raw:
            record = read_joined(raw, self.names)
        else:
            record = self.reader(raw, aliases) if aliases else self.reader(raw)
        if self.form == BOXED:  # the number stands after the last "####", if there is one
            record.answers = [a.rpartition("####")[2] if isinstance(a, str) else a for a in record.answers]
        return record


_ALL = (
    DataSet(
        "hotpotqa",
        read_hotpotqa,
        "question, answer, context",
        other_names=("hotpot_qa", "hotpot"),
        subsets=("distractor",),
    ),
    DataSet("nq", read_fields, "question, answer", other_names=("nq_open", "natural_questions")),
    DataSet("musique", read_musique, "question, answer, answer_aliases"),
    DataSet(
        "2wiki",
        read_2wiki,
        "question, answer",
        other_names=("2wikimultihopqa", "2wikimultihop"),
        alias_file="id_aliases.json",
        between=" ",
    ),
    DataSet(
        "triviaqa",
        read_triviaqa,
        "question, answer{value, aliases}",
        other_names=("tq", "trivia_qa"),
        subsets=("rc.nocontext", "unfiltered.nocontext"),
    ),
    DataSet("popqa", read_popqa, "question, possible_answers", split="test"),
    DataSet("bamboogle", read_fields, "Question, Answer", split="test"),
    DataSet(
        "gsm8k", read_fields, "question, answer with ####", form=BOXED, ability="math", subsets=("main",)
    ),
    DataSet("qa", read_fields, "question, answers or answer"),
)
DATA_SETS = {data_set.name: data_set for data_set in _ALL}


def find(name: str) -> DataSet:
    """The data set called ``name``. Raises PrepareError with the known names."""
    if name not in DATA_SETS:
        raise PrepareError(f"{name!r}{did_you_mean(name, DATA_SETS)}: data sets are {', '.join(DATA_SETS)}")
    return DATA_SETS[name]
