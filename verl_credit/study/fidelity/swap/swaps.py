"""One measurement of swaps: decisions of sampled groups, values of their alternatives, and the credit each would get."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from verl_credit.credit.turn.mode import TurnMode
from verl_credit.records.run.files import append_json
from verl_credit.study.fidelity.bootstrap import Measure
from verl_credit.study.fidelity.subject import Subject
from verl_credit.study.fidelity.swap.decisions import Decision, Groups, completed, find_decisions
from verl_credit.study.fidelity.swap.make import Made, Maker
from verl_credit.study.fidelity.swap.measures import SwapAgreement, SwapAgreements
from verl_credit.study.fidelity.swap.worth import worth
from verl_credit.study.fidelity.values import VALUES, values_of
from verl_credit.worlds.rollouts.protocol import State
from verl_credit.worlds.rollouts.sampler import digest

SWAPS = "swaps.jsonl"
COMPLETIONS = 8
"""Behind each alternative."""


@dataclass(frozen=True)
class SwapCredit:
    """``agreement`` is None where the credit could not be made: for ``reason``."""

    name: str
    kind: str
    held_out: bool
    agreement: SwapAgreement | None
    reason: str


@dataclass(frozen=True)
class Swaps:
    """Of the decisions whose alternatives are valued."""

    decisions: list[Decision]
    wanted: int
    sure_pairs: tuple[int, int]
    """Of all alternatives, and of two searches."""
    draws: Measure | None
    """Regret of the policy's own draws; None without decisions."""
    credits: list[SwapCredit]


def measure_swaps(
    subject: Subject,
    groups: Groups,
    out: Path,
    *,
    wanted: int,
    continuations: int,
    seed: int,
    modes: Sequence[TurnMode],
    say: Callable[[float, str], None] = lambda share, text: None,
    enough: Callable[[], bool] = lambda: False,
) -> Swaps:
    """``groups``, ``out``, ``continuations``, ``seed``: those of `measure`, whose ``values.jsonl`` has the groups' values.

    Values of alternatives are added there as they come; ``swaps.jsonl`` is written at the end. Once ``enough`` says so no
    more prompts are valued, and decisions without values are left out.
    """
    sampler, protocol = subject.sampler(), subject.protocol
    decisions = find_decisions(groups, sampler, protocol, wanted=wanted, seed=seed)
    values = values_of(
        [state for decision in decisions for state in _states(decision)],
        subject.roll,
        continuations=continuations,
        seed=seed,
        path=out / VALUES,
        say=lambda done, of: say(0.5 * done / of, f"swaps: values of alternatives of {done} of {of} prompts"),
        enough=enough,
    )
    decisions = [d for d in decisions if all(digest(state.ids) in values for state in _states(d))]
    if not decisions:
        return Swaps([], wanted, (0, 0), None, [])
    ends = completed(decisions, groups, sampler, protocol, completions=COMPLETIONS, seed=seed)
    maker, made = Maker(subject, groups, modes, seed), []
    for number, decision in enumerate(decisions):
        say(0.5 + 0.5 * number / len(decisions), f"swaps: credit of {number} of {len(decisions)} decisions")
        made.append(maker(decision, ends[number], values))
    agreements = SwapAgreements(decisions, values, COMPLETIONS)
    _write(out / SWAPS, decisions, [[worth(a, values) for a in d.alternatives] for d in decisions], made)
    draws = agreements.regret_of_draws(decisions)
    return Swaps(decisions, wanted, agreements.sure, draws, _credits(made, agreements))


def _states(decision: Decision) -> list[State]:
    """Whose values its alternatives take."""
    return [decision.state, *(a.step.next for a in decision.alternatives if a.step.next is not None)]


def _credits(made: Sequence[Sequence[Made]], agreements: SwapAgreements) -> list[SwapCredit]:
    """Of what was made for every decision."""
    found = []
    for first, *others in zip(*made, strict=True):
        of_all = [first, *others]
        reason = next((one.reason for one in of_all if one.credit_A_C is None), "")
        agreement = None
        if not reason:
            agreement = agreements.of([one.credit_A_C for one in of_all], held_out=first.held_out)
        found.append(SwapCredit(first.name, first.kind, first.held_out, agreement, reason))
    return found


def _write(
    path: Path,
    decisions: Sequence[Decision],
    worth: Sequence[Sequence[float]],
    made: Sequence[Sequence[Made]],
) -> None:
    """A line for every alternative."""
    path.unlink(missing_ok=True)
    for decision, q_A, credits in zip(decisions, worth, made, strict=True):
        for place, alternative in enumerate(decision.alternatives):
            line = {
                "prompt": decision.prompt,
                "trajectory": decision.trajectory,
                "turn": decision.turn,
                "alternative": place,
                "times": alternative.times,
                "ends": alternative.step.next is None,
                "q": q_A[place],
                "credits": {c.name: c.credit_A_C[place] for c in credits if c.credit_A_C is not None},
            }
            append_json(path, line)
