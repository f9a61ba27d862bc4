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
from contextlib import ExitStack, contextmanager, suppress
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
from verl_credit.recipe.doctor.context import Context
from verl_credit.recipe.doctor.machine import existing
from verl_credit.recipe.doctor.network import ADDRESS, INIT, given_address, run_address, unreachable
from verl_credit.recipe.doctor.software import wants_cuda
from verl_credit.recipe.doctor.status import Result, failed, passed, skipped
from verl_credit.recipe.this_machine import Facts, in_a_process
from verl_credit.recipe.world import serves_search
from verl_credit.redact import redact

PROBES = "verl_credit.host.process.doctor_probes"
TOOLS = f"{MULTI_TURN}.tool_config_path"
PROBE_S = 180.0
CPUS_PER_RANK = 3  # verl's placement group of every rank has this many
START = "ray start --head on the first machine, ray start --address=HOST:6379 on the others"
# ray.init refuses these beside an address.
LOCAL_ONLY = ("num_cpus", "num_gpus", "resources", "labels", "object_store_memory")

Ask = Callable[..., tuple[int | None, str]]


def ask_host(address: str, paths: str) -> tuple[int | None, str]:
    return in_a_process(["-m", PROBES, address, paths], PROBE_S)


def check_cluster(context: Context, reach: Callable[[str], str] = unreachable) -> Result:
    """Checks without starting a process: the address answers and the keys beside it are accepted, or resources suffice."""
    facts, config = context.facts, context.config
    if "ray" not in facts.packages:
        return failed("ray is not installed", "verl needs it", "pip install 'verl-credit[verl]'")
    address = run_address(facts.environment, config)
    init = {} if config is None else OmegaConf.select(config, INIT) or {}
    if not address:
        return _local(facts, config, init)
    if why := reach(address):
        where = "RAY_ADDRESS" if facts.environment.get("RAY_ADDRESS") else "/tmp/ray/ray_current_cluster"
        where = ADDRESS if given_address(config) == address else where
        return failed(
            f"{where} says {address}, and nobody answers there ({why})",
            "a cluster that runs",
            f"{START}; or `ray stop` and unset RAY_ADDRESS for a local one",
        )
    if refused := {f"{INIT}.{key}": init[key] for key in LOCAL_ONLY if init.get(key) is not None}:
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
        return failed(f"{ADDRESS}=auto, and no cluster runs here", START, f"{ADDRESS}=null for a local one")
    if nodes > 1:
        return failed(f"no cluster, and trainer.nnodes={nodes}", f"a cluster of {nodes} nodes", START)
    if gpus < ranks and wants_cuda(config):
        fix = f"trainer.n_gpus_per_node={gpus}, or another hardware=" if gpus else "see cuda"
        return failed(plan, f"{ranks} GPUs (trainer.n_gpus_per_node)", fix)
    if gpus < ranks:
        return failed(plan, f"{ranks} logical GPUs: verl asks for one per rank", f"{INIT}.num_gpus={ranks}")
    if cpus < (wanted := CPUS_PER_RANK * ranks + 1):
        right = (
            f"{wanted} CPUs: {CPUS_PER_RANK} per rank and one for the trainer; with fewer it waits for ever"
        )
        return failed(plan, right, f"{INIT}.num_cpus={wanted} (logical, they are not reserved)")
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
            fix = " ".join(f"{key}=ELSEWHERE" for key in FOLDERS)
            return failed(f"{error.filename}: {error.strerror}", "folders that can be written", fix)
        answer = answer_of(*ask(address, json.dumps([mark.file for mark in marks])))
    if isinstance(answer, str):
        return failed(f"the cluster at {address}: {answer}", "a cluster whose nodes run a task", "see ray")
    return judge_nodes(answer, marks, config)


def answer_of(code: int | None, printed: str) -> list[dict] | str:
    """Returns the JSON of a process's last line, or a text with the error."""
    lines = [line for line in printed.strip().splitlines() if line.strip()]
    if code is None:
        return f"no answer in {PROBE_S:g} s"
    if code == 0 and lines:
        with suppress(ValueError):
            return json.loads(lines[-1])
    return lines[-1][:300] if lines else f"it ended with exit code {code} and printed nothing"


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
    for node in nodes:
        lacking = [name for name, there in node.get("plugin", {}).items() if not there]
        if found := node.get("error") or (lacking and f"lacks {', '.join(lacking)}"):
            fix = "the same verl-credit, Python and Ray in the environment of every node"
            return failed(f"{node['host']}: {found}", "nodes that run a task and have the plugin", fix)
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
    if len(machines) > 1 and (found := loopback_server(config)):
        fix = "verl-credit-retriever serve --host ADDRESS (docs/recipes.md#several-machines), or config.url of the MCP tool"
        on = f"{found}, and agent loops run on {', '.join(machines)}"
        return failed(on, "an address that every node reaches", fix)
    shared = " and ".join(f"{mark.key}={mark.folder}" for mark in marks)
    return passed(f"{', '.join(node['host'] for node in nodes)} see {shared}")


def loopback_server(config: DictConfig) -> str:
    """The server of searches or of an MCP tool that other machines cannot reach; "" where there is none."""
    search = config.search
    if search.max_searches and search.url is None and serves_search(config):
        return "search.url=null: the run's own server listens on this machine alone"
    urls = [("search.url", url) for url in urls_of(search)] if search.max_searches and search.url else []
    urls += [
        (f"the MCP server's config.url in {select(config, TOOLS)}", url) for url in _mcp_addresses(config)
    ]
    alone = [f"{key}={redact(url)} is another machine on every node" for key, url in urls if loopback(url)]
    return next(iter(alone), "")


def _mcp_addresses(config: DictConfig) -> list[str]:
    """The addresses of the MCP servers in the recipe's tool file. A file that verl does not read has none: the check `tools`
    names the fault."""
    if not (path := select(config, TOOLS)):
        return []
    try:
        tools = select(OmegaConf.load(path), "tools") or []
    except (OSError, YAMLError, OmegaConfBaseException):
        return []
    given = [tool for tool in tools if isinstance(tool, DictConfig) and tool.get("class_name") == MCP_TOOL]
    return [str(url) for tool in given if (url := select(tool, "config.url"))]
