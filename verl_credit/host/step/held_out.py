"""Held-out evaluation with verl's own validation code, once per sampling mode of ``evaluation.modes``."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from verl.trainer.ppo.v1.trainer_base import PPOTrainer

from verl_credit.errors import EvaluationOverrun
from verl_credit.host.step.stops import check_evaluation_faults
from verl_credit.records.run import events
from verl_credit.records.run.files import VALIDATION, append_json, read_json_lines


class EvaluatingTrainer(PPOTrainer):
    """The class that inherits from it must have ``run_dir`` and ``watch``."""

    _evaluation_mode: str | None = None

    def _validate(self):
        """A step that was evaluated before a resume is not evaluated again."""
        for row in read_json_lines(self.run_dir / VALIDATION):
            if row["step"] == self.global_steps:
                return {name: value for name, value in row.items() if name != "step"}
        loader, merged = self.val_dataloader, {}
        in_time = self._limit_of_this_evaluation()
        rows = len(self.val_dataset) * self.config.actor_rollout_ref.rollout.val_kwargs.n
        try:
            for mode in self.config.evaluation.modes:
                self.watch.begin(rows)
                self._evaluation_mode, self.val_dataloader = mode, EvaluationLoader(loader, mode, in_time)
                merged |= super()._validate()
                self.watch.settle(rows - len(self.watch.errors))
        finally:
            self.val_dataloader, self._evaluation_mode = loader, None
        check_evaluation_faults(merged, self.config.faults.max_tool_faults, self.config.search.url)
        append_json(self.run_dir / VALIDATION, {"step": self.global_steps, **merged})
        in_time()
        return merged

    def _limit_of_this_evaluation(self) -> Callable[[], None]:
        """Raises EvaluationOverrun once the evaluation that begins now has taken ``evaluation.max_hours``."""
        hours, began = self.config.evaluation.max_hours, time.monotonic()

        def in_time() -> None:
            if hours is not None and time.monotonic() - began > 3600 * hours:
                text = f"evaluation.max_hours={hours:g}: the evaluation after step {self.global_steps} takes longer"
                events.note(self.run_dir, events.EVALUATION_OVERRUN, text)
                raise EvaluationOverrun(text)

        return in_time

    def _dump_generations(self, inputs, outputs, gts, scores, reward_extra_infos_dict, dump_path):
        """verl names the file by the step alone: each mode has a folder, or the last one would overwrite the others."""
        folder = Path(dump_path) / self._evaluation_mode if self._evaluation_mode else dump_path
        super()._dump_generations(inputs, outputs, gts, scores, reward_extra_infos_dict, str(folder))

    def _val_metrics_update(
        self, data_sources, sample_uids, extra_infos, sample_turns, expected_acc_counts=None
    ):
        """The mode goes into the metrics' names only: reward functions see the data source as it is."""
        return label_mode(super()._val_metrics_update, self._evaluation_mode)(
            data_sources, sample_uids, extra_infos, sample_turns, expected_acc_counts
        )


class EvaluationLoader:
    """The validation data with a sampling mode on every row.

    verl fixes validation sampling once for all workers. Therefore our agent loops read the mode from the row, so that greedy
    and sampled accuracy come from the same weights.
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
    questions. verl averages every value of the reward function; a list per turn (`column:NAME`) has no mean, therefore it
    gets only values that are no containers."""

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
