"""What the trainer's process does alone between rollout and forward, while every GPU waits, and what it reads and writes.

    python evidence/information_gain/driver.py [--rows 1024] [--repeats 5] [--json FILE]

Rows as `TurnAgentLoop` writes them, in a store in memory: 8 rollouts a prompt of 500 tokens, 2 to 4 turns, 3,096 response
tokens at most. `CreditTrainer` makes the step with verl's methods; the forward gives random numbers. CPU seconds of one
thread, medians, without the store's, the forward's and the garbage collector's (it is off: a collection goes through all of
verl's modules and takes .3 s whenever it comes). Bytes: of tensors in our own calls of the store, not in verl's.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import tempfile
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict
from transfer_queue import KVBatchMeta
from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics
from verl.trainer.ppo.v1 import trainer_base
from verl.trainer.ppo.v1.trainer_base import PPOTrainer

from verl_credit.host.rollout.agent_loop import TurnAgentLoopOutput
from verl_credit.host.step import store, trainer
from verl_credit.names import BRANCH_LOG_PROBS, BRANCHES, ROW_RECORD, TURN_REWARDS
from verl_credit.recipe.compose import unchecked_config
from verl_credit.turns import step as credit_step
from verl_credit.turns.book import RowRecord
from verl_credit.turns.branches import decode_branches
from verl_credit.worlds.lab.protocol import make_tokenizer

PROMPT, RESPONSE, ROLLOUTS = 500, 3096, 8
OVERRIDES = [
    "data.train_files=x", "data.val_files=x", "actor_rollout_ref.model.path=x", "search.url=http://x",
    "keep_rollouts.steps=0",
]  # fmt: skip


class Store:
    """TransferQueue's calls in memory. Of calls with ``counts``: the bytes of each field, and the CPU seconds in all."""

    def __init__(self, rows: dict[str, dict]):
        self.rows, self.bytes, self.cpu_s = rows, Counter(), 0.0

    def calls(self, counts: bool) -> SimpleNamespace:
        def put(keys, partition_id, fields, tags=None):
            for name, column in fields.items():
                values = (
                    column.unbind() if isinstance(column, torch.Tensor) else [item.data for item in column]
                )
                for key, value in zip(keys, values, strict=True):
                    self.rows[key][name] = value
                count("written", name, values)
            return KVBatchMeta(keys=list(keys), tags=[{}] * len(keys), partition_id=partition_id)

        def get(keys, partition_id, select_fields):
            found = {}
            for name in select_fields:
                if not all(name in self.rows[key] for key in keys):
                    continue
                values = [self.rows[key][name] for key in keys]
                count("read", name, values)
                tensors = isinstance(values[0], torch.Tensor)
                found[name] = store.nested(values) if tensors else NonTensorStack(*map(NonTensorData, values))
            return TensorDict(found, batch_size=len(keys))

        def count(what, name, values):
            if counts and isinstance(values[0], torch.Tensor):
                self.bytes[f"{what} {name}"] += sum(value.nbytes for value in values)

        def kept_apart(call):
            def run(*given, **named):
                begun = time.process_time()
                try:
                    return call(*given, **named)
                finally:
                    self.cpu_s += time.process_time() - begun

            return run

        return SimpleNamespace(kv_batch_put=kept_apart(put), kv_batch_get=kept_apart(get))


def rows_of_a_step(n: int, tokenizer) -> dict[str, dict]:
    draw, rows = random.Random(0), {}
    ids, special = range(10, len(tokenizer) - 60), tokenizer.convert_tokens_to_ids("<|im_start|>")
    for number in range(n):
        if number % ROLLOUTS == 0:
            prompt = [*draw.choices(ids, k=PROMPT - 2), special, 20]
        response, turn_ids, turns = [], [], draw.choice((3, 3, 4, 4))
        for turn in range(turns):
            response += draw.choices(ids, k=140)
            turn_ids += [turn] * 140
            if turn < turns - 1:
                page = draw.randrange(500, 780)
                response += [*draw.choices(ids, k=page), special, 20]
                turn_ids += [-1] * (page + 2)
        assert len(response) <= RESPONSE
        extra = {ROW_RECORD: RowRecord(stop_reason="answer").as_dict(), TURN_REWARDS: None}
        output = TurnAgentLoopOutput(
            prompt_ids=prompt, response_ids=response, response_mask=[int(t >= 0) for t in turn_ids],
            turn_ids=turn_ids, metrics=AgentLoopMetrics(), extra_fields=extra, reward_score=draw.choice((0.0, 1.0)),
        )  # fmt: skip
        row = output.as_dict() | {"uid": f"{number // ROLLOUTS}", "extra_info": {"question": "Who?"}}
        row["reward_model"] = {"ground_truth": {"target": [f"gold answer {number // ROLLOUTS}"]}}
        rows[f"{number // ROLLOUTS:04}_{number % ROLLOUTS}_0"] = row
    return rows


