"""A measurement of swaps: decisions of sampled groups, values of their alternatives, and the credit each would get."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from verl_credit.records.run.files import append_json
from verl_credit.study.fidelity.mode_credit import Credit, find_modes
from verl_credit.study.fidelity.request import Request
from verl_credit.study.fidelity.result import credits_as_dict, not_measured, shown
from verl_credit.study.fidelity.subject import Subject
from verl_credit.study.fidelity.swap.decisions import ALTERNATIVES, Decision, completed, find_decisions, worth
from verl_credit.study.fidelity.swap.regret import SwapAgreement, SwapAgreements
from verl_credit.study.fidelity.swap.swapped import Maker
from verl_credit.study.fidelity.values import VALUES, Value, values_of
from verl_credit.study.stats import Measure
from verl_credit.worlds.rollouts.protocol import State
from verl_credit.worlds.rollouts.rollout import Groups
from verl_credit.worlds.rollouts.sampler import digest

SWAPS = "swaps.jsonl"
COMPLETIONS = 8
"""The number of completions of each alternative."""


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
        [state for decision in decisions for state in _states(decision)],
        subject.roll,
        continuations=request.continuations,
        seed=seed,
        path=out / VALUES,
        say=lambda done, of: say(0.5 * done / of, f"swaps: values of alternatives of {done} of {of} prompts"),
        enough=enough,
    )
    decisions = [d for d in decisions if all(digest(state.ids) in values for state in _states(d))]
    if not decisions:
        return Swaps([], request.swaps, (0, 0), None, [])
    ends = completed(decisions, groups, sampler, protocol, completions=COMPLETIONS, seed=seed)
    maker, credits = Maker(subject, groups, find_modes(request.modes), seed), []
    for number, decision in enumerate(decisions):
        say(0.5 + 0.5 * number / len(decisions), f"swaps: credit of {number} of {len(decisions)} decisions")
        credits.append(maker(decision, ends[number], values))
    agreements = SwapAgreements(decisions, values, COMPLETIONS)
    _write(out / SWAPS, decisions, values, credits)
    agreed = [_agreement(of_all, agreements) for of_all in zip(*credits, strict=True)]
    return Swaps(decisions, request.swaps, agreements.sure, agreements.regret_of_draws(decisions), agreed)


def _states(decision: Decision) -> list[State]:
    """Returns the decision's state and the states after its searches."""
    return [decision.state, *(a.step.next for a in decision.alternatives if a.step.next is not None)]


def _agreement(of_all: Sequence[Credit], agreements: SwapAgreements) -> tuple[Credit, SwapAgreement | None]:
    """``of_all``: a credit, for every decision."""
    if missing := next((credit for credit in of_all if credit.advantages is None), None):
        return missing, None
    held_out = of_all[0].held_out
    return of_all[0], agreements.of([credit.advantages for credit in of_all], held_out=held_out)


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
