"""What is reported of a step's rows and credit, what is noted, and what ends the run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from omegaconf import DictConfig

from verl_credit.config.settings import INFO_GAIN, CreditSettings
from verl_credit.errors import IntegrityError, one_line
from verl_credit.names import ANSWER_WHEN_SOLVED, ROWS_LEFT_OUT, TURNS_CUT
from verl_credit.records.run import events
from verl_credit.records.run.events import (
    cut_note,
    left_out_note,
    no_gains_note,
    small_groups_note,
    unlikely_answers_note,
)
from verl_credit.redact import redact
from verl_credit.turns.rollout.book import NO_TOKEN, TurnBatch
from verl_credit.turns.rollout.mcp import MCP_SERVER
from verl_credit.turns.rollout.reward.env_record import FAULTS
from verl_credit.turns.rollout.sessions import joined
from verl_credit.turns.step.assign import StepCredit
from verl_credit.turns.step.outputs import check_outputs
from verl_credit.turns.step.signals.signal import turns_with, turns_without
from verl_credit.turns.step.step import StepHost
from verl_credit.turns.step.step_metrics import credit_metrics, gain_metrics, row_metrics

NOTED_SHARE = 0.25  # share of a step's rows, the default of faults.max_tool_faults
NO_ANSWER = ("connect", "deadline")
UNREWARDED = "faults.max_unrewarded_steps"


class StepChecks:
    """One for a run. Its methods raise IntegrityError for a step that must not be trained on."""

    def __init__(self, config: DictConfig, settings: CreditSettings) -> None:
        self._config, self._settings = config, settings
        note = partial(events.note, config.run_dir, "no_rewards")
        self._unrewarded = UnrewardedSteps(config.faults.max_unrewarded_steps, note)
        self._states_checked = self._planning_checked = self._begins_checked = False

    def rows(self, host: StepHost, turns: TurnBatch) -> TurnBatch:
        """Called before the rows are scored; returns them joined (`sessions.joined`)."""
        check_outputs(turns, self._settings, self._config)
        turns = joined(turns)
        host.report(metrics := row_metrics(turns))
        pairs = zip(turns.records, turns.is_padding, strict=True)
        real = [record for record, pad in pairs if not pad]
        # verl's own estimators cannot leave out a row, so with them no fault is tolerated.
        tolerated = self._config.faults.max_tool_faults if self._settings.turn_estimator else 0.0
        if not self._begins_checked:
            check_environments_begin_alike(real)
            self._begins_checked = True
        faults = check_tool_faults(real, tolerated, self._config.search.url)
        host.note("tool_faults", faults and f"warning: in step {host.step} {faults}")
        host.note("turn_length", cut_note(metrics[TURNS_CUT], host.step, self._config.search.max_new_tokens))
        return turns

    def credit(self, host: StepHost, step: StepCredit) -> None:
        """Called when every token has its advantage."""
        n = self._config.actor_rollout_ref.rollout.n
        host.report(metrics := gain_metrics(step) | credit_metrics(step, n))
        mode = self._settings.algorithm.turn_mode
        host.note("small_groups", small_groups_note(mode, metrics | step.metrics, host.step, n))
        left_out = metrics.get(ROWS_LEFT_OUT, 0.0)
        host.note("rows_left_out", left_out_note(left_out, host.step, mode.name))
        template, likely = self._settings.algorithm.info_gain_template, step.metrics.get(ANSWER_WHEN_SOLVED)
        host.note("unlikely_answers", unlikely_answers_note(likely, host.step, template))
        if gains := step.signals.get(INFO_GAIN):
            known_N = gains[0][gains[1] & step.tables.valid_B[:, None] & gains[0].isfinite()].abs()
            host.note("no_gains", no_gains_note(known_N.max().item(), host.step) if len(known_N) else None)
        self._unrewarded.see(step, host.step)
        if not self._states_checked and step.inputs.rewarding:
            check_states_are_shared(step)
            self._states_checked = True
        if not self._planning_checked:
            check_planning_has_signal(step)
            self._planning_checked = True


def check_environments_begin_alike(records: Sequence[Mapping]) -> None:
    """Called for the first step: an environment that begins otherwise than its row was written for other keys."""
    if differing := [record for record in records if record["tool_fault"] == "env_differs"]:
        raise IntegrityError(
            f"{len(differing)} of {len(records)} rows have another first observation than their environments give: "
            f"{differing[0]['fault_detail']}. Write them with `verl-credit prepare env` and this run's keys environment.*; "
            "an environment has to begin alike with equal seeds"
        )


def check_tool_faults(records: Sequence[Mapping], tolerated_share: float, url) -> str | None:
    """Stop where tool faults masked out more than ``tolerated_share`` of the rows. Returns a line about a share above
    ``NOTED_SHARE``, with the cause that was seen most."""
    faulty = [record for record in records if record["tool_fault"]]
    if len(faulty) <= min(tolerated_share, NOTED_SHARE) * len(records):
        return None
    kinds = Counter(record["tool_fault"] for record in faulty)
    by = "the engine (actor_rollout_ref.rollout.name)" if set(kinds) == {NO_TOKEN} else _server(url, faulty)
    line = (
        f"{len(faulty)} of {len(records)} rows were masked out after faults of {by}: "
        f"{_causes(faulty)}; a share of {tolerated_share:g} is tolerated (faults.max_tool_faults)"
    )
    if len(faulty) <= tolerated_share * len(records):
        return line
    silent = kinds.most_common(1)[0][0] in NO_ANSWER and "search server" in by
    raise IntegrityError(f"{line}.{' Is the server up? (GET URL/readyz)' if silent else ''}")


def _causes(faulty: Sequence[Mapping]) -> str:
    """The number of faults of each kind, with the cause that was seen most of the commonest kind."""
    kinds = Counter(record["tool_fault"] for record in faulty).most_common()
    seen = Counter(record.get("fault_detail") for record in faulty if record["tool_fault"] == kinds[0][0])
    cause = one_line(seen.most_common(1)[0][0] or "")  # a server's own text may be in it
    counts = ", ".join(f"{count} {code}" for code, count in kinds)
    return f"{counts} (most often: {cause})" if cause else counts


def check_evaluation_faults(
    metrics: Mapping[str, float], tolerated_share: float, url: str | None, faulty: Sequence[Mapping] = ()
) -> None:
    """Stop where too many held-out rows had a tool fault, because verl counts such a row as a wrong answer. ``faulty``: the
    records of these rows."""
    causes = f": {_causes(faulty)}" if faulty else ""
    for name, share in metrics.items():
        if "/tool_fault/mean@" in name and share > tolerated_share:
            raise IntegrityError(
                f"held-out evaluation: {name} = {share:.3f} of the rows were masked out after faults of "
                f"{_server(url, faulty)}{causes}; a share of {tolerated_share:g} is tolerated (faults.max_tool_faults)"
            )


def _server(url: str | None, faulty: Sequence[Mapping]) -> str:
    """Names the tools that failed. Without a search server these are tools in the user's own agent loop."""
    if faulty and all(record["tool_fault"] in FAULTS for record in faulty):
        return "environments (environment.path)"
    by_mcp = [(record.get("fault_detail") or "").startswith(MCP_SERVER) for record in faulty]
    if by_mcp and all(by_mcp):
        return "MCP servers"
    also = " and MCP servers" if any(by_mcp) else ""
    return f"the search server at {redact(url)}{also}" if url else "tools"


