"""The progress display: reads the run's files as they grow and prints a line per step."""

from __future__ import annotations

import threading
import time
from functools import partial
from pathlib import Path

from verl_credit.records.run import events
from verl_credit.records.run.files import EVENTS, METRICS, VALIDATION, GrowingFile
from verl_credit.records.run.validation import EM, REWARD, held_out_names

# Whole lines at once, also into a pipe or a file.
say_at_once = partial(print, flush=True)


class Progress:
    """A thread of the launching process; ``with Progress(run_dir, total_steps): ...``"""

    def __init__(self, run_dir: Path, total_steps: int | None, *, write=say_at_once, interval_s=0.5) -> None:
        self.run_dir, self.total_steps = Path(run_dir), total_steps
        self.write, self.interval_s, self.start = write, interval_s, time.monotonic()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._files = {name: GrowingFile(self.run_dir / name) for name in (EVENTS, METRICS, VALIDATION)}
        for file in self._files.values():
            file.new_rows()  # without this read the lines of earlier starts would be printed again
        self._running_em: float | None = None

    def __enter__(self) -> Progress:
        self._thread.start()
        return self

    def __exit__(self, *_) -> None:
        self._stop.set()
        self._thread.join()
        self._show()

    def say(self, text: str) -> None:
        minutes, seconds = divmod(int(time.monotonic() - self.start), 60)
        self.write(f"{minutes:02d}:{seconds:02d}  {text}")

    def note(self, kind: str, text: str) -> None:
        """Record an event and print the new events; for the launching process, before the display runs."""
        events.record(self.run_dir, kind, text)
        self._show()

    def _watch(self) -> None:
        while not self._stop.wait(self.interval_s):
            self._show()

    def _show(self) -> None:
        for row in self._files[EVENTS].new_rows():
            self.say(row["text"])
        for row in self._files[VALIDATION].new_rows():
            self.say(evaluation_line(row))
        for row in self._files[METRICS].new_rows():
            em = row.get("credit/outcome/em")
            if em is not None:  # exponential mean over about five steps
                self._running_em = em if self._running_em is None else 0.8 * self._running_em + 0.2 * em
            self.say(step_line(row, self.total_steps, self._running_em))


class Throttled:
    """A (share, text) callback that prints at most one line every ``every_s`` seconds, and the last line."""

    def __init__(self, say, name: str = "lab", *, every_s: float = 5.0) -> None:
        self.say, self.name, self.every_s, self._last = say, name, every_s, float("-inf")

    def __call__(self, share: float, text: str) -> None:
        now = time.monotonic()
        if share >= 1.0 or now - self._last >= self.every_s:
            self._last = now
            self.say(f"{self.name} {share:4.0%}  {text}")


def step_line(row: dict, total_steps: int | None, running_em: float | None) -> str:
    """Returns step, EM (or the reward), turns, gain and seconds; the caller prints the elapsed time before them.

    ``total_steps`` is None for a run that counts epochs and has no checkpoint yet."""
    parts = [f"step {row['step']:>3}" + (f"/{total_steps}" if total_steps else "")]
    if row.get("credit/outcome/em") is not None:
        parts.append(f"EM {row['credit/outcome/em']:.3f} (running {running_em:.3f})")
    elif row.get("critic/score/mean") is not None:
        parts.append(f"reward {row['critic/score/mean']:.3f}")
    for label, key, form in (
        ("turns", "credit/turns_per_row", ".2f"),
        ("gain", "credit/gain/mean", "+.4f"),
        ("clipped", "actor/pg_clipfrac", ".3f"),
        ("s/step", "timing_s/step", ".1f"),
        ("of it gain", "credit/gain/seconds", ".1f"),
    ):
        if row.get(key) is not None:
            parts.append(f"{label} {row[key]:{form}}")
    return "  ".join(parts)


def evaluation_line(row: dict) -> str:
    """Held-out exact match by data source and mode, or the reward where there is none."""
    texts = []
    for measure, word in ((EM, "EM"), (REWARD, "reward")):
        found = [(*key, row[of[measure]]) for key, of in held_out_names(row).items() if measure in of]
        values = ", ".join(f"{source}-{mode} {value:.3f}" for source, mode, value in found)
        texts += [f"{word} after step {row['step']}: {values}"] if values else []
    return f"held-out {'; '.join(texts)}" if texts else f"evaluated after step {row['step']}"
