"""`verl-credit campaign run|status|report`."""

from pathlib import Path
from typing import Annotated

from typer import Argument, Option, Typer

from verl_credit.cli.command import PLAIN, Overrides, ends
from verl_credit.errors import ExitCode, one_line

MISSING = "the report needs scipy, statsmodels and pandas: pip install 'verl-credit[campaign]'"
campaign = Typer(help="several conditions with several seeds, and what can be concluded from them", **PLAIN)
Campaign = Annotated[str, Argument(help="a campaign's file, or a shipped one (turn_modes_lab)")]
Folder = Annotated[Path | None, Option("--dir", help="runs/campaigns/NAME where not given")]


@campaign.command(help="run every condition with every seed; the same command goes on after a kill")
@ends("campaign run", OSError)
def run(
    file: Campaign,
    folder: Folder = None,
    parallel: Annotated[int, Option(help="runs side by side, on CPUs")] = 1,
    overrides: Overrides = (),
) -> ExitCode:
    from verl_credit.study.campaign.runner import run_campaign

    code, folder = run_campaign(file, folder, parallel, overrides)
    _report(folder)
    return code


@campaign.command(help="how far the runs of a campaign are")
@ends("campaign status", OSError)
def status(file: Campaign, folder: Folder = None) -> None:
    """Prints a line for every run, then the sums."""
    from verl_credit.study.campaign.record import read_record
    from verl_credit.study.campaign.state import State, states

    folder = _folder(file, folder)
    campaign = read_record(folder).campaign
    run_states = states(campaign, folder)
    wide = max(len(one.run.folder) for one in run_states)
    print(f"{'run':<{wide}}  {'state':<11}  hours  steps    area")
    for one in run_states:
        area = "     -" if one.value is None else f"{one.value:6.3f}"
        step = one.curve.steps[-1] if one.curve else 0
        line = f"{one.run.folder:<{wide}}  {one.state:<11}  {one.hours:5.2f}  {step:5d}  {area}  {one_line(one.why)}"
        print(line.rstrip())
    done = sum(one.state is State.DONE for one in run_states)
    hours, budget = sum(one.hours for one in run_states), campaign.budget
    limits = [budget.runs and f"{budget.runs} runs", budget.hours and f"{budget.hours:g} hours"]
    most = ", ".join(filter(None, limits))
    said = f"engine {campaign.engine}: {done} of {len(run_states)} runs done, {hours:.2f} hours"
    print(f"{said}; budget: {most}" if most else said)
    if note := campaign.cannot_resolve():
        print(f"note: {note}")


@campaign.command(help="write campaign.html: curves, differences with intervals, tests, verdicts")
@ends("campaign report", OSError)
def report(file: Campaign, folder: Folder = None) -> ExitCode:
    from verl_credit.study.campaign.record import read_record

    folder = _folder(file, folder)
    read_record(folder)
    return ExitCode.DONE if _report(folder) else ExitCode.PREFLIGHT


def _folder(name: str, folder: Path | None) -> Path:
    """``name`` may be the campaign's folder itself."""
    from verl_credit.study.campaign.file import read_campaign
    from verl_credit.study.campaign.record import RECORD
    from verl_credit.study.campaign.runner import DEFAULT

    if folder is None and (Path(name) / RECORD).exists():
        folder = Path(name)
    return (folder or DEFAULT / read_campaign(name)[0].name).expanduser().resolve()


def _report(folder: Path) -> bool:
    """A report that cannot be written does not hide how the campaign ended."""
    try:
        from verl_credit.study.campaign.report import write_campaign_report

        print(f"report: {write_campaign_report(folder)}", flush=True)
    except ModuleNotFoundError as error:
        print(f"no report: {MISSING} ({error})", flush=True)
        return False
    except (OSError, ValueError) as error:
        print(f"no report: {error}", flush=True)
        return False
    return True