def check_turns_have_rewards(step: StepCredit, names: set[str]) -> None:
    """Called for the first step that measures these turn signals: one that reaches no turn would do nothing."""
    settings, mask = step.settings, step.rewarded_B_K
    a, signals = settings.algorithm, settings.turn_signals
    if not bool(mask.any()):
        raise IntegrityError(
            f"algorithm.info_gain_norm_mode={a.info_gain_norm_mode}: none of the {int(step.tables.valid_B.sum())} "
            f"trajectories of the step has a turn with a reward ({', '.join(signals)}). Does the policy call a tool (chat "
            "template? tool format?)? Do tools give rewards? Does "
            f"info_gain_first_turn={a.info_gain_first_turn} leave out single searches?"
        )
    for name in sorted(names):
        if step.metrics.get(turns_with(name)) == 0:
            others = ", ".join(each for each in signals if each != name)
            raise IntegrityError(
                f"turn signal {name!r} gave no reward in the first step that measures it: every turn's reward comes from "
                f"{others} alone; leave it out of algorithm.turn_signals, or see that it gives some"
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
            f"of the {counts['states']} states of the step has a second turn (algorithm.turn_anchor={a.turn_anchor})"
        )


def check_planning_has_signal(step: StepCredit) -> None:
    """Called for the first step: a planning mask without a single token leaves HICRA and SEPA without effect."""
    if step.metrics.get("credit/planning/token_share") == 0:
        pipeline = step.settings.algorithm
        raise IntegrityError(
            f"algorithm.transform_mode={pipeline.transform_mode} needs planning tokens, but "
            f"algorithm.planning.detector={pipeline.planning.detector} found none in the first step: the policy's texts "
            "contain none of the phrases looked for (algorithm.strategic_grams)"
        )


