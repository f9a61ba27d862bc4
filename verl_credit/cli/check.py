"""`verl-credit check` runs the laws on a user's operator or on every registered operator."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from typer import Argument, Option

from verl_credit.cli.command import Params, ends, modules_from_here
from verl_credit.errors import ExitCode

if TYPE_CHECKING:
    from verl_credit.credit.laws import Subject

Kind = Literal["outcome", "turn", "transform", "algorithm", "uncertainty"]


@ends("check", ValueError)
def check(
    operator: Annotated[str | None, Argument(help="my_module:my_operator; none: all registered ones")] = None,
    kind: Annotated[Kind | None, Option(help="when it cannot be inferred")] = None,
    params: Params = None,
) -> ExitCode:
    """Exit code 0 when all laws hold or are exempt, 1 when one is broken, 4 when there is nothing to check."""
    from verl_credit.credit import REGISTRY
    from verl_credit.credit.laws import own_subject, registered_subject
    from verl_credit.credit.plugins import load

    with modules_from_here():
        if operator is not None:
            subject = own_subject(load(operator, "operator"), operator, kind=kind, params=params)
            return ExitCode.FAILED if _report(subject, details=True) else ExitCode.DONE
        broken = [_report(registered_subject(level, name), details=False) for level, name in REGISTRY]
    print(f"{len(broken)} operators, {sum(map(bool, broken))} broken")
    return ExitCode.FAILED if any(broken) else ExitCode.DONE


def _report(subject: Subject, *, details: bool) -> int:
    from verl_credit.credit.laws import check as run_laws

    findings = run_laws(subject)
    broken = [finding for finding in findings if finding.wrong]
    name = f"{subject.level} {subject.name}"
    if broken and broken[0].name == "runs":
        why = f"{broken[0].detail} for {broken[0].example[0]}"
        print(f"{name}: BROKEN: {why}; --params '{{...}}' gives it params")
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
