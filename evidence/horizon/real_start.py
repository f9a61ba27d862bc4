"""A supervised start of `real_cpu` in half of the time: the recipe's demonstrations, epochs and batches, but only the upper
third of the layers and the last norm are trained, at twice the learning rate.

    python evidence/horizon/real_start.py --real DIR --questions QUESTIONS --out POLICY

DIR has `policy`, `encoder` and `multihop`, as `verl-credit real --dir DIR` makes them.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict
from pathlib import Path

import torch
from transformers import PreTrainedModel

from verl_credit.precision import one_thread
from verl_credit.recipe.compose import load_config
from verl_credit.records.run.progress import Throttled, say_at_once
from verl_credit.worlds.real import multihop

SHARE = 3
"""One layer of so many is trained, the upper ones."""
STYLE = multihop.WarmStart(lr=1e-4)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name in ("--real", "--out"):
        parser.add_argument(name, type=Path, required=True)
    parser.add_argument("--questions", required=True)
    given = parser.parse_args()
    config = load_config("real_cpu", [f"real.dir={given.real}", f"real.questions={given.questions}"])
    data, search = config.data, config.search
    template = config.actor_rollout_ref.model.custom_chat_template
    longest = data.max_prompt_length + data.max_response_length
    view = multihop.View(template, search.topk, search.max_page_chars, longest)
    whole = multihop.train

    def upper(model: PreTrainedModel, demos, style, seed, on_step):
        train_upper(model)
        return whole(model, demos, STYLE, seed, on_step)

    multihop.train = upper
    given.out.mkdir(parents=True, exist_ok=True)
    with one_thread():
        began, say = time.process_time(), Throttled(say_at_once, "real")
        parts = (given.real / name for name in ("policy", "encoder", "multihop"))
        made = multihop.write_start(given.out, *parts, view, config.real.data_seed, say)
    made["warm_start"] = asdict(STYLE)
    made["cpu_seconds"] = round(time.process_time() - began)
    (given.out / "start.json").write_text(json.dumps(made, indent=1) + "\n")


def train_upper(model: PreTrainedModel) -> list[torch.nn.Parameter]:
    """Freezes the rest; the embedding, which is the head too, is part of it. Returns the parameters that are trained."""
    layers = model.model.layers
    upper = [*layers[len(layers) - len(layers) // SHARE :], model.model.norm]
    model.requires_grad_(False)
    for module in upper:
        module.requires_grad_(True)
    return [weight for weight in model.parameters() if weight.requires_grad]


if __name__ == "__main__":
    main()