class UnrewardedSteps:
    """Counts, for each turn signal, the consecutive measured steps in which no turn got a reward.

    The first step that measures a signal has to give some turn a reward. ``note`` gets a message for the first of
    consecutive steps. More than ``tolerated`` such steps stop the run; None tolerates any number. Steps without a tool turn
    do not count, because a policy may learn that it needs no tool. Gains stop no run, because only the policy
    can leave a step without them.
    """

    def __init__(self, tolerated: int | None, note: Callable[[str], None]) -> None:
        self._tolerated, self._note = tolerated, note
        self._counted: dict[str, list[int]] = {}
        self._noted: set[str] = set()

    def see(self, step: StepCredit, number: int) -> None:
        """Raises IntegrityError."""
        measured = step.settings.signals_at(number)
        if new := measured - self._counted.keys():
            check_turns_have_rewards(step, new)  # gains: later than step 1 with info_gain_warmup_steps
        for name in sorted(measured):
            counted = self._counted.setdefault(name, [])
            if step.metrics[turns_with(name)]:
                counted.clear()
                self._noted.discard(name)
            else:
                self._unrewarded(step, number, name, counted)

    def _unrewarded(self, step: StepCredit, number: int, name: str, counted: list[int]) -> None:
        tool_turns = int(step.metrics[turns_without(name)])
        tolerated = self._tolerated if tool_turns and name != INFO_GAIN else None
        if name not in self._noted or (tolerated is not None and not counted):
            text = f"none of the {tool_turns} tool turns a reward"
            if not tool_turns:
                faulty = sum(bool(record["tool_fault"]) for record in step.inputs.turns.records)
                left = f" in the rows that are left: {faulty} were masked out after faults of their tools"
                text = f"no reward: no tool was called{left if faulty else ''}"
            if tolerated is not None:
                text += f"; {tolerated + 1} such steps in a row stop the run ({UNREWARDED})"
            self._note(f"warning: in step {number} turn signal {name!r} gave {text}")
            self._noted.add(name)
        if tolerated is None:
            return
        counted.append(number)
        if len(counted) > tolerated:
            raise IntegrityError(
                f"turn signal {name!r} gave no turn a reward in {len(counted)} steps in a row, although tools were called "
                f"(steps {', '.join(map(str, counted))}). Does its tool, column or function still give rewards? "
                f"{UNREWARDED}={tolerated} tolerates as many; null: any number"
            )
