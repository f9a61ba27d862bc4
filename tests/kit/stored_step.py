"""A step of one of our trainers from the rows in a store to the rows in the store, without Ray."""

from __future__ import annotations

from typing import ClassVar

import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict
from verl.trainer.ppo.v1.trainer_base import PPOTrainer

from kit.byte_world import make_tokenizer
from kit.fake_store import FakeStore
from kit.recipes import load_config
from kit.turn_rows import Row, padding_row, turn_batch
from verl_credit.host.step import store
from verl_credit.names import ROW_RECORD, TURN_IDS, TURN_REWARDS
from verl_credit.turns.rollout.book import RowRecord

TURNS_OF_TWO = ("call", "page", "done")
ROWS = [
    Row(
        TURNS_OF_TWO,
        turn_rewards=(reward,),
        columns={"of_turns": [reward]},
        record=RowRecord(stop_reason="answer", versions=versions),
    )
    for reward, versions in (
        (0.4, [[4, 4], [5, 5]]),
        (0.1, [[5, 5], [5, 5]]),
        (-0.2, [[3, 3], [3, 4]]),
        (0.3, [[5, 5], [5, 5]]),
    )
]
OUTCOMES, PROMPTS = [1.0, 0.0, 1.0, 0.0], ["a", "a", "b", "b"]
STEP = 6
OVERRIDES = [
    "algorithm.turn_signal=tool_reward",
    "algorithm.info_gain_norm_mode=separate",
    "keep_rollouts.groups=1",
]


class Workers:
    """The actors: log-probs that follow from the token's place, the row, and the version of the weights."""

    _dispatch_info: ClassVar[dict] = {"actor": [0]}

    def __init__(self, kept: FakeStore):
        self.kept, self.version, self._copies, self.asked = kept, 0, {}, []

    def save_model_to_cpu(self, n):
        self._copies[n] = self.version

    def restore_model_from_cpu(self, n):
        self.version = self._copies[n]

    def clear_cpu_model(self, n):
        del self._copies[n]

    def compute_log_prob(self, batch):
        """``asked``: the version, and whether these are rows of the store."""
        stored = not isinstance(batch, TensorDict)
        self.asked.append((self.version, stored))
        ids = (
            self.kept.kv_batch_get(batch.keys, batch.partition_id, ["input_ids"])["input_ids"]
            if stored
            else batch["input_ids"]
        )
        log_probs = [
            -0.1 - 0.01 * torch.arange(len(row)).double() - 0.02 * number - self.version
            for number, row in enumerate(ids.unbind())
        ]
        fields = {
            "log_probs": torch.nested.as_nested_tensor(log_probs, layout=torch.jagged),
            "entropy": torch.nested.as_nested_tensor([-row for row in log_probs], layout=torch.jagged),
        }
        return store.write(batch, fields) if stored else TensorDict(fields, batch_size=len(log_probs))


def put(kept: FakeStore, turns):
    """The rows as verl's agent loops write them; a fifth is a copy of the first that fills the batch."""
    n = range(len(turns.prompt_ids))
    prompts = [[*PROMPTS, "pad"][row] for row in n]
    names = [f"{prompt}_{number}_0" for number, prompt in enumerate(prompts)]

    def nested(rows):
        return torch.nested.as_nested_tensor([torch.as_tensor(row) for row in rows], layout=torch.jagged)

    def objects(values):
        return NonTensorStack(*(NonTensorData(value) for value in values))

    lengths = [len(ids) for ids in turns.response_ids]
    made_from = [0 if turns.is_padding[row] else row for row in n]
    fields = {
        "prompts": nested(turns.prompt_ids),
        "responses": nested(turns.response_ids),
        "input_ids": nested([turns.prompt_ids[row] + turns.response_ids[row] for row in n]),
        **dict.fromkeys(
            ("response_mask", "loss_mask"),
            nested([turns.response_mask_B_T[row, : lengths[row]] for row in n]),
        ),
        TURN_IDS: nested([turns.turn_ids_B_T[row, : lengths[row]].short() for row in made_from]),
        "rollout_log_probs": nested([-0.5 * torch.ones(lengths[row]).double() for row in n]),
        "rm_scores": nested([outcome_at_the_end([*OUTCOMES, 1.0][row], lengths[row]) for row in n]),
        "uid": objects(prompts),
        "reward_model": objects([{"ground_truth": truth} for truth in turns.ground_truths]),
        "extra_info": objects(turns.extra_infos),
        "of_turns": objects([turns.columns[row].get("of_turns") for row in n]),
        "extra_fields": objects(
            [{ROW_RECORD: turns.records[row], TURN_REWARDS: turns.turn_rewards[row]} for row in n]
        ),
    }
    tags = [{"is_padding": padding} for padding in turns.is_padding]
    return kept.kv_batch_put(names, "train", TensorDict(fields, batch_size=len(names)), tags)


def outcome_at_the_end(outcome: float, length: int) -> torch.Tensor:
    scores = torch.zeros(length)
    scores[-1] = outcome
    return scores


class StoredStep:
    """``make(kind, *overrides)`` makes the step of a trainer; afterwards ``metrics``, and ``field(name)`` of every row.

    ``filled``: with a row that fills the batch. ``updates``: those that the step has made before, each with a version of the
    weights of its own.
    """

    def __init__(self, tmp_path, monkeypatch):
        self.kept, self._folder = FakeStore().install(monkeypatch), tmp_path
        self.weighed = []  # fields of the store that hold weights of its tokens
        monkeypatch.setattr(
            PPOTrainer, "__init__", lambda trainer, config: setattr(trainer, "config", config)
        )
        self.tokenizer = tokenizer = make_tokenizer()
        monkeypatch.setattr(PPOTrainer, "_update_actor", lambda trainer, batch, metrics: batch)
        monkeypatch.setattr(
            PPOTrainer, "_init_tokenizer", lambda trainer: setattr(trainer, "tokenizer", tokenizer)
        )

    def make(self, kind, *overrides, updates=0, filled=True):
        trainer = kind(load_config("lab", [*OVERRIDES, f"run_dir={self._folder}", *overrides]))
        trainer.actor_rollout_wg = Workers(self.kept)
        trainer.global_steps, trainer.total_training_steps, trainer.timing_raw = STEP, 30, {}
        trainer._init_tokenizer()
        self.workers, self.metrics = trainer.actor_rollout_wg, {}
        for update in range(updates + 1):
            trainer.local_trigger_step = self.workers.version = update
            turns = turn_batch([*ROWS, *[padding_row(ROWS[0])] * filled], trainer.tokenizer)
            batch = trainer._compute_old_log_prob(put(self.kept, turns), self.metrics)
        self._batch = trainer._compute_advantage(batch, self.metrics)
        trainer._update_actor(self._batch, self.metrics)
        return self.metrics, self.field

    def field(self, name):
        return list(store.read(self._batch, name)[name].unbind())
