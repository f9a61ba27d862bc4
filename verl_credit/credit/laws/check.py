"""Runs every law and property on one subject."""

from __future__ import annotations

from dataclasses import dataclass

from verl_credit.credit.laws.laws import LAWS, Broken
from verl_credit.credit.laws.properties import PROPERTIES
from verl_credit.credit.laws.subjects import Subject

SEEDS = range(3)


@dataclass(frozen=True)
class Finding:
    """The result for one law or property."""

    name: str
    says: str
    verdict: str
    """holds | BROKEN | exempt | yes | no (the last two: properties)"""
    detail: str = ""

    @property
    def wrong(self) -> bool:
        return self.verdict == "BROKEN"


def counterexample(examine, subject: Subject, seeds=SEEDS) -> str | None:
    """The counterexample of the first seed that breaks the law, or None. An operator's exception is a counterexample."""
    for seed in seeds:
        try:
            examine(subject, seed)
        except Broken as broken:
            return f"seed {seed}: {broken}"
        except Exception as error:
            return f"seed {seed}: {type(error).__name__}: {error}"
    return None


def check(subject: Subject, seeds=SEEDS) -> list[Finding]:
    """Test all laws that are not exempt, and all properties, which must match the declared ones, if any are declared."""
    findings = []
    for name, law in LAWS.items():
        exempt = subject.exempt.get(name)
        if name == "others" and subject.scope == "batch":
            exempt = "its scope is the batch"
        if exempt is not None:
            findings.append(Finding(name, law.__doc__, "exempt", exempt))
            continue
        found = counterexample(law, subject, seeds)
        findings.append(Finding(name, law.__doc__, "holds" if found is None else "BROKEN", found or ""))
    for name, examine in PROPERTIES.items():
        if name in ("weighs", "conserves") and subject.level != "token":
            continue
        found = counterexample(examine, subject, seeds)
        verdict, declared = "yes" if found is None else "no", subject.properties
        if declared is not None and (name in declared) != (found is None):
            verdict = "BROKEN"
            found = found or "not declared, but it holds"
        findings.append(Finding(name, examine.__doc__, verdict, found or ""))
    return findings
