"""Runs every law and property on one subject."""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from verl_credit.credit.laws import laws, rewards, tokens
from verl_credit.credit.laws import laws as steady
from verl_credit.credit.laws.broken import Broken
from verl_credit.credit.laws.example import Example, Log, lines, smallest
from verl_credit.credit.laws.properties import PROPERTIES
from verl_credit.credit.laws.subjects import Result, Subject
from verl_credit.credit.laws.world import World

SEEDS = range(3)
NUMBERS = re.compile(r"[\d.e, \[\]-]+")

FIRST = (steady.runs, steady.pure)
LAWS: dict[str, Callable[[Subject, World], None]] = {
    law.__name__: law
    for law in (
        *FIRST, rewards.ties, rewards.better, rewards.signed, laws.order, tokens.turns, tokens.follows, tokens.flat,
        tokens.weighs_by, tokens.absent, rewards.reads, rewards.no_gains, laws.observations, laws.others, laws.width,
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


def counterexample(
    law: Callable, subject: Subject, seeds=SEEDS, kept: dict[tuple, Result] | None = None
) -> Example | None:
    """The first world that breaks the law, or None. An operator's exception is a counterexample.

    Laws that are given the same ``kept`` compute the result of an unchanged world once. Each of them has tensors of its own,
    so that what an operator does to its input reaches no other law, and the laws of `FIRST` call anew.
    """
    worlds = getattr(law, "worlds", laws.usual_worlds)
    for seed in seeds:
        for number, world in enumerate(worlds(seed)):
            known = subject
            if kept is not None and law not in FIRST:
                known = replace(subject, run=partial(_run_once, subject, world, kept, (worlds, seed, number)))
            log = Log(known)
            try:
                law(log.subject, world)
            except Broken as broken:
                return Example(law, world, str(broken), log.runs[-broken.runs :])
            except Exception as error:
                return Example(law, world, f"{type(error).__name__}: {error}", log.runs[-1:])
    return None


def _run_once(
    subject: Subject, unchanged: World, kept: dict[tuple, Result], key: tuple, world: World
) -> Result:
    if world is not unchanged:
        return subject.run(world)
    if key not in kept:
        kept[key] = subject.run(world)
    return kept[key]


def check(subject: Subject, seeds=SEEDS) -> list[Finding]:
    """Test all laws that are not exempt, and all properties, which must match the declared ones, if any are declared.

    Only findings about ``runs`` and ``pure`` are returned where these laws are broken: others would tell of the same.
    """
    findings, kept = [], {}
    for name, law in LAWS.items():
        exempt = subject.exempt.get(name)
        if name == "others" and subject.scope == "batch":
            exempt = "its scope is the batch"
        if exempt is not None:
            findings.append(Finding(name, law.__doc__, "exempt", exempt))
            continue
        example = counterexample(law, subject, seeds, kept)
        findings.append(_finding(name, law, "holds" if example is None else "BROKEN", example, subject))
        if law is rewards.better and (why := subject.exempt.get(rewards.TOOL_TURNS)):
            findings.append(Finding(rewards.TOOL_TURNS, "The same of its tool turns.", "exempt", why))
        if example is not None and law in FIRST:
            return findings
    findings = _once(findings)
    for name, examine in PROPERTIES.items():
        if name in ("weighs", "conserves") and subject.level != "token":
            continue
        example = counterexample(examine, subject, seeds, kept)
        verdict, declared = "yes" if example is None else "no", subject.properties
        undeclared = declared is not None and example is None and name not in declared
        if undeclared:
            # a registered operator's declaration is complete
            verdict = "yes" if subject.operator is None else "BROKEN"
        elif declared is not None and name in declared and example is not None:
            verdict = "BROKEN"
        finding = _finding(name, examine, verdict, example, subject)
        findings.append(replace(finding, detail="not declared, but it holds") if undeclared else finding)
    return findings


def _once(findings: list[Finding]) -> list[Finding]:
    """An operator's error, or a counterexample, that several laws have in common is reported for the first one only."""
    first, once = {}, []
    for finding in findings:
        result = finding.example[-1] if finding.example else finding.name
        key = NUMBERS.sub("", result) if "Error: " in result else finding.example or finding.name
        before = first.setdefault(key, finding.name)
        same = finding.wrong and before != finding.name
        once.append(replace(finding, detail=f"as for {before}", example=()) if same else finding)
    return once


def _finding(name: str, law: Callable, verdict: str, example: Example | None, subject: Subject) -> Finding:
    if example is None or verdict != "BROKEN":
        return Finding(name, law.__doc__, verdict, "" if example is None else example.message)
    example = smallest(example, subject)
    return Finding(name, law.__doc__, verdict, example.message, tuple(lines(example, subject)))
