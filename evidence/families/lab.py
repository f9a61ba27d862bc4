"""Trains the lab for three steps with a tiny policy of another family, and compares its gains with single rows.

    python evidence/families/lab.py [--families qwen3_5 llama gpt_oss] [--scorers rows server] [--out DIR]

The policy has the family's own layers and writes its calls in the family's form (`forms.py`). It is trained on the tiny
lab's demonstrations, so that it searches, then `verl-credit train` runs with no key of the family given: the attention, the
padding, the tool format and the text before the scored answer are what `auto` chooses. The gains of the first step, which
the start's weights have made, are computed again with transformers alone, one row to a forward.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

import torch
import yaml
from forms import FORMS
from transformers import AutoModelForCausalLM, AutoTokenizer

from verl_credit.precision import one_thread
from verl_credit.records.run.tables import ROLLOUTS, TURNS, read_table, table_path
from verl_credit.worlds.lab import warm_start
from verl_credit.worlds.lab.build import build_lab
from verl_credit.worlds.lab.config import SIZES, WarmStart
from verl_credit.worlds.lab.evaluate import LocalRetriever
from verl_credit.worlds.lab.protocol import name_groups
from verl_credit.worlds.lab.world import make_world

SEED = 0


def make_policy(family: str, lab, folder: Path, steps: int) -> None:
    """Trains the family's tiny model on the lab's demonstrations in the family's form."""
    form, config = FORMS[family], SIZES["tiny"]
    world = make_world(SEED, config.world)
    tokenizer = form.tokenizer(world.names())
    retriever = LocalRetriever(lab.encoder, lab.index)
    names = name_groups(tokenizer, world)
    copied = {one for group in names for one in group}
    written = warm_start.make_demonstrations(world, retriever, config, SEED)
    demos = [warm_start.encode_demo(form.rewrite(one), tokenizer, copied, 2.0) for one in written]
    ends = [tokenizer.convert_tokens_to_ids(one) for one in dict.fromkeys((form.end, "<|call|>"))]
    ends = [one for one in ends if one is not None]
    torch.manual_seed(SEED)
    model = AutoModelForCausalLM.from_config(
        form.config(
            vocab_size=len(tokenizer),
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=ends,
            bos_token_id=None,
        ),
        attn_implementation="eager",
    )
    style = WarmStart(steps=steps, short_steps=steps // 2)
    with one_thread():
        warm_start.Trainer(model, demos, names, style, SEED).run(steps)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def train(lab: Path, policy: Path, run: Path, scorer: str) -> float:
    """Three steps with the family's own choices; returns the seconds."""
    began = time.monotonic()
    keys = [
        f"run_dir={run}", f"lab.dir={lab}", "lab.size=tiny", f"actor_rollout_ref.model.path={policy}",
        f"algorithm.info_gain_scorer={scorer}", "trainer.total_training_steps=3", "data.train_batch_size=4",
        "trainer.test_freq=-1", "trainer.val_before_train=false", "data.max_response_length=640",
        "search.max_new_tokens=64", "data.max_prompt_length=64", "keep_rollouts.steps=3", "keep_rollouts.groups=null",
    ]  # fmt: skip
    command = [sys.executable, "-m", "verl_credit.cli", "train", "--config-name", "lab", *keys]
    with run.with_suffix(".log").open("w") as log:
        done = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, check=False)
    if done.returncode:
        raise SystemExit(f"train ended with {done.returncode}; see {log.name}")
    return time.monotonic() - began


def compare(policy: Path, run: Path) -> dict:
    """The gains of step 1, written by the start's weights, against single rows of transformers."""
    config = yaml.safe_load((run / "config.yaml").read_text())
    prefix, template = (config["algorithm"][f"info_gain_{name}"] for name in ("prefix", "template"))
    tokenizer = AutoTokenizer.from_pretrained(policy)
    model = AutoModelForCausalLM.from_pretrained(
        policy, attn_implementation="eager", dtype=torch.float32
    ).eval()
    rows = read_table(table_path(run, ROLLOUTS, 1)).columns
    turns = read_table(table_path(run, TURNS, 1)).columns
    gains = {
        (row, turn): reward
        for row, turn, reward, has in zip(
            *(turns[n] for n in ("row", "turn", "reward", "has_reward")), strict=True
        )
        if has
    }
    probability = Probability(model, tokenizer, prefix + template)
    worst, found = 0.0, 0
    for row, prompt, response, turn_ids, golds in zip(
        *(rows[name] for name in ("row", "prompt_ids", "response_ids", "turn", "golds")), strict=True
    ):
        first = {}  # of every turn, its first token in the response
        for place, turn in enumerate(turn_ids):
            if turn >= 0:
                first.setdefault(turn, place)
        before = probability(prompt, golds)
        for turn in sorted(first)[1:]:
            after = probability([*prompt, *response[: first[turn]]], golds)
            if (row, turn - 1) in gains:
                worst, found = max(worst, abs(after - before - gains[row, turn - 1])), found + 1
            before = after
    return {"gains": found, "largest_difference": worst, "prefix": prefix}


class Probability:
    """exp(mean log-prob) of the gold answer's tokens after a context, the best alias's, by one forward a row."""

    def __init__(self, model, tokenizer, text: str):
        self.model, self.tokenizer, self.text = model, tokenizer, text

    def __call__(self, context: list[int], golds: list[str]) -> float:
        return max(self._one(context, gold) for gold in golds)

    @torch.no_grad()
    def _one(self, context: list[int], gold: str) -> float:
        head = self.text.index("{answer}")
        whole = self.tokenizer(
            self.text.replace("{answer}", gold), add_special_tokens=False, return_offsets_mapping=True
        )
        ids = torch.tensor([[*context, *whole["input_ids"]]])
        log_prob_T = self.model(ids).logits[0].log_softmax(-1)
        places = [
            len(context) + place
            for place, (start, end) in enumerate(whole["offset_mapping"])
            if start < head + len(gold) and end > head and end > start
        ]
        return (
            torch.stack([log_prob_T[place - 1, ids[0, place]] for place in places])
            .double()
            .mean()
            .exp()
            .item()
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--families", nargs="+", default=list(FORMS), choices=list(FORMS))
    parser.add_argument("--scorers", nargs="+", default=["rows", "server"])
    parser.add_argument("--steps", type=int, default=300, help="supervised steps of the policy")
    parser.add_argument("--out", type=Path, default=Path("runs/families"))
    arguments = parser.parse_args()
    out = arguments.out.resolve()
    lab = build_lab(out / "lab", world_seed=SEED, size="tiny")
    results = {}
    for family in arguments.families:
        policy = out / family / "policy"
        if not policy.exists():
            make_policy(family, lab, policy, arguments.steps)
        for scorer in arguments.scorers:
            run = out / family / scorer
            shutil.rmtree(run, ignore_errors=True)
            seconds = train(lab.root, policy, run, scorer)
            steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
            results[f"{family}, {scorer}"] = {
                "seconds": round(seconds, 1), "steps": len(steps), **compare(policy, run),
                "searches_per_row": steps[0]["credit/tool/searches_per_row"],
                "gain_turns": [s["credit/gain/turns"] for s in steps],
            }  # fmt: skip
            print(json.dumps({f"{family}, {scorer}": results[f"{family}, {scorer}"]}), flush=True)
    (out / "lab.json").write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
