"""Two steps of `real_math_cpu` that roll out with vLLM on a CPU: how far its log-probs are from the trainer's.

    make .venv-vllm/.installed
    .venv-vllm/bin/python evidence/real/vllm_steps.py --real DIR --work runs/real_vllm [--precisions float32]

DIR is the recipe's `real.dir`, with the policy built. Each precision is a run in --work; one that is finished is read again.
Writes vllm_steps.json beside this script; a precision that is not asked for stays as it is there. Ratios are the trainer's
probability over the engine's, over all sampled tokens.

    python evidence/real/vllm_steps.py --read RUN

reads the same numbers from any run with `algorithm.rollout_correction.rollout_is=token`, and writes vllm_gpu.json.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

from common import HERE, machine, write

from verl_credit.run.files import METRICS, VALIDATION, read_json_lines
from verl_credit.run.versions import VERSIONS

KEPT = HERE / "vllm_steps.json"
ROLLOUT = "actor_rollout_ref.rollout"
ENGINE = f"+{ROLLOUT}.engine_kwargs.vllm"
# Limits of vLLM's CPU back end (docs/host.md).
SETTINGS = (
    f"{ROLLOUT}.name=vllm",
    f"{ROLLOUT}.load_format=auto",
    f"{ROLLOUT}.enforce_eager=true",
    f"+{ROLLOUT}.enable_sleep_mode=false",
    f"{ROLLOUT}.free_cache_engine=true",
    f"{ROLLOUT}.tensor_model_parallel_size=1",
    f"{ENGINE}.kv_cache_memory_bytes=536870912",
    f"{ENGINE}.block_size=32",
    f"{ENGINE}.worker_extension_cls=verl_credit.host.cpu.vllm_extension.CPUWorkerExtension",
    "algorithm.rollout_correction.rollout_is=token",
    "trainer.total_training_steps=2",
    "trainer.test_freq=-1",
    "trainer.save_freq=-1",
    "trainer.val_before_train=false",
)
HELD_OUT = tuple(f"val-aux/arithmetic-{mode}/em/mean@1" for mode in ("greedy", "sampled"))
PRECISIONS = {"float32": "fp32", "bfloat16": "bf16"}
NAMES = {
    "largest ratio": "rollout_corr/rollout_is_max",
    "smallest ratio": "rollout_corr/rollout_is_min",
    "mean difference of probabilities": "training/rollout_probs_diff_mean",
    "largest difference of probabilities": "training/rollout_probs_diff_max",
    "correlation of probabilities": "training/rollout_actor_probs_pearson_corr",
    "kl": "rollout_corr/kl",
    "em": "credit/outcome/em",
    "generation, seconds": "timing_s/gen",
    "update, seconds": "timing_s/update_actor",
    "step, seconds": "timing_s/step",
}


def run(real: Path, folder: Path, dtype: str) -> list[dict]:
    if len(steps := _steps(folder)) < 2:
        precision = f"actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype={PRECISIONS[dtype]}"
        command = [sys.executable, "-m", "verl_credit.cli", "train", "--config-name", "real_math_cpu"]
        given = [f"real.dir={real}", f"run_dir={folder}", f"{ROLLOUT}.dtype={dtype}", precision]
        subprocess.run([*command, *given, *SETTINGS], check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
        steps = _steps(folder)
    return steps


def _steps(folder: Path) -> list[dict]:
    rows = read_json_lines(folder / METRICS)
    return [{"step": row["step"], **{name: row.get(key) for name, key in NAMES.items()}} for row in rows]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--real", type=Path, help="the recipe's real.dir")
    parser.add_argument("--work", type=Path, default=Path("runs/real_vllm"))
    parser.add_argument("--precisions", nargs="*", choices=PRECISIONS, default=PRECISIONS)
    parser.add_argument("--read", type=Path, help="a run that is there")
    given = parser.parse_args()
    if given.read:
        versions = json.loads((given.read / VERSIONS).read_text())
        held_out = [
            {key: row.get(key) for key in ("step", *HELD_OUT)}
            for row in read_json_lines(given.read / VALIDATION)
        ]
        write(
            HERE / "vllm_gpu.json", {"versions": versions, "held_out": held_out, "steps": _steps(given.read)}
        )
        return
    if not given.real:
        parser.error("--real DIR or --read RUN is needed")
    kept = json.loads(KEPT.read_text()) if KEPT.exists() else {}
    found = {
        dtype: run(given.real.resolve(), given.work.resolve() / dtype, dtype) for dtype in given.precisions
    }
    here = machine("torch", "transformers", "verl", "vllm")
    write(KEPT, kept | {dtype: {"machine": here, "steps": steps} for dtype, steps in found.items()})
    for dtype, steps in found.items():
        for step in steps:
            print(dtype, step)


if __name__ == "__main__":
    main()
