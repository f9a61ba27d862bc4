"""Held-out evaluation in several sampling modes with verl's own validation code."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np


class EvaluationLoader:
    """The validation data with a sampling mode on every row.

    verl fixes validation sampling once for all workers; the search agent reads it from the row instead, so
    that greedy and sampled accuracy come from the same weights.
    """

    def __init__(self, loader, mode: str, before_batch: Callable[[], None] = lambda: None) -> None:
        self.loader, self.mode, self.before_batch = loader, mode, before_batch

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[dict]:
        for batch in self.loader:
            self.before_batch()
            modes = np.empty(len(batch["raw_prompt"]), dtype=object)
            modes[:] = self.mode
            yield {**batch, "sampling": modes}


def label_mode(update: Callable, mode: str) -> Callable:
    """verl's ``_val_metrics_update`` with the mode appended to data sources ("lab" becomes "lab-greedy"), and the number of
    questions. Of the reward function's values it gets numbers and texts alone: verl averages all others, and a list per turn
    (`column:NAME`) has no mean."""

    def labelled(data_sources, sample_uids, extra_infos, sample_turns, expected_acc_counts):
        several = (list, tuple, dict, set, np.ndarray)
        extra_infos = {
            name: values
            for name, values in extra_infos.items()
            if not any(isinstance(value, several) for value in values)
        }
        expected = {(f"{source}-{mode}", uid): n for (source, uid), n in (expected_acc_counts or {}).items()}
        metrics = update(
            [f"{source}-{mode}" for source in data_sources],
            sample_uids,
            extra_infos,
            sample_turns,
            expected_acc_counts=expected or None,
        )
        for source in set(data_sources):
            uids = {uid for uid, of in zip(sample_uids, data_sources, strict=True) if of == source}
            metrics[f"val-aux/{source}-{mode}/questions"] = len(uids)
        return {k.replace("val-aux/num_turns/", f"val-aux/num_turns-{mode}/"): v for k, v in metrics.items()}

    return labelled
