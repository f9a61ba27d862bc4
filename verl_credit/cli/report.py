"""`verl-credit report RUN`, `report CAMPAIGN`, `report --watch RUN`, `report A B`."""

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from verl_credit.cli.command import ends
from verl_credit.errors import ExitCode, PreflightError, show_value


@ends("report {run_dir}", OSError, ValueError)
def report(
    run_dir: Annotated[list[Path], Argument(help="the folder of a run, of two, or of a campaign")],
    watch: Annotated[bool, Option("--watch", help="write it anew while the run goes on")] = False,
) -> ExitCode | None:
    """Writes a report; writes nothing into a refused folder."""
    from verl_credit.records.report.write import watch as rewrite
    from verl_credit.records.report.write import write_report, write_two
    from verl_credit.records.run.progress_line import say_at_once
    from verl_credit.study.campaign.record import RECORD

    if len(run_dir) > 2 or (watch and len(run_dir) > 1):
        raise PreflightError("--watch takes one run" if watch else "expected one run, or two to compare")
    if (run_dir[0] / RECORD).exists() and len(run_dir) == 1:
        if watch:
            raise PreflightError("--watch takes a run, and this is a campaign's folder")
        from verl_credit.cli import campaign

        return campaign.report(str(run_dir[0]))
    if watch:
        rewrite(run_dir[0], say_at_once)
    elif len(run_dir) == 2:
        print(write_two(*run_dir, _differences(*run_dir)))
    else:
        print(write_report(run_dir[0]))


def _differences(a: Path, b: Path) -> dict[str, list[tuple[str, str, str]]] | None:
    """The differences of `verl-credit diff` without paths and logging; None where a run has no configuration."""
    from verl_credit.cli.recipe.differences import LAST, compare, read_run_side
    from verl_credit.cli.saved_run import CONFIG

    if not all((folder / CONFIG).is_file() for folder in (a, b)):
        return None
    groups = compare(read_run_side(a), read_run_side(b), base=dict)
    shown = {
        name: [(row.key, show_value(row.a), show_value(row.b)) for row in groups[name]] for name in groups
    }
    shown.pop(LAST, None)
    return shown
