"""What is reported of a step's rows and credit, what is noted, and what ends the run."""

from __future__ import annotations

from functools import partial

from omegaconf import DictConfig

from verl_credit.config.settings import CreditSettings
from verl_credit.records.run import events
from verl_credit.records.run.events import (
    ROWS_LEFT_OUT,
    TURNS_CUT,
    cut_note,
    left_out_note,
    small_groups_note,
)
from verl_credit.turns.assign import StepCredit
from verl_credit.turns.book import TurnBatch
from verl_credit.turns.step import StepHost
from verl_credit.turns.step_metrics import (
    UnrewardedSteps,
    check_planning_has_signal,
    check_states_are_shared,
    check_tool_faults,
    credit_metrics,
    gain_metrics,
    row_metrics,
)


class StepChecks:
    """One for a run. Its methods raise IntegrityError for a step that must not be trained on."""

    def __init__(self, config: DictConfig, settings: CreditSettings) -> None:
        self._config, self._settings = config, settings
        note = partial(events.note, config.run_dir, "no_rewards")
        self._unrewarded = UnrewardedSteps(config.faults.max_unrewarded_steps, note)
        self._states_checked = self._planning_checked = False

    def rows(self, host: StepHost, turns: TurnBatch) -> None:
        """Called before the rows are scored."""
        host.report(metrics := row_metrics(turns))
        pairs = zip(turns.records, turns.is_padding, strict=True)
        real = [record for record, pad in pairs if not pad]
        # verl's own estimators cannot leave out a row, so with them no fault is tolerated.
        tolerated = self._config.faults.max_tool_faults if self._settings.turn_estimator else 0.0
        faults = check_tool_faults(real, tolerated, self._config.search.url)
        host.note("tool_faults", faults and f"warning: in step {host.step} {faults}")
        host.note("turn_length", cut_note(metrics[TURNS_CUT], host.step, self._config.search.max_new_tokens))

    def credit(self, host: StepHost, step: StepCredit) -> None:
        """Called when every token has its advantage."""
        n = self._config.actor_rollout_ref.rollout.n
        host.report(metrics := gain_metrics(step) | credit_metrics(step, n))
        mode = self._settings.algorithm.turn_mode
        host.note("small_groups", small_groups_note(mode, metrics | step.metrics, host.step, n))
        left_out = metrics.get(ROWS_LEFT_OUT, 0.0)
        host.note("rows_left_out", left_out_note(left_out, host.step, mode.name))
        self._unrewarded.see(step, host.step)
        if not self._states_checked and step.inputs.rewarding:
            check_states_are_shared(step)
            self._states_checked = True
        if not self._planning_checked:
            check_planning_has_signal(step)
            self._planning_checked = True
