"""Judges the Ray cluster that a run would join or start, and the plugin in its workers; `host` collects the facts."""

from __future__ import annotations

from collections.abc import Callable

from omegaconf import DictConfig, OmegaConf

from verl_credit.recipe.doctor.context import Context
from verl_credit.recipe.doctor.hardware.software import wants_cuda
from verl_credit.recipe.doctor.network import ADDRESS, given_address, run_address, unreachable
from verl_credit.recipe.doctor.probe import PROBE_S, answer_of
from verl_credit.recipe.doctor.result import Result, failed, passed, skipped
from verl_credit.recipe.machine.facts import Facts
from verl_credit.recipe.machine.gather import in_a_process

PROBES = "verl_credit.host.process.doctor_probes"
CPUS_PER_RANK = 3  # verl's placement group of every rank has this many
# ray.init refuses these beside an address.
LOCAL_ONLY = ("num_cpus", "num_gpus", "resources", "labels", "object_store_memory")

Ask = Callable[..., tuple[int | None, str]]


def ask_host(*question: str) -> tuple[int | None, str]:
    return in_a_process(["-m", PROBES, *question], PROBE_S)


def check_plugin(context: Context, ask: Ask = ask_host) -> Result | list[Result]:
    """Looks for the plugin in a fresh process here, or in fresh workers of the cluster, whose resources it checks too."""
    config, address = context.config, run_address(context.facts.environment, context.config)
    if not address:
        return _plugin_here(ask)
    answer = answer_of(*ask("cluster", address))
    if isinstance(answer, str):
        return failed(f"the cluster at {address}: {answer}", "a cluster that takes this Python and Ray",
                      "the same versions of both on every node")  # fmt: skip
    nodes = answer["nodes"]
    return [_resources(address, nodes, config), _plugin_everywhere(nodes)]


def check_cluster(context: Context, reach: Callable[[str], str] | None = None) -> Result:
    """Checks without starting a process: the address answers and the keys beside it are accepted, or resources suffice."""
    facts, config = context.facts, context.config
    if "ray" not in facts.packages:
        return failed("ray is not installed", "verl needs it", "pip install 'verl-credit[verl]'")
    address = run_address(facts.environment, config)
    if not address:
        return _local(facts, config)
    if why := (reach or unreachable)(address):
        where = "RAY_ADDRESS" if facts.environment.get("RAY_ADDRESS") else "/tmp/ray/ray_current_cluster"
        return failed(
            f"{ADDRESS if given_address(config) == address else where} says {address}, and nobody answers there ({why})",
            "a cluster that runs",
            "ray start --head on the first machine, ray start --address=HOST:6379 on the others; or "
            "`ray stop` and unset RAY_ADDRESS for a local one",
        )
    if config is not None and (refused_keys := _refused_keys(config)):
        return failed(
            f"a cluster at {address}, and {', '.join(refused_keys)}",
            "ray.init refuses these beside a cluster",
            " ".join(f"{key.partition('=')[0]}=null" for key in refused_keys),
        )
    return passed(f"a cluster answers at {address}")


def _refused_keys(config: DictConfig) -> list[str]:
    given = OmegaConf.select(config, "ray_kwargs.ray_init") or {}
    return [f"ray_kwargs.ray_init.{k}={given[k]}" for k in LOCAL_ONLY if given.get(k) is not None]


