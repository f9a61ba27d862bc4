"""The imports of the fork server, and which workers may have them.

A fork must not differ from a fresh process. So there is one thread, every variable of the environment that an import has
read has the worker's value, and random states are new. No import may start the generator of Ray's library, which nobody
can renew. The hash seed is the server's for all workers; fresh ones draw each their own, so that nothing can depend on it.
"""

from __future__ import annotations

import gc
import importlib
import os
import random
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import SimpleNamespace

OF_RAY = ("RAY_JOB_ID", "RAY_RAYLET_PID")
"""Ray's library copies them when it is imported; all workers of a run have the same."""
NATIVE = (
    *OF_RAY, "OMP_", "MKL_", "KMP_", "GOMP_", "OPENBLAS_", "LD_", "GLIBC_", "MALLOC_", "PYTHON", "PYTORCH_", "TORCH_CPP_",
    "TORCH_SHOW_", "ATEN_", "DNNL_", "ONEDNN_", "LANG", "LC_",
)  # fmt: skip
"""C libraries and Python itself read variables that begin so when they are loaded."""
READ_AGAIN = {"CUDA_VISIBLE_DEVICES"}
"""Ray alone reads it in an import, and a worker of ours reads it again (`Imports.move_to`)."""
WITHOUT_THREADS = {"JE_ARROW_MALLOC_CONF": "background_thread:false", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
"""While the imports run: pyarrow's allocator starts no thread, and a look for GPUs does not start CUDA."""


@contextmanager
def variables_read() -> Iterator[set[str]]:
    """The names that Python code looks up in os.environ. Going through all variables is no look-up."""
    names: set[str] = set()
    look_up = os._Environ.__getitem__

    def noted(self, name):
        if sys._getframe(1).f_code.co_name not in ("__iter__", "copy"):
            names.add(name)
        return look_up(self, name)

    os._Environ.__getitem__ = noted
    try:
        yield names
    finally:
        os._Environ.__getitem__ = look_up


@contextmanager
def unseeded_generators() -> Iterator[list[random.Random]]:
    """Lists every `random.Random` that is made without a seed; one with a seed is the same in fresh processes."""
    made: list[random.Random] = []
    set_up = random.Random.__init__

    def noted(self, x=None):
        set_up(self, x)
        if x is None and type(self) is random.Random:
            made.append(self)

    random.Random.__init__ = noted
    try:
        yield made
    finally:
        random.Random.__init__ = set_up


@contextmanager
def ids_from_the_system(modules: list[str]) -> Iterator[None]:
    """Lets the system draw the ids of the actor classes that Ray's modules make: `ray.remote` would start the generator of
    Ray's library, and two forks would draw equal ids from it."""
    if not any(module.startswith("ray.") for module in modules):
        yield
        return
    actor = importlib.import_module("ray.actor")
    ids = actor.ActorClassID
    actor.ActorClassID = SimpleNamespace(from_random=lambda: ids(os.urandom(ids.size())))
    try:
        yield
    finally:
        actor.ActorClassID = ids


def drawn_in_a_fork() -> bytes:
    """An id that Ray's library draws in a fork; any random bytes where Ray is not imported."""
    reader, writer = os.pipe()
    if (fork := os.fork()) == 0:
        try:
            ray = sys.modules.get("ray")
            os.write(writer, ray.ActorClassID.from_random().binary() if ray else os.urandom(16))
        finally:
            os._exit(0)
    os.close(writer)
    with open(reader, "rb") as file:
        drawn = file.read()
    os.waitpid(fork, 0)
    return drawn


def differing(here: Mapping[str, str], there: Mapping[str, str], names: set[str]) -> list[str]:
    """The variables that matter and have another value in the worker."""
    native = {name for name in {*here, *there} if name.startswith(NATIVE)}
    return sorted(name for name in names | native if here.get(name) != there.get(name))


def more_threads() -> str:
    """Why a fork would copy half a process; empty where this process has one thread."""
    threads = len(os.listdir("/proc/self/task"))
    return "" if threads == 1 else f"the fork server has {threads} threads"


class Imports:
    """``early`` is imported at once; ``late``, which imports Ray, in the environment of the first worker."""

    def __init__(self, early: list[str], late: list[str]) -> None:
        self.late, self.environment = late, dict(os.environ)
        self._read: set[str] = set()
        self._changed: dict[str, str | None] = {}
        self._generators: list[random.Random] = []
        self._refusal = ""
        self._make(early)

    def _make(self, modules: list[str]) -> None:
        before = dict(os.environ)
        ours = {name: value for name, value in WITHOUT_THREADS.items() if name not in before}
        os.environ.update(ours)
        with variables_read() as names, unseeded_generators() as generators, ids_from_the_system(modules):
            for module in modules:
                importlib.import_module(module)
        for name in ours:
            del os.environ[name]
        self._generators += generators
        self._read |= names - READ_AGAIN
        self._changed |= {name: os.environ.get(name) for name, _ in os.environ.items() ^ before.items()}
        gc.collect()
        gc.freeze()
        # OpenBLAS ends its threads at a fork, and starts them again when it needs them.
        if drawn_in_a_fork() == drawn_in_a_fork():
            self._refusal = "an import has started Ray's random generator: forks would draw equal ids"

    def why_not(self, environment: dict[str, str]) -> str:
        """Why a worker with this environment cannot be a fork; empty where it can."""
        others = differing(self.environment, environment, self._read)
        # `train` has made the same imports, and its workers inherit what these wrote.
        others = [name for name in others if environment.get(name) != self._changed.get(name, self)]
        if self.late and set(others) <= set(OF_RAY):
            late, self.environment, self.late, others = self.late, environment, [], []
            self._set(environment)
            try:
                self._make(late)
            except (Exception, SystemExit) as error:
                self._refusal = f"an import of the fork server failed: {type(error).__name__}: {error}"
        if others:
            return f"the fork server has another {', '.join(others)}"
        return self._refusal or more_threads()

    def _set(self, environment: dict[str, str]) -> None:
        after = {**environment, **self._changed}  # the imports would have changed it there, too
        os.environ.clear()
        os.environ.update({name: value for name, value in after.items() if value is not None})
        time.tzset()

    def move_to(self, environment: dict[str, str]) -> None:
        """Gives a worker its environment, and new random states as a fresh process draws them. Python's own generator draws
        one at every fork."""
        self._set(environment)
        for generator in self._generators:
            generator.seed()
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed()
        if "torch" in sys.modules:
            sys.modules["torch"].default_generator.seed()
        if "ray" in sys.modules:  # what else Ray copied
            sys.modules["ray._raylet"].Config.initialize("")
            seen = sys.modules["ray._private.utils"].get_visible_accelerator_ids()
            sys.modules["ray._private.worker"].global_worker.original_visible_accelerator_ids = seen
