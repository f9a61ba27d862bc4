"""evidence/gpu at a size for a CPU: its parts, its queue of runs with a command that stands for `verl-credit`, its world."""

import ast
import subprocess
import sys
import zipfile
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "evidence"))

from gpu import children, record, table  # noqa: E402
from gpu.half_hour import carry, drive, order, world  # noqa: E402
from gpu.machine import code_version  # noqa: E402
from gpu.parts import PARTS  # noqa: E402

from kit.recipes import OWN, load_config  # noqa: E402
from verl_credit.recipe.rules import validate  # noqa: E402


@pytest.mark.nightly
def test_the_first_parts_at_a_size_for_a_cpu_have_no_row_that_is_off(tmp_path):
    places = [
        "--out",
        str(tmp_path),
        "--work",
        str(tmp_path / "work"),
        "--parts",
        "kernels,branches,forward,log_probs",
    ]
    command = [
        sys.executable,
        "-W",
        "ignore",
        str(ROOT / "evidence/gpu/run.py"),
        "--device",
        "cpu",
        "--tiny",
        *places,
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.name)
def test_a_part_is_repeated_after_a_change_to_what_it_imports(part):
    declared = {path for pattern in part.files for path in ROOT.glob(pattern)}
    module = ROOT / "evidence" / (part.module.replace(".", "/") + ".py")
    nodes = [node for node in ast.walk(ast.parse(module.read_text())) if isinstance(node, ast.ImportFrom)]
    names = {
        f"{node.module}{more}" for node in nodes for more in ("", *(f".{one.name}" for one in node.names))
    }
    files = {
        (folder / name.replace(".", "/")).with_suffix(".py")
        for name in names
        for folder in (ROOT, ROOT / "evidence")
    }
    beside = {
        ROOT / "evidence/gpu" / f"{name}.py" for name in ("machine", "children", "record", "parts", "table")
    }
    imported = {file for file in files if file.exists()}
    assert (
        module in declared
        and imported
        and imported - declared <= beside
        and len(code_version(part.files)) == 12
    )


def test_the_committed_page_is_what_its_json_says(tmp_path):
    """Nobody wrote a number into it by hand."""
    (tmp_path / "results").symlink_to(ROOT / "evidence" / "gpu" / "results")
    table.write_page(tmp_path)
    assert (tmp_path / "README.md").read_text() == (ROOT / "evidence" / "gpu" / "README.md").read_text()


# --- the queue ---


@pytest.mark.parametrize(
    "engine", [order.VLLM, *(pytest.param(one, marks=pytest.mark.slow) for one in (order.HF, "rehearsal"))]
)
@pytest.mark.parametrize("run", order.QUEUE, ids=lambda run: run.name)
def test_a_run_is_accepted_and_cuts_rows_in_number_only(run, engine, tmp_path, monkeypatch):
    tiny = engine == "rehearsal"
    monkeypatch.setattr(world, "read_manifest", lambda *given: {"tiny": tiny})
    given = order.overrides(run, tiny=tiny, engine=order.HF if tiny else engine, hardware="h100x1")
    given += world.overrides(tmp_path, "http://127.0.0.1:1", tmp_path, run.recipe)
    config, own = load_config(run.recipe, [*given, f"run_dir={tmp_path}"]), load_config(run.recipe, OWN)
    validate(config)
    assert config.actor_rollout_ref.rollout.name == (order.HF if tiny else engine)
    assert config.trainer.total_training_steps == run.steps
    lengths = (
        "data.max_prompt_length",
        "data.max_response_length",
        "search.max_new_tokens",
        "search.max_searches",
    )
    assert tiny or all(OmegaConf.select(config, key) == OmegaConf.select(own, key) for key in lengths)
    rows = config.data.train_batch_size * config.actor_rollout_ref.rollout.n
    assert rows < own.data.train_batch_size * own.actor_rollout_ref.rollout.n


FAKE = """
import json, os, subprocess, sys
from pathlib import Path
given = dict(one.split("=", 1) for one in sys.argv[2:] if "=" in one)
run_dir, steps = Path(given["run_dir"]), int(given["trainer.total_training_steps"])
if sys.argv[1] == "plan":
    print(json.dumps({"phases": [], "assumptions": {"mfu": 0.35}, "hardware": {"peak_bf16": 1e15},
                      "step": {"seconds": {"decode": 1.0}, "flops": {"update": 2e14}}}))
    sys.exit()
run_dir.mkdir(parents=True, exist_ok=True)
forever = "import os; os.read(os.pipe()[0], 1)"
if run_dir.name == "R4":
    child = subprocess.Popen([sys.executable, "-c", forever], start_new_session=True)
    (run_dir / "child").write_text(str(child.pid))
    exec(forever)
done = len((run_dir / "metrics.jsonl").read_text().splitlines()) if (run_dir / "metrics.jsonl").exists() else 0
if done:
    with (run_dir / "events.jsonl").open("a") as file:
        file.write(json.dumps({"kind": "resume", "text": f"resume: exact, from step {done}", "time": 1.0}) + "\\n")
for step in range(done + 1, steps + 1):
    (run_dir / "checkpoints" / f"global_step_{step}").mkdir(parents=True)
    row = {"step": step, "timing_s/step": 9.0, "timing_s/gen": 1.0, "timing_s/old_log_prob": 2.0 + step % 2,
           "timing_s/update_actor": 1.0, "perf/mfu/actor": 0.3, "prompt_length/mean": 9, "response_length/mean": 9,
           "rollout_corr/k3_kl": 0.001, "rollout_corr/log_ppl_diff": 0.0, "actor/ppo_kl": 0.0, "actor/grad_norm": 1.0,
           "credit/gain/scored": step % 2, "credit/gain/contexts_scored": 9, "credit/gain/std": 0.1,
           "credit/clip_scale/std": 0.2, "credit/gain/failed_rows": 0, "credit/gain/seconds": 0.3}
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\\n")
"""


