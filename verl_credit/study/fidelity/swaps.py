"""Swaps replace a turn of a rollout by other proposals of the policy: does credit go to the better turns (`decisions`)?

For every alternative and completion the group has the prompt's other rollouts, unchanged, and this one. A mode is called as
in training: one of batch scope sees the other groups of the training batch, too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch

from verl_credit.config.settings import CreditSettings
from verl_credit.credit.outcome import OUTCOME_OPERATORS
from verl_credit.credit.turn.mode import TurnMode
from verl_credit.records.report.again import TurnTables
from verl_credit.records.run.files import append_json
from verl_credit.study.fidelity.credits import (
    CONTINUATIONS,
    Credit,
    batches,
    brought,
    credits_of_parts,
    fewer_turns,
    find_modes,
    rows_of,
)
from verl_credit.study.fidelity.decisions import (
    ALTERNATIVES,
    Decision,
    SwapAgreement,
    SwapAgreements,
    completed,
    find_decisions,
    worth,
)
from verl_credit.study.fidelity.request import Request
from verl_credit.study.fidelity.result import credits_as_dict, not_measured, shown
from verl_credit.study.fidelity.rows import tables_of
from verl_credit.study.fidelity.subject import Subject
from verl_credit.study.fidelity.values import VALUES, Value, part_of, values_of
from verl_credit.study.stats import Measure
from verl_credit.worlds.rollouts.rollout import Groups, Trajectory
from verl_credit.worlds.rollouts.sampler import digest

COMPLETIONS = 8
"""The number of completions of each alternative."""


class Maker:
    """Every credit of a decision, for all of its alternatives and completions. ``groups`` are those of all prompts."""

    def __init__(self, subject: Subject, groups: Groups, modes: Sequence[TurnMode], seed: int):
        self._subject, self._groups, self._modes = subject, groups, modes
        self._settings = CreditSettings.from_config(subject.config)
        self._drawn = np.random.default_rng(seed)
        self._all = self._tables(groups)

    def __call__(
        self, decision: Decision, completed: list[list[Trajectory]], values: Mapping[str, Value]
    ) -> list[Credit]:
        """The same names in the same order for every decision; ``advantages``: [alternatives, completions]."""
        groups = swapped_groups(self._groups[decision.prompt], decision, completed)
        tables, shape = self._tables(groups), (len(completed), len(completed[0]))
        size, prompt, group_B = self._subject.config.data.train_batch_size, decision.prompt, self._all.group_B
        others_B = (group_B // size == prompt // size) & (group_B != prompt)
        others = rows_of(self._all, others_B) if others_B.any() else None
        credits = [
            *credit_of_modes(tables, decision, self._modes, others),
            *credit_of_controls(tables, groups, decision, self._subject.data, self._drawn),
            *monte_carlo(decision, values),  # the same whatever the completion
        ]
        for place, credit in enumerate(credits):
            if credit.advantages is not None:
                whole = np.broadcast_to(credit.advantages.reshape(shape[0], -1), shape)
                credits[place] = replace(credit, advantages=whole)
        return credits

    def _tables(self, groups: Groups) -> TurnTables:
        subject = self._subject
        with subject.forward() as forward:
            return tables_of(subject.batch(groups), groups, self._settings, forward, subject.tokenizer)[0]


def swapped_groups(
    group: Sequence[Trajectory], decision: Decision, completed: Groups
) -> list[list[Trajectory]]:
    """The group for every alternative and completion, in this order, with each in place of the decision's trajectory."""
    place = decision.trajectory
    return [[*group[:place], path, *group[place + 1 :]] for paths in completed for path in paths]


def credit_of_modes(
    tables: TurnTables, decision: Decision, modes: Sequence[TurnMode], others: TurnTables | None
) -> list[Credit]:
    """The credit of the decision's turn in every group of ``tables`` (`swapped_groups`).

    ``others``: the other groups of the batch, for modes that read them.
    """
    groups, rows = batches(tables, 1), int((tables.group_B == 0).sum())

    def parts(mode: TurnMode, changes: Mapping) -> list[TurnTables]:
        if others is not None and reads_batch(mode, changes, tables.pipeline):
            return [beside(group, others) for group in groups]
        return [tables]

    def of_turn(advantages: list[torch.Tensor]) -> np.ndarray:
        # A part begins with swapped groups, and the others' rows come after them.
        per_part, first = len(groups) // len(advantages), decision.trajectory
        return torch.cat([a[first::rows, decision.turn][:per_part] for a in advantages]).numpy()

    return credits_of_parts(tables.pipeline, modes, parts, of_turn)


