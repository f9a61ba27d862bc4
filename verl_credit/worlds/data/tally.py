"""Counts of what was read, dropped and written, for the printed table and report.json."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from verl_credit.errors import printable

EXAMPLES = 5  # per reason, in report.json


@dataclass
class SplitTally:
    """The counts of one split of the source: ``records`` = ``kept`` + the sum of ``dropped``."""

    records: int = 0
    kept: int = 0
    dropped: Counter = field(default_factory=Counter)
    examples: dict[str, list[str]] = field(default_factory=dict)

    def drop(self, reason: str, where: str, detail: str = "") -> None:
        self.dropped[reason] += 1
        shown = self.examples.setdefault(reason, [])
        if len(shown) < EXAMPLES:
            shown.append(printable(f"{where}: {detail}" if detail else where))


@dataclass
class Tally:
    """The counts of one `prepare`."""

    splits: dict[str, SplitTally] = field(default_factory=dict)
    left_out: Counter = field(default_factory=Counter)
    """Gold answers that were left out, by reason."""
    other_answers: int = 0
    """Kept rows whose question occurs in the same split with other answers."""
    files: dict[str, dict[str, int]] = field(default_factory=dict)
    """Counts of each written file."""

    def of(self, split: str) -> SplitTally:
        return self.splits.setdefault(split, SplitTally())

    def as_dict(self, data_set: str) -> dict:
        return {
            "data_set": data_set,
            "read": {name: vars(split) for name, split in self.splits.items()},
            "gold_answers_left_out": dict(self.left_out),
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
        if self.other_answers:
            lines.append(f"  kept: {self.other_answers} questions that also occur with other answers")
        for name, counts in self.files.items():
            lines.append(
                f"{name}: " + ", ".join(f"{n} {what.replace('_', ' ')}" for what, n in counts.items())
            )
        return "\n".join(lines)