@pytest.fixture
def adopting():
    """What a command started is this process's child when the command is gone, as in the driver's process."""
    children.adopt_orphans()
    yield
    children._PRCTL(children.PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


@pytest.mark.slow
def test_a_queue_cuts_a_silent_run_and_what_it_started_and_runs_nothing_twice(tmp_path, adopting):
    """R3 goes on with what R2 left; a queue without time starts nothing."""
    (tmp_path / "fake.py").write_text(FAKE)
    made = SimpleNamespace(
        prepare=lambda root, tiny: None, weights=lambda root, model, device: root / model,
        served=lambda root: nullcontext("http://127.0.0.1:1"), overrides=lambda *given: [],
    )  # fmt: skip
    facts = {"device": "CPU", "gpus": 0, "memory_gib": None, "python": "3", "software": {}}
    queue = [run if run.name != "R4" else order.Run(*list(vars(run).values())[:6], 2) for run in order.QUEUE]

    def go(minutes=30.0):
        kept = record.Record(tmp_path / "half_hour.json")
        one = drive.Queue(kept, tmp_path, tmp_path, "cpu", True, "h100x1", facts, minutes)
        one.command, one.made, one.grace_s = (sys.executable, str(tmp_path / "fake.py")), made, 2.0
        one._child = lambda out, command, limit_s, child=one._child: (
            child(out, [sys.executable, "-c", ""], 60)
            if out.name.startswith("weights")
            else child(out, command, limit_s)
        )
        return one.run(queue), record.read(kept.path)

    good, found = go(minutes=0.0)
    assert not good and all("are left of 0 minutes" in run["why"] for run in found["runs"].values())
    good, found = go()
    states = {name: run["state"] for name, run in found["runs"].items()}
    assert not good and states == {"R2": "done", "R4": "cut", "R3": "done", "R1": "done", "R5": "done"}
    assert "cut after 2 s" in found["runs"]["R4"]["why"]
    stat = Path(f"/proc/{(tmp_path / 'runs/R4/child').read_text()}/stat")
    assert not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z"
    rows = {row["name"]: row for row in found["rows"]}
    assert rows["R1: price of gains"]["found"]["forward_ratio"] == pytest.approx(1.5)
    assert rows["R1: MFU"]["found"]["by_plan_flops"] == pytest.approx(0.2)
    assert (
        rows["R2: k3 of step 2"]["verdict"]
        == rows["R3: resume"]["verdict"]
        == rows["R1: gains"]["verdict"]
        == "ok"
    )
    assert (tmp_path / "R1/metrics.jsonl").exists() and "| R4 |" in (tmp_path / "table.md").read_text()
    before = (tmp_path / "runs/R1/metrics.jsonl").read_text()
    go()
    assert (tmp_path / "runs/R1/metrics.jsonl").read_text() == before


@pytest.mark.e2e
@pytest.mark.nightly
def test_the_rehearsal(tmp_path):
    """World, weights, runs with gains and LoRA, a resume and the table, as on a GPU; transformers roll out."""
    script = str(ROOT / "evidence/gpu/half_hour/drive.py")
    command = [sys.executable, "-W", "ignore", script, "--device", "cpu", "--tiny"]
    places = ["--out", str(tmp_path / "out"), "--work", str(tmp_path / "work")]
    done = subprocess.run([*command, *places], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = {row["name"]: row for row in record.read(tmp_path / "out/half_hour.json")["rows"]}
    assert rows["R1: gains"]["found"]["contexts_scored"] > 0
    assert rows["R2: k3 of step 2"]["verdict"] == rows["R3: resume"]["verdict"] == "ok"


# --- what it runs on, and what is read of it ---


def test_what_is_carried_arrives_and_a_lost_piece_is_refused(tmp_path):
    wheel = tmp_path / "one-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name in (
            "one/a.py",
            "one-1.0.data/purelib/one/b.py",
            "one-1.0.dist-info/RECORD",
            "vllm/_moe_C.so",
        ):
            archive.writestr(name, f"# {name}")
    pieces = carry.pack([wheel], tmp_path / "out", piece=64)
    assert len(pieces) > 1
    carry.unpack(tmp_path / "out", tmp_path / "site")
    found = {
        path.relative_to(tmp_path / "site").as_posix()
        for path in (tmp_path / "site").rglob("*.py*")
        if "cache" not in str(path)
    }
    assert found == {"one/a.py", "one/b.py"}
    pieces[0].unlink()
    with pytest.raises(ValueError, match="one is missing or broken"):
        carry.unpack(tmp_path / "out", tmp_path / "again")
