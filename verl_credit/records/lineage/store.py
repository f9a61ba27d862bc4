"""A folder that remembers trials: ``results.tsv`` in the public format, and ``results.jsonl`` beside it."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from verl_credit.errors import printable
from verl_credit.names import bare_id
from verl_credit.records.lineage.prompt import LineageSnapshot, page
from verl_credit.records.lineage.table import HEADER, Damage, format_row, read_rows
from verl_credit.records.lineage.trial import NUMBERS, Trial, best_of, chain, keeps_of, last, number
from verl_credit.records.run.files import plain

TABLE, COMPANION = "results.tsv", "results.jsonl"
STARTED, ENDED = "started", "ended"


class LineageError(OSError):
    """A file of a store cannot be read or written; the message names it."""


class LineageStore:
    """The trials of a folder. Files are only appended to: a row is written once, when its trial has ended.

    A trial that has begun is only in the companion, because the table has no status for it; a killed trial stays
    ``unfinished`` until a row with its id is added. Lines that are no rows are skipped and listed by ``damaged``; they
    stay in the file.

    Departures from the released store: ``lower_is_better`` has no default (True is wrong for an accuracy); ``best`` looks
    at kept trials only; the header is decided under the lock; rows are on the disk when ``append`` returns; ids that are
    taken, numbers that are not finite and cells that would not be read back are refused.

    Errors: LineageError names the file that cannot be read or written, ValueError what is wrong with a trial.
    """

    def __init__(self, root: str | Path, *, lower_is_better: bool) -> None:
        self.root, self.lower_is_better = Path(root), lower_is_better
        self.path, self.companion = self.root / TABLE, self.root / COMPANION

    # Reading

    def all_trials(self) -> tuple[Trial, ...]:
        """All rows, in the order of the file."""
        return tuple(read_rows(_read(self.path, shared=True), TABLE)[0])

    def latest(self, n: int = 1) -> tuple[Trial, ...]:
        """The last ``n`` rows, oldest first; none for n ≤ 0."""
        return last(self.all_trials(), n)

    def best(self) -> Trial | None:
        """The best metric among ``keep`` and ``baseline``; None where none of them has one."""
        return best_of(self.all_trials(), lower_is_better=self.lower_is_better)

    def keeps(self) -> tuple[Trial, ...]:
        """Rows with status ``keep``, best first, those without a metric last."""
        return keeps_of(self.all_trials(), lower_is_better=self.lower_is_better)

    def chain_to(self, exp_id: str) -> tuple[Trial, ...]:
        """Returns the trials from the root to ``exp_id``, as `trial.chain` does. Raises KeyError when it has no row."""
        return chain(self.all_trials(), exp_id)

    def damaged(self) -> tuple[Damage, ...]:
        """Lines of both files that could not be read."""
        table = read_rows(_read(self.path, shared=True), TABLE)[1]
        return (*table, *_read_events(self.companion)[1])

    def facts(self, exp_id: str) -> dict[str, Any]:
        """The facts of a trial in the companion: those of its last start, then those of its end."""
        return self.all_facts().get(exp_id, {})

    def all_facts(self) -> dict[str, dict[str, Any]]:
        """``facts`` of every trial in the companion, by id."""
        facts_of: dict[str, dict[str, Any]] = {}
        for row in _read_events(self.companion)[0]:
            known = {key: value for key, value in row.items() if key not in ("event", "exp_id")}
            facts_of.setdefault(row["exp_id"], {}).update(known)
        return facts_of

    def unfinished(self) -> dict[str, dict[str, Any]]:
        """Trials that began and have no row, with the facts of their last start: they are running or were killed."""
        return self._unfinished(self.all_trials())

    def _unfinished(self, trials: tuple[Trial, ...]) -> dict[str, dict[str, Any]]:
        done = {trial.exp_id for trial in trials}
        started = {row["exp_id"]: row for row in _read_events(self.companion)[0] if row["event"] == STARTED}
        return {exp_id: row for exp_id, row in started.items() if exp_id not in done}

    def render_prompt(
        self,
        for_specialist: str,
        *,
        top_k: int = 20,
        recent_n: int = 30,
        last_m_full: int = 10,
        session_timestamp: str = "",
    ) -> LineageSnapshot:
        """Renders ``KNOWLEDGE.md``, which a person or an agent reads before the next trial."""
        trials = self.all_trials()
        best = best_of(trials, lower_is_better=self.lower_is_better)
        to_best = chain(trials, best.exp_id) if best else ()
        top = keeps_of(trials, lower_is_better=self.lower_is_better)[: max(top_k, 0)]
        recent, full = last(trials, recent_n)[::-1], last(trials, last_m_full)[::-1]
        found = LineageSnapshot("", best, to_best, top, recent, full)
        return replace(found, rendered_prompt=page(found, trials, for_specialist, session_timestamp))

    # Writing

    def append(
        self, trial: Trial | Callable[[tuple[Trial, ...]], Trial], facts: Mapping[str, Any] | None = None
    ) -> Trial:
        """Add the row of a trial that has ended, and its facts. Returns the trial.

        ``trial`` may be a function of the trials that are there: it is called under the lock, so that two that end at once
        are not both the baseline. Raises ValueError for an id that is taken, a number that is not finite, a cell that
        would not be read back; LineageError where a file cannot be written: then neither file has a part of it.
        """
        with _locked(self.path):
            content = _read(self.path)
            if callable(trial):
                trial = trial(tuple(read_rows(content)[0]))
            trial = replace(trial, **{name: number(name, getattr(trial, name)) for name in NUMBERS})
            bare_id(trial.exp_id)
            if _taken(trial.exp_id, content):
                raise ValueError(f"exp_id={trial.exp_id!r} is taken in {self.path}: an id names one trial")
            event = _format_event(ENDED, trial.exp_id, dict(facts or {}))
            _add({self.path: self._before(content) + format_row(trial), **self._event(event)})
        return trial

    def start(
        self,
        exp_id: str | Callable[[tuple[Trial, ...], Mapping[str, dict]], str],
        facts: Mapping[str, Any] | Callable[[], Mapping[str, Any]] | None = None,
    ) -> str:
        """Record that a trial begins, or continues after a kill. Returns its id.

        ``exp_id`` may be a function, which chooses the id under the lock from the trials and the unfinished trials;
        ``facts`` may be a function that is called after it. Raises the errors of ``append``.
        """
        with _locked(self.path):
            content = _read(self.path)
            if callable(exp_id):
                trials = tuple(read_rows(content)[0])
                exp_id = exp_id(trials, self._unfinished(trials))
            bare_id(exp_id)
            if _taken(exp_id, content):
                raise ValueError(f"exp_id={exp_id!r} has ended in {self.path}: what goes on is a new trial")
            facts = facts() if callable(facts) else facts
            event = _format_event(STARTED, exp_id, dict(facts or {}))
            _add({self.path: self._before(content), **self._event(event)})
        return exp_id

    def _before(self, content: bytes) -> bytes:
        """Returns what a new row needs before it: the header, the end of a cut line, or nothing.

        Raises ValueError for a file that is no table of trials.
        """
        header = (HEADER + "\n").encode()
        if len(content) < len(header) and header.startswith(content):
            return header[len(content) :]  # nothing yet, or cut by a kill
        first = content.removeprefix(b"\xef\xbb\xbf").partition(b"\n")[0].removesuffix(b"\r")
        if first != HEADER.encode():
            beginning = printable(first[:80].decode(errors="replace"))
            raise ValueError(
                f"{self.path} begins with '{beginning}', not with the header of a table of trials; nothing was written"
            )
        return _new_line(self.path)

    def _event(self, line: bytes) -> dict[Path, bytes]:
        return {self.companion: _new_line(self.companion) + line}


def _taken(exp_id: str, content: bytes) -> bool:
    """A search of bytes first: a store of thousands of rows is not taken apart for every row that is added."""
    name = exp_id.encode()
    starts = (name + b"\t", b'"' + name.replace(b'"', b'""') + b'"\t')
    if not any(b"\n" + start in content for start in starts):
        return False
    return any(trial.exp_id == exp_id for trial in read_rows(content)[0])


@contextmanager
def _or_lineage_error(what: str, path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise LineageError(f"{path} cannot be {what}: {error.strerror}") from error


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold ``flock`` on ``path``, as other writers of the format do; a missing file and folder are created."""
    with _or_lineage_error("written", path):
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("ab")
    with file:
        with _or_lineage_error("locked", path):
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _read(path: Path, shared: bool = False) -> bytes:
    """The whole file; empty when it is missing. ``shared``: wait until no process writes."""
    with _or_lineage_error("read", path), suppress(FileNotFoundError), path.open("rb") as file:
        if shared:
            fcntl.flock(file, fcntl.LOCK_SH)
        return file.read()
    return b""


