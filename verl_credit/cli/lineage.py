"""`verl-credit lineage show|best|chain|diff|render|export` reads the trials of a folder."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

from typer import Argument, Option, Typer

from verl_credit.cli.command import PLAIN, AsJson, ends
from verl_credit.errors import ExitCode, did_you_mean, one_line, printable
from verl_credit.records.lineage import LineageStore, RecipeEdit, Trial
from verl_credit.records.lineage.trial import NUMBERS
from verl_credit.records.run.files import write_text

KNOWLEDGE = "KNOWLEDGE.md"


class NotKnown(ValueError):
    """The store lacks the trial or column that the command line names."""


lineage = Typer(help="the trials of a folder, as `train` writes them down", **PLAIN)
refusals = ends("lineage --dir {folder}", NotKnown, OSError, to="stderr")
Store = Annotated[Path, Option("--dir", help="folder of the trials (results.tsv)")]
Lower = Annotated[
    bool | None, Option("--lower-is-better/--higher-is-better", help="where results.jsonl does not say it")
]
STORE = Path("runs/lineage")


@lineage.command(help="the trials of a folder, as `train` writes them down")
@refusals
def show(folder: Store = STORE, as_json: AsJson = False) -> None:
    """Prints the trials in the order of the file, then unfinished trials; --json also has the damaged lines."""
    store = _open(folder)
    if as_json:
        facts = store.all_facts()
        trials = [asdict(trial) | {"facts": facts.get(trial.exp_id, {})} for trial in store.all_trials()]
        damaged = [asdict(one) for one in store.damaged()]
        print(json.dumps({"trials": trials, "unfinished": store.unfinished(), "damaged": damaged}))
        return
    for trial in store.all_trials():
        print(_line(trial))
    for exp_id, start in store.unfinished().items():
        began = one_line(f"{start.get('timestamp', 'at an unknown time')} in {start.get('job_name', '?')}")
        print(f"exp_{one_line(exp_id)}  began {began}, and has no end: it goes on, or it was killed")


@lineage.command(help="the best trial that was kept")
@refusals
def best(folder: Store = STORE, lower_is_better: Lower = None, as_json: AsJson = False) -> None:
    store = _open(folder, lower_is_better, ordered=True)
    trial = store.best()
    if as_json:
        print(json.dumps(asdict(trial) | {"facts": store.facts(trial.exp_id)} if trial else None))
    else:
        print(_line(trial) if trial else "no kept trial has a metric")


@lineage.command(help="the trials that led to one")
@refusals
def chain(
    exp_id: Annotated[str | None, Argument(help="none: the best")] = None,
    folder: Store = STORE,
    lower_is_better: Lower = None,
    as_json: AsJson = False,
) -> None:
    """Prints the trials from the root to ``exp_id``, or to the best."""
    store = _open(folder, lower_is_better, ordered=exp_id is None)
    last = _one(store, exp_id) if exp_id is not None else store.best()
    if last is None:
        raise NotKnown("no kept trial has a metric; name a trial")
    trials = store.chain_to(last.exp_id)
    if as_json:
        print(json.dumps([asdict(trial) for trial in trials]))
        return
    if gone := trials[0].parent_exp:
        print(f"exp_{one_line(gone)}  is not in the store, or is a descendant of its own")
    for trial in trials:
        print(_line(trial))


@lineage.command(help="what a trial's snapshot changes")
@refusals
def diff(
    exp_id: str, other: Annotated[str | None, Argument(help="or its parent")] = None, folder: Store = STORE
) -> ExitCode:
    """Compares a trial's snapshot with its parent's or another's. Exit code 1 where they differ."""
    store = _open(folder)
    trial = _one(store, exp_id)
    if other is None and not trial.parent_exp:
        raise NotKnown(f"{exp_id} has no parent; name the trial to compare it with")
    parent = _one(store, other or trial.parent_exp)
    for one in (trial, parent):
        if not one.snapshot_path:
            raise NotKnown(f"{one.exp_id} has no snapshot_path")
    text = RecipeEdit(trial, trial.snapshot_path, parent.snapshot_path).diff()
    print(text, end="")
    return ExitCode.DIFFERENT if text else ExitCode.DONE


