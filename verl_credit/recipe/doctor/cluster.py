"""Judges the Ray cluster that a run would join or start: resources, the plugin in its workers, and what its nodes see.

verl's task runner, and in it our trainer, runs on any node with a free CPU and writes metrics, trajectories, events and the
checkpoints' tracker there; every node's workers write their shards; the process that was started reads them. So these
folders have to be shared. This process writes a file with a random text, and a process on every node reads it.
"""

from __future__ import annotations

import json
import os
import secrets
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from verl_credit.address import loopback, urls_of
from verl_credit.config.keys import FOLDERS
from verl_credit.config.resolved import select
from verl_credit.names import MCP_TOOL
from verl_credit.recipe.agent_loops import MULTI_TURN
from verl_credit.recipe.doctor.context import PROBE_S, Context, answer_of
from verl_credit.recipe.doctor.machine import existing
from verl_credit.recipe.doctor.network import ADDRESS, given_address, run_address, unreachable
from verl_credit.recipe.doctor.software import wants_cuda
from verl_credit.recipe.doctor.status import Result, failed, passed, skipped
from verl_credit.recipe.this_machine import Facts, in_a_process
from verl_credit.recipe.world import serves_search
from verl_credit.redact import redact

PROBES = "verl_credit.host.process.doctor_probes"
TOOLS = f"{MULTI_TURN}.tool_config_path"
CPUS_PER_RANK = 3  # verl's placement group of every rank has this many
# ray.init refuses these beside an address.
LOCAL_ONLY = ("num_cpus", "num_gpus", "resources", "labels", "object_store_memory")

Ask = Callable[..., tuple[int | None, str]]


def ask_host(address: str, paths: str) -> tuple[int | None, str]:
    return in_a_process(["-m", PROBES, address, paths], PROBE_S)


def check_cluster(context: Context, reach: Callable[[str], str] | None = None) -> Result:
    """Checks without starting a process: the address answers and the keys beside it are accepted, or resources suffice."""
    facts, config = context.facts, context.config
    if "ray" not in facts.packages:
        return failed("ray is not installed", "verl needs it", "pip install 'verl-credit[verl]'")
    address = run_address(facts.environment, config)
    init = {} if config is None else OmegaConf.select(config, "ray_kwargs.ray_init") or {}
    if not address:
        return _local(facts, config, init)
    if why := (reach or unreachable)(address):
        where = "RAY_ADDRESS" if facts.environment.get("RAY_ADDRESS") else "/tmp/ray/ray_current_cluster"
        return failed(
            f"{ADDRESS if given_address(config) == address else where} says {address}, and nobody answers there ({why})",
            "a cluster that runs",
            "ray start --head on the first machine, ray start --address=HOST:6379 on the others; or "
            "`ray stop` and unset RAY_ADDRESS for a local one",
        )
    if refused := {f"ray_kwargs.ray_init.{k}": init[k] for k in LOCAL_ONLY if init.get(k) is not None}:
        return failed(
            f"a cluster at {address}, and {', '.join(f'{key}={value}' for key, value in refused.items())}",
            "ray.init refuses these beside a cluster",
            " ".join(f"{key}=null" for key in refused),
        )
    return passed(f"a cluster answers at {address}")


def _local(facts: Facts, config: DictConfig | None, init) -> Result:
    """Checks the resources of the cluster that a run starts on this machine."""
    cpus = init.get("num_cpus") or facts.cpus
    gpus = init.get("num_gpus") if init.get("num_gpus") is not None else len(facts.devices)
    plan = f"no cluster; a run starts one here with {cpus} CPUs and {gpus} GPUs"
    if config is None:
        return passed(plan)
    nodes, ranks = config.trainer.nnodes, config.trainer.n_gpus_per_node
    if given_address(config) == "auto":
        return failed(f"{ADDRESS}=auto, and no cluster runs here", "a cluster that runs",
                      f"ray start --head, or {ADDRESS}=null for a local one")  # fmt: skip
    if nodes > 1:
        return failed(f"no cluster, and trainer.nnodes={nodes}", f"a cluster of {nodes} nodes",
                      "ray start --head here, ray start --address=HOST:6379 on the others")  # fmt: skip
    if gpus < ranks and wants_cuda(config):
        return failed(plan, f"{ranks} GPUs (trainer.n_gpus_per_node)",
                      f"trainer.n_gpus_per_node={gpus}, or another hardware=" if gpus else "see cuda")  # fmt: skip
    if gpus < ranks:
        return failed(
            plan, f"{ranks} logical GPUs: verl asks for one per rank", f"ray_kwargs.ray_init.num_gpus={ranks}"
        )
    if cpus < (wanted := CPUS_PER_RANK * ranks + 1):
        return failed(plan, f"{wanted} CPUs: {CPUS_PER_RANK} per rank and one for the trainer; with fewer it waits "
                      "for ever", f"ray_kwargs.ray_init.num_cpus={wanted} (logical, they are not reserved)")  # fmt: skip
    return passed(plan)


