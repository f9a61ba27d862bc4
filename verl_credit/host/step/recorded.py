"""Records a run: its stages, the metrics of its steps, checkpoints with our state, and the last step of ``max_hours``."""

from __future__ import annotations

from pathlib import Path

import ray
import torch
from omegaconf import DictConfig

from verl_credit.config.keys import reads
from verl_credit.config.settings import CreditSettings
from verl_credit.host.hf_rollout.sync import server_name
from verl_credit.names import ROLLOUT_NAME
from verl_credit.recipe.step_size import twice
from verl_credit.records.run import events
from verl_credit.records.run.alarms import Watch
from verl_credit.records.run.files import METRICS, VALIDATION, VALUES, append_json, read_json_lines, rewind
from verl_credit.records.run.resume import delete_old
from verl_credit.records.run.state import TimeLimit, describe_resume, resumed_folder, save_state
from verl_credit.turns.step.step import SEPA, TURN_VALUES, StepHost


class Recorder:
    """Writes into the folder of the run; one for a run."""

    def __init__(self, config: DictConfig) -> None:
        self.config, self.run_dir = config, Path(config.run_dir)
        self._limit = None if config.max_hours is None else TimeLimit(config.max_hours)
        self._saved_step: int | None = None
        self._stages: set[str] = set()
        self._alarms: Watch | None = None
        self._restored: dict[str, float] = {}
        self._weights: str | None = None

    def stage(self, text: str) -> None:
        """Records how far the start of this process is, once."""
        if text not in self._stages:
            events.record(self.run_dir, events.STAGE, text)
            self._stages.add(text)

    # --- one step ------------------------------------------------------------------------------------

    def finished(self, host: StepHost, metrics: dict, timing_raw: dict[str, float], *, last: bool) -> None:
        """Records the step's metrics, notes alarms, and stops the run after the next step where ``max_hours`` says so."""
        self._alarm(host, metrics)
        append_json(self.run_dir / METRICS, {"step": host.step, **metrics})
        self.stage("the first step is finished")
        timing_s = {
            name: timing_raw[name] for name in ("step", "save_checkpoint", "testing") if name in timing_raw
        }
        if self._limit is not None and not last and self._limit.next_is_last(timing_s):
            host.stop()
            text = (
                f"max_hours={self.config.max_hours:g}: step {host.step + 1} is the last of this run; the same "
                "command goes on from it"
            )
            events.note(self.run_dir, "max_hours", text)

    def _alarm(self, host: StepHost, metrics: dict) -> None:
        if self._alarms is None:
            settings, lr = (
                CreditSettings.from_config(self.config),
                self.config.actor_rollout_ref.actor.optim.lr,
            )
            grouped = reads.grouped(settings)
            tokens = min(4 * self.config.search.max_new_tokens, self.config.data.max_response_length)
            remedies = {"half_lr": f"{lr / 2:g}", "more": twice(self.config, grouped), "tokens": str(tokens)}
            self._alarms = Watch(self.run_dir, host.step - 1, remedies, grouped)
        for kind, text in self._alarms.see(host.step, metrics):
            host.note(kind, text)

    # --- checkpoints -----------------------------------------------------------------------------------

    def save(self, step: int, metrics: dict, state: dict | None, planned_steps: int) -> None:
        """Writes our state beside verl's checkpoint, before verl writes that. ``metrics``: all of the step's."""
        folder = Path(self.config.trainer.default_local_dir) / f"global_step_{step}"
        named = {name: value for name, value in metrics.items() if not name.startswith(("timing_", "perf/"))}
        save_state(folder, self.config, step, named, (state or {}).get(SEPA), planned_steps)
        if state and TURN_VALUES in state:
            torch.save(state[TURN_VALUES], folder / VALUES)

    def saved(self, step: int) -> None:
        self._saved_step = step
        delete_old(self.config, step)

    def to_save(self, step: int) -> bool:
        """Whether the step is one of `keep_checkpoints` that verl has not saved."""
        return step in self.config.keep_checkpoints and self._saved_step != step

    def resumed(self, step: int) -> dict | None:
        """Cuts the files of the run back to ``step``; returns our state of its checkpoint."""
        for name in (METRICS, VALIDATION):
            rewind(self.run_dir / name, step)
        if step == 0:
            return None
        message, self._restored, sepa = describe_resume(self.config, step)
        events.note(self.run_dir, "resume", message)
        values = resumed_folder(self.config, step) / VALUES
        return {SEPA: sepa, TURN_VALUES: torch.load(values, weights_only=True) if values.exists() else None}

    def restored(self, step: int) -> None:
        """Records, after the first evaluation, a step that an earlier run saved but did not record."""
        if self._restored and step not in {row["step"] for row in read_json_lines(self.run_dir / METRICS)}:
            evaluated = {row["step"]: row for row in read_json_lines(self.run_dir / VALIDATION)}
            append_json(self.run_dir / METRICS, {"step": step} | self._restored | evaluated.get(step, {}))

    # --- weights ---------------------------------------------------------------------------------------

    def synced(self) -> dict[str, float]:
        """Returns whether the first rollout server's weights changed since the last call; verl compares checksums itself."""
        before, self._weights = self._weights, of_rollout_server(self.config, "weights_checksum")
        return (
            {} if self._weights is None else {"credit/sync/weights_changed": float(before != self._weights)}
        )


def of_rollout_server(config: DictConfig, method: str) -> str | None:
    """What a method of the first rollout server returns; None for the engines that have no such methods."""
    if config.actor_rollout_ref.rollout.name != ROLLOUT_NAME:
        return None
    return ray.get(getattr(ray.get_actor(server_name(0)), method).remote())
