"""Held-out evaluation, once per mode of ``evaluation.modes``, with verl's own validation code."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from verl.trainer.ppo.v1.trainer_base import PPOTrainer

from verl_credit.errors import EvaluationOverrun
from verl_credit.host.rollout.evaluation import EvaluationLoader, label_mode
from verl_credit.host.step.stops import check_evaluation_faults
from verl_credit.records.run import events
from verl_credit.records.run.files import VALIDATION, append_json, read_json_lines


class EvaluatingTrainer(PPOTrainer):
    """Expects ``run_dir`` and ``watch`` of the class that it is part of."""

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
