"""Held-out evaluation in several sampling modes with verl's own validation code."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

MODES = ("greedy", "sampled")


class EvaluationLoader:
    """The validation data with a sampling mode on every row and the mode in its data source's name.

    verl fixes validation sampling once for all workers; the search agent reads it from the row instead, so
    that greedy and sampled accuracy come from the same weights.
    """

    def __init__(self, loader, mode: str) -> None:
        self.loader, self.mode = loader, mode

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[dict]:
        for batch in self.loader:
            rows = len(batch["raw_prompt"])
            sources = batch.get("data_source", ["unknown"] * rows)
            yield {
                **batch,
                "sampling": _objects([self.mode] * rows),
                "data_source": _objects([f"{source}-{self.mode}" for source in sources]),
            }


def label_mode(metrics: dict, mode: str) -> dict:
    """Metrics that verl does not name after the data source get the mode into their name."""
    return {
        name.replace("val-aux/num_turns/", f"val-aux/num_turns-{mode}/"): v for name, v in metrics.items()
    }


def _objects(values: list[str]) -> np.ndarray:
    array = np.empty(len(values), dtype=object)
    array[:] = values
    return array
