"""Processes that value contexts. Each takes a part of the prompts at a time."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import AbstractContextManager, nullcontext, suppress
from math import ceil
from multiprocessing.connection import Connection

import torch

from verl_credit.errors import PreflightError
from verl_credit.recipe.this_machine import cores
from verl_credit.study.fidelity.subject import Subject
from verl_credit.study.fidelity.true_values import PROMPTS_AT_ONCE, Value, value_part
from verl_credit.worlds.rollouts.protocol import State

FEWEST_PROMPTS = 32
"""Fewer prompts are not worth processes on two cores: during their start one process values about 14 prompts."""
_subject: Subject | None = None
"""A process of the pool has here what `_begin` loaded."""


class Workers:
    """``load`` is called in every process, which is new: it has to be a function of a module, or a partial of one.

    They end with ``with``, at once, and with the process that started them, however that ends.
    """

    def __init__(self, load: Callable[[], Subject], processes: int):
        context = multiprocessing.get_context("forkserver")  # what is imported is imported once for all
        context.set_forkserver_preload(["verl_credit.study.fidelity.workers"])
        parent, self._end = context.Pipe(duplex=False)
        self._processes = processes
        self._pool = ProcessPoolExecutor(
            processes, mp_context=context, initializer=_begin, initargs=(load, parent)
        )

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_) -> None:
        self._end.close()
        self._pool.shutdown(cancel_futures=True)

    def start(self) -> None:
        """Lets the processes load while this one does something else."""
        for _ in range(self._processes):
            self._pool.submit(os.getpid)

    def values(self, parts: Iterable[list[State]], *, continuations: int, seed: int) -> Iterator[list[Value]]:
        """Values of the parts, in the order in which they are done. A part is taken when a process is free for it, and all
        that were taken are done. Raises PreflightError where a process died."""
        waiting, parts = set[Future](), iter(parts)
        try:
            while True:
                while len(waiting) < self._processes and (part := next(parts, None)) is not None:
                    waiting.add(self._pool.submit(_values, part, continuations, seed))
                if not waiting:
                    return
                done, waiting = wait(waiting, return_when=FIRST_COMPLETED)
                for one in done:
                    yield one.result()
        except BrokenProcessPool as error:
            use = "the same call goes on, with fewer by --parallel if memory ran out"
            raise PreflightError(f"one of {self._processes} processes died; {use}") from error


def workers_of(
    load: Callable[[], Subject], prompts: int, parallel: int | None
) -> AbstractContextManager[Workers | None]:
    """``parallel`` processes, but no more than parts. None for one process: the caller then does the work.

    ``parallel`` None: as many as there are cores, from `FEWEST_PROMPTS` on.
    """
    if parallel is None:
        parallel = cores() if prompts >= FEWEST_PROMPTS else 1
    processes = min(parallel, ceil(prompts / PROMPTS_AT_ONCE))
    return nullcontext() if processes < 2 else Workers(load, processes)


def _begin(load: Callable[[], Subject], parent: Connection) -> None:
    global _subject
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the process that started us, too
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    torch.set_num_threads(1)
    with suppress(ModuleNotFoundError):  # a subject without an index of FAISS does without it
        import faiss

        faiss.omp_set_num_threads(1)
    _subject = load()


def _end_with(parent: Connection) -> None:
    parent.poll(None)  # nothing is ever sent: this returns when the parent closes its end, or dies
    os._exit(0)


def _values(part: Sequence[State], continuations: int, seed: int) -> list[Value]:
    return value_part(part, _subject.roll, continuations=continuations, seed=seed)
