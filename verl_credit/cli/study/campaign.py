"""`verl-credit campaign run|status|report`."""

from __future__ import annotations

from pathlib import Path

from verl_credit.errors import ConfigError, ExitCode, PreflightError, one_line
from verl_credit.recipe.doctor.hardware.disk import sweep_warnings
from verl_credit.study.campaign.file import read_campaign
from verl_credit.study.campaign.record import RECORD, read_record
from verl_credit.study.campaign.runner import DEFAULT, run_campaign
from verl_credit.study.campaign.state import State, states

MISSING = "the report needs scipy, statsmodels and pandas: pip install 'verl-credit[campaign]'"


def run(name: str, folder: Path | None, parallel: int, overrides: list[str]) -> ExitCode:
    try:
        code, folder = run_campaign(name, folder, parallel, overrides, sweep_warnings)
    except (ConfigError, PreflightError, OSError) as error:
        return _refused("run", error)
    _report(folder)
    return code


def status(name: str, folder: Path | None) -> ExitCode:
    """A line for every run, then what there is in all."""
    try:
        folder = _folder(name, folder)
        campaign = read_record(folder).campaign
        found = states(campaign, folder)
    except (ConfigError, OSError) as error:
        return _refused("status", error)
    wide = max(len(one.run.folder) for one in found)
    print(f"{'run':<{wide}}  {'state':<11}  hours  steps    area")
    for one in found:
        area = "     -" if one.value is None else f"{one.value:6.3f}"
        step = one.curve.steps[-1] if one.curve else 0
        print(
            f"{one.run.folder:<{wide}}  {one.state:<11}  {one.hours:5.2f}  {step:5d}  {area}  {one_line(one.why)}".rstrip()
        )
    done = sum(one.state is State.DONE for one in found)
    hours, budget = sum(one.hours for one in found), campaign.budget
    most = [f"{budget.runs} runs"] if budget.runs else []
    most += [f"{budget.hours:g} hours"] if budget.hours else []
    print(
        f"engine {campaign.engine}: {done} of {len(found)} runs done, {hours:.2f} hours"
        + (f"; budget: {', '.join(most)}" if most else "")
    )
    if note := campaign.cannot_resolve():
        print(f"note: {note}")
    return ExitCode.DONE


def report(name: str, folder: Path | None) -> ExitCode:
    try:
        folder = _folder(name, folder)
        read_record(folder)
    except (ConfigError, OSError) as error:
        return _refused("report", error)
    return ExitCode.DONE if _report(folder) else ExitCode.PREFLIGHT


def _folder(name: str, folder: Path | None) -> Path:
    """``name`` may be the campaign's folder itself."""
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


def _refused(command: str, error: Exception) -> ExitCode:
    print(f"verl-credit campaign {command}: {error}", flush=True)
    return ExitCode.PREFLIGHT
