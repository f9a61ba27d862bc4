"""Starts the fork server of a run (`fork_server`) where the run may have one."""

from __future__ import annotations

import os
import secrets
import shlex
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from omegaconf import DictConfig, OmegaConf

from verl_credit.config.keys import AUTO
from verl_credit.errors import ConfigError
from verl_credit.host.process import fork_client
from verl_credit.host.process.fork_server import KIND
from verl_credit.recipe.doctor.network import INIT, run_address
from verl_credit.records.run import events

KEY = "fork_workers"
SERVER = "verl_credit.host.process.fork_server"
EARLY = (
    "tensordict", "transformers", "transformers.modeling_layers", "transformers.models.auto.auto_factory", "aiohttp",
    "datasets", "fastapi", "peft.utils.save_and_load", "requests", "numpy", "jsonschema", "hydra", "psutil",
)  # fmt: skip
"""verl, Ray and TransferQueue import these; none of them imports Ray."""
LATE = (
    "ray._private.workers.default_worker",
    "verl_credit.host.process.launch",
    "verl_credit.host.step.trainer",
    "verl_credit.host.actor.worker",
    "verl_credit.host.rollout.agent_loop",
    "verl_credit.host.rollout.agent_manager",
    "verl_credit.host.hf_rollout.server",
    "verl_credit.host.hf_rollout.sync",
)
RUNTIME_ENV = f"{INIT}.runtime_env"
PY_EXECUTABLE = f"{RUNTIME_ENV}.py_executable"
OTHER_PYTHONS = ("py_executable", "pip", "uv", "conda", "container", "image_uri", "_nsight", "_rocprof_sys")
ISOLATION = f"{INIT}.enable_resource_isolation"


def why_not(config: DictConfig) -> str:
    """Why the workers of this run start Python themselves; empty where a fork server makes them."""
    impossible = ""
    theirs = [name for name in OTHER_PYTHONS if (OmegaConf.select(config, RUNTIME_ENV) or {}).get(name)]
    if sys.platform != "linux":
        impossible = "a fork server needs Linux"
    elif theirs:
        impossible = f"{RUNTIME_ENV}.{theirs[0]} chooses the workers' Python"
    elif address := run_address(os.environ, config):
        impossible = f"the run joins the cluster at {address}"
    elif OmegaConf.select(config, ISOLATION):
        impossible = f"{ISOLATION}=true: Ray would isolate the client, and not the worker"
    elif "OMP_NUM_THREADS" not in os.environ:
        impossible = (
            "OMP_NUM_THREADS is not set: Ray sets it in a worker, after a fork has loaded what reads it"
        )
    choice = config.get(KEY, AUTO)
    if choice is True and impossible:
        raise ConfigError(key=KEY, value=choice, accepted=f"auto or false: {impossible}")
    if choice is False:
        return f"{KEY}=false"
    if choice == AUTO and config.trainer.device != "cpu":
        return f"trainer.device={config.trainer.device}: fork_workers=auto is for runs without a GPU"
    return impossible


def _environment() -> dict[str, str]:
    """What a worker sees of the environment of `train`: verl has written there that tensordict is not lazy, and the shell
    that Ray starts a worker with corrects the folder."""
    folder = os.environ.get("PWD", "")
    right = os.path.isdir(folder) and os.path.samefile(folder, ".")
    return {"LAZY_LEGACY_OP": "False", **os.environ, "PWD": folder if right else os.getcwd()}


@contextmanager
def fork_server(config: DictConfig) -> Iterator[str | None]:
    """Gives the command that Ray runs as a worker's Python; None where the workers start Python themselves. No file of the
    server has a name, so that nothing is left of it where `train` is killed."""
    run_dir = Path(config.run_dir)
    if why := why_not(config):
        events.record(run_dir, KIND, f"every worker makes its own imports: {why}")
        yield None
        return
    name, ending = f"verl-credit-{secrets.token_hex(16)}", threading.Event()
    with tempfile.TemporaryFile() as log:
        command = [sys.executable, "-m", SERVER, name, str(run_dir), ",".join(EARLY), ",".join(LATE)]
        streams = {"stdin": subprocess.PIPE, "stdout": log, "stderr": subprocess.STDOUT}
        server = subprocess.Popen(command, env=_environment(), start_new_session=True, **streams)
        watch = threading.Thread(target=_record_early_end, args=(server, log, run_dir, ending), daemon=True)
        watch.start()
        try:
            yield shlex.join([sys.executable, "-I", "-S", fork_client.__file__, name])
        finally:
            ending.set()
            server.terminate()  # also while it still imports, so that a refused start does not wait
            watch.join()
            server.stdin.close()


def _record_early_end(
    server: subprocess.Popen, log: BinaryIO, run_dir: Path, ending: threading.Event
) -> None:
    code = server.wait()
    if not ending.is_set():
        log.seek(0)
        last = log.read().decode(errors="replace").strip().splitlines()[-1:]
        with suppress(OSError):
            events.record(run_dir, KIND, f"the fork server ended early, with {code}: {' '.join(last)}")
