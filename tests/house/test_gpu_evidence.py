"""The command for GPU machines, at a size for a CPU: its parts, its files, and what happens when a part is cut or breaks."""

import ast
import json
import os
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "evidence"))

from gpu import drive, part_kernels, part_said, record, table  # noqa: E402
from gpu.machine import code_version, slug  # noqa: E402
from gpu.parts import PARTS, Part  # noqa: E402
from gpu.record import Record, about, at_least, at_most, same, within_factor  # noqa: E402

MACHINE = {
    "device": "CPU, x, 2 cores",
    "gpus": 0,
    "memory_gib": None,
    "python": "3",
    "software": {"torch": "2"},
}
TORCH_ONLY = ("kernels", "branches", "forward", "log_probs")


@pytest.fixture
def setting(tmp_path):
    return drive.Setting("cpu", True, "laptop", None, str(tmp_path / "out"), str(tmp_path / "work"))


def content(setting, name):
    return record.read(setting.results(MACHINE["device"]) / f"{name}.json")


# --- parts that need torch and transformers alone ---

BLOCKED = """
import importlib, json, sys
from pathlib import Path

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("verl", "ray", "vllm", "hydra", "omegaconf", "tensordict", "transfer_queue", "pyarrow"):
            raise ImportError(f"{name} is blocked")

sys.meta_path.insert(0, Blocked())
from gpu.drive import Setting
from gpu.record import Record
names, out = sys.argv[1].split(","), Path(sys.argv[2])
for name in names:
    importlib.import_module(f"gpu.part_{name}").run(
        Setting("cpu", True, "laptop", None, str(out), str(out)), Record(out / f"{name}.json")
    )
"""


@pytest.mark.nightly
def test_the_first_parts_run_with_torch_and_transformers_alone(tmp_path):
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", BLOCKED, ",".join(TORCH_ONLY), str(tmp_path)],
        env=os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'evidence'}"}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for name in TORCH_ONLY:
        rows = record.read(tmp_path / f"{name}.json")["rows"]
        verdicts = Counter(row["verdict"] for row in rows)
        assert verdicts["off"] == 0, [row for row in rows if row["verdict"] == "off"]
        assert verdicts["ok"] >= 2 and all(row["found"] for row in rows if row["verdict"] == "ok")
        # nothing that did not run looks as if it had
        assert all(row.get("why") and not row["found"] for row in rows if row["verdict"] == "not run")
    not_run = [row for row in record.read(tmp_path / "log_probs.json")["rows"] if row["verdict"] == "not run"]
    assert any("verl is blocked" in row["why"] for row in not_run)


def test_the_registry_says_which_parts_those_are():
    assert tuple(part.name for part in PARTS[1:5]) == TORCH_ONLY
    assert not any(part.needs or part.on_cpu for part in PARTS[1:5])


# --- what repeats a part ---


def imported(path: Path) -> set[Path]:
    """Files of evidence/gpu and of verl_credit that a file imports."""
    nodes = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom)]
    names = {
        f"{node.module}{more}" for node in nodes for more in ("", *(f".{one.name}" for one in node.names))
    }
    files = {(ROOT / name.replace(".", "/")).with_suffix(".py") for name in names}
    files |= {(ROOT / "evidence" / name.replace(".", "/")).with_suffix(".py") for name in names}
    return {file for file in files if file.exists()}


@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.name)
def test_a_part_is_repeated_after_a_change_to_what_it_imports(part):
    declared = {path for pattern in part.files for path in ROOT.glob(pattern)}
    assert all(list(ROOT.glob(pattern)) for pattern in part.files)
    module = ROOT / "evidence" / (part.module.replace(".", "/") + ".py")
    beside = {ROOT / "evidence/gpu" / f"{name}.py" for name in ("machine", "children", "record", "parts")}
    assert len(code_version(part.files)) == 12 and all(path.is_file() for path in declared)
    assert module in declared and imported(module) and imported(module) - declared <= beside


