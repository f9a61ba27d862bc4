"""Runs of GRPO by the twin whose middle and late policies `cosine.py` measures, chosen by their training rollouts.

    python evidence/horizon/policies.py LAB HOPS WORLD_SEED SEED RUN

RUN gets config.yaml, metrics.jsonl and two checkpoints: the policy after the first step for which the mean exact match of
its rollouts and of the step's before is at least .5, and the same for .7, where the run ends. After 30 steps it ends anyhow,
and a policy that is not reached by then is the one after step 30. Settings are the recipe's.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from verl_credit.cli.train.start import save_config
from verl_credit.recipe.compose import load_config
from verl_credit.records.run.files import METRICS, append_json
from verl_credit.records.run.progress import say_at_once
from verl_credit.study.twin import Twin

SHARES, MOST = (0.5, 0.7), 30


def main(lab: str, hops: str, world: str, seed: str, run: Path) -> None:
    given = {"lab.dir": lab, "lab.hops": hops, "lab.world_seed": world, "seed": seed, "data.seed": seed}
    given |= {"run_dir": run, "trainer.total_training_steps": MOST, "algorithm.info_gain_norm_mode": "none"}
    config = load_config("lab", [f"{key}={value}" for key, value in given.items()])
    torch.set_num_threads(1)
    run.mkdir(parents=True)
    save_config(config, run)
    twin, waits, before = Twin(config, run, say_at_once), list(SHARES), 0.0
    for step, metrics in twin.steps():
        append_json(run / METRICS, {"step": step, **metrics})
        em = metrics["credit/outcome/em"]
        reached = [share for share in waits if (step > 1 and (em + before) / 2 >= share) or step == MOST]
        if reached:
            twin.save(run / "checkpoints" / f"global_step_{step}" / "actor" / "huggingface")
            say_at_once(f"step {step} is the policy of {', '.join(map(str, reached))}")
        waits, before = [share for share in waits if share not in reached], em
        if not waits:
            return


if __name__ == "__main__":
    main(*sys.argv[1:5], Path(sys.argv[5]).resolve())
