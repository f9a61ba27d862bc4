"""The parts in order of value, each with its files, requirements, time limit, prediction and the prediction's source."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Part:
    """``module`` has ``run(setting, record)``. The limits are seconds; ``tiny_limit_s`` holds for ``--tiny``."""

    name: str
    module: str
    what: str
    predicted: str
    files: tuple[str, ...] = ()
    """Patterns of the files that decide its results: a change elsewhere does not repeat it."""
    needs: tuple[str, ...] = ()
    """Any of verl, vllm (packages) and cuda (at least one GPU), in addition to torch and transformers."""
    limit_s: int = 1200
    tiny_limit_s: int = 120
    on_cpu: str = ""
    """Why the part does not run with ``--device cpu``; "" if it does."""

    def missing(self, machine: Mapping) -> str:
        """Why the part cannot run here; "" if it can."""
        if not machine["gpus"] and self.on_cpu:
            return self.on_cpu
        have = set(machine["software"]) | ({"cuda"} if machine["gpus"] else set())
        # On a CPU the tiny settings roll out with transformers.
        required = [need for need in self.needs if machine["gpus"] or need not in ("vllm", "cuda")]
        return ", ".join(WORDS[need] for need in required if need not in have)


WORDS = {"verl": "verl is not installed", "vllm": "vLLM is not installed", "cuda": "no GPU is here"}
ATTENTION = (
    "evidence/gpu/models.py",
    "verl_credit/policy/attention/*.py",
    "verl_credit/recipe/plan/model_shape.py",
)
FORWARD = "evidence/information_gain/forward.py"
WORLD = tuple(f"evidence/gpu/half_hour/{name}.py" for name in ("world", "text", "weights"))
TRAINING = (
    "evidence/gpu/half_hour/*.py", "evidence/gpu/half_hour/*.yaml", "evidence/gpu/coin_reward.py", "verl_credit/**/*.py",
    "retriever/**/*.py", "recipes/**/*.yaml",
)  # fmt: skip

PARTS = (
    Part(
        "half_hour", "gpu.half_hour.drive",
        "recipes for larger models: steps, gains and their price, memory by phase, MFU, LoRA, an exact resume",
        "verl-credit plan; evidence/gpu/half_hour/order.py says what each run decides",
        files=TRAINING, needs=("verl",), limit_s=2400, tiny_limit_s=900,
    ),
    Part(
        "kernels", "gpu.part_kernels",
        "attention kernels against the definition and against eager: values, gradients, compilations, memory, time",
        "errors within the start's tolerances (verl_credit/policy/attention), no compilation for a new length, memory below "
        "that of unfused attention",
        files=("evidence/gpu/part_kernels.py", *ATTENTION), limit_s=1800,
    ),
    Part(
        "branches", "gpu.part_branches",
        "gains by branch against gains by rows on English text: error, correlation, spread",
        "equal in fp32; in bf16 no further from fp32 than rows are (tests/policy/test_attention_kernels.py)",
        files=("evidence/gpu/part_branches.py", FORWARD, *ATTENTION), limit_s=1200,
    ),
    Part(
        "forward", "gpu.part_forward",
        "what gains cost beside the forward that is made anyway (evidence/information_gain/forward.py)",
        "the limits and the CPU's table in evidence/information_gain/README.md",
        files=("evidence/gpu/part_forward.py", FORWARD, *ATTENTION), limit_s=1800,
    ),
    Part(
        "log_probs", "gpu.part_log_probs",
        "log-probs of sampled tokens: ours, flash-attn's loss, verl's loop: time, memory, error",
        "ours and flash-attn's within 1e-6 of float64; memory as verl_credit/recipe/plan/activations.py counts it",
        files=(
            "evidence/gpu/part_log_probs.py", "evidence/gpu/models.py", "verl_credit/policy/log_probs.py",
            "verl_credit/config/log_prob_path.py", "verl_credit/policy/log_prob_chunks.py",
            "verl_credit/recipe/plan/activations.py", "verl_credit/recipe/plan/job.py",
        ),
        limit_s=900,
    ),
)  # fmt: skip
