"""LoRA under vLLM: compares the engine's log-probs with those of the trainer's new adapter after an update.

Two steps at a large learning rate. In the second the engine samples with the adapter of the first; without it, its
log-probs would be the base model's, far from the trainer's.
"""

from __future__ import annotations

from gpu import runs
from gpu.part_steps import _first
from gpu.record import at_most
from gpu.world import model_folder, world

RECIPE = "math_sepa"
SOURCE = "assumed: engine and trainer differ by less than 0.15 nats a token in bf16"
K3 = 0.01  # r - 1 - log r of a token's ratio r, in the mean; half its squared log


def run(setting, record) -> None:
    with world(setting) as here:
        model = model_folder(setting, runs.named_model(RECIPE))
        hardware = "spark" if setting.hardware == "spark" else "h100x1"
        given = [
            f"hardware={hardware}", *here.overrides(RECIPE, model), *runs.SMALL, "trainer.save_freq=-1",
            "trainer.total_training_steps=2", "actor_rollout_ref.actor.optim.lr=1e-3",
            "algorithm.rollout_correction.rollout_is=token",  # verl then compares the two over all sampled tokens
        ]  # fmt: skip
        run_dir, _ = runs.train(setting, "lora", RECIPE, given)
    for row in runs.metrics(run_dir):
        found = {
            "k3": _first(row, "rollout_corr/k3_kl"),
            "log_ppl_difference": _first(row, "rollout_corr/log_ppl_diff"),
            "moved_by_an_update": _first(row, "actor/ppo_kl"),
            "grad_norm": _first(row, "actor/grad_norm"),
        }
        record.add(f"step {row['step']}", found, {"k3": at_most(K3)}, SOURCE)
