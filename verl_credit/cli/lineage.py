"""`verl-credit lineage show|best|render` reads the trials of a folder."""

import json
import sys
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

from typer import Option, Typer

from verl_credit.cli.command import PLAIN, AsJson, ends
from verl_credit.errors import one_line, printable
from verl_credit.records.lineage import LineageStore, Trial
from verl_credit.records.run.files import write_text

lineage = Typer(help="the trials of a folder, as `train` writes them down", **PLAIN)
refusals = ends("lineage --dir {folder}", OSError, to="stderr")
Store = Annotated[Path, Option("--dir", help="folder of the trials (results.tsv)")]
Lower = Annotated[bool, Option("--lower-is-better", help="a smaller core_metric is better")]
Out = Annotated[Path | None, Option(help="the file; none: KNOWLEDGE.md in the folder")]
STORE = Path("runs/lineage")


@lineage.command(help="the trials of a folder, as `train` writes them down")
@refusals
def show(folder: Store = STORE, as_json: AsJson = False) -> None:
    store = _open(folder)
    trials = store.all_trials()
    if as_json:
        print(json.dumps({"trials": list(map(asdict, trials)), "damaged": store.damaged()}))
    for trial in () if as_json else trials:
        print(_line(trial))


@lineage.command(help="the best trial that was kept")
@refusals
def best(folder: Store = STORE, lower_is_better: Lower = False, as_json: AsJson = False) -> None:
    trial = _open(folder, lower_is_better).best()
    if as_json:
        print(json.dumps(asdict(trial) if trial else None))
    else:
        print(_line(trial) if trial else "no kept trial has a metric")


@lineage.command(help="write KNOWLEDGE.md, to be read before the next trial")
@refusals
def render(
    folder: Store = STORE,
    out: Out = None,
    specialist: Annotated[str, Option("--for", help="who reads it")] = "verl-credit",
    lower_is_better: Lower = False,
) -> None:
    now = f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}"
    text = _open(folder, lower_is_better).render_prompt(specialist, session_timestamp=now)
    print(write_text(out or folder / "KNOWLEDGE.md", text))


def _open(folder: Path, lower_is_better: bool = False) -> LineageStore:
    """Opens a store and names its damaged lines."""
    store = LineageStore(folder, lower_is_better=lower_is_better)
    if not store.path.exists():
        raise FileNotFoundError(f"{store.path} is not there; --dir names the folder of a table of trials")
    for one in store.damaged():
        print(f"not read: {printable(one)}", file=sys.stderr)
    return store


def _line(trial: Trial) -> str:
    metric = "-" if trial.core_metric is None else f"{trial.core_metric:.6f}"
    delta = "" if trial.delta_vs_best is None else f" ({trial.delta_vs_best:+.6f})"
    return one_line(f"{trial.label}  {trial.status}  {metric}{delta}  {trial.hypothesis}").rstrip()
