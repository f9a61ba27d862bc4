"""How many questions of a data file can be answered from an index: their gold pages are in it, or an answer's text is.

At most ``MOST`` rows are asked, drawn with a fixed seed. A row may name its gold pages: ``extra_info.gold_ids`` (ids) or
``extra_info.supporting`` (titles, as `verl-credit prepare` writes them). Without them, and where one is missing, an alias of
the gold answer is looked for as whole words, both in the form in which the reward compares them.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from verl_credit.errors import one_line
from verl_credit.turns.rollout.reward.golds import gold_answers
from verl_credit.turns.rollout.reward.qa import BOXED, WHOLE, answer_form, comparison
from verl_credit.turns.rollout.search.wire import Page
from verl_credit_retriever.index.corpus import parse_line

MOST, SEED, EXAMPLES = 256, 0, 5


@dataclass(frozen=True)
class Question:
    where: str
    """The file and the row's number."""
    text: str
    golds: tuple[str, ...]
    ids: frozenset[str] = frozenset()
    titles: frozenset[str] = frozenset()

    @property
    def names_pages(self) -> bool:
        return bool(self.ids or self.titles)

    @property
    def needles(self) -> tuple[str, ...]:
        """The answers that a page can hold. "yes" stands on any page."""
        return tuple(gold for gold in self.golds if gold.lower().strip() not in WHOLE)


@dataclass
class Coverage:
    """``page``: questions whose gold pages are all there; ``answer``: others with an answer's text; ``without``: neither."""

    rows: int
    """Of the files."""
    page: int = 0
    answer: int = 0
    without: list[Question] = field(default_factory=list)
    unjudged: int = 0
    """No gold page is named, and the answer is yes, no, or mathematics."""

    def count(self, question: Question, ids: set[str], titles: set[str], answers: set[str]) -> None:
        """``ids``, ``titles``, ``answers``: those of the questions that some page has."""
        wanted = {_title(title) for title in question.titles}
        if question.ids <= ids if question.ids else question.names_pages and wanted <= titles:
            self.page += 1
        elif any(gold in answers for gold in question.needles):
            self.answer += 1
        elif question.names_pages or question.needles:
            self.without.append(question)
        else:
            self.unjudged += 1

    @property
    def judged(self) -> int:
        return self.page + self.answer + len(self.without)

    @property
    def share(self) -> float:
        return (self.page + self.answer) / self.judged if self.judged else 0.0

    def line(self) -> str:
        asked = self.judged + self.unjudged
        drawn = f", drawn with seed {SEED} from {self.rows} rows" if asked < self.rows else ""
        if not self.judged:
            return f"none of {asked} questions{drawn} names its pages or has an answer that a page can hold"
        text = (
            f"{self.page + self.answer} of {self.judged} questions ({self.share:.0%}{drawn}) can be answered: "
            f"{self.page} by all their gold pages, {self.answer} by the text of an answer anywhere in the corpus"
        )
        if self.unjudged:
            text += f"; {self.unjudged} more have no answer that a page can hold"
        shown = [
            f"{one_line(question.text)[:100]!r} ({one_line(question.golds[0])[:40]!r}, {question.where})"
            for question in self.without[:EXAMPLES]
        ]
        return f"{text}; not: {'; '.join(shown)}" if shown else text


def draw(files: Sequence[str], prompt_key: str = "prompt") -> tuple[list[Question], int]:
    """At most ``MOST`` questions of the files, which can train, and the number of all rows."""
    import pyarrow.dataset as arrow_dataset
    import pyarrow.parquet as parquet

    sets = [arrow_dataset.dataset(parquet.ParquetDataset(Path(f).expanduser()).files) for f in files]
    sizes = [one.count_rows() for one in sets]
    total, chosen = sum(sizes), range(sum(sizes))
    if total > MOST:
        chosen = sorted(random.Random(SEED).sample(range(total), MOST))
    questions, first = [], 0
    for path, one, size in zip(files, sets, sizes, strict=True):
        rows = [row - first for row in chosen if first <= row < first + size]
        names = [name for name in (prompt_key, "reward_model", "extra_info") if name in one.schema.names]
        columns = one.take(rows, columns=names).to_pylist() if rows else []
        questions += [
            question_of(f"{path} row {row}", given, prompt_key)
            for row, given in zip(rows, columns, strict=True)
        ]
        first += size
    return questions, total


def question_of(where: str, row: dict, prompt_key: str = "prompt") -> Question:
    """The question as ``extra_info.question`` has it, else as the last message of the user does."""
    about, truth = row.get("extra_info") or {}, row["reward_model"]["ground_truth"]
    asked = about.get("question")
    if not isinstance(asked, str) or not asked.strip():
        said = [
            m["content"] for m in row[prompt_key] if m["role"] == "user" and isinstance(m["content"], str)
        ]
        asked = said[-1].rpartition("Question:")[2].strip() if said else ""
    golds = () if answer_form(truth) == BOXED else tuple(gold_answers(truth))
    ids, titles = (frozenset(map(str, about.get(name) or ())) for name in ("gold_ids", "supporting"))
    return Question(where, asked, golds, ids, titles)


def in_corpus(questions: Sequence[Question], rows: int, pages: Iterable[Page]) -> Coverage:
    """Counts over all ``pages``."""
    seen, coverage = _seen(questions, pages), Coverage(rows)
    for question in questions:
        coverage.count(question, *seen)
    return coverage


def _title(title: str) -> str:
    """A corpus may quote its titles, as Wiki-18's does."""
    return " ".join(title.strip().strip('"').casefold().split())


def _seen(questions: Iterable[Question], pages: Iterable[Page]) -> tuple[set[str], set[str], set[str]]:
    """(ids, titles and answers of the questions that some page has). Answers are looked for by their first word, in the form
    in which the reward compares them, also in a page's title."""
    questions = list(questions)
    wanted = {id for question in questions for id in question.ids}
    named = {_title(title) for question in questions for title in question.titles}
    starts_of: dict[Callable, dict[str, list]] = defaultdict(lambda: defaultdict(list))
    for gold in {gold for question in questions for gold in question.needles}:
        form, text = comparison(gold)
        if words := text.split():
            starts_of[form][words[0]].append((words, gold))
    ids, titles, answers = set(), set(), set()
    for page in pages:
        ids |= {page.id} & wanted
        titles |= {_title(page.title)} & named
        for form, starts in starts_of.items():
            words = form(f"{page.title}\n{page.text}").split()
            for place, word in enumerate(words):
                for needle, gold in starts.get(word, ()):
                    if words[place : place + len(needle)] == needle:
                        answers.add(gold)
    return ids, titles, answers


def pages_of(corpus: Path) -> Iterable[Page]:
    """The pages of a corpus that the retriever reads: a file of JSON lines, or an index's folder, which has a copy.

    Raises ValueError for a line that is no page, OSError without the file.
    """
    file = corpus / "corpus.jsonl" if corpus.is_dir() else corpus
    with open(file, "rb") as lines:
        for row, line in enumerate(lines):
            if line.strip():
                read = parse_line(line, f"{file}:{row + 1}", row)
                title, _, text = read["contents"].partition("\n")
                yield Page(read["id"], title, text, None)
