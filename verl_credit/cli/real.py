"""`verl-credit real` builds the files of a recipe with trained weights, without a run."""

from pathlib import Path
from typing import Annotated, Literal

from typer import Option

from verl_credit.cli.command import Overrides, ends
from verl_credit.errors import PreflightError

RECIPES = {"multihop": "real_cpu", "arithmetic": "real_math_cpu"}


@ends("real --dir {folder}")
def real(
    folder: Annotated[Path, Option("--dir")],
    task: Literal["arithmetic", "multihop"] = "multihop",
    questions: Annotated[
        str | None, Option(help="of multihop: HotpotQA's file with paragraphs, or OWNER/NAME on the hub")
    ] = None,
    seed: Annotated[
        int, Option(parser=int, help="of the questions, of which are held out, of the supervised start")
    ] = 0,
    size: Annotated[Literal["full", "tiny"], Option(help="tiny: two layers")] = "full",
    overrides: Overrides = (),
) -> None:
    from verl_credit.recipe.compose import load_config, quoted
    from verl_credit.recipe.world import missing_line, world_of
    from verl_credit.records.run.progress import Throttled, say_at_once

    given = [f"real.dir={quoted(str(folder.expanduser().resolve()))}", f"real.data_seed={seed}"]
    given += [f"real.questions={quoted(questions)}"] if questions is not None else []
    config = load_config(RECIPES[task], [*given, f"real.size={size}", *overrides])
    if missing := missing_line(config):
        raise PreflightError(missing)
    world_of(config).build(Throttled(say_at_once, "real"))
    print(f"ready: {folder}")
