"""The result of a measurement: as lines of text, and as what ``fidelity.json`` has of it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from verl_credit.records.run.files import plain, write_text
from verl_credit.study.fidelity.agreements import Agreement
from verl_credit.study.fidelity.alignment import GradientAgreement
from verl_credit.study.fidelity.credits import Credit
from verl_credit.study.fidelity.gradients import RLOO, integrity
from verl_credit.study.fidelity.subject import Subject
from verl_credit.study.fidelity.true_values import ScoredTurn, Value, martingale
from verl_credit.study.stats import Measure, prompts_for
from verl_credit.worlds.rollouts.rollout import Trajectory


@dataclass(frozen=True)
class Result:
    """The first prompts, whose values are complete: all of them unless time was short."""

    groups: list[list[Trajectory]]
    turns: list[ScoredTurn]
    values: dict[str, Value]
    """The values of distinct contexts, by digest."""
    credits: list[tuple[Credit, Agreement | None]]
    """The run's, every mode's and the controls', with the agreement with A*; None where there is no credit."""
    gradients: dict[str, GradientAgreement]
    """The gradients' agreement by the name of the credit, and of `REFERENCE`; empty when not requested."""
    headroom: dict
    """What true values win (`headroom`); empty without gradients."""
    of_prompts: int
    """The number of requested prompts."""
    reliability: Measure
    sure_pairs: tuple[int, int]
    """Pairs of tool turns, and pairs with the ending turn."""

    @property
    def prompts(self) -> int:
        return len(self.groups)

    @property
    def otherwise(self) -> float:
        """Share of continuations on whose way a tool answered otherwise than in the rollout."""
        values = self.values.values()
        return sum(v.otherwise for v in values) / sum(v.continuations for v in values)


def table(name: str, result: Result) -> list[str]:
    """A line per credit; missing credits come at the end, with the reason."""
    tools = sum(turn.kind == "tool" for turn in result.turns)
    cut = f"the first {result.prompts} of {result.of_prompts} prompts, "
    cut = cut if result.prompts < result.of_prompts else ""
    lines = [
        f"{name}: {cut}{tools} tool turns of {len(result.turns)}, {len(result.values)} distinct contexts, "
        f"{result.sure_pairs[0]} + {result.sure_pairs[1]} sure pairs, reliability of A* {shown(result.reliability)}",
        f"{'credit':<38} {'pearson':<20} {'same turn':<20} {'pairs in order':<20} with the ending turn",
    ]
    for credit, agreement in result.credits:
        if agreement is not None:
            cells = (agreement.pearson, agreement.same_turn, agreement.pairs, agreement.end_pairs)
            lines.append(f"{credit.name:<38} " + " ".join(f"{shown(cell):<20}" for cell in cells).rstrip())
    lines += [f"{one.name:<38} not measured: {one.reason}" for one, found in result.credits if found is None]
    if result.otherwise:
        lines.append(
            f"in {result.otherwise:.0%} of continuations a tool gave another answer than in the rollout: A* of the turns "
            "after it is not exact, and need not be 0 on average"
        )
    lines.append(
        "Monte Carlo and true values: by the first half of the continuations, compared with A* by the second"
    )
    zs = [(one, "-" if one.z is None else f"{one.z:+.1f}") for one in martingale(result.turns)]
    scores = ", ".join(f"{one.name} {one.mean:+.3f} (z {z})" for one, z in zs)
    return [*lines, f"0 on average: mean A* at {scores}", *gradient_table(result)]


def gradient_table(result: Result) -> list[str]:
    """The gradients of the same credits; nothing where they were not measured."""
    if not result.gradients:
        return []
    names = f"{'own cosine':<20} {'minus GRPO':<22} {'cosine of E[g]':<20} signal to noise"
    lines = [f"{'gradient of':<38} {names}"]
    for name, agreement in result.gradients.items():
        cells = (agreement.own, agreement.own_difference, agreement.bias, agreement.signal_to_noise)
        lines.append(f"{name:<38} " + " ".join(f"{shown(cell):<20}" for cell in cells).rstrip())
    if RLOO in result.gradients:
        bias, holds_1 = integrity(result.gradients)
        doubt = "; its interval should hold 1" if holds_1 is False else ""
        lines.append(f"1 on average: the cosine of RLOO's E[g], {shown(bias)}{doubt}")
    first = next(iter(result.gradients.values()))
    if needed := prompts_for(first.own):
        lines.append(f"own cosine to +-.05 takes about {needed} prompts, by the interval found here")
    return [*lines, result.headroom["says"]]


def shown(measure: Measure) -> str:
    if measure.value is None:
        return "undefined" if measure.low is None else f"undefined [{measure.low:.2f}, {measure.high:.2f}]"
    if measure.low is None:
        return f"{measure.value:.2f}"
    return f"{measure.value:.2f} [{measure.low:.2f}, {measure.high:.2f}]"


def write_result(path: Path, settings: dict, policies: list[dict]) -> None:
    write_text(path, json.dumps(plain({"settings": settings, "policies": policies}), indent=1) + "\n")


def as_dict(subject: Subject, result: Result) -> dict:
    """Returns the entry of a policy in ``fidelity.json``."""
    return {
        "policy": subject.name,
        "step": subject.step,
        "engine": subject.engine,
        "prompts": result.prompts,
        "of_prompts": result.of_prompts,
        "turns": len(result.turns),
        "contexts": len(result.values),
        "otherwise": result.otherwise,
        "sure_pairs": result.sure_pairs,
        "reliability": asdict(result.reliability),
        "credits": {
            credit.name: {"kind": credit.kind, "held_out": credit.held_out}
            | ({"reason": credit.reason} if agreement is None else asdict(agreement))
            for credit, agreement in result.credits
        },
        "gradients": {name: asdict(agreement) for name, agreement in result.gradients.items()},
        "headroom": result.headroom,
        "integrity": [asdict(score) for score in martingale(result.turns)],
    }
