"""Stops a run whose further steps would be wrong and look normal. Each message says what happened and what to do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from verl_credit.config.settings import FORWARD_SIGNALS
from verl_credit.errors import IntegrityError
from verl_credit.redact import redact
from verl_credit.turns.assign import StepCredit
from verl_credit.turns.signals import turns_with, turns_without

UNREWARDED = "faults.max_unrewarded_steps"


def check_tool_faults(faults: Counter, rows: int, tolerated_share: float, url) -> None:
    """Stop where tool faults masked out more than ``tolerated_share`` of the rows. ``faults``: masked rows by code."""
    if faults.total() > tolerated_share * rows:
        kinds = ", ".join(f"{count} {code}" for code, count in faults.most_common())
        up = " Is the server up? (GET URL/readyz)" if url else ""
        raise IntegrityError(
            f"{faults.total()} of {rows} rows were masked out after faults of {_server(url)}: {kinds}; "
            f"a share of {tolerated_share:g} is tolerated (faults.max_tool_faults).{up}"
        )


def check_evaluation_faults(metrics: dict, tolerated_share: float, url) -> None:
    """Stop where too many held-out rows had a tool fault, because verl counts such a row as a wrong answer."""
    for name, share in metrics.items():
        if name.endswith("/tool_fault/mean@1") and share > tolerated_share:
            raise IntegrityError(
                f"held-out evaluation: {name} = {share:.3f} of the rows were masked out after faults of {_server(url)}; "
                f"a share of {tolerated_share:g} is tolerated (faults.max_tool_faults)"
            )


def _server(url: str | None) -> str:
    """Names the tools that failed. Without a search server these are tools in the user's own agent loop."""
    return f"the search server at {redact(url)}" if url else "tools"


def check_turns_have_rewards(step: StepCredit, names: set[str]) -> None:
    """Called for the first step that measures these turn signals: one that reaches no turn would do nothing."""
    settings = step.settings
    mask = step.rewarded_B_K
    mode = f"algorithm.info_gain_norm_mode={settings.algorithm.info_gain_norm_mode}"
    if not bool(mask.any()):
        first = settings.algorithm.info_gain_first_turn
        raise IntegrityError(
            f"{mode}, but none of the {int(step.tables.valid_B.sum())} trajectories of the step has a turn with a reward "
            f"({', '.join(settings.turn_signals)}): the policy calls no tool (chat template? tool format?), its tools give "
            f"none, or info_gain_first_turn={first} leaves single-search rows without a gain"
        )
    for name in sorted(names):
        if step.metrics.get(turns_with(name)) == 0:
            raise IntegrityError(
                f"turn signal {name!r} gave no reward in the first step that measures it: every turn's reward comes from "
                f"{', '.join(each for each in settings.turn_signals if each != name)} alone; leave it out of "
                "algorithm.turn_signals, or see that it gives some"
            )
    if settings.dynamic_clip and not bool((step.credit.clip_scale_B_K[mask] != 1).any()):
        raise IntegrityError(
            "policy_loss.dynamic_clip=true, but every clip scale of the step is exactly 1: "
            "no turn's reward differs from those of its group (rollout.n too small? a signal that is the same everywhere?)"
        )


def check_states_are_shared(step: StepCredit) -> None:
    """Called for the first step: states that no second turn starts from leave the mode without its own part."""
    counts = step.credit.counts
    if counts.get("states", 1) == counts.get("states_of_one", 0):
        a = step.settings.algorithm
        raise IntegrityError(
            f"algorithm.info_gain_norm_mode={a.info_gain_norm_mode} compares turns that start from the same state, but none "
            f"of the {counts['states']} states of the step has a second turn (algorithm.turn_anchor={a.turn_anchor}, "
            f"turn_anchor_similarity={a.turn_anchor_similarity})"
        )


def check_planning_has_signal(step: StepCredit) -> None:
    """Called for the first step: a planning mask without a single token leaves HICRA and SEPA without effect."""
    if step.metrics.get("credit/planning/token_share") == 0:
        pipeline = step.settings.algorithm
        raise IntegrityError(
            f"algorithm.transform_mode={pipeline.transform_mode} needs planning tokens, but "
            f"algorithm.planning.detector={pipeline.planning.detector} found none in the first step: the policy's texts "
            "contain none of the phrases looked for (algorithm.strategic_grams, algorithm.planning.threshold)"
        )


class UnrewardedSteps:
    """Counts, for each turn signal, the consecutive measured steps in which no turn got a reward.

    The first step that measures a signal has to give some turn a reward. ``note`` gets a message for the first of
    consecutive steps. More than ``tolerated`` such steps stop the run; None tolerates any number. Steps without a tool turn
    do not count, because a policy may learn that it needs no tool. Gains and infopo stop no run, because only the policy
    can leave a step without them.
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
            after = (
                f"; {self._tolerated + 1} such steps in a row stop the run ({UNREWARDED})" if stops else ""
            )
            self._note(f"warning: in step {number} turn signal {name!r} gave {gave}{after}")
            self._noted.add(name)
        if not stops:
            return
        counted.append(number)
        if len(counted) > self._tolerated:
            raise IntegrityError(
                f"turn signal {name!r} gave no turn a reward in {len(counted)} steps in a row, although tools were called "
                f"(steps {', '.join(map(str, counted))}): they were trained as if it were not there. Does its tool, column "
                f"or function still give rewards? {UNREWARDED}={self._tolerated} tolerates as many; null: any number"
            )
