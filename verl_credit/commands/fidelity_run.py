"""`verl-credit fidelity` through a run's own rollouts: its trainer starts anew, loads the policy, and measures it.

Engine, agent loops, tools, search server and reward are those of the run, so this takes what a training of it takes. The lab
alone has a quicker way (`fidelity.subject`).
"""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from verl_credit.commands.another_run import (
    LOG,
    check_passwords,
    link_checkpoint,
    own_folder,
    resumed,
    run_alone,
    write_recipe,
)
from verl_credit.config.turn_limit import DEFAULT
from verl_credit.errors import ConfigError, PreflightError
from verl_credit.fidelity.request import RESULT, TABLE, Request
from verl_credit.names import AGENT_NAME, MEASURE_MODE
from verl_credit.recipe.rules.other_tools import tools_given
from verl_credit.run.lock import holder_is_gone
from verl_credit.run.progress import say_at_once

FOLDER = "run"


def why_by_run(config: DictConfig) -> str | None:
    """Why a policy of this run cannot be rolled out in this process; None where it can."""
    if "lab" not in config:
        return "the run is not of the lab"
    if (loop := OmegaConf.select(config, DEFAULT)) not in (None, AGENT_NAME):
        return f"{DEFAULT}={loop}"
    if given := tools_given(config):
        return ", ".join(f"{key}={path}" for key, path in given.items())
    if config.search.shuffle_seed is not None:
        return f"search.shuffle_seed={config.search.shuffle_seed}"
    return None


def measure_by_run(
    config: DictConfig, checkpoint: Path | None, request: Request
) -> tuple[Mapping, Sequence[str]]:
    """(what ``fidelity.json`` has of the policy, the table's lines). ``config``: the run's; ``checkpoint`` None: the policy
    that it starts from.

    Raises PreflightError and ConfigError for what is refused, RuntimeError where the run fails.
    """
    folder = Path(request.out) / FOLDER
    fixed = {
        **own_folder(folder),
        "trainer.v1.trainer_mode": MEASURE_MODE,
        "trainer.save_freq": -1,
        # A value without some of its continuations is another one.
        "faults.max_failed_rollouts": 0.0,
        **({"trainer.resume_mode": "disable"} if checkpoint is None else resumed(folder, checkpoint)),
    }
    keys = {text.lstrip("+~").partition("=")[0]: text for text in request.overrides}
    if taken := [name for name in fixed if name in keys]:
        raise ConfigError(f"{keys[taken[0]]}: {taken[0]} is set by fidelity and cannot be overridden")
    check_passwords(config, keys)
    if checkpoint is not None and (checkpoint / "actor/huggingface/model.safetensors").is_file():
        raise PreflightError(
            f"{checkpoint}: the twin's, which no run of Ray's can load; expected --engine sampler"
        )
    if folder.exists() and not holder_is_gone(folder):
        raise PreflightError(f"{folder}: another measurement is going on there")
    shutil.rmtree(folder, ignore_errors=True)  # of an earlier try; values and rollouts stand outside
    folder.mkdir(parents=True)
    if checkpoint is not None:
        link_checkpoint(checkpoint, folder)
    write_recipe(folder, config, fixed)
    request.write(folder)
    out, log = Path(request.out), folder / LOG
    for name in (RESULT, TABLE):
        (out / name).unlink(missing_ok=True)
    say_at_once(
        f"fidelity {request.name}: through the run's own rollouts; Ray and verl say the rest in {log}"
    )
    with _followed(log, f"fidelity {request.name}"):
        run_alone(folder, request.overrides, f"{request.name} is not measured")
    (policy,) = json.loads((out / RESULT).read_text())["policies"]
    return policy, (out / TABLE).read_text().splitlines()


@contextmanager
def _followed(log: Path, mark: str, *, every_s: float = 1.0) -> Iterator[None]:
    """Says the lines of ``log`` that have ``mark``, as they come."""
    ended, place = threading.Event(), 0

    def look() -> None:
        nonlocal place
        while not ended.wait(every_s):
            if log.exists():
                *lines, _ = log.read_bytes()[place:].split(b"\n")
                place += sum(len(line) + 1 for line in lines)
                for line in lines:
                    _, found, rest = line.decode(errors="replace").partition(mark)
                    if found:
                        say_at_once(mark + rest)

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
