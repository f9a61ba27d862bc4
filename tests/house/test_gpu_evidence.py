"""evidence/gpu at a size for a CPU: its parts, the runs of its queue, its page."""

import subprocess
import sys
from pathlib import Path

import pytest
from omegaconf import OmegaConf

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "evidence"))

from gpu import record, table  # noqa: E402
from gpu.half_hour import order, world  # noqa: E402

from kit.recipes import OWN, load_config  # noqa: E402
from verl_credit.recipe.rules import validate  # noqa: E402


@pytest.mark.nightly
def test_the_first_parts_at_a_size_for_a_cpu_have_no_row_that_is_off(tmp_path):
    places = f"--out {tmp_path} --work {tmp_path}/work --parts kernels,branches,forward,log_probs"
    command = [sys.executable, "-W", "ignore", str(ROOT / "evidence/gpu/run.py"), "--device", "cpu", "--tiny"]
    done = subprocess.run([*command, *places.split()], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_committed_page_is_what_its_json_says(tmp_path):
    """Nobody wrote a number into it by hand."""
    (tmp_path / "results").symlink_to(ROOT / "evidence" / "gpu" / "results")
    table.write_page(tmp_path)
    assert (tmp_path / "README.md").read_text() == (ROOT / "evidence" / "gpu" / "README.md").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("engine", [order.VLLM, "rehearsal"])
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
    data, search = ("max_prompt_length", "max_response_length"), ("max_new_tokens", "max_searches")
    lengths = [*(f"data.{name}" for name in data), *(f"search.{name}" for name in search)]
    assert tiny or all(OmegaConf.select(config, key) == OmegaConf.select(own, key) for key in lengths)
    rows = config.data.train_batch_size * config.actor_rollout_ref.rollout.n
    assert rows < own.data.train_batch_size * own.actor_rollout_ref.rollout.n


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
