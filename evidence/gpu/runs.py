"""Starts `verl-credit train` as a user does, and reads its output files."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from gpu.machine import environment

GPU_RECIPES = ("math_sepa", "spark_qwen3_4b", "multihop_qwen3_4b", "singlehop_qwen3_4b")
TWINS = {"singlehop_qwen3_4b": "multihop_qwen3_4b"}
# A policy with random weights calls no tool and never ends: its one turn fills the row, as a plan assumes.
FULL_ROWS = ("search.max_searches=0", "search.max_new_tokens=${data.max_response_length}")
# A run that shows a mechanism and not its cost, with few and short rows; several fit on one GPU at a time.
SMALL = (
    "data.train_batch_size=8", "actor_rollout_ref.actor.ppo_mini_batch_size=4", "actor_rollout_ref.rollout.n=4",
    "search.max_new_tokens=64", "data.max_response_length=512",
    "actor_rollout_ref.rollout.gpu_memory_utilization=0.15",
)  # fmt: skip
TINY = (
    "data.train_batch_size=4", "actor_rollout_ref.actor.ppo_mini_batch_size=2", "actor_rollout_ref.rollout.n=2",
    "search.max_new_tokens=16", "data.max_prompt_length=768", "data.max_response_length=128", "search.max_searches=1",
    "trainer.total_training_steps=1", "trainer.save_freq=-1",
)  # fmt: skip


def recipes(setting) -> dict[str, list[str]]:
    """Recipe -> the overrides for this machine's hardware."""
    if setting.device == "cpu":
        return {"search_cpu": list(TINY)}
    return {name: [f"hardware={setting.hardware}"] for name in GPU_RECIPES}


def named_model(recipe: str) -> str:
    """The name of the recipe's model."""
    return {"math_sepa": "Qwen/Qwen3-4B-Instruct-2507"}.get(recipe, "Qwen/Qwen3-4B")


def command(*arguments: str) -> tuple[int, str]:
    """(exit code, everything that `verl-credit` printed)."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "verl_credit.cli", *arguments], env=environment(),
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
    )  # fmt: skip
    return done.returncode, done.stdout


def plan(recipe: str, overrides: Sequence[str]) -> dict:
    """`verl-credit plan --json`. Raises RuntimeError with its message when it cannot plan."""
    code, output = command("plan", "--config-name", recipe, "--json", *overrides)
    try:
        planned = json.loads(output[output.index("{") :])
    except ValueError:
        planned = {"error": output[-300:]}
    if "error" in planned:
        raise RuntimeError(f"plan ended with exit code {code}: {planned['error']}")
    return planned


def train(
    setting, name: str, recipe: str, overrides: Sequence[str], *, keep: bool = False
) -> tuple[Path, str]:
    """(folder of the run, its output). Raises RuntimeError when it fails."""
    run_dir = Path(setting.work).resolve() / "runs" / name
    if not keep:
        shutil.rmtree(run_dir, ignore_errors=True)
    run_dir.parent.mkdir(parents=True, exist_ok=True)
    code, output = command("train", "--config-name", recipe, f"run_dir={run_dir}", *overrides)
    if code:
        # The last line says why; those before it are shown as far as there is room.
        last = " | ".join(reversed(output.strip().splitlines()[-4:]))
        raise RuntimeError(f"train ended with exit code {code}: {last}")
    return run_dir, output


def metrics(run_dir: Path) -> list[dict]:
    from verl_credit.records.run.files import METRICS, read_json_lines

    return read_json_lines(run_dir / METRICS)


@contextmanager
def device_peak() -> Iterator[list[int]]:
    """The peak of MiB in use on a GPU, by nvidia-smi twice a second; an empty list if it reports none (GB10, no GPU)."""
    seen: list[int] = []
    if shutil.which("nvidia-smi") is None:
        yield seen
        return
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "-lms", "500"]
    process = subprocess.Popen(query, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)

    def listen():
        for line in process.stdout:
            if line.strip().isdigit():
                seen[:] = [max([*seen, int(line)])]

    reader = threading.Thread(target=listen, daemon=True)
    reader.start()
    try:
        yield seen
    finally:
        process.kill()
        process.wait()
        reader.join(5)
