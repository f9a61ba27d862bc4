"""The trainer that `verl-credit fidelity` starts: it loads a policy as a resumed run does, and makes no step."""

from __future__ import annotations

import sys
import time
from functools import partial
from pathlib import Path

from verl.trainer.ppo.v1.trainer_base import register_trainer

from verl_credit.errors import ConfigError, IntegrityError, PreflightError
from verl_credit.host.measure.subject import RunSubject
from verl_credit.host.step.trainer import CreditTrainer
from verl_credit.names import MEASURE_MODE
from verl_credit.records.run import events
from verl_credit.records.run.files import write_text
from verl_credit.records.run.progress import Throttled
from verl_credit.study.fidelity.measure import measure
from verl_credit.study.fidelity.request import REQUEST, RESULT, TABLE, Request
from verl_credit.study.fidelity.result import as_dict, table, write_result


@register_trainer(MEASURE_MODE)
class MeasuringTrainer(CreditTrainer):
    def fit(self, agent_loop_manager):
        request = Request.read(self.run_dir)
        if request is None:
            raise IntegrityError(
                f"trainer.v1.trainer_mode={MEASURE_MODE}: {self.run_dir} has no {REQUEST}; `verl-credit fidelity` starts it"
            )
        self._check_workers(agent_loop_manager)
        self.agent_loop_manager = agent_loop_manager
        sys.path.insert(0, request.folder)
        try:
            self._measure(request)
        except (ConfigError, PreflightError) as error:
            raise IntegrityError(str(error)) from error
        finally:
            self._shutdown_dump_executor()

    def _measure(self, request: Request) -> None:
        say = Throttled(partial(events.note, self.run_dir, "fidelity"), f"fidelity {request.name}")
        subject, out = RunSubject(self, request, say), Path(request.out)
        end = None if request.minutes is None else time.monotonic() + 60 * request.minutes
        result = measure(
            subject,
            request,
            say=say,
            enough=lambda: end is not None and time.monotonic() >= end,
            prompts_at_once=1,
        )
        write_text(out / TABLE, "\n".join(table(subject.name, result)) + "\n")
        write_result(out / RESULT, request.settings, [as_dict(subject, result) | {"swaps": {}}])
