"""`verl-credit check`: the laws, run on an operator of the user's or on every registered one."""

from __future__ import annotations

import sys

from verl_credit.credit.laws import Subject, check, own_subject, registered_subject
from verl_credit.credit.plugins import load
from verl_credit.credit.registry import REGISTRY

OK, BROKEN, UNUSABLE = 0, 1, 4


def check_operators(path: str | None, kind: str | None = None, params: dict | None = None) -> int:
    """Exit code 0 when all laws hold or are exempt, 1 when one is broken, 4 when there is nothing to check."""
    if path is None:
        subjects = [registered_subject(level, name) for level, name in REGISTRY]
    else:
        sys.path.insert(0, "")  # a module in the folder one stands in
        try:
            subjects = [own_subject(load(path, "operator"), path, kind=kind, params=params)]
        except ValueError as error:
            print(f"verl-credit check: {error}")
            return UNUSABLE
    broken = [_report(subject, details=path is not None) for subject in subjects]
    if path is None:
        print(f"{len(subjects)} operators, {sum(map(bool, broken))} broken")
    return BROKEN if any(broken) else OK


def _report(subject: Subject, *, details: bool) -> int:
    findings = check(subject)
    broken = [finding for finding in findings if finding.wrong]
    name = f"{subject.level} {subject.name}"
    if broken and broken[0].name == "runs":
        print(
            f"{name}: BROKEN: {broken[0].detail} for {broken[0].example[0]}; --params '{{...}}' gives it params"
        )
        return 1
    print(f"{name}: {'BROKEN' if broken else 'lawful'}")
    for finding in findings:
        if details or finding.wrong or finding.verdict == "exempt":
            why = f"  ({finding.detail})" if finding.detail else ""
            print(f"  {finding.verdict:7} {finding.name:13} {finding.says}{why}")
            for line in finding.example:
                print(f"          {line}")
    if broken and broken[0].name == "pure":
        print("  The other laws are not tested: what they find would change from call to call.")
    return len(broken)
