"""doctor's probes of Ray and verl, each in a process of its own: ``python -m verl_credit.host.process.doctor_probes ...``.

``plugin`` reports whether the plugin is registered in a fresh process. ``cluster ADDRESS`` reports the nodes of a Ray
cluster, and the same of a fresh worker on every node. ``files ADDRESS PATHS`` reads the files PATHS, a JSON list, on every
node. The last line of the output is JSON. verl and ray are imported only inside a probe, so that a missing one is a result.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

WORKER_S = 120.0  # a fresh worker imports verl first


def registered() -> dict[str, bool]:
    """The names that are registered: the platform after `import verl` alone, the others after `register_all`."""
    import verl  # noqa: F401
    from verl.plugin.platform.platform_manager import PlatformRegistry

    platform = PlatformRegistry.get("cpu") is not None
    from verl_credit.host.process.verl_checks import register_all
    from verl_credit.host.registry import registered_names

    register_all()
    return {"platform cpu": platform, **registered_names()}


def read_files(paths: list[str]) -> list[str]:
    """The text of each file, or the reason why it cannot be read."""
    texts = []
    for path in paths:
        try:
            texts.append(Path(path).read_text(errors="replace"))
        except OSError as error:
            texts.append(error.strerror or type(error).__name__)
    return texts


def cluster(ray, address: str) -> dict:
    """The living nodes: {"nodes": [{"id", "host", "cpus", "gpus", "plugin": {name: registered} or "error": text}]}."""
    return ask_nodes(ray, address, "plugin", registered)


def ask_nodes(ray, address: str, key: str, question, *arguments) -> dict:
    """The nodes as in `cluster`; ``key`` of each is the result of ``question(*arguments)`` in a worker on it."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    try:
        nodes = [node for node in ray.nodes() if node["Alive"]]
        task, pending = ray.remote(question), []
        for node in nodes:
            there = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            placed = task.options(num_cpus=0, max_retries=0, scheduling_strategy=there)
            pending.append(placed.remote(*arguments))
        return {"nodes": [_report(ray, node, key, asked) for node, asked in zip(nodes, pending, strict=True)]}
    finally:
        ray.shutdown()


def _report(ray, node: dict, key: str, reference) -> dict:
    resources = node["Resources"]
    report = {
        "id": node["NodeID"][:8],
        "host": node.get("NodeManagerHostname") or node.get("NodeManagerAddress"),
        "cpus": resources.get("CPU", 0.0),
        "gpus": resources.get("GPU", 0.0),
    }
    try:
        return {**report, key: ray.get(reference, timeout=WORKER_S)}
    except Exception as error:  # whatever the worker ended with is the answer
        last = (str(error).strip().splitlines() or ["no message"])[-1]
        return {**report, "error": f"{type(error).__name__}: {last[:300]}"}


def main(arguments: list[str]) -> int:
    match arguments:
        case ["plugin"]:
            result: dict = registered()
        case ["cluster", address]:
            import ray

            result = cluster(ray, address)
        case ["files", address, paths]:
            import ray

            result = ask_nodes(ray, address, "found", read_files, json.loads(paths))
        case _:
            questions = "plugin | cluster ADDRESS | files ADDRESS PATHS"
            print(f"usage: python -m verl_credit.host.process.doctor_probes {questions}", file=sys.stderr)
            return 2
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
