"""`verl-credit report RUN`, `report CAMPAIGN`."""

from pathlib import Path
from typing import Annotated

from typer import Argument

from verl_credit.cli.command import ends
from verl_credit.errors import ExitCode


@ends("report {run_dir}", OSError, ValueError)
def report(
    run_dir: Annotated[Path, Argument(help="the folder of a run or of a campaign")],
) -> ExitCode | None:
    """Writes a report; writes nothing into a refused folder."""
    from verl_credit.records.report.write import write_report
    from verl_credit.study.campaign.record import RECORD

    if (run_dir / RECORD).exists():
        from verl_credit.cli import campaign

        return campaign.report(str(run_dir))
    print(write_report(run_dir))
