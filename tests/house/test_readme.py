"""README: its figures are those of evidence."""

import json
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def test_the_demo_is_an_interval_over_runs():
    """The smallest and the largest run of evidence/async with the synchronous trainer: no interval over questions."""
    runs = json.loads((ROOT / "evidence" / "async" / "numbers.json").read_text())
    of_lab = runs["lab: mean over the seeds, smallest, largest"]["credit"]
    percent = [f"{100 * value:.0f}" for step in ("em 0", "em 30") for value in of_lab[step][1:]]
    low, high, after_low, after_high = percent
    assert f"rises from {low} to {high} % to **{after_low} to {after_high} %** in 30 steps" in " ".join(
        README.split()
    )


def test_nothing_is_learned_where_nothing_can_be_found():
    held_out = json.loads((ROOT / "evidence" / "lab" / "numbers.json").read_text())
    (found,) = (table for name, table in held_out.items() if name.startswith("held out"))
    swapped = [rows[-1][1] for name, rows in found.items() if name.startswith("swapped")]
    (said,) = re.findall(r"nothing is learned: ([\d.]+) % at most", " ".join(README.split()))
    assert len(swapped) == 3 and max(swapped) <= float(said) / 100 <= 0.01
