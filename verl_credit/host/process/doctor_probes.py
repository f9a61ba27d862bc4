"""What doctor asks of Ray and verl, each in a process of its own: ``python -m verl_credit.host.process.doctor_probes ...``.

``plugin``: is the plugin registered in a fresh process? ``cluster ADDRESS``: the nodes of a Ray cluster, and the same
question in a fresh worker of every node. ``files ADDRESS PATHS``: what a process of every node reads there (PATHS: a JSON
list). The last line of the output is JSON. This file imports neither verl nor ray before it is asked: where they are
missing, that is an answer.
"""

from __future__ import annotations

import json
import sys

WORKER_S = 120.0  # a fresh worker imports verl first


def registered() -> dict[str, bool]:
    """As a worker comes by it: verl is imported, and nothing else; then what our own processes do, explicitly."""
    import verl  # noqa: F401
    from verl.plugin.platform.platform_manager import PlatformRegistry

    platform = PlatformRegistry.get("cpu") is not None
    from verl_credit.host.process.register import register_all
    from verl_credit.host.registry import registered_names

    register_all()
    return {"platform cpu": platform, **registered_names()}


def read_files(paths: list[str]) -> list[str]:
    """The text of each, or what the reader met."""
    from pathlib import Path

    found = []
    for path in paths:
        try:
            found.append(Path(path).read_text(errors="replace"))
        except OSError as error:
            found.append(error.strerror or type(error).__name__)
    return found


def cluster(ray, address: str, timeout_s: float = WORKER_S) -> dict:
    """{"nodes": [{"id", "host", "cpus", "gpus", "plugin": {name: there?} or "error": text}]} of the living nodes."""
    return ask_nodes(ray, address, "plugin", registered, timeout_s=timeout_s)


def ask_nodes(ray, address: str, key: str, question, *arguments, timeout_s: float = WORKER_S) -> dict:
    """The nodes as in `cluster`, each with ``key``: what ``question(*arguments)`` gives in a worker there."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    try:
        nodes = [node for node in ray.nodes() if node["Alive"]]
        task = ray.remote(question)
        asked = {}
        for node in nodes:
            there = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            asked[node["NodeID"]] = task.options(num_cpus=0, max_retries=0, scheduling_strategy=there).remote(
                *arguments
            )
        return {"nodes": [_report(ray, node, key, asked[node["NodeID"]], timeout_s) for node in nodes]}
    finally:
        ray.shutdown()


def _report(ray, node: dict, key: str, reference, timeout_s: float) -> dict:
    resources = node["Resources"]
    found = {
        "id": node["NodeID"][:8],
        "host": node.get("NodeManagerHostname") or node.get("NodeManagerAddress"),
        "cpus": resources.get("CPU", 0.0),
        "gpus": resources.get("GPU", 0.0),
    }
    try:
        return {**found, key: ray.get(reference, timeout=timeout_s)}
    except Exception as error:  # whatever the worker ended with is the answer
        last = (str(error).strip().splitlines() or ["no message"])[-1]
        return {**found, "error": f"{type(error).__name__}: {last[:300]}"}


def main(arguments: list[str]) -> int:
    if arguments == ["plugin"]:
        found: dict = registered()
    elif arguments[:1] == ["cluster"] and len(arguments) == 2:
        import ray

        found = cluster(ray, arguments[1])
    elif arguments[:1] == ["files"] and len(arguments) == 3:
        import ray

        found = ask_nodes(ray, arguments[1], "found", read_files, json.loads(arguments[2]))
    else:
        questions = "plugin | cluster ADDRESS | files ADDRESS PATHS"
        print(f"usage: python -m verl_credit.host.process.doctor_probes {questions}", file=sys.stderr)
        return 2
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
