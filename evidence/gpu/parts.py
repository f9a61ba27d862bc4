"""The parts in order of value, each with its requirements, time limit, prediction and the prediction's source."""

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

PARTS = (
    Part(
        "kernels", "gpu.part_kernels",
        "attention kernels against the definition and against eager: values, gradients, compilations, memory, time",
        "errors within the start's tolerances (verl_credit/policy/attention), no compilation for a new length, memory below "
        "that of unfused attention",
        limit_s=1800,
    ),
    Part(
        "branches", "gpu.part_branches",
        "gains by branch against gains by rows on English text: error, correlation, spread",
        "equal in fp32; in bf16 no further from fp32 than rows are (tests/policy/test_attention_kernels.py)",
        limit_s=1200,
    ),
    Part(
        "forward", "gpu.part_forward",
        "what gains cost beside the forward that is made anyway (evidence/information_gain/forward.py)",
        "the limits and the CPU's table in evidence/information_gain/README.md",
        limit_s=1800,
    ),
    Part(
        "log_probs", "gpu.part_log_probs",
        "log-probs of sampled tokens: ours, flash-attn's loss, verl's loop: time, memory, error",
        "ours and flash-attn's within 1e-6 of float64; memory as verl_credit/recipe/plan/activations.py counts it",
        limit_s=900,
    ),
    Part(
        "steps", "gpu.part_steps",
        "a training step of every recipe that fits: peaks and seconds of its phases",
        "verl-credit plan",
        needs=("verl", "vllm", "cuda"), limit_s=7200, tiny_limit_s=600,
    ),
    Part(
        "resume", "gpu.part_resume",
        "two steps, save, resume for the third",
        "resume: exact (tests/e2e/test_e2e_lab.py)",
        needs=("verl", "vllm", "cuda"), limit_s=3600,
        on_cpu="two more runs of a minute each; tests/e2e/test_e2e_lab.py checks it on a CPU",
    ),
    Part(
        "server", "gpu.part_server",
        "scorer `server`: vLLM's log-probs of a prompt with and without a cache hit, against `branch`",
        "a shorter or a full list, aligned from the end; bf16: 0.045 nats (docs/host.md: 1.4e-6 in fp32)",
        needs=("verl", "vllm", "cuda"), limit_s=1200,
        on_cpu="vLLM is needed; `make test-vllm` checks it on a CPU",
    ),
    Part(
        "lora", "gpu.part_lora",
        "LoRA under vLLM: do adapters arrive",
        "the engine's log-probs follow the trainer's after an update",
        needs=("verl", "vllm", "cuda"), limit_s=3600,
        on_cpu="vLLM is needed: the engine `hf` takes full weights only",
    ),
    Part(
        "said", "gpu.part_said",
        "`doctor` and `plan` beside what happened",
        "doctor fails no check of what ran; its attention checks say what `kernels` found",
        needs=("verl",), limit_s=900,
    ),
)  # fmt: skip
