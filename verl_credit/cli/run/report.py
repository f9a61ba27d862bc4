"""`verl-credit report RUN`, `report CAMPAIGN`, `report --watch RUN`, `report A B`."""

from __future__ import annotations

from pathlib import Path

from verl_credit.cli.study import campaign
from verl_credit.errors import ConfigError, ExitCode, one_line, show_value
from verl_credit.records.report import watch, write_report, write_two
from verl_credit.records.run.progress import say_at_once
from verl_credit.study.campaign.record import RECORD


def report(folders: list[Path], follow: bool) -> int:
    """Exit code 4 for a folder that cannot be reported on; nothing is written then."""
    named = " ".join(map(str, folders))
    if len(folders) > 2 or (follow and len(folders) > 1):
        at_most = "--watch takes one run" if follow else "expected one run, or two to compare"
        print(f"verl-credit report {named}: {at_most}")
        return ExitCode.PREFLIGHT
    if (folders[0] / RECORD).exists() and len(folders) == 1:
        if follow:
            print(f"verl-credit report {named}: --watch takes a run, and this is a campaign's folder")
            return ExitCode.PREFLIGHT
        return campaign.report(named, None)
    try:
        if follow:
            watch(folders[0], say_at_once)
        elif len(folders) == 2:
            print(write_two(*folders, _differences(*folders)))
        else:
            print(write_report(folders[0]))
    except (ConfigError, OSError, ValueError) as error:
        print(f"verl-credit report {named}: {one_line(str(error))}")
        return ExitCode.PREFLIGHT
    return ExitCode.DONE


def _differences(a: Path, b: Path) -> dict[str, list[tuple[str, str, str]]] | None:
    """As `verl-credit diff` finds them, without paths and logging; None where a run has no configuration."""
    from verl_credit.cli.run.diff import CONFIG, LAST, compare, read_run_side

    if not all((folder / CONFIG).is_file() for folder in (a, b)):
        return None
    found = compare(read_run_side(a), read_run_side(b), base=dict)
    return {
        name: [(row.key, show_value(row.a), show_value(row.b)) for row in rows]
        for name, rows in found.groups.items()
        if name != LAST
    }
