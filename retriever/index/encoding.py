"""Encodes the shards that are missing: in this process, or in one process per device."""

import multiprocessing
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from functools import cache

from verl_credit_retriever.index.shards import Shards

BATCHES_PER_CHUNK = 16  # texts of one chunk are sorted by length together
LOOK_SECONDS = 0.2  # between two looks at what the processes have encoded


def encode_missing(
    shards: Shards,
    encoder,
    batch_size: int,
    *,
    done: int = 0,
    report: Callable[[int, int], None] | None = None,
    devices: Sequence[str] = (),
) -> None:
    """Encode the shards that are not done: with `encoder`, or with a process for each of several `devices`.

    `report(rows that are encoded, of how many)` is called after each chunk. A process takes the next missing shard when it
    has written one. The bytes are those of a single device of that sort with as many threads. Errors: those of the encoder,
    and ChildProcessError when a process was killed; shards that are written stay.
    """
    chunk_rows = batch_size * BATCHES_PER_CHUNK

    def on_rows(rows: int) -> None:
        nonlocal done
        done += rows
        if report:
            report(done, shards.rows)

    on_rows(0)
    if len(devices) > 1:
        import torch

        again = {"path": encoder.path, "manifest": {"encoder": encoder.fingerprint()}}
        again |= {"batch_size": encoder.batch_size, "dtype": encoder.dtype}
        job = (again, torch.get_num_threads(), shards, chunk_rows)
        return _encode_on(devices, shards.missing(), job, on_rows)
    for shard in shards.missing():
        shards.encode(shard, encoder.encode_passages, chunk_rows, on_rows)


def _encode_on(devices: Sequence[str], missing: list[int], job: tuple, on_rows) -> None:
    """Encode the `missing` shards. `job`: arguments of `SentenceEncoder.for_index`, threads, shards, texts of a chunk."""
    context = multiprocessing.get_context("spawn")  # CUDA does not survive a fork
    free, rows = context.SimpleQueue(), context.SimpleQueue()
    for device in devices:
        free.put(device)
    pool = ProcessPoolExecutor(len(devices), context, initializer=_start, initargs=(job, free, rows))
    try:
        left = {pool.submit(_encode_shard, shard) for shard in missing}
        while left:
            ended, left = wait(left, LOOK_SECONDS, FIRST_COMPLETED)
            while not rows.empty():
                on_rows(rows.get())
            for future in ended:
                future.result()
    except BrokenProcessPool:
        raise ChildProcessError(
            "a process that encodes was killed (no memory left?); the same command goes on at the missing shards"
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)


_given: tuple = ()


def _start(job: tuple, free, rows) -> None:
    global _given
    # A process takes its device once: a task that took one could find none left, and wait for ever.
    _given = (job, free.get(), rows)
    parent = multiprocessing.parent_process()
    if parent is not None:  # a pool's processes would wait for ever for a parent that was killed
        threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()


def _encode_shard(shard: int) -> None:
    encoder = _loaded()
    if isinstance(encoder, Exception):
        raise encoder
    (*_, shards, chunk_rows), _, rows = _given
    shards.encode(shard, encoder.encode_passages, chunk_rows, rows.put)


@cache
def _loaded():
    """This process's encoder, or the error of loading it: every task reports that error."""
    import torch
    import transformers

    from verl_credit_retriever.encoder import SentenceEncoder

    (arguments, threads, *_), device, _ = _given
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(threads)
    try:
        return SentenceEncoder.for_index(device=device, **arguments)
    except Exception as error:
        return error
