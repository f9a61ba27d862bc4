"""The driver of the half hour on a GPU, with a command that stands for `verl-credit`: its cuts and its table."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "evidence"))

from gpu import record  # noqa: E402
from gpu.half_hour import drive, order  # noqa: E402

pytestmark = pytest.mark.slow  # each starts a driver, which starts commands
FAKE = ROOT / "tests" / "kit" / "fake_drive.py"
QUEUE = {run.name: run for run in order.QUEUE}
H100 = {
    "device": "NVIDIA H100",
    "gpus": 1,
    "memory_gib": 79.1,
    "python": "3",
    "software": {"torch": "2", "verl": "0.9.1"},
}


@pytest.fixture
def half_hour(tmp_path):
    """Starts a driver; ``go(...)`` waits for it and returns what it wrote."""
    drivers = []

    def begin(only="R1,R2,R4,R3,R5", facts=H100, **settings) -> subprocess.Popen:
        given = {"only": only, "facts": facts, "out": str(go.out), "work": str(tmp_path / "work"), **settings}
        paths = os.pathsep.join(map(str, (ROOT, ROOT / "evidence", FAKE.parent)))
        drivers.append(subprocess.Popen(
            [sys.executable, "-W", "ignore", str(FAKE), json.dumps(given)], env=os.environ | {"PYTHONPATH": paths},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        ))  # fmt: skip
        return drivers[-1]

    def go(*given, **settings) -> dict:
        driver = begin(*given, **settings)
        go.printed, _ = driver.communicate(timeout=120)
        go.code = driver.returncode
        return content()

    def content() -> dict:
        found = record.read(go.out / "half_hour.json")
        assert found, go.printed
        return found

    go.out, go.runs, go.begin, go.content = tmp_path / "out", tmp_path / "work" / "runs", begin, content
    yield go
    for driver in drivers:
        driver.kill()
        driver.wait()


def wait_for(met: Callable[[], object], what: str) -> object:
    over = time.monotonic() + 60
    while not (found := met()):
        assert time.monotonic() < over, what
        time.sleep(0.05)
    return found


def states(content) -> dict[str, str]:
    return {name: state["state"] for name, state in content["runs"].items()}


def row(content, name) -> dict:
    return next(row for row in content["rows"] if row["name"] == name)


def gone(path: Path) -> bool:
    """Whether the process whose id the file holds has ended, or is a zombie."""
    stat = Path(f"/proc/{path.read_text()}/stat")
    return not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z"


def test_the_queue_in_order_of_value_with_every_number(half_hour):
    found = half_hour()
    assert half_hour.code == 1 and states(found) == dict.fromkeys(("R1", "R2", "R4", "R3", "R5"), "done"), (
        half_hour.printed
    )
    assert [row["name"] for row in found["rows"] if row["verdict"] == "off"] == ["engine"]  # vLLM is not here
    started = [found["runs"][name]["started_s"] for name in ("R1", "R2", "R4", "R3", "R5")]
    assert started == sorted(started)
    assert row(found, "R1: run")["found"]["steps"] == "1, 2, 3"
    price = row(found, "R1: price of gains")["found"]
    assert price["price_of_forward_s"] == pytest.approx(0.2) and price["forward_ratio"] == pytest.approx(1.1)
    assert (price["step_s_with_gains"], price["step_s_without"]) == (11.0, 10.0)
    assert row(found, "R1: gains")["found"] == {
        "contexts_scored": 9, "gain_std": 0.1, "clip_scale_std": 0.2, "failed_rows": 0
    }  # fmt: skip
    assert row(found, "R1: MFU")["found"]["by_plan_flops"] == pytest.approx(0.2)  # 2e14 FLOPs in 1 s of 1e15
    assert row(found, "R2: k3 of step 2")["verdict"] == "ok"
    assert row(found, "R3: resume")["found"] == {"resume": "resume: exact, from step 2"}
    assert found["runs"]["R3"]["steps"] == "1 of 1" and row(found, "R3: run")["verdict"] == "ok"
    assert {path.name for path in (half_hour.out / "R1").iterdir()} >= {
        "stdout.txt",
        "metrics.jsonl",
        "plan.txt",
    }
    again = half_hour()  # nothing is left to do
    assert [again["runs"][name]["started_s"] for name in ("R1", "R2", "R4", "R3", "R5")] == started


def test_a_silent_run_is_cut_a_broken_one_stays_red_and_the_queue_goes_on(half_hour):
    behaviour = {
        "R1": {"until": 0, "hangs": True, "child": True},
        "R4": {"until": 1, "dies": "CUDA out of memory"},
    }
    found = half_hour("R1,R4,R5", behaviour=behaviour, limit_s=1.0)
    assert states(found) == {"R1": "cut", "R4": "failed", "R5": "done"}, half_hour.printed
    assert "no new step for 1 s: starting" in found["runs"]["R1"]["why"]
    assert "exit code 1: starting | CUDA out of memory" in found["runs"]["R4"]["why"]
    assert found["runs"]["R4"]["steps"] == "1 of 2"
    assert row(found, "R1: run")["verdict"] == row(found, "R4: run")["verdict"] == "off"
    assert "CUDA out of memory" in (half_hour.out / "table.md").read_text()
    assert gone(half_hour.runs / "R1" / "pid") and gone(half_hour.runs / "R1" / "child")


def test_a_run_that_stops_after_its_first_step_is_cut_and_keeps_it(half_hour):
    found = half_hour("R1", behaviour={"R1": {"until": 1, "hangs": True}}, limit_s=1.0)
    assert states(found) == {"R1": "cut"} and found["runs"]["R1"]["steps"] == "1 of 3"
    assert row(found, "R1: gains")["verdict"] == "ok"
    assert len((half_hour.out / "R1" / "metrics.jsonl").read_text().splitlines()) == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_killed_driver_leaves_a_complete_table_and_no_process(half_hour, number):
    driver = half_hour.begin(
        "R1,R2", behaviour={"R1": {"until": 1, "hangs": True, "child": number == signal.SIGTERM}}
    )
    table, copy = half_hour.out / "table.md", half_hour.out / "R1" / "metrics.jsonl"
    wait_for(lambda: copy.exists() and "1 of 3" in table.read_text(), "a step in the table")
    driver.send_signal(number)
    driver.wait()
    found = half_hour.content()
    assert found["runs"]["R1"]["steps"] == "1 of 3" and "first_step_s" in found["runs"]["R1"]
    assert states(found) == (
        {"R1": "cut", "R2": "not run"} if number == signal.SIGTERM else {"R1": "running", "R2": "waiting"}
    )
    assert len(copy.read_text().splitlines()) == 1
    text = table.read_text()
    assert "| R1 " in text and "| R2 " in text and "1 of 3" in text and "contexts_scored 9" in text
    wait_for(lambda: gone(half_hour.runs / "R1" / "pid"), "the run ends with its driver")
    assert number == signal.SIGKILL or gone(half_hour.runs / "R1" / "child")
    assert drive.running(half_hour.out) == 0


def test_follow_shows_the_table_and_stop_ends_the_queue(half_hour, capsys):
    half_hour.begin("R1", behaviour={"R1": {"until": 2, "hangs": True}})
    wait_for(lambda: "2 of 3" in drive.shown(half_hour.out), "two steps in the table")
    out = ["--out", str(half_hour.out)]
    assert drive.main(["--follow", "0.1", *out]) == 0
    assert "2 of 3" in capsys.readouterr().out
    assert drive.main(["--only", "R1", *out]) == drive.NOT_HERE  # one driver at a time
    assert drive.main(["--stop", *out]) == 0
    assert "the driver was ended" in capsys.readouterr().out and gone(half_hour.runs / "R1" / "pid")
    assert drive.main(["--follow", "60", *out]) == drive.ENDED  # at once


def test_nothing_starts_that_cannot_reach_its_first_step(half_hour):
    found = half_hour("R1,R3", minutes=QUEUE["R3"].first_step_s / 60 - 0.1)
    assert states(found) == {"R1": "not run", "R3": "not run"}
    assert f"its first step takes {QUEUE['R1'].first_step_s}" in found["runs"]["R1"]["why"]
    assert found["runs"]["R3"]["why"] == "R2 left no checkpoint"


def test_the_minutes_end_a_run(half_hour):
    found = half_hour("R1", minutes=0.05, first_step_s=0, behaviour={"R1": {"until": 1, "hangs": True}})
    assert states(found) == {"R1": "cut"} and "minutes are over" in found["runs"]["R1"]["why"]


@pytest.mark.parametrize("lora", [True, False])
def test_without_vllm_every_run_rolls_out_with_transformers(half_hour, lora):
    name = "R1" if lora else "R4"
    found = half_hour(name, facts=H100 | {"software": H100["software"] | ({"vllm": "0.24"} if lora else {})})
    given = (half_hour.runs / name / "argv").read_text().splitlines()
    assert "actor_rollout_ref.rollout.name=hf" in given and not any("load_format" in one for one in given)
    assert ("actor_rollout_ref.model.lora.merge=true" in given) is lora
    why = row(found, "engine")["why"]
    assert ("No module named 'vllm'" if lora else "vLLM is not installed") in why and "rollout.name=hf" in why
    assert "| hf |" in (half_hour.out / "table.md").read_text()


def test_a_smaller_device_gets_the_plans_remedies_or_no_run(half_hour):
    small = H100 | {"memory_gib": 24.0}
    remedy = "actor_rollout_ref.actor.fsdp_config.optimizer_offload=true"
    found = half_hour(
        "R1,R4", facts=small, behaviour={"R1": {"large": True, "remedy": remedy}, "R4": {"large": True}}
    )
    assert states(found) == {"R1": "done", "R4": "not run"}
    assert found["runs"]["R1"]["remedies"] == remedy
    assert remedy in (half_hour.runs / "R1" / "argv").read_text()
    assert "it does not fit by the plan: rollout 3.0 of 2.0 GiB" in found["runs"]["R4"]["why"]


def test_a_fault_of_the_driver_ends_no_other_run(half_hour):
    found = half_hour("R1,R4", behaviour={"R1": {"odd": True}})
    assert states(found) == {"R1": "failed", "R4": "done"}
    assert "the driver: KeyError: 'run'" in found["runs"]["R1"]["why"] and half_hour.code == 1


def test_a_full_disk_is_in_the_table_and_stops_only_what_needs_it(half_hour):
    found = half_hour("R1,R2", room=5.0, behaviour={"R2": {"disk": 2**33}})
    assert "5.0 GiB free" in row(found, "disk")["why"]
    assert states(found) == {"R1": "done", "R2": "not run"} and "8.0 GiB" in found["runs"]["R2"]["why"]


def test_without_a_world_or_a_gpu_the_table_says_why_nothing_ran(half_hour, monkeypatch):
    old = {"gpus": 0, "device": "no GPU", "memory_gib": None, "no_gpu": "RuntimeError: the driver is too old"}
    found = half_hour("R1", facts=H100 | old)
    why = "torch 2 sees no GPU: RuntimeError: the driver is too old"
    assert found["runs"]["R1"]["why"] == row(found, "device")["why"] == why and states(found) == {
        "R1": "not run"
    }
    monkeypatch.setenv("NO_WORLD", "1")
    found = half_hour("R1")
    assert states(found) == {"R1": "not run"} and "the disk is full" in found["runs"]["R1"]["why"]


def test_as_a_part_it_is_not_done_before_every_run_is(half_hour, tmp_path):
    path = tmp_path / "half_hour.json"
    broken = {"R4": {"until": 0, "dies": "out of memory"}}
    for behaviour, code in ((broken, 1), ({}, 0), (broken, 0)):  # the third call runs nothing again
        driver = half_hour.begin("R1,R4", part=str(path), behaviour=behaviour)
        printed, _ = driver.communicate(timeout=120)
        assert driver.returncode == code, printed
        assert ("R4 failed: exit code 1: starting | out of memory" in printed) == (code == 1)
    assert set(states(record.read(path)).values()) == {"done"}
    assert "hardware=h100x1" in (half_hour.runs / "R4" / "argv").read_text()  # one GPU of eight


def test_the_driver_leaves_its_shell(tmp_path):
    """Detached; on a machine without a GPU it writes its table and ends."""
    command = [sys.executable, str(ROOT / "evidence/gpu/half_hour/drive.py"), "--out", str(tmp_path / "out")]
    begun = subprocess.run(
        [*command, "--work", str(tmp_path / "work")], capture_output=True, text=True, cwd=tmp_path
    )
    assert begun.returncode == 0, begun.stderr
    followed = subprocess.run([*command, "--follow", "60"], capture_output=True, text=True, cwd=tmp_path)
    assert followed.returncode == drive.ENDED and followed.stdout.count("sees no GPU: ") >= 5


@pytest.mark.e2e
@pytest.mark.nightly
def test_the_rehearsal(tmp_path):
    """World, weights, plan, runs with gains and LoRA, a resume and the table, as on a GPU; transformers roll out."""
    command = [
        sys.executable,
        "-W",
        "ignore",
        str(ROOT / "evidence/gpu/half_hour/drive.py"),
        "--device",
        "cpu",
        "--tiny",
    ]
    done = subprocess.run(
        [*command, "--foreground", "--out", str(tmp_path / "out"), "--work", str(tmp_path / "work")],
        capture_output=True, text=True, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    found = record.read(tmp_path / "out" / "half_hour.json")
    assert states(found) == dict.fromkeys(("R1", "R2", "R4", "R3", "R5"), "done")
    gains, price = row(found, "R1: gains")["found"], row(found, "R1: price of gains")["found"]
    assert gains["contexts_scored"] > 0 and gains["clip_scale_std"] > 0 and price["step_s_without"] > 0
    assert row(found, "R2: k3 of step 2")["verdict"] == row(found, "R3: resume")["verdict"] == "ok"
    for phase in ("log-prob", "update", "optimizer step", "weight sync"):
        assert row(found, f"R1: memory, {phase}")["found"]["found_gib"] > 0
