"""The queue, in order of value: what each run changes in its recipe, how long it may take, what it decides.

Memory is decided by the tokens of a micro-batch and by the longest row: rows are cut in number, never in length.
"""

from __future__ import annotations

from dataclasses import dataclass

HF = "hf"  # the engine of the rehearsal on a CPU
VLLM = "vllm"


@dataclass(frozen=True)
class Run:
    """``limit_s``: half as much again as was estimated after R1 on one H100."""

    name: str
    recipe: str
    decides: str
    model: str
    steps: int
    overrides: tuple[str, ...]
    limit_s: int
    resumes: str = ""
    """The run whose folder and checkpoint this one takes over."""

    def lora(self) -> bool:
        return any(one.startswith("actor_rollout_ref.model.lora_rank=") for one in self.overrides)


ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
GROUPS = ("data.train_batch_size=8", f"{ROLLOUT}.n=8", f"{ACTOR}.ppo_mini_batch_size=2")
LORA = ("actor_rollout_ref.model.lora_rank=32", f"{ROLLOUT}.load_format=safetensors")
EAGER, GRAPHS = f"{ROLLOUT}.enforce_eager=true", f"{ROLLOUT}.enforce_eager=false"
# Each process that imports verl takes seconds of all cores at a first start.
FEW_PROCESSES = ("reward.num_workers=1", f"{ROLLOUT}.agent.num_workers=2")
MATH = (
    "data.train_batch_size=16", f"{ROLLOUT}.n=4", f"{ACTOR}.optim.lr=1e-3", "actor_rollout_ref.model.lora_rank=64",
    "algorithm.rollout_correction.rollout_is=token", EAGER, "trainer.save_freq=2",
)  # fmt: skip
NO_SAVE = "trainer.save_freq=-1"
TINY = ("data.train_batch_size=2", f"{ROLLOUT}.n=4", f"{ACTOR}.ppo_mini_batch_size=1", "seed=0")
OF_VLLM = (f"{ROLLOUT}.load_format=", f"{ROLLOUT}.enforce_eager=")

# What no GPU has shown comes first.
QUEUE = (
    Run("R2", "math_sepa", "token credit at T=.7, the adapters that the engine samples with, a checkpoint",
        "qwen3-4b", 2, MATH, 560),
    Run(
        "R4", "multihop_qwen3_4b", "full fine-tuning, whole weights to the engine, CUDA graphs", "qwen3-1.7b", 2,
        ("model=qwen3_1_7b", *GROUPS, GRAPHS, NO_SAVE), 500,
    ),
    Run("R3", "math_sepa", "an exact resume", "qwen3-4b", 3, MATH, 420, resumes="R2"),
    Run(
        "R1", "multihop_qwen3_4b", "4 B with LoRA makes steps with gains, what gains cost, memory by phase", "qwen3-4b", 3,
        (*GROUPS, *LORA, EAGER, NO_SAVE, "algorithm.info_gain_every=2"), 810,
    ),
    Run(
        "R5", "spark_qwen3_4b", "the Spark's recipe with its rows of 5,120 tokens", "qwen3-4b", 1,
        (*GROUPS, *LORA, EAGER, NO_SAVE, "max_hours=null"), 440,
    ),
)  # fmt: skip


def overrides(run: Run, *, tiny: bool, engine: str, hardware: str) -> list[str]:
    """Returns the run's overrides without its data, model and folder."""
    given = [
        f"hardware={'laptop' if tiny else hardware}",
        f"trainer.total_training_steps={run.steps}",
    ]
    if engine == HF:
        given += [one for one in run.overrides if not one.startswith(OF_VLLM)]
        given += [
            f"{ROLLOUT}.name={HF}",
            *(["actor_rollout_ref.model.lora.merge=true"] if run.lora() else []),
        ]
    else:
        given += run.overrides
    return [*given, *(TINY if tiny else FEW_PROCESSES)]
