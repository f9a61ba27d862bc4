"""Peak memory per phase: on a device that counts every byte, and by the resident size of this process."""

import asyncio
import random
import time
from types import SimpleNamespace

import pytest
import torch
from omegaconf import OmegaConf
from verl.utils import tensordict_utils as tu
from verl.workers.engine_workers import ActorRolloutRefWorker

from verl_credit.host.actor import phase_memory, worker
from verl_credit.host.actor.phase_memory import PhaseMemory
from verl_credit.host.cpu.platform import device_module
from verl_credit.records.run.files import EVENTS, PHASES, read_json_lines

MIB = 2**20


class Device:
    """Counts as torch.cuda does; ``since_start`` is the peak that nobody resets."""

    def __init__(self, resets=True):
        self.live = self.peak = self.since_start = 0
        self.resets = resets

    def hold(self, size):
        self.live += size
        self.peak, self.since_start = max(self.peak, self.live), max(self.since_start, self.live)

    def max_memory_allocated(self):
        return self.peak

    def max_memory_reserved(self):
        return 2 * self.peak

    def reset_peak_memory_stats(self):
        if not self.resets:
            raise OSError("read-only file system")
        self.peak = self.live


@pytest.fixture
def device(monkeypatch):
    made = Device()
    monkeypatch.setattr(phase_memory, "get_torch_device", lambda: made)
    return made


class Worker:
    """An actor worker of verl's: every phase takes what ``takes`` says for it, and gives it back."""

    def __init__(self, device):
        self.device, self.actor = device, self
        self.engine = SimpleNamespace(optimizer_step=lambda: self.take("optimizer step"))
        self.takes = {"log-prob": 3, "loss": 8, "backward": 6, "optimizer step": 5, "weight sync": 2}

    def take(self, name):
        self.device.hold(self.takes[name])
        self.device.hold(-self.takes[name])

    def infer_batch(self, data):
        self.take("log-prob")
        return self._postprocess_output()

    def train_mini_batch(self, data):
        for _ in range(2):  # mini-batches
            self.take("loss")
            self.take("backward")
            self.engine.optimizer_step()
        return self._postprocess_output()

    def _postprocess_output(self):
        gib = {name: peak() / 2**30 for name, peak in zip(phase_memory.VERLS, self.peaks(), strict=True)}
        return tu.get_tensordict(tensor_dict={}, non_tensor_dict={"metrics": {"loss": 1.0, **gib}})

    def peaks(self):
        return self.device.max_memory_allocated, self.device.max_memory_reserved

    async def update_weights(self, global_steps=None, mode="auto"):
        self.take("weight sync")
        return {"mode": mode}


def peaks(folder):
    return {(line["step"], line["phase"]): line["allocated"] for line in read_json_lines(folder / PHASES)}


@pytest.mark.parametrize("load", [90, 0])
def test_a_step_has_a_line_per_phase_and_verls_metrics_are_what_they_were(device, tmp_path, load):
    device.hold(10)
    device.hold(load)
    device.hold(-load)
    measured = Worker(device)
    began = time.time()
    PhaseMemory(tmp_path, rank=3).attach(measured)
    assert asyncio.run(measured.update_weights(global_steps=0, mode="naive")) == {"mode": "naive"}
    for step in (1, 2):
        for call in (measured.infer_batch, measured.train_mini_batch):
            metrics = tu.get(call(None), "metrics")
            assert metrics == {
                "loss": 1.0,
                "perf/max_memory_allocated_gb": device.since_start / 2**30,
                "perf/max_memory_reserved_gb": 2 * device.since_start / 2**30,
            }
        asyncio.run(measured.update_weights(global_steps=step))
    lines = read_json_lines(tmp_path / PHASES)
    each = {"log-prob": 13, "update": 18, "optimizer step": 15, "weight sync": 12}
    assert peaks(tmp_path) == {(0, "weight sync"): 12} | {
        (step, name): size for step in (1, 2) for name, size in each.items()
    }
    assert len(lines) == 9 and all(line["rank"] == 3 and line["note"] is None for line in lines)
    assert all(line["reserved"] == 2 * line["allocated"] for line in lines)
    assert all(began <= line["start"] <= line["end"] <= time.time() for line in lines)
    update, step = lines[2:4]
    assert (update["phase"], step["phase"]) == ("update", "optimizer step")
    assert update["start"] <= step["start"] and step["end"] <= update["end"]