def reads_batch(mode: TurnMode, changes: Mapping, pipeline: Mapping) -> bool:
    """Can rows of other prompts matter to the mode?"""
    operator = changes.get("outcome_operator", pipeline["outcome_operator"])
    by_outcome = mode.any_outcome_operator and operator in OUTCOME_OPERATORS
    return "batch" in (mode.scope, OUTCOME_OPERATORS[operator].scope if by_outcome else "group")


def beside(tables: TurnTables, others: TurnTables) -> TurnTables:
    """Rows of both as one batch, ``tables`` first; groups and anchors are numbered on."""
    both = {}
    for name, fill in (("reward_B_K", 0.0), ("has_reward_B_K", False), ("tokens_B_K1", 0),
                       ("advantage_B_K1", 0.0), ("clip_scale_B_K1", 1.0)):  # fmt: skip
        both[name] = _joined(getattr(tables, name), getattr(others, name), fill)
    for name in ("outcome_B", "valid_B", "n_tool_turns_B"):
        both[name] = torch.cat([getattr(tables, name), getattr(others, name)])
    both["group_B"] = torch.cat([tables.group_B, others.group_B + int(tables.group_B.max()) + 1])
    if tables.anchor_B_K1 is not None:
        further = int(tables.anchor_B_K1.max()) + 1
        anchor_B_K1 = torch.where(others.anchor_B_K1 >= 0, others.anchor_B_K1 + further, -1)
        both["anchor_B_K1"] = _joined(tables.anchor_B_K1, anchor_B_K1, -1)
    rows, uids = [*tables.rows, *others.rows], [*tables.uids, *others.uids]
    return replace(tables, rows=rows, uids=uids, **both)


def _joined(a: torch.Tensor, b: torch.Tensor, fill: float) -> torch.Tensor:
    wide = max(a.shape[1], b.shape[1])
    pad = torch.nn.functional.pad
    return torch.cat([pad(one, (0, wide - one.shape[1]), value=fill) for one in (a, b)])


def credit_of_controls(
    tables: TurnTables,
    groups: Groups,
    decision: Decision,
    data: Sequence[Mapping],
    drawn: np.random.Generator,
) -> list[Credit]:
    """Random credit, and the credits of `controls` that read a group as modes do."""
    credits = [Credit("random", drawn.standard_normal(len(groups)), kind="control")]
    for credit in (fewer_turns(tables, [len(group) for group in groups]), brought(groups, data)):
        if credit.advantages is not None:
            of_turn = [group[decision.trajectory][decision.turn] for group in credit.advantages]
            credit = replace(credit, advantages=np.array(of_turn))
        credits.append(credit)
    return credits


def monte_carlo(decision: Decision, values: Mapping[str, Value]) -> list[Credit]:
    """Q of each alternative less V(s_k), by as many of the first continuations as `controls` takes.

    The first half chooses the alternative that regret is taken to: as many or more would be compared with themselves.
    """
    half = next(iter(values.values())).continuations // 2
    credits = []
    for n in CONTINUATIONS:
        few, credit = part_of(values, slice(n)), None
        reason = f"as many choose the best alternative; expected --continuations {2 * n + 2} at least"
        if n < half:
            before, reason = few[digest(decision.state.ids)].value, ""
            credit = np.array([worth(a, few) - before for a in decision.alternatives])
        credits.append(Credit(f"Monte Carlo, {n}", credit, reason, "control", held_out=True))
    return credits


@dataclass(frozen=True)
class Swaps:
    """The decisions whose alternatives are valued, and the agreement of credits with the values."""

    decisions: list[Decision]
    wanted: int
    sure_pairs: tuple[int, int]
    """Pairs of alternatives, and pairs of two searches."""
    draws: Measure | None
    """Regret of the policy's own draws; None without decisions."""
    credits: list[tuple[Credit, SwapAgreement | None]]
    """The first decision's credit with its agreement; when a decision lacks credit, its reason and None."""


