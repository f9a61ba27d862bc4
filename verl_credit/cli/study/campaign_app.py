"""`verl-credit campaign ...`."""

from pathlib import Path

from typer import Argument, Option, Typer

app = Typer(help="several conditions with several seeds, and what can be concluded from them")
CAMPAIGN = Argument(help="a campaign's file, or a shipped one (turn_modes_lab)")
CAMPAIGN_DIR = Option(None, "--dir", help="the campaign's folder; runs/campaigns/NAME where not given")


@app.command("run", help="run every condition with every seed; the same command goes on after a kill")
def run(
    file: str = CAMPAIGN,
    folder: Path | None = CAMPAIGN_DIR,
    parallel: int = Option(1, parser=int, help="runs side by side, on CPUs"),
    overrides: list[str] = Argument((), help="Hydra overrides for all runs: key=value"),
):
    from verl_credit.cli.study import campaign

    return campaign.run(file, folder, parallel, overrides)


@app.command("status", help="how far the runs of a campaign are")
def status(file: str = CAMPAIGN, folder: Path | None = CAMPAIGN_DIR):
    from verl_credit.cli.study import campaign

    return campaign.status(file, folder)


@app.command("report", help="write campaign.html: curves, differences with intervals, tests, verdicts")
def report(file: str = CAMPAIGN, folder: Path | None = CAMPAIGN_DIR):
    from verl_credit.cli.study import campaign

    return campaign.report(file, folder)