def _local(facts: Facts, config: DictConfig | None) -> Result:
    """Checks the resources of the cluster that a run starts on this machine."""
    init = {} if config is None else OmegaConf.select(config, "ray_kwargs.ray_init") or {}
    cpus = init.get("num_cpus") or facts.cpus
    gpus = init.get("num_gpus") if init.get("num_gpus") is not None else len(facts.devices)
    plan = f"no cluster; a run starts one here with {cpus} CPUs and {gpus} GPUs"
    if config is None:
        return passed(plan)
    trainer = config.trainer
    if given_address(config) == "auto" and not any(p.title.endswith("gcs_server") for p in facts.processes):
        return failed(f"{ADDRESS}=auto, and no cluster runs here", "a cluster that runs",
                      f"ray start --head, or {ADDRESS}=null for a local one")  # fmt: skip
    if trainer.nnodes > 1:
        return failed(f"no cluster, and trainer.nnodes={trainer.nnodes}", f"a cluster of {trainer.nnodes} nodes",
                      "ray start --head here, ray start --address=HOST:6379 on the others")  # fmt: skip
    wanted = cpus_wanted(config)
    if gpus < trainer.n_gpus_per_node and wants_cuda(config):
        return failed(plan, f"{trainer.n_gpus_per_node} GPUs (trainer.n_gpus_per_node)",
                      f"trainer.n_gpus_per_node={gpus}, or another hardware=" if gpus else "see cuda")  # fmt: skip
    if gpus < trainer.n_gpus_per_node:
        return failed(plan, f"{trainer.n_gpus_per_node} logical GPUs: verl asks for one per rank",
                      f"ray_kwargs.ray_init.num_gpus={trainer.n_gpus_per_node}")  # fmt: skip
    if cpus < wanted:
        return failed(plan, f"{wanted} CPUs: {CPUS_PER_RANK} per rank and one for the trainer; with fewer it waits "
                      "for ever", f"ray_kwargs.ray_init.num_cpus={wanted} (logical, they are not reserved)")  # fmt: skip
    return passed(plan)


def cpus_wanted(config: DictConfig) -> int:
    """The logical CPUs that a node needs for every rank's placement group and the process of the training loop."""
    return CPUS_PER_RANK * config.trainer.n_gpus_per_node + 1


def _resources(address: str, nodes: list[dict], config: DictConfig | None) -> Result:
    name, listed = (
        "resources",
        ", ".join(f"{n['host']} ({n['cpus']:g} CPUs, {n['gpus']:g} GPUs)" for n in nodes),
    )
    resources = f"cluster at {address}: {listed or 'no node'}"
    if config is None:
        return passed(resources, name)
    each, count = config.trainer.n_gpus_per_node, config.trainer.nnodes
    fit = [n for n in nodes if n["gpus"] >= each and n["cpus"] >= CPUS_PER_RANK * each]
    if len(fit) >= count:
        return passed(resources, name)
    return failed(resources, f"{count} nodes with {each} GPUs and {CPUS_PER_RANK * each} CPUs each",
                  f"start Ray on more nodes, or trainer.nnodes={max(1, len(fit))}", name)  # fmt: skip


def _plugin_here(ask: Ask) -> Result:
    answer = answer_of(*ask("plugin"))
    if isinstance(answer, str):
        return failed(f"a fresh process: {answer}", "a process that imports verl registers the plugin",
                      "pip install 'verl-credit[verl]' in this environment")  # fmt: skip
    return _plugin({"a fresh process": answer})


def _plugin_everywhere(nodes: list[dict]) -> Result:
    broken = [f"{n['host']}: {n['error']}" for n in nodes if "error" in n]
    if broken:
        return failed("; ".join(broken), "a fresh worker of every node registers the plugin",
                      "install verl-credit in the environment of every node")  # fmt: skip
    if not nodes:
        return skipped("the cluster has no node")
    return _plugin({n["host"]: n["plugin"] for n in nodes})


def _plugin(found: dict[str, dict[str, bool]]) -> Result:
    lacking = {where: [name for name, there in names.items() if not there] for where, names in found.items()}
    if any(lacking.values()):
        missing = "; ".join(f"{where} lacks {', '.join(names)}" for where, names in lacking.items() if names)
        return failed(missing, "all of ours in verl's registries", "install the same verl-credit everywhere")
    some = next(iter(found.values()))
    return passed(f"{len(some)} names registered in {', '.join(found)}")
