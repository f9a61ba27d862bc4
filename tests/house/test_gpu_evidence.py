"""The command for GPU machines, at a size for a CPU: its parts, its files, and what happens when a part is cut or breaks."""

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

from gpu import drive, part_kernels, part_said, record, runs, table  # noqa: E402
from gpu.machine import slug  # noqa: E402
from gpu.parts import PARTS, Part  # noqa: E402
from gpu.record import Record, about, at_least, at_most, same, within_factor  # noqa: E402
from gpu.world import World, _tokenizer  # noqa: E402

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


@pytest.mark.slow
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
    assert tuple(part.name for part in PARTS[:4]) == TORCH_ONLY
    assert not any(part.needs or part.on_cpu for part in PARTS[:4])


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


def test_a_part_that_is_done_is_not_run_again(scripted, setting, monkeypatch):
    assert scripted()
    found = content(setting, "kernels")
    assert found["state"] == "done" and [row["verdict"] for row in found["rows"]] == ["ok", "ok"]
    assert found["device"] == MACHINE["device"] and found["tiny"] and found["when"] and found["version"]
    assert scripted() and scripted.calls() == 1
    assert scripted(again=True) and scripted.calls() == 2
    monkeypatch.setattr(drive, "code_version", lambda: "another")
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


# --- the parts that train ---


@pytest.mark.parametrize("recipe", runs.GPU_RECIPES[:3])  # the fourth differs in its name
def test_the_overrides_of_the_training_parts_are_accepted(recipe, tmp_path):
    """Nobody can start them here: that they compose and pass validation is what can be known."""
    from kit.recipes import load_config
    from verl_credit.recipe.rules import validate

    overrides = World(tmp_path, "http://127.0.0.1:1", False).overrides(recipe, "Qwen/Qwen3-4B")
    config = load_config(
        recipe, ["hardware=h100x1", *overrides, *runs.SMALL, *runs.FULL_ROWS, f"run_dir={tmp_path}"]
    )
    validate(config)
    assert config.search.max_new_tokens == config.data.max_response_length
    assert config.algorithm.info_gain_norm_mode == "none"
    assert Path(config.reward.custom_reward_function.path).is_file()
    assert config.data.train_batch_size % config.actor_rollout_ref.actor.ppo_mini_batch_size == 0


@pytest.mark.parametrize(
    ("recipe", "trained", "tossed"),
    [("math_sepa", True, True), ("multihop_qwen3_4b", True, False), ("multihop_qwen3_4b", False, True)],
)
def test_given_weights_are_judged_by_their_answers_where_they_can_give_some(
    recipe, trained, tossed, tmp_path
):
    overrides = World(tmp_path, "http://127.0.0.1:1", trained).overrides(recipe, "Qwen/Qwen3-4B")
    assert ("credit=grpo" in overrides) is tossed
    assert any("coin_reward" in override for override in overrides) is tossed


def test_a_random_policy_has_a_word_for_every_logit():
    """verl's server samples none above the tokenizer's; and what the chat needs is where it was."""
    small, full = _tokenizer(), _tokenizer(5000)
    assert len(full) == 5000 > len(small)
    text = "<|im_start|>user\nWhat is <answer>?<|im_end|>\n"
    assert full.encode(text) == small.encode(text) and full.decode(full.encode(text)) == text
    assert len(full.encode("\n")) == 1 and full.eos_token_id == small.eos_token_id
    assert "word4999" in full.decode([4999])
    rendered = [
        full.apply_chat_template([{"role": "user", "content": "x"}], tools=tools, tokenize=False)
        for tools in (None, [{"type": "function", "function": {"name": "search"}}])
    ]
    assert rendered[0] != rendered[1] and "search" in rendered[1]


def test_doctor_is_compared_with_what_the_kernels_did(tmp_path):
    rows = Record(tmp_path / "said.json")
    kernel = {"name": "flex, bf16, 600 tokens", "verdict": "off"}
    for status, verdict in (("pass", "off"), ("fail", "ok")):
        part_said._check(rows, "flex-attention", {"status": status, "found": "x"}, [kernel])
        assert rows.content["rows"][0]["verdict"] == verdict


@pytest.mark.e2e
@pytest.mark.nightly
def test_a_step_of_training_through_the_command(tmp_path):
    """World, model folder, run, clocks and plan, as on a GPU; transformers roll out."""
    command = [sys.executable, "-W", "ignore", str(ROOT / "evidence/gpu/run.py"), "--device", "cpu", "--tiny"]
    done = subprocess.run(
        [*command, "--parts", "steps,resume", "--out", str(tmp_path), "--work", str(tmp_path / "work")],
        capture_output=True, text=True, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    steps, resume = (
        record.read(tmp_path / "results" / "cpu-tiny" / f"{n}.json") for n in ("steps", "resume")
    )
    assert resume["state"] == "not run" and "test_e2e_lab" in resume["why"]
    memory, step = steps["rows"]
    assert memory["found"]["planned_tensors_gib"] > 0
    assert all(step["found"][name] > 0 for name in ("gen", "old_log_prob", "update_actor"))
    assert "| steps | done | 0 | 0 | 2 | 0 |" in done.stdout