def forward(self, batch, metrics):
    """Random log-probs in the place of the policy's."""
    begun = time.process_time()
    for key in batch.keys:
        row = self.kept.rows[key]
        row["old_log_probs"] = row["entropy"] = -torch.rand(len(row["responses"]))
        if BRANCHES in row:
            row[BRANCH_LOG_PROBS] = -torch.rand(max(1, len(decode_branches(row[BRANCHES])[1])))
    self.timing["forward"] = time.process_time() - begun
    return batch


def timed(self, name, function):
    """``function``, whose CPU seconds without those of the store come into ``timing``."""

    def run(*given, **named):
        begun = time.process_time() - self.kept.cpu_s
        result = function(*given, **named)
        self.timing[name] = time.process_time() - self.kept.cpu_s - begun
        return result

    return run


def step(n: int, folder: str, tokenizer) -> dict[str, dict]:
    """CPU seconds around the forward and of two parts of it, CPU seconds of the advantages, and bytes by field."""
    kept, metrics = Store(rows_of_a_step(n, tokenizer)), {}
    batch = KVBatchMeta(keys=list(kept.rows), tags=[{}] * n, partition_id="train")
    with ExitStack() as stack:

        def patch(owner, name, value):
            stack.enter_context(mock.patch.object(owner, name, value))

        patch(PPOTrainer, "__init__", lambda self, config: setattr(self, "config", config))
        patch(PPOTrainer, "_compute_old_log_prob", forward)
        patch(store, "tq", kept.calls(True))
        patch(trainer_base, "tq", kept.calls(False))
        made = trainer.CreditTrainer(unchecked_config("multihop_qwen3_4b", [*OVERRIDES, f"run_dir={folder}"]))
        made.kept, made.timing, made.timing_raw, made.tokenizer = kept, {}, {}, tokenizer
        made.global_steps, made.total_training_steps, made.actor_rollout_wg = 1, 10, None
        made.credit = trainer.CreditRun.of(made.settings, tokenizer)
        patch(store, "fetch_turn_batch", timed(made, "fetch", store.fetch_turn_batch))
        patch(credit_step, "plan_gains", timed(made, "plan", credit_step.plan_gains))
        batch = timed(made, "log_probs", made._compute_old_log_prob)(batch, metrics)
        timed(made, "advantages", made._compute_advantage)(batch, metrics)
    made.timing["log_probs"] -= made.timing.pop("forward")
    return {"cpu_s": made.timing, "bytes": dict(kept.bytes), "contexts": metrics["credit/gain/contexts"]}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=1024)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    gc.disable()
    tokenizer = make_tokenizer([])
    with tempfile.TemporaryDirectory() as folder:
        runs = [step(arguments.rows, folder, tokenizer) for _ in range(arguments.repeats)]
    cpu_s = {
        part: round(statistics.median(run["cpu_s"][part] for run in runs), 3) for part in runs[0]["cpu_s"]
    }
    found = {"rows": arguments.rows, "cpu_s": cpu_s, "contexts": runs[0]["contexts"]}
    found["mib"] = {name: round(n / 2**20, 2) for name, n in runs[0]["bytes"].items()}
    found["mib"]["all"] = round(sum(runs[0]["bytes"].values()) / 2**20, 1)
    print(json.dumps(found, indent=1))
    if arguments.json:
        arguments.json.write_text(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
