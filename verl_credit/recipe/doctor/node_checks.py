"""Checks that every node of a cluster sees the folders that a run writes, and reaches the search servers.

verl's task runner, and in it our trainer, runs on any node with a free CPU and writes metrics, trajectories, events and the
checkpoints' tracker there; every node's workers write their shards; the process that was started reads them. So these
folders have to be shared. This process writes a file with a random text, and a process on every node reads it.
"""

from __future__ import annotations

import json
import os
import secrets
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from omegaconf import DictConfig

from verl_credit.address import loopback
from verl_credit.config.keys import FOLDERS
from verl_credit.recipe.doctor.context import Context
from verl_credit.recipe.doctor.hardware.disk import existing
from verl_credit.recipe.doctor.network import run_address
from verl_credit.recipe.doctor.probe import answer_of
from verl_credit.recipe.doctor.ray_checks import Ask, ask_host
from verl_credit.recipe.doctor.result import Result, failed, passed, skipped
from verl_credit.recipe.world import serves_search
from verl_credit.redact import redact
from verl_credit.turns.search.client import urls_of


@dataclass(frozen=True)
class Mark:
    """A file with ``text`` in the folder that ``key`` names, or in its nearest existing parent."""

    key: str
    folder: Path
    file: str
    text: str


def check_nodes(context: Context, ask: Ask = ask_host) -> Result:
    """Checks the nodes, only where a run would join a cluster."""
    config = context.config
    address = run_address(context.facts.environment, config)
    if not address:
        return skipped("no cluster: a run has this machine alone")
    with ExitStack() as stack:
        try:
            marks = [stack.enter_context(marked(key, folder)) for key, folder in folders(config)]
        except OSError as error:
            return failed(f"{error.filename}: {error.strerror}", "folders that can be written",
                          " ".join(f"{key}=ELSEWHERE" for key in FOLDERS))  # fmt: skip
        answer = answer_of(*ask("files", address, json.dumps([mark.file for mark in marks])))
    if isinstance(answer, str):
        return failed(f"the cluster at {address}: {answer}", "a cluster whose nodes run a task", "see ray")
    return judge_nodes(answer["nodes"], marks, config)


def folders(config: DictConfig) -> list[tuple[str, Path]]:
    """Returns (key, folder) for the folders that a run writes; the checkpoints' only where it is outside the run's."""
    run_dir, checkpoints = (
        Path(str(value)).expanduser().resolve()
        for value in (config.run_dir, config.trainer.default_local_dir)
    )
    inside = run_dir in (checkpoints, *checkpoints.parents)
    return [(FOLDERS[0], run_dir)] if inside else [(FOLDERS[0], run_dir), (FOLDERS[1], checkpoints)]


@contextmanager
def marked(key: str, folder: Path) -> Iterator[Mark]:
    """Writes the file and removes it afterwards."""
    text = secrets.token_hex(8)
    with tempfile.NamedTemporaryFile("w", dir=existing(folder), prefix=".verl_credit_") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
        yield Mark(key, folder, file.name, text)


def judge_nodes(nodes: Sequence[dict], marks: Sequence[Mark], config: DictConfig) -> Result:
    """Judges ``nodes``: {"host", "cpus", "found": [text of each mark's file, or the error]} or "error" instead of "found".

    A node without a CPU gets none of our processes.
    """
    nodes = [node for node in nodes if node["cpus"] > 0]
    if broken := [f"{node['host']}: {node['error']}" for node in nodes if "error" in node]:
        return failed("; ".join(broken), "nodes that run a task", "see ray")
    for number, mark in enumerate(marks):
        blind = [f"{n['host']} ({n['found'][number]})" for n in nodes if n["found"][number] != mark.text]
        if blind:
            return failed(
                f"{mark.key}={mark.folder}: what this machine writes there is not seen by {', '.join(blind)}",
                "one folder for all nodes: the trainer runs on any of them and writes there, and this process reads it",
                f"{mark.key}=FOLDER on a file system that all nodes share",
            )
    machines = sorted({node["host"] for node in nodes})
    if len(machines) > 1 and (alone := loopback_server(config)):
        return failed(
            f"{alone}, and agent loops run on {', '.join(machines)}",
            "an address that every node reaches",
            "verl-credit-retriever serve --host ADDRESS --allow-remote --token-file FILE, search.url=http://ADDRESS:PORT, "
            "search.token_env",
        )
    shared = " and ".join(f"{mark.key}={mark.folder}" for mark in marks)
    return passed(f"{', '.join(node['host'] for node in nodes)} see {shared}")


def loopback_server(config: DictConfig) -> str:
    """The address of a search server that other machines cannot reach; "" where there is none."""
    if not config.search.max_searches:
        return ""
    if config.search.url is None:
        return (
            "search.url=null: the run's own server listens on this machine alone"
            if serves_search(config)
            else ""
        )
    alone = [redact(url) for url in urls_of(config.search) if loopback(url)]
    return f"search.url={alone[0]} is another machine on every node" if alone else ""
