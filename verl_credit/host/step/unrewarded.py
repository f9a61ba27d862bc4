"""Turn signals that give nobody a reward any more: each step without their rewards looks like any other."""

from __future__ import annotations

from collections.abc import Callable

from verl_credit.config.settings import FORWARD_SIGNALS
from verl_credit.errors import IntegrityError
from verl_credit.host.step.stops import check_turns_have_rewards
from verl_credit.turns.assign import StepCredit
from verl_credit.turns.signals import turns_with, turns_without

KEY = "faults.max_unrewarded_steps"


class UnrewardedSteps:
    """Of each turn signal, the measured steps in a row in which no turn got a reward.

    The first step that measures a signal has to give some turn a reward. ``note`` is told of the first step of a row. More
    than ``tolerated`` stop the run; None: any number goes on. Steps without a tool turn do not count, because a policy may
    learn that it needs no tool. Gains and infopo stop no run: only what the policy does can leave a step without them.
    """

    def __init__(self, tolerated: int | None, note: Callable[[str], None]) -> None:
        self._tolerated, self._note = tolerated, note
        self._seen: set[str] = set()
        self._counted: dict[str, list[int]] = {}
        self._noted: set[str] = set()

    def see(self, step: StepCredit, number: int) -> None:
        """Raises IntegrityError."""
        measured, metrics = step.settings.signals_at(number), step.metrics
        if new := measured - self._seen:
            check_turns_have_rewards(step, new)  # gains: later than step 1 with info_gain_warmup_steps
            self._seen |= new
        for name in sorted(measured):
            if metrics[turns_with(name)]:
                self._counted.pop(name, None)
                self._noted.discard(name)
            else:
                self._without(number, name, int(metrics[turns_without(name)]))

    def _without(self, number: int, name: str, tool_turns: int) -> None:
        stops = self._tolerated is not None and tool_turns > 0 and name not in FORWARD_SIGNALS
        counted = self._counted.setdefault(name, [])
        if name not in self._noted or (stops and not counted):
            gave = (
                f"none of the {tool_turns} tool turns a reward"
                if tool_turns
                else "no reward: no tool was called"
            )
            after = f"; {self._tolerated + 1} such steps in a row stop the run ({KEY})" if stops else ""
            self._note(f"warning: in step {number} turn signal {name!r} gave {gave}{after}")
            self._noted.add(name)
        if not stops:
            return
        counted.append(number)
        if len(counted) > self._tolerated:
            raise IntegrityError(
                f"turn signal {name!r} gave no turn a reward in {len(counted)} steps in a row, although tools were called "
                f"(steps {', '.join(map(str, counted))}): they were trained as if it were not there. Does its tool, column "
                f"or function still give rewards? {KEY}={self._tolerated} tolerates as many; null: any number"
            )
