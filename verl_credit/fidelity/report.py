"""A measurement as lines of text, and as what ``fidelity.json`` has of it."""

from __future__ import annotations

from dataclasses import asdict

from verl_credit.fidelity.measure import Result
from verl_credit.fidelity.measures import Measure
from verl_credit.fidelity.subject import Subject


def table(name: str, result: Result) -> list[str]:
    """A line per credit; those that could not be made at the end, with the reason."""
    tools = sum(turn.kind == "tool" for turn in result.turns)
    cut = (
        ""
        if result.prompts == result.of_prompts
        else f"the first {result.prompts} of {result.of_prompts} prompts, "
    )
    lines = [
        f"{name}: {cut}{tools} tool turns of {len(result.turns)}, {result.contexts} distinct contexts, "
        f"{result.sure_pairs[0]} + {result.sure_pairs[1]} sure pairs, reliability of A* {shown(result.reliability)}",
        f"{'credit':<34} {'pearson':<20} {'same turn':<20} {'pairs in order':<20} with the ending turn",
    ]
    missing = []
    for credit, found in zip(result.credits, result.agreements, strict=True):
        if found is None:
            missing.append(f"{credit.name:<34} not measured: {credit.reason}")
        else:
            cells = (found.pearson, found.same_turn, found.pairs, found.end_pairs)
            lines.append(f"{credit.name:<34} " + " ".join(f"{shown(cell):<20}" for cell in cells).rstrip())
    scores = ", ".join(
        f"{s.name} {s.mean:+.3f} (z {'-' if s.z is None else f'{s.z:+.1f}'})" for s in result.integrity
    )
    halves = "Monte Carlo: credit by the first half of the continuations, compared with A* by the second"
    return [*lines, *missing, halves, f"0 on average: mean A* at {scores}"]


def shown(measure: Measure) -> str:
    if measure.value is None:
        return "undefined"
    if measure.low is None:
        return f"{measure.value:.2f}"
    return f"{measure.value:.2f} [{measure.low:.2f}, {measure.high:.2f}]"


def as_dict(subject: Subject, result: Result) -> dict:
    """Of one policy."""
    credits = {
        credit.name: {"kind": credit.kind, "held_out": credit.held_out}
        | ({"reason": credit.reason} if found is None else asdict(found))
        for credit, found in zip(result.credits, result.agreements, strict=True)
    }
    return {
        "policy": subject.name,
        "step": subject.step,
        "prompts": result.prompts,
        "of_prompts": result.of_prompts,
        "turns": len(result.turns),
        "contexts": result.contexts,
        "sure_pairs": result.sure_pairs,
        "reliability": asdict(result.reliability),
        "credits": credits,
        "integrity": [asdict(score) for score in result.integrity],
    }
