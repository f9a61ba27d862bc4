"""A folder that remembers trials: ``results.tsv`` in the public format."""

import csv
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock

from verl_credit.errors import printable
from verl_credit.records.lineage.prompt import page
from verl_credit.records.lineage.trial import COLUMNS, Trial, best_of, chain, keeps_of
from verl_credit.records.run.files import replaced

TABLE, LOCK = "results.tsv", "results.lock"


class LineageStore:
    """The trials of a folder. A row is written once, when its trial has ended; no byte of another row changes.

    Departures from the released store: ``lower_is_better`` has no default (True is wrong for an accuracy); ``best`` looks
    at kept trials only; the header is decided under the lock; ids that are taken, numbers that are not finite and cells
    that would not be read back are refused; lines that are no rows are skipped and listed by ``damaged``.

    Raises OSError for a file that cannot be read or written, ValueError for what is wrong with a trial or the table.
    """

    def __init__(self, root: str | Path, *, lower_is_better: bool) -> None:
        self.root, self.lower_is_better = Path(root), lower_is_better
        self.path = self.root / TABLE

    def all_trials(self) -> tuple[Trial, ...]:
        """Returns all rows, in the order of the file."""
        return tuple(read_rows(self._content())[0])

    def damaged(self) -> tuple[str, ...]:
        """Names the lines of the table that could not be read."""
        return tuple(f"{TABLE} {what}" for what in read_rows(self._content())[1])

    def best(self) -> Trial | None:
        """Returns the best metric among ``keep`` and ``baseline``; None where none of them has one."""
        return best_of(self.all_trials(), lower_is_better=self.lower_is_better)

    def render_prompt(
        self,
        for_specialist: str,
        *,
        top_k: int = 20,
        recent_n: int = 30,
        last_m_full: int = 10,
        session_timestamp: str = "",
    ) -> str:
        """Returns the text of ``KNOWLEDGE.md``, which a person or an agent reads before the next trial."""
        trials = self.all_trials()
        if not trials:
            return "# Session start — empty lineage\n"
        best = best_of(trials, lower_is_better=self.lower_is_better)
        return page(
            for_specialist,
            session_timestamp,
            to_best=chain(trials, best.exp_id) if best else (),
            top=keeps_of(trials, lower_is_better=self.lower_is_better)[: max(top_k, 0)],
            recent=trials[::-1][: max(recent_n, 0)],
            full=trials[::-1][: max(last_m_full, 0)],
        )

    def append(self, row: Callable[[tuple[Trial, ...]], Trial]) -> Trial:
        """Adds the trial that ``row`` makes of the trials that are there, and returns it. ``row`` is called under the lock,
        so that two trials that end at once are not both the baseline."""
        self.root.mkdir(parents=True, exist_ok=True)
        with FileLock(self.root / LOCK):
            content = self._content()
            trials = tuple(read_rows(content)[0])
            trial = row(trials)
            if any(trial.exp_id == other.exp_id for other in trials):
                raise ValueError(f"exp_id={trial.exp_id!r} is taken in {self.path}: an id names one trial")
            line = f"{trial.row()}\n".encode()
            if (read := read_rows(line)) != ([trial], []):
                raise ValueError(f"exp_id={trial.exp_id!r} would not be read back: {'; '.join(read[1])}")
            before = self._before(content)
            with replaced(self.path) as file:
                file.write(before + line)
        return trial

    def _content(self) -> bytes:
        return self.path.read_bytes() if self.path.exists() else b""

    def _before(self, content: bytes) -> bytes:
        """Returns the table as a new row can follow it. Raises ValueError for a file that is no table of trials."""
        header = "\t".join(COLUMNS).encode()
        if (header + b"\n").startswith(content):  # nothing yet, or cut by a kill
            return header + b"\n"
        first = content.removeprefix(b"\xef\xbb\xbf").partition(b"\n")[0].removesuffix(b"\r")
        if first != header:
            begins = printable(first[:80].decode(errors="replace"))
            raise ValueError(f"{self.path} begins with '{begins}'; expected the header of a table of trials")
        return content if content.endswith(b"\n") else content + b"\n"


def read_rows(content: bytes) -> tuple[list[Trial], list[str]]:
    """Returns (trials in the order of the file, damaged lines). A quoted cell may have several lines. Its row ends before a
    line where a whole row begins, so that a quote which is never closed damages its own line only."""
    lines = content.decode("utf-8-sig", errors="surrogateescape").split("\n")
    records: list[tuple[list[str] | str | None, int]] = [(None, 0)] * len(lines)
    for at in reversed(range(len(lines))):  # so that the rows that begin in later lines are known
        cells, end = _cells(lines[at]), at + 1
        while cells is None and end < len(lines) and not _is_row(records[end][0]):
            end += 1
            if lines[end - 1].count('"') % 2:  # else the quote is still open
                cells = _cells("\n".join(lines[at:end]))
        records[at] = (cells, end if _is_row(cells) else at + 1)
    trials, damaged, at = [], [], 0
    while at < len(lines):
        cells, end = records[at]
        try:
            if not isinstance(cells, list):
                raise ValueError(cells or "a quote that is never closed")
            if lines[at].strip() and (at or cells != list(COLUMNS)):
                trials.append(Trial.of(cells))
        except ValueError as error:
            damaged.append(f"line {at + 1}: {error}: {printable(lines[at][:80])}")
        at = end
    return trials, damaged


def _cells(line: str) -> list[str] | str | None:
    """Returns the cells of one row, None where a quote is open at the end, or what is wrong."""
    if "\0" in line or any("\ud800" <= c <= "\udfff" for c in line):
        return "a null byte, or bytes that are no UTF-8"
    try:
        return next(csv.reader([line.removesuffix("\r")], delimiter="\t", strict=True), [])
    except csv.Error as error:
        return None if "unexpected end" in str(error) else printable(str(error))


def _is_row(cells: list[str] | str | None) -> bool:
    return isinstance(cells, list) and len(cells) == len(COLUMNS)
