"""Swaps as lines of text, and as what ``fidelity.json`` has of them."""

from __future__ import annotations

from dataclasses import asdict

from verl_credit.study.fidelity.report import shown
from verl_credit.study.fidelity.swap.decisions import ALTERNATIVES
from verl_credit.study.fidelity.swap.swaps import COMPLETIONS, Swaps


def swap_table(swaps: Swaps) -> list[str]:
    """A line per credit; those that could not be made at the end, with the reason."""
    found = as_dict(swaps)
    lines = [
        f"swaps: {found['decisions']} of {found['wanted']} decisions, {found['alternatives']} alternatives, "
        f"{found['ending']} of them end; {swaps.sure_pairs[0]} sure pairs, {swaps.sure_pairs[1]} of two searches"
    ]
    if swaps.draws is None:
        return [*lines, "no turn was found for which the policy proposes two alternatives"]
    lines += [
        f"regret of the policy's own draws: {shown(swaps.draws)}",
        f"{'':<34} {'one completion':<59} mean of {COMPLETIONS} completions",
        f"{'credit':<34} " + f"{'pairs in order':<18} {'of searches':<18} {'regret':<20} " * 2,
    ]
    missing = []
    for credit in swaps.credits:
        if credit.agreement is None:
            missing.append(f"{credit.name:<34} not measured: {credit.reason}")
        else:
            one, mean = credit.agreement.one, credit.agreement.mean
            cells = (one.pairs, one.searches, one.regret, mean.pairs, mean.searches, mean.regret)
            widths = (18, 18, 20, 18, 18, 20)
            text = " ".join(f"{shown(cell):<{width}}" for cell, width in zip(cells, widths, strict=True))
            lines.append(f"{credit.name:<34} {text}".rstrip())
    return [*lines, *missing]


def as_dict(swaps: Swaps) -> dict:
    """Of one policy."""
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
        "credits": {
            credit.name: {"kind": credit.kind, "held_out": credit.held_out}
            | ({"reason": credit.reason} if credit.agreement is None else asdict(credit.agreement))
            for credit in swaps.credits
        },
    }
