"""doctor's probe of a Ray cluster, in a process of its own: ``doctor_probes ADDRESS PATHS``.

A fresh worker on every node reports whether the plugin is registered there, and reads the files PATHS, a JSON list. The
last line of the output is JSON.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

WORKER_S = 120.0  # a fresh worker imports verl first


def read_files(paths: list[str]) -> list[str]:
    """The text of each file, or the reason why it cannot be read."""
    texts = []
    for path in paths:
        try:
            texts.append(Path(path).read_text(errors="replace"))
        except OSError as error:
            texts.append(error.strerror or type(error).__name__)
    return texts


def look(paths: list[str]) -> dict:
    """What a run needs of a node: the text of each file, and the names that are registered (the platform after `import
    verl` alone, the others after `register_all`)."""
    import verl  # noqa: F401
    from verl.plugin.platform.platform_manager import PlatformRegistry

    platform = PlatformRegistry.get("cpu") is not None
    from verl_credit.host.process.verl_checks import register_all
    from verl_credit.host.registry import registered_names

    register_all()
    return {"plugin": {"platform cpu": platform, **registered_names()}, "found": read_files(paths)}


def ask_nodes(ray, address: str, paths: list[str]) -> list[dict]:
    """Returns the living nodes: {"host", "cpus", "gpus"} with what `look` returns in a worker there, or with "error"."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    try:
        nodes = [node for node in ray.nodes() if node["Alive"]]
        task, pending = ray.remote(look), []
        for node in nodes:
            there = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            pending.append(task.options(num_cpus=0, max_retries=0, scheduling_strategy=there).remote(paths))
        return [_report(ray, node, asked) for node, asked in zip(nodes, pending, strict=True)]
    finally:
        ray.shutdown()


def _report(ray, node: dict, reference) -> dict:
    host = node.get("NodeManagerHostname") or node.get("NodeManagerAddress")
    cpus, gpus = (node["Resources"].get(kind, 0.0) for kind in ("CPU", "GPU"))
    report = {"host": host, "cpus": cpus, "gpus": gpus}
    try:
        return report | ray.get(reference, timeout=WORKER_S)
    except Exception as error:  # whatever the worker ended with is the answer
        last = (str(error).strip().splitlines() or ["no message"])[-1]
        return {**report, "error": f"{type(error).__name__}: {last[:300]}"}


if __name__ == "__main__":
    import ray

    print(json.dumps(ask_nodes(ray, sys.argv[1], json.loads(sys.argv[2]))))
