"""`verl-credit run` starts a command that launches verl. Our plugin adopts the launch in its own process, and trains."""

import json
import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

from typer import Argument, Option

from verl_credit.cli.command import ends
from verl_credit.cli.recipe.adopt import new_yaml
from verl_credit.errors import ConfigError, ExitCode
from verl_credit.names import TAKE_OVER


@ends("run", interrupted="interrupted")
def run(
    command: Annotated[list[str], Argument(help="what starts the launch, after --: bash run.sh")],
    write: Annotated[str | None, Option("--write", help="write the recipe, and do not train")] = None,
) -> int:
    """Returns the exit code of the command; 4 where it launched nothing that could be adopted."""
    file = None if write is None else new_yaml(write).absolute()
    with TemporaryDirectory() as folder:
        noted = Path(folder, "launches")
        task = json.dumps({"write": file and str(file), "noted": str(noted)})
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
        try:
            code = subprocess.run(command, env={**os.environ, TAKE_OVER: task, "PATH": path}).returncode
        except OSError as error:
            raise ConfigError(key="command", value=command[0], accepted=str(error.strerror)) from error
        if noted.exists():
            return code
    use = f"it launched nothing that was adopted; its python has to find verl and verl_credit, as {sys.executable} does"
    print(f"verl-credit run: {use}", flush=True)
    return code or ExitCode.PREFLIGHT
