"""Runs every law and property on one subject. A counterexample is made smaller, and written as lists that one can paste."""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from verl_credit.credit.laws import effects, laws
from verl_credit.credit.laws.drawn_world import PER_TOKEN, World
from verl_credit.credit.laws.effects import PROPERTIES
from verl_credit.credit.laws.laws import Broken
from verl_credit.credit.laws.subjects import Result, Subject
from verl_credit.credit.plugins.calls import turn_lists

SEEDS = range(3)
TRIES = 200
NUMBERS = re.compile(r"[\d.e, \[\]-]+")

FIRST = (laws.runs, laws.pure)
LAWS: dict[str, Callable[[Subject, World], None]] = {
    law.__name__: law
    for law in (
        *FIRST, effects.ties, effects.better, effects.signed, laws.order, effects.turns, effects.follows, effects.flat,
        effects.weighs_by, effects.absent, effects.reads, effects.no_gains, laws.observations, laws.others, laws.width,
        laws.dtype, laws.layout, laws.padding_rows, laws.nonfinite, laws.edges, laws.travels,
    )
}  # fmt: skip


@dataclass(frozen=True)
class Finding:
    """The result for one law or property."""

    name: str
    says: str
    verdict: str
    """holds | BROKEN | exempt | yes | no (the last two: properties)"""
    detail: str = ""
    example: tuple[str, ...] = ()
    """The calls that break it, as lines of Python lists."""

    @property
    def wrong(self) -> bool:
        return self.verdict == "BROKEN"


@dataclass(frozen=True)
class Run:
    """Describes one call of the operator; ``given`` holds the turns' advantages when the law brought its own."""

    world: World
    given: torch.Tensor | None
    result: torch.Tensor | Exception


@dataclass(frozen=True)
class Example:
    """A world that breaks a law, and the calls that show it."""

    law: Callable
    world: World
    message: str
    runs: list[Run] = field(default_factory=list)


def examined(law: Callable, subject: Subject, world: World, *, own_errors: bool = True) -> Example | None:
    """The world as an example, if it breaks the law, as an operator's exception does, and a law's with ``own_errors``."""
    runs: list[Run] = []
    known = {name: getattr(subject, name) for name in ("run", "apply", "unfloored")}
    calls: dict[str, Any] = {
        name: partial(_logged, call, runs) for name, call in known.items() if call is not None
    }
    try:
        law(replace(subject, **calls), world)
    except Broken as broken:
        return Example(law, world, str(broken), runs[-broken.runs :])
    except Exception as error:
        if own_errors or (runs and runs[-1].result is error):
            return Example(law, world, f"{type(error).__name__}: {error}", runs[-1:])
    return None


def _logged(function: Callable, runs: list[Run], world: World, given: torch.Tensor | None = None) -> Any:
    try:
        result = function(world) if given is None else function(world, given)
    except Exception as error:
        runs.append(Run(world, given, error))
        raise
    runs.append(Run(world, given, getattr(result, "advantage_B_T", result)))
    return result


def counterexample(
    law: Callable, subject: Subject, seeds=SEEDS, kept: dict[tuple, Result] | None = None
) -> Example | None:
    """The first world that breaks the law, or None. An operator's exception is a counterexample.

    Laws that are given the same ``kept`` compute the result of an unchanged world once. Each of them has tensors of its own,
    so that what an operator does to its input reaches no other law, and the laws of `FIRST` call anew.
    """
    worlds = getattr(law, "worlds", laws.usual_worlds)

    def run_once(key: tuple, unchanged: World, world: World) -> Result:
        if world is not unchanged or kept is None:
            return subject.run(world)
        if key not in kept:
            kept[key] = subject.run(world)
        return kept[key]

    for seed in seeds:
        for number, world in enumerate(worlds(seed)):
            once = partial(run_once, (worlds, seed, number), world)
            known = subject if law in FIRST else replace(subject, run=once)
            if (example := examined(law, known, world)) is not None:
                return example
    return None