def _new_line(path: Path) -> bytes:
    """Returns the line end that an appended line needs first when a kill has cut the last line; else nothing."""
    with _or_lineage_error("read", path), suppress(FileNotFoundError), path.open("rb") as file:
        file.seek(max(file.seek(0, os.SEEK_END) - 1, 0))
        return b"" if file.read() in (b"", b"\n") else b"\n"
    return b""


def _add(lines: Mapping[Path, bytes]) -> None:
    """Appends to every file; the lines are on the disk when this returns. If one file fails, no file keeps its lines."""
    before: dict[Path, int] = {}
    for path, content in lines.items():
        try:
            with _or_lineage_error("written", path), path.open("ab") as file:
                before[path] = os.fstat(file.fileno()).st_size
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
        except LineageError:
            for other, size in before.items():
                with suppress(OSError):  # a cut line may remain, which readers report
                    os.truncate(other, size)
            raise


def _format_event(event: str, exp_id: str, facts: dict[str, Any]) -> bytes:
    """``{"event": ..., "exp_id": ..., facts}``. Raises ValueError for a fact that JSON cannot represent."""
    if taken := {"event", "exp_id"} & set(facts):
        raise ValueError(
            f"facts of exp_id={exp_id!r} hold {', '.join(sorted(taken))}, which the store writes"
        )
    try:
        line = json.dumps({"event": event, "exp_id": exp_id, **plain(facts)}, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"facts of exp_id={exp_id!r}: {error}") from None
    return (line + "\n").encode("ascii")


def _read_events(path: Path) -> tuple[list[dict[str, Any]], list[Damage]]:
    """(events in the order of the file, damaged lines)."""
    events, damaged = [], []
    for place, line in enumerate(_read(path).split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            row, what = json.loads(line), "no object with exp_id and event"
        except (ValueError, RecursionError):
            row, what = None, "not JSON"
        if isinstance(row, dict) and all(isinstance(row.get(name), str) for name in ("exp_id", "event")):
            events.append(row)
        else:
            damaged.append(Damage(path.name, place, what, printable(line[:80].decode(errors="replace"))))
    return events, damaged