@dataclass(frozen=True)
class Mark:
    """A file with ``text`` in the folder that ``key`` names, or in its nearest existing parent."""

    key: str
    folder: Path
    file: str
    text: str


def check_nodes(context: Context, ask: Ask = ask_host) -> Result:
    """Checks the nodes, only where a run would join a cluster."""
    config = context.recipe
    address = run_address(context.facts.environment, config)
    if not address:
        return skipped("no cluster: a run has this machine alone")
    with ExitStack() as stack:
        try:
            marks = [stack.enter_context(marked(key, folder)) for key, folder in folders(config)]
        except OSError as error:
            return failed(f"{error.filename}: {error.strerror}", "folders that can be written",
                          " ".join(f"{key}=ELSEWHERE" for key in FOLDERS))  # fmt: skip
        answer: list[dict] | str = answer_of(*ask(address, json.dumps([mark.file for mark in marks])))
    if isinstance(answer, str):
        return failed(f"the cluster at {address}: {answer}", "a cluster whose nodes run a task", "see ray")
    return judge_nodes(answer, marks, config)


def folders(config: DictConfig) -> list[tuple[str, Path]]:
    """Returns (key, folder) for the folders that a run writes; the checkpoints' only where it is outside the run's."""
    run_dir, checkpoints = (
        Path(str(value)).expanduser().resolve()
        for value in (config.run_dir, config.trainer.default_local_dir)
    )
    pairs = list(zip(FOLDERS, (run_dir, checkpoints), strict=True))
    return pairs[:1] if checkpoints.is_relative_to(run_dir) else pairs


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
    """Judges ``nodes``: {"host", "cpus", "gpus", "plugin": {name: registered}, "found": [text of each mark's file, or the
    error]}, or "error" instead of the last two. A node without a CPU gets none of our processes.
    """
    nodes = [node for node in nodes if node["cpus"] > 0]
    if broken := "; ".join(f"{node['host']}: {node['error']}" for node in nodes if "error" in node):
        fix = "verl-credit, with the same versions of Python and Ray, in the environment of every node"
        return failed(broken, "nodes that run a task", fix)
    for node in nodes:
        if lacking := [name for name, there in node["plugin"].items() if not there]:
            right = "all of ours in verl's registries of every node"
            return failed(
                f"{node['host']} lacks {', '.join(lacking)}", right, "install the same verl-credit everywhere"
            )
    each, count = config.trainer.n_gpus_per_node, config.trainer.nnodes
    fit = [n for n in nodes if n["gpus"] >= each and n["cpus"] >= CPUS_PER_RANK * each]
    if len(fit) < count:
        found = ", ".join(f"{n['host']} ({n['cpus']:g} CPUs, {n['gpus']:g} GPUs)" for n in nodes) or "no node"
        right = f"{count} nodes with {each} GPUs and {CPUS_PER_RANK * each} CPUs each"
        return failed(found, right, f"start Ray on more nodes, or trainer.nnodes={max(1, len(fit))}")
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
    if len(machines) > 1 and (local := [url for url in mcp_addresses(config) if loopback(url)]):
        return failed(
            f"the MCP server {local[0]} is another machine on every node, and agent loops run on {', '.join(machines)}",
            "an address that every node reaches",
            f"config.url in {select(config, TOOLS)}",
        )
    shared = " and ".join(f"{mark.key}={mark.folder}" for mark in marks)
    return passed(f"{', '.join(node['host'] for node in nodes)} see {shared}")


def mcp_addresses(config: DictConfig) -> list[str]:
    """The addresses of the MCP servers in the recipe's tool file. Without one, or where it is not what verl reads, none: the
    check `tools` loads it with verl and names the fault."""
    if not (path := select(config, TOOLS)):
        return []
    try:
        tools = select(OmegaConf.load(path), "tools") or []
    except (OSError, YAMLError, OmegaConfBaseException):
        return []
    given = [tool for tool in tools if isinstance(tool, DictConfig) and tool.get("class_name") == MCP_TOOL]
    return [str(url) for tool in given if (url := select(tool, "config.url"))]


def loopback_server(config: DictConfig) -> str:
    """The address of a search server that other machines cannot reach; "" where there is none."""
    if not config.search.max_searches:
        return ""
    if config.search.url is None:
        own = "search.url=null: the run's own server listens on this machine alone"
        return own if serves_search(config) else ""
    alone = [redact(url) for url in urls_of(config.search) if loopback(url)]
    return f"search.url={alone[0]} is another machine on every node" if alone else ""