def check(subject: Subject, seeds=SEEDS) -> list[Finding]:
    """Test all laws that are not exempt, and all properties, which must match the declared ones, if any are declared.

    Only findings about ``runs`` and ``pure`` are returned where these laws are broken: others would tell of the same.
    """
    findings: list[Finding] = []
    kept: dict[tuple, Result] = {}
    for name, law in LAWS.items():
        exempt = subject.exempt.get(name)
        if name == "others" and subject.scope == "batch":
            exempt = "its scope is the batch"
        if exempt is not None:
            findings.append(Finding(name, law.__doc__ or "", "exempt", exempt))
            continue
        example = counterexample(law, subject, seeds, kept)
        findings.append(_finding(law, "holds" if example is None else "BROKEN", example, subject))
        if law is effects.better and (why := subject.exempt.get(effects.TOOL_TURNS)):
            findings.append(Finding(effects.TOOL_TURNS, "The same of its tool turns.", "exempt", why))
        if example is not None and law in FIRST:
            return findings
    findings = _once(findings)
    for name, examine in PROPERTIES.items():
        if name in ("weighs", "conserves") and subject.level != "token":
            continue
        example, declared = counterexample(examine, subject, seeds, kept), subject.properties
        undeclared = declared is not None and example is None and name not in declared
        wrong = undeclared and subject.operator is not None  # a registered operator's declaration is complete
        wrong |= example is not None and name in (declared or ())
        verdict = "BROKEN" if wrong else "yes" if example is None else "no"
        finding = _finding(examine, verdict, example, subject)
        findings.append(replace(finding, detail="not declared, but it holds") if undeclared else finding)
    return findings


def _once(findings: list[Finding]) -> list[Finding]:
    """An operator's error, or a counterexample, that several laws have in common is reported for the first one only."""
    first: dict[Any, str] = {}
    once = []
    for finding in findings:
        result = finding.example[-1] if finding.example else finding.name
        key = NUMBERS.sub("", result) if "Error: " in result else finding.example or finding.name
        before = first.setdefault(key, finding.name)
        same = finding.wrong and before != finding.name
        once.append(replace(finding, detail=f"as for {before}", example=()) if same else finding)
    return once


def _finding(law: Callable, verdict: str, example: Example | None, subject: Subject) -> Finding:
    if example is None or verdict != "BROKEN":
        return Finding(law.__name__, law.__doc__ or "", verdict, "" if example is None else example.message)
    example = smallest(example, subject)
    shown = tuple(lines(example, subject))
    return Finding(law.__name__, law.__doc__ or "", verdict, example.message, shown)


def smallest(example: Example, subject: Subject) -> Example:
    """The smallest world that a greedy search finds in `TRIES`. A call's error counts, a law's own does not."""
    tries, world = 0, _smaller(example.world)
    while (tried := next(world, None)) is not None and tries < TRIES:
        tries += 1
        found = examined(example.law, subject, tried, own_errors=False)
        if found is not None:
            example, world = found, _smaller(tried)
    return example


