"""`verl-credit lab` builds the embedded world without a run."""

from pathlib import Path
from typing import Annotated, Literal

from typer import Option

from verl_credit.cli.command import ends


@ends("lab --dir {folder}", OSError)
def lab(
    folder: Annotated[Path, Option("--dir")],
    world_seed: Annotated[int, Option(parser=int)] = 0,
    size: Literal["full", "tiny"] = "full",
) -> None:
    from verl_credit.records.run.progress import Throttled, say_at_once
    from verl_credit.worlds.lab.build import build_lab

    paths = build_lab(folder, world_seed=world_seed, size=size, progress=Throttled(say_at_once))
    print(f"lab ready: {paths.root}")
