"""Peak memory of the actor's process in each phase of a step (`phase_memory=true`): a line of phases.jsonl per phase.

A line has ``step``, ``rank``, ``device``, ``phase``, and ``start`` and ``end`` in seconds since 1970. ``allocated`` is the
largest number of bytes in live tensors, ``reserved`` of those that torch took from the device; on a CPU both are the peak
resident size of the process. ``note`` says that a phase failed, or why it could not be measured: then both are null. A phase
that runs several times in a step has as many lines.

The device's peak begins anew with every phase. What lived before counts in a phase's peak, what was freed before does not.
The optimizer's steps run inside the update, whose line is about its other parts: the losses and the backwards.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path

from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_name, get_torch_device

from verl_credit.records.run.files import PHASES, append_json

LOG_PROB, UPDATE, OPTIMIZER_STEP, WEIGHT_SYNC = "log-prob", "update", "optimizer step", "weight sync"
VERLS = ("perf/max_memory_allocated_gb", "perf/max_memory_reserved_gb")
"""verl's metrics of an update. They stay the peaks since the start of the process, because verl never resets them."""


class PhaseMemory:
    """Measures one process. A phase may begin inside another, which it interrupts."""

    def __init__(self, run_dir: Path, rank: int) -> None:
        self._path, self._rank, self._device = run_dir / PHASES, rank, get_torch_device()
        self._synced = 0  # the last step whose weights the rollout engine has
        self._running: list[dict] = []
        self._found: dict[str, dict] = {}  # phases of the outermost phase that runs
        self._since_start = (0, 0)
        self._why: str | None = None

    @contextmanager
    def phase(self, name: str, step: int) -> Iterator[None]:
        self._read()
        row = self._found.setdefault(
            name, {"phase": name, "step": step, "start": time.time(), "peak": (0, 0), "note": None}
        )
        self._running.append(row)
        try:
            yield
        except BaseException as error:
            row["note"] = f"ended by {type(error).__name__}"
            raise
        finally:
            self._read()
            row["end"] = time.time()
            self._running.pop()
            if not self._running:
                self._write()

    def _read(self) -> None:
        """Adds the peak since the last call to the phase that runs."""
        peak = self._device.max_memory_allocated(), self._device.max_memory_reserved()
        self._since_start = _larger(self._since_start, peak)
        if self._running:
            self._running[-1]["peak"] = _larger(self._running[-1]["peak"], peak)
        try:
            self._device.reset_peak_memory_stats()
        except (OSError, RuntimeError) as error:
            self._why = f"the device's peak cannot be reset: {error}"

    def _write(self) -> None:
        for row in self._found.values():
            peak = row.pop("peak")
            allocated, reserved = peak if self._why is None else (None, None)
            row |= {"allocated": allocated, "reserved": reserved, "note": row["note"] or self._why}
            append_json(self._path, {"rank": self._rank, "device": get_device_name(), **row})
        self._found = {}

    def attach(self, worker) -> None:
        """Measures the phases of a worker of verl's from now on."""
        trains = worker.actor
        trains.infer_batch = self._measured(LOG_PROB, trains.infer_batch)
        trains.train_mini_batch = self._measured(UPDATE, trains.train_mini_batch)
        trains.engine.optimizer_step = self._measured(OPTIMIZER_STEP, trains.engine.optimizer_step)
        trains._postprocess_output = self._with_peaks_since_start(trains._postprocess_output)
        worker.update_weights = self._sync(worker.update_weights)

    def _measured(self, name: str, call: Callable) -> Callable:
        @wraps(call)
        def measured(*args, **kwargs):
            with self.phase(name, self._synced + 1):
                return call(*args, **kwargs)

        return measured

    def _sync(self, call: Callable) -> Callable:
        @wraps(call)
        async def measured(global_steps: int | None = None, **kwargs):
            self._synced = global_steps or self._synced
            with self.phase(WEIGHT_SYNC, self._synced):
                return await call(global_steps=global_steps, **kwargs)

        return measured

    def _with_peaks_since_start(self, call: Callable) -> Callable:
        @wraps(call)
        def measured(*args, **kwargs):
            output = call(*args, **kwargs)
            self._read()
            metrics = tu.get(output, "metrics")
            metrics |= {name: peak / 1024**3 for name, peak in zip(VERLS, self._since_start, strict=True)}
            return output

        return measured


def _larger(one: tuple[int, int], other: tuple[int, int]) -> tuple[int, int]:
    return max(one[0], other[0]), max(one[1], other[1])
