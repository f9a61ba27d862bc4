"""Lists engine processes whose driver has ended, with the memory that they hold; it does not stop them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from datetime import timedelta

from verl_credit.recipe.doctor.context import Context
from verl_credit.recipe.doctor.network import cluster_address
from verl_credit.recipe.doctor.result import Result, passed, warned
from verl_credit.recipe.machine import Process, size

ENGINE = re.compile(
    r"^ray::|^VLLM::|^VllmWorker|^sglang::|(^|/)(raylet|gcs_server)$|(^|/)vllm$|^vllm\.|^verl_credit_retriever(\.|$)|"
    r"(^|/)verl-credit-retriever$"
)
RETRIEVER = re.compile(r"verl_credit_retriever|verl-credit-retriever")
INITS = ("init", "systemd", "tini", "docker-init", "dumb-init", "catatonit", "launchd")


def check_processes(context: Context) -> Result:
    facts = context.facts
    orphaned = orphans(facts.processes, cluster_address(facts.environment))
    if not orphaned:
        return passed("no engine process without a parent")
    ages = [timedelta(seconds=max(0, round(facts.now - process.started))) for process in orphaned]
    return warned(
        "; ".join(
            f"{p.pid} {label(p)[:60]} (user {p.user}, {age} old, {size(p.memory)})"
            for p, age in zip(orphaned, ages, strict=True)
        ),
        "engine processes whose run has ended hold memory and ports",
        f"look at them, then: kill {' '.join(str(p.pid) for p in orphaned)}",
    )


def orphans(processes: Iterable[Process], cluster: str = "") -> list[Process]:
    """Returns engine processes whose driver has ended, oldest first, so that a process precedes those that it started.

    A driver is any living ancestor that is neither an engine process nor an init. Processes of the cluster that
    ``ray start`` brought up (``cluster``: its address) have an init as their rightful parent. A retriever with a
    ``--parent-pid`` is an orphan when that process has ended; a retriever started by hand never is.
    """
    by_pid = {process.pid: process for process in processes}
    orphaned = [p for p in by_pid.values() if ENGINE.search(label(p)) and not _driven(p, by_pid, cluster)]
    return sorted(orphaned, key=lambda p: (p.started, p.pid))


def label(process: Process) -> str:
    """The title a process gave itself, the module after ``python -m``, the script that Python runs, or its program."""
    title = process.title.split(" ")[0] if process.title.startswith(("ray::", "VLLM::")) else process.title
    if not title.rsplit("/", 1)[-1].startswith("python"):
        return title
    rest = list(process.command[1:])
    while rest and rest[0].startswith("-") and rest[0] != "-m":
        del rest[: 2 if rest[0] in ("-W", "-X") else 1]
    if rest[:1] == ["-m"]:
        del rest[0]
    return rest[0] if rest else title


def _driven(process: Process, by_pid: Mapping[int, Process], cluster: str) -> bool:
    if RETRIEVER.search(label(process)):
        command = process.command
        if "--parent-pid" not in command[:-1]:
            return True
        given = command[command.index("--parent-pid") + 1]
        parent = by_pid.get(int(given)) if given.isdigit() else None
        return parent is not None and parent.started <= process.started
    # A raylet, or the head's server, of the cluster at HOST:PORT has one of these arguments.
    port = cluster.rpartition(":")[2]
    own = {f"--gcs-address={cluster}", f"--gcs_server_port={port}"} if cluster else set()
    seen: set[int] = set()
    while process.pid not in seen:
        seen.add(process.pid)
        if not own.isdisjoint(process.command):
            return True
        parent = by_pid.get(process.parent)
        # A parent younger than its child is another process that reuses the number of the ended parent.
        if parent is None or parent.pid == process.pid or parent.started > process.started:
            return False
        if not ENGINE.search(label(parent)):
            # Process 1 of a container adopts orphans, unless it is a Python program, which may be the driver.
            of_ours = parent.name.startswith(("python", "ray", "verl-credit"))
            return parent.name not in INITS and (parent.pid != 1 or of_ours)
        process = parent
    return False
