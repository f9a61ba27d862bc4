"""`verl-credit probe --checkpoint RUN/checkpoints/global_step_N`: does one update change the entropy as first order says?"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from verl_credit.cli.command import ends
from verl_credit.cli.saved_run import saved_step
from verl_credit.errors import ExitCode
from verl_credit.records.run.files import plain, write_text
from verl_credit.records.run.progress import Throttled, say_at_once

RESULT, PICTURE = "probe.json", "probe.png"


@ends("probe", ValueError, OSError, failed={RuntimeError: ExitCode.FAILED})
def probe(
    checkpoint: Annotated[Path, Option(help="RUN/checkpoints/global_step_N")],
    config: Annotated[
        Path | None, Option(help="the probe's file (docs/probe.md); defaults where not given")
    ] = None,
    out: Annotated[
        Path | None, Option(help="a folder for the result; probes/RUN-step-N beside the run")
    ] = None,
    overrides: Annotated[
        list[str], Argument(help="Hydra overrides of the run's configuration, for new rollouts")
    ] = (),
) -> None:
    """Exit code 1 where the trainer's step or the measurement fails; nothing is written then."""
    from verl_credit.recipe.doctor.network import ray_on_loopback

    ray_on_loopback(os.environ)  # before Ray is imported
    from verl_credit.cli.probe import update
    from verl_credit.config.keys.section import declared
    from verl_credit.recipe.yaml_files import read_tree
    from verl_credit.study.probe.picture import picture
    from verl_credit.study.probe.settings import ProbeSettings

    settings = declared(ProbeSettings, {} if config is None else read_tree(config), str(config))
    saved = saved_step(checkpoint)
    folder = out or saved.run_dir.parent / "probes" / f"{saved.run_dir.name}-step-{saved.step}"
    settings = update.with_mini_batch(settings, saved)
    print(f"probe: {settings.banner()}")
    path = update.rollout_file(saved, folder, settings, overrides)
    result = update.run(saved, path, settings, say=Throttled(say_at_once, "probe"))
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / RESULT, json.dumps(plain(result), indent=1, allow_nan=False) + "\n")
    (folder / PICTURE).write_bytes(picture(result))
    print("\n".join(update.summary(result)))
    print(f"{folder / RESULT}\n{folder / PICTURE}")
