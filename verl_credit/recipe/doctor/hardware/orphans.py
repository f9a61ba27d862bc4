"""Lists engine processes whose driver has ended, with the memory that they hold; it does not stop them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from verl_credit.recipe.doctor.context import Context
from verl_credit.recipe.doctor.network import cluster_address
from verl_credit.recipe.doctor.result import Result, passed, warned
from verl_credit.recipe.machine.facts import Process, size

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
    return warned(
        "; ".join(describe(process, facts.now) for process in orphaned),
        "engine processes whose run has ended hold memory and ports",
        f"look at them, then: kill {' '.join(str(p.pid) for p in orphaned)}",
    )


def describe(process: Process, now: float) -> str:
    age = max(0.0, now - process.started)
    return (
        f"{process.pid} {label(process)[:60]} (user {process.user}, {_age(age)} old, {size(process.memory)})"
    )


def orphans(processes: Iterable[Process], cluster: str = "") -> list[Process]:
    """Returns engine processes whose driver has ended, oldest first, so that a process precedes those that it started.

    A driver is any living ancestor that is neither an engine process nor an init. Processes of the cluster that
    ``ray start`` brought up (``cluster``: its address) have an init as their rightful parent. A retriever with a
    ``--parent-pid`` is an orphan when that process has ended; a retriever started by hand never is.
    """
    by_pid = {process.pid: process for process in processes}
    orphaned = [p for p in by_pid.values() if is_engine(p) and not _driven(p, by_pid, cluster)]
    return sorted(orphaned, key=lambda p: (p.started, p.pid))


def is_engine(process: Process) -> bool:
    return bool(ENGINE.search(label(process)))


def label(process: Process) -> str:
    """The title a process gave itself, the module after ``python -m``, the script that Python runs, or its program."""
    title = process.title.split(" ")[0] if process.title.startswith(("ray::", "VLLM::")) else process.title
    program = title.rsplit("/", 1)[-1]
    if not program.startswith("python"):
        return title
    rest = list(process.command[1:])
    while rest and rest[0].startswith("-") and rest[0] != "-m":
        del rest[: 2 if rest[0] in ("-W", "-X") else 1]
    if rest[:1] == ["-m"]:
        return rest[1] if len(rest) > 1 else title
    return rest[0] if rest else title


def _driven(process: Process, by_pid: Mapping[int, Process], cluster: str) -> bool:
    if RETRIEVER.search(label(process)):
        return _retriever_has_parent(process, by_pid)
    seen: set[int] = set()
    current = process
    while current.pid not in seen:
        seen.add(current.pid)
        if cluster and is_engine(current) and _serves(current, cluster):
            return True
        parent = by_pid.get(current.parent)
        # A parent younger than its child is another process that reuses the number of the ended parent.
        if parent is None or parent.pid == current.pid or parent.started > current.started:
            return False
        if not is_engine(parent):
            return not _is_init(parent)
        current = parent
    return False


def _serves(process: Process, cluster: str) -> bool:
    """Is it a raylet or the head's server of the cluster at ``cluster`` (HOST:PORT)?"""
    own = (f"--gcs-address={cluster}", f"--gcs_server_port={cluster.rpartition(':')[2]}")
    return any(argument in own for argument in process.command)


def _retriever_has_parent(process: Process, by_pid: Mapping[int, Process]) -> bool:
    command = process.command
    if "--parent-pid" not in command[:-1]:
        return True
    given = command[command.index("--parent-pid") + 1]
    parent = by_pid.get(int(given)) if given.isdigit() else None
    return parent is not None and parent.started <= process.started


def _is_init(process: Process) -> bool:
    """Does the process adopt orphans? It is an init by name, or a container's process 1 that is not a Python program."""
    if process.name in INITS:
        return True
    return process.pid == 1 and not process.name.startswith(("python", "ray", "verl-credit"))


def _age(seconds: float) -> str:
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"
