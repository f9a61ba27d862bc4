"""The tab-separated table: rows to bytes, and bytes to rows, whatever else stands among them."""

from __future__ import annotations

import csv
from dataclasses import dataclass

from verl_credit.errors import printable
from verl_credit.records.lineage.trial import COLUMNS, Trial

HEADER = "\t".join(COLUMNS)


@dataclass(frozen=True)
class Damage:
    """A line of a file that is no row of it: where it stands, what is wrong, and how it begins."""

    file: str
    line: int
    what: str
    text: str

    def __str__(self) -> str:
        return f"{self.file} line {self.line}: {self.what}: {self.text}"


def format_row(trial: Trial) -> bytes:
    """A line as csv writes it with minimal quoting.

    Raises ValueError where the row would not be read back as it is: a null byte, what is no Unicode, a cell of more than
    131,072 characters (the limit of csv readers), a text that holds a whole row.
    """
    cells = [
        '"' + cell.replace('"', '""') + '"' if set(cell) & set('\t\n\r"') else cell for cell in trial.cells()
    ]
    try:
        row = ("\t".join(cells) + "\n").encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"exp_id={trial.exp_id!r}: a cell holds what is no Unicode: {printable(error.object[error.start :][:20])}"
        ) from None
    rows, damaged = read_rows(row)
    if rows != [trial]:
        what = damaged[0].what if damaged else "a cell would be read differently"
        raise ValueError(f"exp_id={trial.exp_id!r} cannot be written as one row: {what}")
    return row


def read_rows(content: bytes, file: str = "") -> tuple[list[Trial], list[Damage]]:
    """(trials in the order of the file, damaged lines). Blank lines and the header at the top are neither.

    A line that is a whole row is that row, whatever stands before it: a quote that is never closed damages its own line
    only. A row's last line needs no line end if all its cells are there.
    """
    lines = content.removeprefix(b"\xef\xbb\xbf").split(b"\n")
    ends = _records(lines)
    trials, damaged, at, header = [], [], 0, False
    while at < len(lines):
        (cells, last), line = ends[at], lines[at]
        try:
            if cells == list(COLUMNS):
                if header or trials:
                    raise ValueError("a second header")
                header = True
            elif line.strip():
                if not _is_row(cells):
                    wrong = f"{len(cells)} cells; expected {len(COLUMNS)}"
                    raise ValueError(cells if isinstance(cells, str) else wrong)
                trials.append(Trial.from_cells(cells))
        except ValueError as error:
            beginning = printable(line.decode(errors="replace")[:80])
            damaged.append(Damage(file, at + 1, str(error), beginning))
        at = last + 1
    return trials, damaged


def _records(lines: list[bytes]) -> list[tuple[list[str] | str, int]]:
    """Returns for every line the cells of the row that begins there, or the fault; and the row's last line.

    Lines are read from the end, so that a quoted cell of several lines stops where a later row begins.
    """
    records: list[tuple[list[str] | str, int]] = [("", 0)] * len(lines)
    for start in reversed(range(len(lines))):
        cells, last = _cells(lines[start]), start
        while cells is None and last + 1 < len(lines) and not _is_row(records[last + 1][0]):
            last += 1
            if lines[last].count(b'"') % 2:  # else the quote is still open
                cells = _cells(b"\n".join(lines[start : last + 1]))
        if last > start and not _is_row(cells):
            cells, last = None, start
        records[start] = ("a quote that is never closed" if cells is None else cells, last)
    return records


def _is_row(cells: list[str] | str | None) -> bool:
    return isinstance(cells, list) and len(cells) == len(COLUMNS)


def _cells(line: bytes) -> list[str] | str | None:
    """The cells of one row, None when a quote is open at the end, or a sentence with the fault."""
    if b"\0" in line:
        return "a null byte"
    try:
        text = line.removesuffix(b"\r").decode()  # a line end of Windows
    except UnicodeDecodeError as error:
        return f"bytes that are no UTF-8: {line[error.start : error.start + 8]!r}"
    try:
        return next(csv.reader([text], delimiter="\t", strict=True), [])
    except csv.Error as error:
        problem = printable(str(error))  # it quotes a tab as it is
    return None if "unexpected end" in problem else problem