@pytest.mark.parametrize("name", ["log-prob", "loss", "backward", "optimizer step", "weight sync"])
def test_what_a_phase_takes_is_in_its_line_and_in_no_other(device, tmp_path, name):
    found = []
    for more in (0, 1000):
        measured, folder = Worker(device), tmp_path / str(more)
        measured.takes[name] += more
        PhaseMemory(folder, rank=0).attach(measured)
        measured.infer_batch(None)
        measured.train_mini_batch(None)
        asyncio.run(measured.update_weights(global_steps=1))
        found.append(peaks(folder))
    before, after = found
    changed = "update" if name in ("loss", "backward") else name
    largest = 8 if changed == "update" else before[1, changed]  # of an update its larger moment
    assert after == before | {(1, changed): before[1, changed] - largest + measured.takes[name]}


def test_on_any_course_the_peaks_are_those_of_the_bytes_and_the_largest_is_that_since_the_start(
    device, tmp_path
):
    draw = random.Random(0)
    memory = PhaseMemory(tmp_path, rank=0)
    expected, step = {}, 0

    def course(*phases):
        for _ in range(draw.randrange(6)):
            device.hold(draw.randint(-min(50, device.live), 60))
            for phase in phases:
                expected[phase] = max(expected[phase], device.live)

    for step in range(60):
        course()  # between phases
        expected[step, "update"] = device.live
        with memory.phase("update", step):
            course((step, "update"))
            for _ in range(draw.randrange(3)):
                expected[step, "optimizer step"] = max(expected.get((step, "optimizer step"), 0), device.live)
                with memory.phase("optimizer step", step):
                    course((step, "optimizer step"))
                expected[step, "update"] = max(expected[step, "update"], device.live)
                course((step, "update"))
        memory._read()
        assert memory._since_start == (device.since_start, 2 * device.since_start)
    assert peaks(tmp_path) == expected


def test_a_phase_that_fails_has_a_line_that_says_so(device, tmp_path):
    memory = PhaseMemory(tmp_path, rank=0)
    with pytest.raises(MemoryError), memory.phase("update", 4):
        device.hold(70)
        raise MemoryError
    (line,) = read_json_lines(tmp_path / PHASES)
    assert (line["allocated"], line["note"]) == (70, "ended by MemoryError")


def test_a_peak_that_cannot_be_reset_is_no_number(device, tmp_path):
    device.resets = False
    measured = Worker(device)
    PhaseMemory(tmp_path, rank=0).attach(measured)
    measured.infer_batch(None)
    (line,) = read_json_lines(tmp_path / PHASES)
    assert (line["allocated"], line["reserved"]) == (None, None)
    assert line["note"] == "the device's peak cannot be reset: read-only file system"


def test_on_a_cpu_a_phase_is_measured_by_the_processs_resident_size(tmp_path, monkeypatch):
    monkeypatch.setattr(phase_memory, "get_torch_device", device_module)
    memory = PhaseMemory(tmp_path, rank=0)
    for step, size in enumerate((64, 192, 64)):
        with memory.phase("log-prob", step):
            torch.ones(size * MIB, dtype=torch.uint8)  # freed at once
    small, large, again = (line["allocated"] for line in read_json_lines(tmp_path / PHASES))
    assert large - small == pytest.approx(128 * MIB, abs=8 * MIB)
    assert again == pytest.approx(small, abs=8 * MIB)


@pytest.mark.parametrize("given", [{}, {"phase_memory": False}, {"phase_memory": True}])
def test_only_a_worker_that_is_asked_measures(device, tmp_path, monkeypatch, given):
    verls = Worker(device)
    made = object.__new__(worker.CreditWorker)
    made.config = OmegaConf.create(
        {"actor": {"policy_loss": {"loss_mode": "vanilla"}}, "run_dir": str(tmp_path)} | given
    )
    made.actor, made.ref, made._is_actor, made.distillation_enabled = verls, None, True, False
    monkeypatch.setattr(worker.CreditWorker, "rank", 0)
    monkeypatch.setattr(ActorRolloutRefWorker, "init_model", lambda self: None)
    before = set(vars(verls))
    made.init_model()
    device.hold(5)
    device.hold(-5)
    verls.infer_batch(None)
    on = given.get("phase_memory", False)
    assert (set(vars(verls)) == before) == (not on)
    assert ("update_weights" in vars(made)) == on
    assert (tmp_path / PHASES).exists() == on
    assert device.peak == (0 if on else 5)  # without it nothing is reset
    stages = [row["text"] for row in read_json_lines(tmp_path / EVENTS)]
    assert stages == ["the actor's process is up", "the actor is loaded"]
