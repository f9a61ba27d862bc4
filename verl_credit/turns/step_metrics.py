"""Metrics of the credit step, all under ``credit/``.

verl reduces metrics by substring of their name (max, min, sum, total), therefore the names here avoid those words unless
they mean it. Means are per row or per turn; nothing is averaged twice.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from verl_credit.config.settings import FORWARD_SIGNALS, INFO_GAIN
from verl_credit.credit.groups import group_counts
from verl_credit.errors import IntegrityError, one_line
from verl_credit.lazy import torch
from verl_credit.records.run.events import ROWS_LEFT_OUT, TURNS_CUT
from verl_credit.redact import redact
from verl_credit.turns.assign import StepCredit
from verl_credit.turns.book import NO_TOKEN, STOP_REASONS, TurnBatch
from verl_credit.turns.mcp import MCP_SERVER
from verl_credit.turns.search.faults import FAULT_CODES
from verl_credit.turns.signals.signal import turns_with, turns_without

COUNTED = (
    "nonfinite_outcomes", "nonfinite_rewards", "turns_without_reward", "turn_groups", "turn_groups_of_one",
    "turn_groups_of_two",
)  # fmt: skip
OPTIONAL = (
    "turns_without_anchor", "states", "states_of_one", "turns_without_score", "groups_with_and_without_scores",
)  # fmt: skip
SCORES = ("em", "f1", "format_ok", "format_penalty")


def row_metrics(turns: TurnBatch) -> dict[str, float]:
    """Metrics of what agent loops reported, over all real rows, and of the reward function's scores, over the valid rows."""
    real = [row for row, pad in enumerate(turns.is_padding) if not pad]
    records, rows = [turns.records[row] for row in real], max(len(real), 1)
    reasons = Counter(record["stop_reason"] for record in records)
    metrics = {f"credit/stop/{reason}": reasons[reason] / rows for reason in STOP_REASONS}
    all_turns = int(turns.n_turns_B[real].sum())
    metrics[TURNS_CUT] = reasons["turn_length"] / max(all_turns, 1)  # a turn that is cut is its row's last
    faults = Counter(record["tool_fault"] for record in records if record["tool_fault"])
    metrics |= {f"credit/tool/fault_{code}": faults[code] for code in (*FAULT_CODES, NO_TOKEN)}
    metrics["credit/tool/fault_rows"] = sum(faults.values())
    metrics["credit/tool/retries"] = sum(record["n_retries"] for record in records)
    metrics["credit/tool/bad_calls"] = sum(record["bad_calls"] for record in records)
    metrics["credit/tool/other_calls"] = sum(record["n_other_calls"] for record in records)
    metrics["credit/tool/other_errors"] = sum(record["other_errors"] for record in records)
    metrics["credit/tool/searches_per_row"] = sum(record["n_searches"] for record in records) / rows
    empty = sum(not search["pages"] for record in records for search in record["searches"])
    metrics["credit/tool/empty_searches"] = empty  # a server that lost its index finds nothing, too
    metrics["credit/rows_trained"] = int(turns.row_valid_B.sum())
    for name in SCORES:
        values = [
            turns.scores[row][name] for row in real if turns.row_valid_B[row] and name in turns.scores[row]
        ]
        if values:
            metrics[f"credit/outcome/{name}"] = sum(values) / len(values)
    return metrics


def gain_metrics(step: StepCredit) -> dict[str, float]:
    """Mean, spread and share of positive ones of the turns' rewards, and their mean per turn index.

    Their names begin with ``credit/gain`` where information gain is the only signal, else with ``credit/turn_reward``.
    """
    mask, gain = step.rewarded_B_K, step.tables.reward_B_K
    name = "credit/gain" if list(step.settings.turn_signals) == [INFO_GAIN] else "credit/turn_reward"
    metrics = {f"{name}/turns": int(mask.sum())}
    if not mask.any():
        return metrics
    values = gain[mask].double()
    metrics |= {f"{name}/mean": _mean(values), f"{name}/std": values.std(correction=0).item()}
    metrics[f"{name}/share_positive"] = _mean(values > 0)
    for turn in range(mask.shape[1]):
        if mask[:, turn].any():
            metrics[f"{name}/turn_{turn}"] = _mean(gain[mask[:, turn], turn])
    return metrics


def credit_metrics(step: StepCredit, group_size: int) -> dict[str, float]:
    """Metrics of turns, advantages per turn index, clip scale, and groups.

    Groups are counts: all, singletons, short (fewer valid rows than rollout.n), tied, and the tied ones split
    into all solved (outcome above 0.5) and all failed. verl puts padding rows into a group of their own, which is left out.
    """
    credit, tables, turns = step.credit, step.tables, step.inputs.turns
    valid, n_turns_B = tables.valid_B, turns.n_turns_B
    real = ~torch.tensor(turns.is_padding)
    metrics = {"credit/invalid_rows": int((real & ~valid).sum())}
    metrics |= {f"credit/{name}": credit.counts[name] for name in COUNTED}
    metrics |= {f"credit/{name}": credit.counts[name] for name in OPTIONAL if name in credit.counts}
    if "rows_left_out" in credit.counts:
        metrics[ROWS_LEFT_OUT] = credit.counts["rows_left_out"] / max(int(valid.sum()), 1)
    metrics |= {
        f"credit/groups/{name.removesuffix('_groups')}": count
        for name, count in group_counts(
            tables.outcome_B[real], tables.group_B[real], row_valid_B=valid[real], group_size=group_size
        ).items()
    }
    metrics["credit/turns_per_row"] = _mean(n_turns_B[valid]) if valid.any() else 0.0
    for turn in range(credit.advantage_B_K.shape[1]):
        rows = valid & (n_turns_B - 1 > turn)
        if rows.any():
            metrics[f"credit/advantage/turn_{turn}"] = _mean(credit.advantage_B_K[rows, turn])
            metrics[f"credit/advantage_abs/turn_{turn}"] = _mean(credit.advantage_B_K[rows, turn].abs())
    if valid.any():
        metrics["credit/advantage/answer"] = _mean(credit.outcome_advantage_B[valid])
        metrics["credit/advantage_abs/answer"] = _mean(credit.outcome_advantage_B[valid].abs())
    mask = step.rewarded_B_K
    if mask.any():
        scale = credit.clip_scale_B_K[mask].double()
        metrics["credit/clip_scale/mean"] = _mean(scale)
        metrics["credit/clip_scale/std"] = scale.std(correction=0).item()
    return metrics


def _mean(values: torch.Tensor) -> float:
    return values.double().mean().item()


NOTED_SHARE = 0.25  # share of a step's rows, the default of faults.max_tool_faults
NO_ANSWER = ("connect", "deadline")
UNREWARDED = "faults.max_unrewarded_steps"


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
            stops = self._tolerated is not None and tool_turns > 0 and name not in FORWARD_SIGNALS
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