def _smaller(world: World) -> Iterator[World]:
    """Fewer prompts, rows, turns and tokens, in this order, then plainer numbers."""
    rows, width = world.mask_B_T.shape
    groups = world.group_B.unique()
    if len(groups) > 1:
        for group in groups:
            yield world.rows((world.group_B == group).nonzero().flatten())
    if rows > 1:
        yield world.rows(torch.arange(rows // 2))
        for row in range(rows):
            yield world.rows((torch.arange(rows) != row).nonzero().flatten())
    if world.has_gain_B_K.any():
        first_B_T = torch.where(world.turn_ids_B_T == 0, 0, -1)
        yield _tidy(world.but(turn_ids_B_T=first_B_T))
        yield world.without_gains()
    columns_T = torch.arange(width)
    written_T = (world.turn_ids_B_T >= 0).any(dim=0)
    kept_T = [] if written_T.all() else [written_T]
    kept_T += [columns_T < last for last in (width // 2,) if last]
    kept_T += [columns_T != place for place in reversed(range(width)) if width > 1]
    for kept in kept_T:
        yield _tidy(world, kept)
    for name, plain in (
        ("group_B", torch.zeros_like(world.group_B) if len(groups) == 1 else world.group_B),
        ("outcome_B", world.outcome_B.round()),
        ("planning_B_T", torch.zeros_like(world.planning_B_T)),
        ("log_prob_B_T", torch.where(world.mask_B_T, world.log_prob_B_T.round(decimals=1), -1.0)),
        ("entropy_B_T", torch.where(world.mask_B_T, world.entropy_B_T.round(decimals=1), 1.0)),
        ("gain_B_K", torch.where(world.has_gain_B_K, world.gain_B_K.round(decimals=1), 0.0)),
    ):
        if not torch.equal(plain, getattr(world, name)):
            yield world.but(**{name: plain})


def _tidy(world: World, kept_T: torch.Tensor | None = None) -> World:
    """Some columns only; turns are numbered anew, and those that are gone have no gain."""
    if kept_T is not None:
        world = world.but(**{name: getattr(world, name)[:, kept_T] for name in PER_TOKEN})
    new_B_T = torch.full_like(world.turn_ids_B_T, -1)
    gains_B_K, has_B_K = torch.zeros_like(world.gain_B_K), torch.zeros_like(world.has_gain_B_K)
    for row, ids_T in enumerate(world.turn_ids_B_T):
        old_K1 = ids_T[ids_T >= 0].unique()
        for number, k in enumerate(old_K1.tolist()):
            new_B_T[row, ids_T == k] = number
        n_tool = max(0, len(old_K1) - 1)
        has_B_K[row, :n_tool] = world.has_gain_B_K[row, old_K1[:-1]]
        gains_B_K[row, :n_tool] = world.gain_B_K[row, old_K1[:-1]]
    gains_B_K = torch.where(has_B_K, gains_B_K, 0.0)
    return world.but(turn_ids_B_T=new_B_T, mask_B_T=new_B_T >= 0, gain_B_K=gains_B_K, has_gain_B_K=has_B_K)


def lines(example: Example, subject: Subject) -> Iterator[str]:
    """Each call: what went in, and what came out, one list per row."""
    for run in example.runs:
        yield ", ".join(f"{name} = {value}" for name, value in _inputs(run, subject))
        if isinstance(run.result, Exception):
            yield f"  -> {type(run.result).__name__}: {run.result}"
        else:
            out: list = _rows(run.result, run.world.mask_B_T)
            if subject.level == "outcome":
                out = [row[0] if row else None for row in out]
            yield f"  -> {out}"


def _inputs(run: Run, subject: Subject) -> Iterator[tuple[str, list]]:
    world, whole = run.world, subject.level == "whole"
    mask_B_T, gains = world.mask_B_T, whole and "gains" in subject.reads
    if subject.level != "token":
        yield "rewards", world.outcome_B.tolist()
    if len(world.group_B.unique()) > 1:
        yield "groups", world.group_B.tolist()
    if not world.valid_B.all():
        yield "valid", world.valid_B.tolist()
    if gains:
        yield "turn_ids", _rows(world.turn_ids_B_T, mask_B_T)
    if gains or subject.level == "turn":
        rows = list(range(len(world.outcome_B)))
        yield "turn_rewards", turn_lists(world.gain_B_K, world.has_gain_B_K, world.turn_ids_B_T, rows)
    for name in subject.tables:
        table = getattr(world, name)
        turn_B_K1 = torch.arange(table.shape[-1]) <= world.n_tool_turns_B[:, None]
        yield name, _rows(table, turn_B_K1) if name.endswith("_K1") else table.tolist()
    if subject.given is not None:
        given_B_T = subject.given(world).advantage_B_T if run.given is None else run.given
        yield "advantages", _rows(given_B_T, mask_B_T)
    if whole or subject.level == "token":
        yield "logprobs", _rows(world.log_prob_B_T, mask_B_T)
        if world.planning_B_T is not None and "planning mask" in subject.reads:
            yield "planning", _rows(world.planning_B_T.int(), mask_B_T)
        if world.entropy_B_T is not None and (whole or subject.uncertainty):
            yield "entropies", _rows(world.entropy_B_T, mask_B_T)


def _rows(values_B_T: torch.Tensor, mask_B_T: torch.Tensor) -> list[list]:
    return [values_t[own_t].tolist() for values_t, own_t in zip(values_B_T.detach(), mask_B_T, strict=True)]