@lineage.command(help="write KNOWLEDGE.md, to be read before the next trial")
@refusals
def render(
    folder: Store = STORE,
    out: Annotated[Path | None, Option(help="the file; none: KNOWLEDGE.md in the folder")] = None,
    specialist: Annotated[str, Option("--for", help="who reads it")] = "verl-credit",
    lower_is_better: Lower = None,
) -> None:
    """Writes KNOWLEDGE.md, into the store's folder where ``out`` is not given."""
    store = _open(folder, lower_is_better, ordered=True)
    page = store.render_prompt(specialist, session_timestamp=f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}")
    path = out or folder / KNOWLEDGE
    try:
        write_text(path, page.rendered_prompt)
    except OSError as error:
        raise NotKnown(f"{path} cannot be written: {error.strerror}") from error
    print(path)


@lineage.command(help="send trials to MLflow, Weights & Biases, ..., by verl's loggers")
@refusals
def export(
    to: Annotated[list[str], Option(help="a logger of verl's: wandb, mlflow, tensorboard, ...; repeatable")],
    exp_ids: Annotated[list[str], Argument(help="none: all")] = (),
    project: Annotated[str, Option(help="where the tracker puts them")] = "lineage",
    folder: Store = STORE,
) -> None:
    store = _open(folder)
    trials = [_one(store, exp_id) for exp_id in exp_ids] or store.all_trials()
    from verl_credit.host.process.track import export_trials

    facts = store.all_facts()

    def parts(trial: Trial) -> tuple[str, dict, dict]:
        columns = asdict(trial)
        numbers = {name: columns.pop(name) for name in NUMBERS}
        known = {name: value for name, value in numbers.items() if value is not None}
        return trial.label, known, columns | {"facts": facts.get(trial.exp_id, {})}

    try:
        number = export_trials(map(parts, trials), to, project)
    except (ValueError, ImportError, RuntimeError) as error:
        raise NotKnown(str(error)) from error
    print(f"{number} trials sent to {', '.join(to)}, project {project}")


def _open(folder: Path, lower_is_better: bool | None = None, *, ordered: bool = False) -> LineageStore:
    """Opens a store and names damaged lines. ``ordered``: the direction matters and comes from the companion by default."""
    store = LineageStore(folder, lower_is_better=bool(lower_is_better))
    if not store.path.exists():
        raise NotKnown(f"{store.path} is not there; --dir names the folder of a table of trials")
    for one in store.damaged():
        print(f"not read: {printable(str(one))}", file=sys.stderr)
    if ordered and lower_is_better is None:
        facts = store.all_facts()
        known = [facts.get(trial.exp_id, {}).get("lower_is_better") for trial in store.all_trials()]
        if known and not any(isinstance(one, bool) for one in known):
            raise NotKnown(
                f"{store.companion} does not say which core_metric is better: add --lower-is-better or "
                "--higher-is-better"
            )
        store.lower_is_better = next((one for one in reversed(known) if isinstance(one, bool)), False)
    return store


def _one(store: LineageStore, exp_id: str) -> Trial:
    names = {trial.exp_id: trial for trial in store.all_trials()}
    if exp_id not in names:
        raise NotKnown(f"no trial {exp_id!r}{did_you_mean(exp_id, names)}")
    return names[exp_id]


def _line(trial: Trial) -> str:
    metric = "-" if trial.core_metric is None else f"{trial.core_metric:.6f}"
    delta = "" if trial.delta_vs_best is None else f" ({trial.delta_vs_best:+.6f})"
    return one_line(f"{trial.label}  {trial.status}  {metric}{delta}  {trial.hypothesis}").rstrip()