def test_a_change_elsewhere_repeats_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr("gpu.machine.ROOT", tmp_path)
    for name in ("verl_credit/policy/attention/sdpa.py", "verl_credit/host/registry.py"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text("1")
    versions = lambda: {part.name: code_version(part.files) for part in PARTS}  # noqa: E731
    before = versions()
    (tmp_path / "verl_credit/host/registry.py").write_text("2")
    assert {name for name, version in versions().items() if version != before[name]} == {"half_hour"}
    before = versions()
    (tmp_path / "verl_credit/policy/attention/sdpa.py").write_text("2")
    changed = {name for name, version in versions().items() if version != before[name]}
    assert changed == {"half_hour", "kernels", "branches", "forward", "server", "said"}


@pytest.mark.slow
def test_a_wrong_kernel_is_off(setting, tmp_path, monkeypatch):
    """Its branches see the whole trunk, whatever their base: nothing that 128 tokens would show."""

    def wrong(query, key, value, pack, **options):
        rows = tuple(
            replace(row, branches=tuple((row.trunk, n) for _, n in row.branches)) for row in pack.rows
        )
        return part_kernels.row_by_row(query, key, value, rows, **options)

    case = part_kernels.Case(600, 16, torch.float32, "cpu", {})
    exact = case.apart(torch.float64)
    assert case.difference(case.apart(torch.float32), exact) < 1e-4
    monkeypatch.setitem(part_kernels.KERNELS, "sdpa", wrong)
    found = case.measure("sdpa", exact) | {"eager_error": 0.0}
    row = Record(tmp_path / "x.json").add(
        "wrong", found, part_kernels._predicted(found, torch.float32, False, 600)
    )
    assert row["verdict"] == "off" and row["found"]["error"] > 0.1


# --- verdicts ---


@pytest.mark.parametrize(
    ("expected", "good", "bad"),
    [
        (at_most(1.0), 1.0, 1.1),
        (at_most(1.0), 0.0, float("nan")),
        (at_least(1), 1, 0),
        (about(10.0, 0.2), 12.0, 12.1),
        (within_factor(10.0, 2), 5.0, 4.9),
        (same("exact"), "exact", "not exact"),
    ],
)
def test_a_prediction_is_met_or_not(tmp_path, expected, good, bad):
    rows = Record(tmp_path / "part.json")
    assert rows.add("good", {"x": good}, {"x": expected})["verdict"] == "ok"
    assert rows.add("bad", {"x": bad}, {"x": expected})["verdict"] == "off"


def test_what_was_predicted_and_not_found_is_off(tmp_path):
    row = Record(tmp_path / "part.json").add("peak", {"other": 1, "peak": None}, {"peak": at_most(1)})
    assert row["verdict"] == "off" and row["why"] == "not found: peak"


def test_rows_are_bounded_and_the_file_is_json(tmp_path):
    rows = Record(tmp_path / "part.json")
    rows.off("long", "x\n" * 10_000)
    rows.add("nan", {"x": float("nan"), "tensor": torch.tensor(2.0)})
    long, nan = json.loads((tmp_path / "part.json").read_text())["rows"]
    assert len(long["why"]) == record.MAX_TEXT and "\n" not in long["why"]
    assert nan["found"] == {"x": None, "tensor": 2.0}


# --- the driver ---

SCRIPTED = """
import os
import subprocess
import sys
from pathlib import Path
from gpu.record import at_most

def run(setting, record):
    work = Path(setting.work)
    with (work / "calls").open("a") as calls:
        calls.write("x")
    if not record.has("first"):
        record.add("first", {"x": 1}, {"x": at_most(2)}, "a test")
    if (work / "break").exists():
        raise OSError("the disk is full")
    if (work / "told").exists():
        forever = "import os; os.read(os.pipe()[0], 1)"
        (work / "pid").write_text(str(subprocess.Popen([sys.executable, "-c", forever]).pid))
        with (work / "told").open("w") as told:
            told.write("first is there")
        exec(forever)
    record.add("second", {"x": 3}, {"x": at_most(2 if (work / "strict").exists() else 4)}, "a test")
"""


@pytest.fixture
def scripted(setting, tmp_path, monkeypatch):
    """A part whose way is told by files in the work folder; called with a number of parts, drives them."""
    work = Path(setting.work)
    work.mkdir()
    (tmp_path / "scripted_part.py").write_text(SCRIPTED)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    part = Part("kernels", "scripted_part", "a scripted part", "what it is told")

    def go(*more, **options):
        return drive.drive([part, *more], setting, MACHINE, **options)

    go.calls = lambda: len((work / "calls").read_text())
    go.work = work
    return go


@pytest.mark.slow
def test_a_part_that_is_done_is_not_run_again(scripted, setting, monkeypatch):
    assert scripted()
    found = content(setting, "kernels")
    assert found["state"] == "done" and [row["verdict"] for row in found["rows"]] == ["ok", "ok"]
    assert found["device"] == MACHINE["device"] and found["tiny"] and found["when"] and found["version"]
    assert scripted() and scripted.calls() == 1
    assert scripted(again=True) and scripted.calls() == 2
    monkeypatch.setattr(drive, "code_version", lambda patterns: "another")
    assert scripted() and scripted.calls() == 3


def test_a_part_that_breaks_keeps_its_rows_and_stops_no_other(scripted, setting):
    (scripted.work / "break").touch()
    assert not scripted(Part("forward", "scripted_part", "", "", needs=("verl",)))
    broken = content(setting, "kernels")
    assert broken["state"] == "failed" and "the disk is full" in broken["why"]
    assert [row["name"] for row in broken["rows"]] == ["first"]
    absent = content(setting, "forward")
    assert absent["state"] == "not run" and absent["why"] == "verl is not installed"
    (scripted.work / "break").unlink()
    assert scripted() and [row["name"] for row in content(setting, "kernels")["rows"]] == ["first", "second"]


@pytest.mark.slow
def test_a_part_goes_on_with_what_its_file_says_of_its_runs(scripted, setting):
    (scripted.work / "break").touch()
    assert not scripted()
    path = setting.results(MACHINE["device"]) / "kernels.json"
    record.write(path, content(setting, "kernels") | {"runs": {"R1": {"state": "done"}}})
    assert not scripted() and content(setting, "kernels")["runs"] == {"R1": {"state": "done"}}
    assert not scripted(again=True) and "runs" not in content(setting, "kernels")


def test_a_number_off_its_prediction_is_seen(scripted, setting):
    (scripted.work / "strict").touch()
    assert not scripted()
    assert [row["verdict"] for row in content(setting, "kernels")["rows"]] == ["ok", "off"]


def test_a_part_that_takes_too_long_is_cut_and_goes_on(scripted, setting, monkeypatch):
    told = scripted.work / "told"
    os.mkfifo(told)
    limit = Part("kernels", "", "", "").tiny_limit_s

    class Patient(subprocess.Popen):
        """Its time is over when the part has said that its first row is there."""

        def wait(self, timeout=None):
            if timeout != limit or not told.exists():
                return super().wait(timeout)
            assert told.read_text() == "first is there"
            raise subprocess.TimeoutExpired(self.args, timeout)

    monkeypatch.setattr(drive.subprocess, "Popen", Patient)
    assert not scripted()
    cut = content(setting, "kernels")
    assert cut["state"] == "cut" and [row["name"] for row in cut["rows"]] == ["first"]
    child = Path(
        f"/proc/{(scripted.work / 'pid').read_text()}/stat"
    )  # what the part started is gone, or a zombie
    assert not child.exists() or child.read_text().rpartition(")")[2].split()[0] == "Z"
    told.unlink()
    assert scripted()
    assert [row["name"] for row in content(setting, "kernels")["rows"]] == ["first", "second"]


# --- the page ---


def test_the_page_says_that_no_gpu_has_run_it_until_one_has(scripted, setting):
    scripted()
    out = Path(setting.out)
    assert "| kernels | done | 2 | 0 | 0 | 0 |" in table.write_page(out)
    page = (out / "README.md").read_text()
    assert "**No GPU has run this yet.**" in page and "predicted" in page and "toy sizes" in page
    on_gpu = content(setting, "kernels") | {"device": "Some GPU", "gpus": 1, "tiny": False}
    record.write(out / "results" / slug("Some GPU", False) / "kernels.json", on_gpu)
    (out / "results" / slug("Some GPU", False) / "NOTES.md").write_text("It was lent for an hour.\n")
    table.write_page(out)
    page = (out / "README.md").read_text()
    assert "No GPU" not in page
    assert page.index("1 x Some GPU") < page.index("lent for an hour") < page.index("## CPU")


def test_the_committed_page_is_what_its_json_says(tmp_path):
    """Nobody wrote a number into it by hand."""
    (tmp_path / "results").symlink_to(ROOT / "evidence" / "gpu" / "results")
    table.write_page(tmp_path)
    assert (tmp_path / "README.md").read_text() == (ROOT / "evidence" / "gpu" / "README.md").read_text()


def test_doctor_is_compared_with_what_the_kernels_did(tmp_path):
    rows = Record(tmp_path / "said.json")
    kernel = {"name": "flex, bf16, 600 tokens", "verdict": "off"}
    for status, verdict in (("pass", "off"), ("fail", "ok")):
        part_said._check(rows, "flex-attention", {"status": status, "found": "x"}, [kernel])
        assert rows.content["rows"][0]["verdict"] == verdict
