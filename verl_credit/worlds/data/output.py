"""The output of `prepare`: rows in verl's format, the corpus of their paragraphs, the counts of its report, and a folder
that is written completely or not at all."""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as parquet

from verl_credit.errors import printable
from verl_credit.names import AGENT_NAME
from verl_credit.turns.rollout.reward.qa import BOXED, TAG
from verl_credit.worlds.data.catalogue import DataSet
from verl_credit.worlds.data.records import PrepareError, Record, is_text

OURS = {"train.parquet", "val.parquet", "test.parquet", "corpus.jsonl", "report.json", "manifest.json"}


def check_free(out: Path, overwrite: bool) -> None:
    """Raises PrepareError when writing to ``out`` would delete files."""
    if out.exists() and not out.is_dir():
        raise PrepareError(f"--out={out} is a file; expected a folder that is new or empty")
    there = sorted(path.name for path in out.iterdir()) if out.exists() else []
    foreign = [name for name in there if name not in OURS]
    if foreign and overwrite:
        raise PrepareError(
            f"--out={out} holds {', '.join(foreign[:3])}, not written by prepare: move it away"
        )
    if there and not overwrite:
        raise PrepareError(f"--out={out} holds {', '.join(there[:3])}: give another folder, or --overwrite")


@contextmanager
def staged(out: Path, overwrite: bool) -> Iterator[Path]:
    """A new folder beside ``out``; it is renamed to ``out`` when the block succeeds, and removed otherwise."""
    out.parent.mkdir(parents=True, exist_ok=True)
    stage = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    try:
        new, old = stage / "new", stage / "old"
        new.mkdir()
        yield new
        check_free(out, overwrite)  # reading takes long: something may have been written there
        if out.exists():
            out.rename(old)
        try:
            new.rename(out)
        except OSError:
            if old.exists():
                old.rename(out)
            raise
    finally:
        shutil.rmtree(stage, ignore_errors=True)


# The chat template adds the tool's schema and the syntax of a call.
PROMPTS = {
    TAG: (
        "Answer the question below. Search for every fact that you are not sure of; you may search several times. "
        "When you know the answer, write it between <answer> and </answer>: the answer alone, in as few words as "
        "possible.\n\nQuestion: {question}"
    ),
    BOXED: (
        "Solve the problem below step by step. Then write the final answer, a single number without units, in "
        "\\boxed{{}}.\n\nProblem: {question}"
    ),
}

_TEXT = pa.string()
SCHEMA = pa.schema(
    {
        "data_source": _TEXT,
        "agent_name": _TEXT,
        "prompt": pa.list_(pa.struct({"role": _TEXT, "content": _TEXT})),
        "ability": _TEXT,
        "reward_model": pa.struct(
            {"style": _TEXT, "ground_truth": pa.struct({"target": pa.list_(_TEXT), "form": _TEXT})}
        ),
        "extra_info": pa.struct(
            {
                "index": pa.int64(),
                **dict.fromkeys(("split", "question", "id"), _TEXT),
                "supporting": pa.list_(_TEXT),
            }
        ),
    }
)


def to_row(record: Record, data_set: DataSet, split: str, index: int) -> dict:
    """Returns the row in verl's format; ``index`` is its number in the file."""
    content = PROMPTS[data_set.form].format(question=record.question)
    return {
        "data_source": data_set.name,
        "agent_name": AGENT_NAME,
        "prompt": [{"role": "user", "content": content}],
        "ability": data_set.ability,
        "reward_model": {"style": "rule", "ground_truth": {"target": record.answers, "form": data_set.form}},
        "extra_info": {"index": index, "split": split}
        | {name: getattr(record, name) for name in ("question", "id", "supporting")},
    }


def write_rows(records: list[Record], data_set: DataSet, split: str, path: Path) -> None:
    rows = [to_row(record, data_set, split, index) for index, record in enumerate(records)]
    parquet.write_table(pa.Table.from_pylist(rows, SCHEMA), path)