def measure_swaps(
    subject: Subject,
    request: Request,
    groups: Groups,
    *,
    say: Callable[[float, str], None] = lambda share, text: None,
    enough: Callable[[], bool] = lambda: False,
) -> Swaps:
    """``groups`` are those of `measure` with this request, whose ``values.jsonl`` has the groups' values.

    Values of alternatives are appended to that file as they come; ``swaps.jsonl`` is written at the end. Once ``enough`` is
    true no more prompts are valued, and decisions without values are left out.
    """
    sampler, protocol, out, seed = subject.sampler(), subject.protocol, Path(request.out), request.seed
    decisions = find_decisions(groups, sampler, protocol, wanted=request.swaps, seed=seed)
    values = values_of(
        [state for decision in decisions for state in decision.states],
        subject.roll,
        continuations=request.continuations,
        seed=seed,
        path=out / VALUES,
        say=lambda done, of: say(0.5 * done / of, f"swaps: values of alternatives of {done} of {of} prompts"),
        enough=enough,
    )
    decisions = [d for d in decisions if all(digest(state.ids) in values for state in d.states)]
    if not decisions:
        return Swaps([], request.swaps, (0, 0), None, [])
    ends = completed(decisions, groups, sampler, protocol, completions=COMPLETIONS, seed=seed)
    maker, credits = Maker(subject, groups, find_modes(request.modes), seed), []
    for number, decision in enumerate(decisions):
        say(0.5 + 0.5 * number / len(decisions), f"swaps: credit of {number} of {len(decisions)} decisions")
        credits.append(maker(decision, ends[number], values))
    agreements, agreed = SwapAgreements(decisions, values, COMPLETIONS), []
    _write(out / "swaps.jsonl", decisions, values, credits)
    for of_all in zip(*credits, strict=True):  # a credit, for every decision
        if missing := next((credit for credit in of_all if credit.advantages is None), None):
            agreed.append((missing, None))
        else:
            advantages, held_out = [credit.advantages for credit in of_all], of_all[0].held_out
            agreed.append((of_all[0], agreements.of(advantages, held_out=held_out)))
    return Swaps(decisions, request.swaps, agreements.sure, agreements.regret_of_draws(decisions), agreed)


def _write(
    path: Path, decisions: Sequence[Decision], values: dict[str, Value], credits: Sequence[Sequence[Credit]]
) -> None:
    """A line for every alternative."""
    path.unlink(missing_ok=True)
    for decision, of_one in zip(decisions, credits, strict=True):
        for place, alternative in enumerate(decision.alternatives):
            line = {
                "prompt": decision.prompt,
                "trajectory": decision.trajectory,
                "turn": decision.turn,
                "alternative": place,
                "times": alternative.times,
                "ends": alternative.step.next is None,
                "q": worth(alternative, values),
                "credits": {c.name: c.advantages[place] for c in of_one if c.advantages is not None},
            }
            append_json(path, line)


def swap_table(swaps: Swaps) -> list[str]:
    """A line per credit; missing credits come at the end, with the reason."""
    numbers = swaps_as_dict(swaps)
    lines = [
        f"swaps: {numbers['decisions']} of {numbers['wanted']} decisions, {numbers['alternatives']} alternatives, "
        f"{numbers['ending']} of them end; {swaps.sure_pairs[0]} sure pairs, {swaps.sure_pairs[1]} of two searches"
    ]
    if swaps.draws is None:
        return [*lines, "no turn was found for which the policy proposes two alternatives"]
    lines += [
        f"regret of the policy's own draws: {shown(swaps.draws)}",
        f"{'':<34} {'one completion':<59} mean of {COMPLETIONS} completions",
        f"{'credit':<34} " + f"{'pairs in order':<18} {'of searches':<18} {'regret':<20} " * 2,
    ]
    for credit, agreement in swaps.credits:
        if agreement is not None:
            cells = [(c.pairs, c.searches, c.regret) for c in (agreement.one, agreement.mean)]
            text = " ".join(f"{shown(a):<18} {shown(b):<18} {shown(c):<20}" for a, b, c in cells)
            lines.append(f"{credit.name:<34} {text}".rstrip())
    return [*lines, *not_measured(swaps.credits)]


def swaps_as_dict(swaps: Swaps) -> dict:
    """Returns the swaps of a policy in ``fidelity.json``."""
    alternatives = [a for decision in swaps.decisions for a in decision.alternatives]
    return {
        "decisions": len(swaps.decisions),
        "wanted": swaps.wanted,
        "draws_per_decision": ALTERNATIVES,
        "completions": COMPLETIONS,
        "alternatives": len(alternatives),
        "ending": sum(a.step.next is None for a in alternatives),
        "sure_pairs": swaps.sure_pairs,
        "draws": None if swaps.draws is None else asdict(swaps.draws),
        "credits": credits_as_dict(swaps.credits),
    }
