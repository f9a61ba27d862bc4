"""`verl-credit lineage ...`."""

from pathlib import Path

from typer import Argument, Option, Typer

app = Typer(help="the trials of a folder, as `train` writes them down")
STORE = Option(Path("runs/lineage"), "--dir", help="folder of the trials (results.tsv)")
LOWER = Option(None, "--lower-is-better/--higher-is-better", help="where results.jsonl does not say it")
JSON = Option(False, "--json", help="machine-readable")


@app.command("show", help="the trials of a folder, as `train` writes them down")
def show(folder: Path = STORE, as_json: bool = JSON):
    from verl_credit.cli.trials import changes as lineage

    return lineage.show(folder, as_json)


@app.command("best", help="the best trial that was kept")
def best(folder: Path = STORE, lower_is_better: bool | None = LOWER, as_json: bool = JSON):
    from verl_credit.cli.trials import changes as lineage

    return lineage.best(folder, lower_is_better, as_json)


@app.command("chain", help="the trials that led to one")
def chain(
    exp_id: str | None = Argument(None, help="none: the best"),
    folder: Path = STORE,
    lower_is_better: bool | None = LOWER,
    as_json: bool = JSON,
):
    from verl_credit.cli.trials import changes as lineage

    return lineage.chain(folder, exp_id, lower_is_better, as_json)


@app.command("diff", help="what a trial's snapshot changes")
def diff(exp_id: str, other: str | None = Argument(None, help="or its parent"), folder: Path = STORE):
    from verl_credit.cli.trials import changes as lineage

    return lineage.diff(folder, exp_id, other)


@app.command("render", help="write KNOWLEDGE.md, to be read before the next trial")
def render(
    folder: Path = STORE,
    out: Path | None = Option(None, help="the file; none: KNOWLEDGE.md in the folder"),
    specialist: str = Option("verl-credit", "--for", help="who reads it"),
    top_k: int = Option(20, min=0, help="kept trials on the leaderboard"),
    recent_n: int = Option(30, min=0, help="trials in the table of recent activity"),
    last_m_full: int = Option(10, min=0, help="trials with their whole hypothesis"),
    lower_is_better: bool | None = LOWER,
):
    from verl_credit.cli.trials import changes as lineage

    return lineage.render(folder, lower_is_better, out, specialist, top_k, recent_n, last_m_full)


@app.command("export", help="send trials to MLflow, Weights & Biases, ..., by verl's loggers")
def export(
    exp_ids: list[str] = Argument((), help="none: all"),
    to: list[str] = Option(help="a logger of verl's: wandb, mlflow, tensorboard, ...; repeatable"),
    project: str = Option("lineage", help="where the tracker puts them"),
    folder: Path = STORE,
):
    from verl_credit.cli.trials import changes as lineage

    return lineage.export(folder, exp_ids, to, project)
