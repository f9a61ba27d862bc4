"""The data sets that can be prepared."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from verl_credit.errors import did_you_mean
from verl_credit.turns.reward.qa import BOXED, TAG
from verl_credit.worlds.data import readers
from verl_credit.worlds.data.records import UNKNOWN_FORM, PrepareError, Record, Rejected


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
            record = readers.read_flashrag(raw, self.between)
        elif "ground_truth" in raw:
            record = readers.read_joined(raw, self.names)
        else:
            record = self.reader(raw, aliases) if aliases else self.reader(raw)
        if self.form == BOXED:
            return replace(record, answers=[readers.final_number(a) for a in record.answers])
        return record


_ALL = (
    DataSet(
        "hotpotqa",
        readers.read_hotpotqa,
        "question, answer, context",
        other_names=("hotpot_qa", "hotpot"),
        subsets=("distractor",),
    ),
    DataSet("nq", readers.read_fields, "question, answer", other_names=("nq_open", "natural_questions")),
    DataSet("musique", readers.read_musique, "question, answer, answer_aliases"),
    DataSet(
        "2wiki",
        readers.read_2wiki,
        "question, answer",
        other_names=("2wikimultihopqa", "2wikimultihop"),
        alias_file="id_aliases.json",
        between=" ",
    ),
    DataSet(
        "triviaqa",
        readers.read_triviaqa,
        "question, answer{value, aliases}",
        other_names=("tq", "trivia_qa"),
        subsets=("rc.nocontext", "unfiltered.nocontext"),
    ),
    DataSet("popqa", readers.read_popqa, "question, possible_answers", split="test"),
    DataSet("bamboogle", readers.read_fields, "Question, Answer", split="test"),
    DataSet(
        "gsm8k",
        readers.read_fields,
        "question, answer with ####",
        form=BOXED,
        ability="math",
        subsets=("main",),
    ),
    DataSet("qa", readers.read_fields, "question, answers or answer"),
)
DATA_SETS = {data_set.name: data_set for data_set in _ALL}


def find(name: str) -> DataSet:
    """The data set called ``name``. Raises PrepareError with the known names."""
    if name not in DATA_SETS:
        raise PrepareError(f"{name!r}{did_you_mean(name, DATA_SETS)}: data sets are {', '.join(DATA_SETS)}")
    return DATA_SETS[name]
