"""The data sets that can be prepared, and the one reader that makes a ``Record`` of a published record."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from verl_credit.errors import did_you_mean
from verl_credit.turns.rollout.reward.golds import decoded, of_mapping, texts_of
from verl_credit.turns.rollout.reward.qa import BOXED, TAG
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

QUESTIONS = ("question", "Question")
ANSWERS = ("golden_answers", "ground_truth", "answers", "answer", "Answer", "possible_answers")
IDS = ("_id", "id", "question_id", "QuestionId")


@dataclass(frozen=True)
class DataSet:
    """How the records of one data set are read, and how its questions are answered."""

    name: str
    form: str = TAG
    """How the policy answers: in the answer tag, or in a box (``turns/rollout/reward/qa.py``)."""
    ability: str = "qa"
    other_names: tuple[str, ...] = ()
    """The set's other names in ``data_source`` and in hub configurations."""
    subsets: tuple[str, ...] = ()
    """Hub configurations to take by default, the best first."""
    split: str = "train"
    """The split of a file whose name contains none."""
    between: str = ""
    """The text between the sentences of a paragraph, in sets whose sentences contain no space between them."""

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name, *self.other_names)

    def read(self, raw) -> Record:
        """Reads a record in FlashRAG's form, its release's, the hub's, or with joined answers. Raises Rejected."""
        if not isinstance(raw, Mapping):
            raise Rejected(UNKNOWN_FORM, f"not an object: {raw!r:.80}")
        # A file of joined answers may mix data sets.
        if "golden_answers" not in raw and "ground_truth" in raw:
            source = str(raw.get("data_source", self.name))
            if source.lower() not in self.names:
                raise Rejected(OTHER_SET, source)
        if raw.get("answerable") is False:  # MuSiQue
            raise Rejected(UNANSWERABLE)
        question = _question(raw)
        written, derived = _answers(raw)
        if self.form == BOXED:  # the number stands after the last "####", if there is one
            written = [answer.rpartition("####")[2] for answer in written]
        paragraphs = _paragraphs(raw, self.between)
        supporting = _titles(raw.get("supporting_facts"))
        return Record(question, written, _id(raw), derived, paragraphs, supporting)


def _first(raw: Mapping, names: Iterable[str]):
    return next((raw[name] for name in names if name in raw), None)


def _question(raw: Mapping) -> str:
    if not any(name in raw for name in QUESTIONS):
        fields = ", ".join(map(str, raw)) or "none"
        raise Rejected(UNKNOWN_FORM, f"no field {' or '.join(QUESTIONS)}; the record has {fields}")
    question = _first(raw, QUESTIONS)
    if not isinstance(question, str) or not question.strip():
        raise Rejected(NO_QUESTION, repr(question)[:80])
    return question.strip()


def _id(raw: Mapping) -> str:
    """The id as text; "" where there is none, or none that a file can hold."""
    value = _first(raw, IDS)
    text = "" if value is None else str(value)
    return text if is_text(text) else ""


def _answers(raw: Mapping) -> tuple[list[str], list[str]]:
    """(the gold answers, a release's normalised copies of them). Raises Rejected for a form that is not certain."""
    try:
        value = decoded(_first(raw, ANSWERS))
        if isinstance(value, Mapping):
            written, derived = of_mapping(value)
        else:
            written, derived = texts_of(value), []
        written = written + texts_of(raw.get("answer_aliases"))
    except ValueError as error:
        raise Rejected(ODD_ANSWER, str(error)) from None
    if isinstance(value, str) and not {*ANSWERS[:-1]} & raw.keys():
        raise Rejected(UNKNOWN_FORM, f"possible_answers is not a JSON list: {value!r:.80}")
    # TriviaQA's test set has "<unk>" in place of answers.
    return ([], []) if written[:1] == ["<unk>"] else (written, derived)


def _as_list(value) -> list:
    """Returns one or more values as a list; None gives an empty list."""
    if value is None:
        return []
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _titles(facts) -> list[str]:
    """Titles from ``[[title, sentence], ..]`` or columns ``{"title", "sent_id"}``, each once; any other form gives none."""
    if isinstance(facts, Mapping):
        titles = _as_list(facts.get("title"))
    else:
        titles = [fact[0] for fact in _as_list(facts) if isinstance(fact, (list, tuple)) and fact]
    return list(dict.fromkeys(title for title in titles if isinstance(title, str) and is_text(title)))


def _paragraphs(raw: Mapping, between: str) -> list[tuple[str, str]]:
    """Paragraphs as (title, text) from MuSiQue's ``paragraphs``, and from ``context`` of the record or FlashRAG's metadata:
    ``[[title, [sentence, ..]], ..]`` or columns ``{"title", "sentences"}``, also as JSON in a string. Any other form gives
    none. Sentences of HotpotQA contain their spaces."""
    listed = [one for one in _as_list(raw.get("paragraphs")) if isinstance(one, Mapping)]
    metadata = raw.get("metadata")
    context = raw.get("context", metadata.get("context") if isinstance(metadata, Mapping) else None)
    if isinstance(context, str):
        try:
            context = json.loads(context)
        except (ValueError, RecursionError):
            context = None
    if isinstance(context, Mapping):
        sentences = _first(context, ("sentences", "content"))
        pairs: Iterable = zip(_as_list(context.get("title")), _as_list(sentences), strict=False)
    else:
        pairs = (p for p in _as_list(context) if isinstance(p, (list, tuple)) and len(p) == 2)
    return [(one.get("title"), one.get("paragraph_text")) for one in listed] + [
        (title, between.join(map(str, _as_list(text)))) for title, text in pairs
    ]


_ALL = (
    DataSet("hotpotqa", other_names=("hotpot_qa", "hotpot"), subsets=("distractor",)),
    DataSet("nq", other_names=("nq_open", "natural_questions")),
    DataSet("musique"),
    DataSet("2wiki", other_names=("2wikimultihopqa", "2wikimultihop"), between=" "),
    DataSet("triviaqa", other_names=("tq", "trivia_qa"), subsets=("rc.nocontext", "unfiltered.nocontext")),
    DataSet("popqa", split="test"),
    DataSet("bamboogle", split="test"),
    DataSet("gsm8k", form=BOXED, ability="math", subsets=("main",)),
    DataSet("qa"),
)
DATA_SETS = {data_set.name: data_set for data_set in _ALL}


def find(name: str) -> DataSet:
    """The data set called ``name``. Raises PrepareError with the known names."""
    if name not in DATA_SETS:
        raise PrepareError(f"{name!r}{did_you_mean(name, DATA_SETS)}: data sets are {', '.join(DATA_SETS)}")
    return DATA_SETS[name]