class CorpusWriter:
    """Writes every paragraph once, in the order of the questions: ``{"id", "contents": "Title\\ntext"}`` per line.

    Paragraphs are the same when title and text are equal. Only digests are kept in memory.
    """

    def __init__(self, path: Path):
        self.counts = {"paragraphs": 0, "repeated": 0, "unusable": 0}
        self._seen: set[bytes] = set()
        self._file = path.open("w", encoding="utf-8")
        self.close = self._file.close

    def add(self, paragraphs: Iterable[tuple[str, str]]) -> None:
        for title, text in paragraphs:
            if not all(isinstance(part, str) and part.strip() and is_text(part) for part in (title, text)):
                self.counts["unusable"] += 1
                continue
            contents = f"{' '.join(title.split())}\n{text.strip()}"
            digest = hashlib.blake2b(contents.encode(), digest_size=16).digest()
            if digest in self._seen:
                self.counts["repeated"] += 1
                continue
            self._seen.add(digest)
            row = {"id": str(self.counts["paragraphs"]), "contents": contents}
            self._file.write(json.dumps(row, ensure_ascii=False) + "\n")
            self.counts["paragraphs"] += 1


@dataclass
class SplitTally:
    """The counts of one split of the source: ``records`` = ``kept`` + the sum of ``dropped``."""

    records: int = 0
    kept: int = 0
    dropped: Counter = field(default_factory=Counter)
    examples: dict[str, list[str]] = field(default_factory=dict)

    def drop(self, reason: str, where: str, detail: str = "") -> None:
        self.dropped[reason] += 1
        examples = self.examples.setdefault(reason, [])
        if len(examples) < 5:  # report.json needs no more of a reason
            examples.append(printable(f"{where}: {detail}" if detail else where))


@dataclass
class Tally:
    """The counts of a `prepare`."""

    splits: dict[str, SplitTally] = field(default_factory=lambda: defaultdict(SplitTally))
    left_out: Counter = field(default_factory=Counter)
    """Gold answers that were left out, by reason."""
    other_answers: int = 0
    """Kept rows whose question occurs in the same split with other answers."""
    doubted: dict[str, list] = field(default_factory=dict)
    """Kept rows with a gold answer that looks like something else, by what it looks like: how many, and the first."""
    not_read: list[str] = field(default_factory=list)
    """Files of the source's folder whose names have no split, where others have one."""
    files: dict[str, dict[str, int]] = field(default_factory=dict)
    """Counts of each written file."""

    def doubt(self, gold: str, looks: str, where: str) -> None:
        self.doubted.setdefault(looks, [0, printable(f"{where}: {gold[:80]!r}")])[0] += 1

    def as_dict(self, data_set: str) -> dict:
        return {
            "data_set": data_set,
            "read": {name: vars(split) for name, split in self.splits.items()},
            "gold_answers_left_out": dict(self.left_out),
            "gold_answers_doubted": self.doubted,
            "same_question_other_answers": self.other_answers,
            "written": self.files,
        }

    def table(self) -> str:
        """The printed table."""
        lines = [f"{'split':8}{'read':>9}{'kept':>9}{'dropped':>9}"]
        for name, split in self.splits.items():
            lines.append(f"{name:8}{split.records:9}{split.kept:9}{sum(split.dropped.values()):9}")
        for name, split in self.splits.items():
            for reason, count in split.dropped.most_common():
                lines.append(f"  {name}: {count} {reason}, first {split.examples[reason][0]}")
        if self.left_out:
            counts = ", ".join(f"{n} {reason}" for reason, n in self.left_out.most_common())
            lines.append(f"  gold answers left out: {counts}")
        for looks, (n, first) in sorted(self.doubted.items(), key=lambda entry: -entry[1][0]):
            lines.append(
                f"  kept as it stands: {n} rows with an answer that looks like {looks}, first {first}"
            )
        if self.other_answers:
            lines.append(f"  kept: {self.other_answers} questions that also occur with other answers")
        if self.not_read:
            lines.append(f"not read, because their names have no split: {', '.join(self.not_read)}")
        for name, counts in self.files.items():
            texts = (f"{n} {what.replace('_', ' ')}" for what, n in counts.items())
            lines.append(f"{name}: {', '.join(texts)}")
        return "\n".join(lines)
