"""What is reported of a step's rows and credit, what is noted, and what ends the run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from omegaconf import DictConfig

from verl_credit.config.settings import INFO_GAIN, CreditSettings
from verl_credit.errors import IntegrityError, one_line
from verl_credit.names import ROWS_LEFT_OUT, TURNS_CUT
from verl_credit.records.run import events
from verl_credit.records.run.events import cut_note, left_out_note, small_groups_note
from verl_credit.redact import redact
from verl_credit.turns.assign import StepCredit
from verl_credit.turns.book import NO_TOKEN, TurnBatch
from verl_credit.turns.mcp import MCP_SERVER
from verl_credit.turns.signals.signal import turns_with, turns_without
from verl_credit.turns.step import StepHost
from verl_credit.turns.step_metrics import credit_metrics, gain_metrics, row_metrics

NOTED_SHARE = 0.25  # share of a step's rows, the default of faults.max_tool_faults
NO_ANSWER = ("connect", "deadline")
UNREWARDED = "faults.max_unrewarded_steps"


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


def check_tool_faults(records: Sequence[Mapping], tolerated_share: float, url) -> str | None:
    """Stop where tool faults masked out more than ``tolerated_share`` of the rows. Returns a line about a share above
    ``NOTED_SHARE``, with the cause that was seen most."""
    faulty = [record for record in records if record["tool_fault"]]
    if len(faulty) <= min(tolerated_share, NOTED_SHARE) * len(records):
        return None
    kinds = _kinds(faulty)
    by_engine = all(code == NO_TOKEN for code, _ in kinds)
    by = "the engine (actor_rollout_ref.rollout.name)" if by_engine else _server(url, faulty)
    line = (
        f"{len(faulty)} of {len(records)} rows were masked out after faults of {by}: "
        f"{_causes(faulty)}; a share of {tolerated_share:g} is tolerated (faults.max_tool_faults)"
    )
    if len(faulty) <= tolerated_share * len(records):
        return line
    up = " Is the server up? (GET URL/readyz)" if kinds[0][0] in NO_ANSWER and "search server" in by else ""
    raise IntegrityError(f"{line}.{up}")


def _kinds(faulty: Sequence[Mapping]) -> list[tuple[str, int]]:
    return Counter(record["tool_fault"] for record in faulty).most_common()


def _causes(faulty: Sequence[Mapping]) -> str:
    """The number of faults of each kind, with the cause that was seen most of the commonest kind."""
    kinds = _kinds(faulty)
    seen = Counter(record.get("fault_detail") for record in faulty if record["tool_fault"] == kinds[0][0])
    cause = one_line(seen.most_common(1)[0][0] or "")  # a server's own text may be in it
    return (
        f"{', '.join(f'{count} {code}' for code, count in kinds)}{f' (most often: {cause})' if cause else ''}"
    )


def check_evaluation_faults(
    metrics: dict, tolerated_share: float, url, faulty: Sequence[Mapping] = ()
) -> None:
    """Stop where too many held-out rows had a tool fault, because verl counts such a row as a wrong answer.

    ``faulty``: the records of all held-out rows with one.
    """
    causes = f": {_causes(faulty)}" if faulty else ""
    for name, share in metrics.items():
        if "/tool_fault/mean@" in name and share > tolerated_share:
            raise IntegrityError(
                f"held-out evaluation: {name} = {share:.3f} of the rows were masked out after faults of "
                f"{_server(url, faulty)}{causes}; a share of {tolerated_share:g} is tolerated (faults.max_tool_faults)"
            )


def _server(url: str | None, faulty: Sequence[Mapping]) -> str:
    """Names the tools that failed. Without a search server these are tools in the user's own agent loop."""
    details = [record.get("fault_detail") or "" for record in faulty]
    if details and all(detail.startswith(MCP_SERVER) for detail in details):
        return "MCP servers"
    also = " and MCP servers" if any(detail.startswith(MCP_SERVER) for detail in details) else ""
    return f"the search server at {redact(url)}{also}" if url else "tools"


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
            f"of the {counts['states']} states of the step has a second turn (algorithm.turn_anchor={a.turn_anchor})"
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


def _masked(step: StepCredit) -> str:
    faulty = sum(bool(record["tool_fault"]) for record in step.inputs.turns.records)
    return (
        f" in the rows that are left: {faulty} were masked out after faults of their tools" if faulty else ""
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
            counted, tool_turns = self._counted.setdefault(name, []), int(metrics[turns_without(name)])
            if metrics[turns_with(name)]:
                counted.clear()
                self._noted.discard(name)
                continue
            stops = self._tolerated is not None and tool_turns > 0 and name != INFO_GAIN
            if name not in self._noted or (stops and not counted):
                gave = (
                    f"none of the {tool_turns} tool turns a reward"
                    if tool_turns
                    else f"no reward: no tool was called{_masked(step)}"
                )
                most = (
                    f"; {self._tolerated + 1} such steps in a row stop the run ({UNREWARDED})"
                    if stops
                    else ""
                )
                self._note(f"warning: in step {number} turn signal {name!r} gave {gave}{most}")
                self._noted.add(name)
            if stops:
                counted.append(number)
            if stops and len(counted) > self._tolerated:
                raise IntegrityError(
                    f"turn signal {name!r} gave no turn a reward in {len(counted)} steps in a row, although tools were "
                    f"called (steps {', '.join(map(str, counted))}): they were trained as if it were not there. Does its "
                    f"tool, column or function still give rewards? {UNREWARDED}={self._tolerated} tolerates as many; null: "
                    "any number"
                )
