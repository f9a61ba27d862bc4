"""Updates of rollouts with several outputs, by our trainer's own methods: rows are put in order, padded and handed out."""

from types import SimpleNamespace

import pytest
import torch
from omegaconf import OmegaConf
from tensordict import NonTensorStack, TensorDict
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer
from verl.trainer.ppo.v1.trainer_base import PPOTrainer

from kit.fake_store import FakeStore
from verl_credit.errors import IntegrityError
from verl_credit.host.rollout.agent_manager import RolloutWatch
from verl_credit.host.step.trainer import CreditTrainer
from verl_credit.turns.rollout.sessions import session_of

KEYS = [f"q_{session}_{output}" for session, outputs in enumerate((1, 3, 1, 2)) for output in range(outputs)]


def nested(values):
    return torch.nested.as_nested_tensor([torch.tensor(one) for one in values], layout=torch.jagged)


class Workers:
    def __init__(self, ranks):
        self.ranks, self.handed = ranks, []
        self._dispatch_info = {"actor": list(range(ranks))}

    def _query_dispatch_info(self, mesh):
        return self._dispatch_info[mesh]

    def update_actor(self, batch):
        self.handed.append(dict(batch.extra_info))
        return {"metrics": {"mfu": [0.0]}}


def balanced(monkeypatch, keys, ranks=1, micro=None, expected=4, **more):
    """(trainer, batch) of a step with 2 rollouts of each question, and one question in an update."""
    fields = {
        name: nested([[n + 1] * (n + 2) for n in range(len(keys))])
        for name in ("prompts", "responses", "input_ids", "response_mask", "position_ids")
    } | {"uid": NonTensorStack(*keys)}
    store = FakeStore().install(monkeypatch)
    tags = [{"seq_len": 2 * (n + 2), "prompt_len": n + 2, "response_len": n + 2} for n in range(len(keys))]
    batch = store.kv_batch_put(keys, "train", TensorDict(fields, batch_size=len(keys)), tags)
    monkeypatch.setattr(PPOTrainer, "__init__", lambda trainer, config: setattr(trainer, "config", config))
    trainer = object.__new__(CreditTrainer)
    trainer.config = OmegaConf.create({
        "actor_rollout_ref": {"actor": {"ppo_mini_batch_size": 1, "ppo_micro_batch_size_per_gpu": micro, "ppo_epochs": 1,
                                        "calculate_entropy": False, "entropy_coeff": 0, "data_loader_seed": 1,
                                        "shuffle": False}, "rollout": {"n": 2, "temperature": 1.0}},
        "trainer": {"critic_warmup": 0},
    })  # fmt: skip
    trainer.settings = SimpleNamespace(turn_estimator=more.get("ours", True))
    trainer.tokenizer, trainer.watch = SimpleNamespace(eos_token_id=9), RolloutWatch(0.0)
    trainer.actor_rollout_wg, trainer.use_critic, trainer.global_steps = Workers(ranks), False, 1
    trainer.watch.drain = list
    trainer.watch.begin(expected)
    monkeypatch.setattr(
        CreditTrainer, "_enter", lambda trainer, batch, metrics: SimpleNamespace(order=lambda: None)
    )
    metrics = {}
    batch = trainer._balance_batch(batch, metrics)
    return trainer, batch, metrics


@pytest.mark.parametrize(("ranks", "micro", "size"), [(1, None, 4), (2, None, 4), (2, 3, 6), (3, None, 6)])
def test_a_mini_batch_has_the_outputs_of_as_many_rollouts_as_the_recipe_says(monkeypatch, ranks, micro, size):
    _, batch, _ = balanced(monkeypatch, KEYS, ranks, micro)
    assert len(batch.keys) == 2 * size and sorted(key for key in batch.keys if key[0] == "q") == KEYS
    per_rank, found = len(batch.keys) // ranks, [[], []]
    for rank in range(ranks):  # as verl's dispatch and its loader divide them
        rows = batch.keys[rank * per_rank : (rank + 1) * per_rank]
        for update in range(2):
            found[update] += rows[update * size // ranks : (update + 1) * size // ranks]
    sessions = [{session_of(key) for key in keys if key[0] == "q"} for keys in found]
    assert sessions == [{"q_0", "q_1"}, {"q_2", "q_3"}]
    assert all(
        tag.get("is_padding", False) == (key[0] != "q")
        for key, tag in zip(batch.keys, batch.tags, strict=True)
    )


def test_the_loss_is_divided_by_rollouts_and_the_rows_are_those_of_the_mini_batch(monkeypatch):
    trainer, batch, _ = balanced(monkeypatch, KEYS)
    workers = trainer.actor_rollout_wg
    with trainer._rows_of_updates("actor_rollout_wg"):
        trainer.distillation_config = None
        PPOTrainer._update_actor(trainer, batch, {})
    assert trainer.actor_rollout_wg is workers
    assert (workers.handed[0]["mini_batch_size"], workers.handed[0]["global_batch_size"]) == (4, 2)


@pytest.mark.parametrize("keys", [["q_0_0", "q_1_0", "q_2_0", "q_3_0"], KEYS])
def test_what_verl_divides_stays_verls(monkeypatch, keys):
    """Rollouts of one output each; and any rollouts, where the estimator is verl's own."""
    called = []
    monkeypatch.setattr(PPOTrainer, "_balance_batch", lambda self, batch, metrics: called.append(1) or batch)
    trainer, batch, _ = balanced(monkeypatch, keys, ours=len(keys) == 4)
    workers = trainer.actor_rollout_wg
    with trainer._rows_of_updates("actor_rollout_wg"):
        assert trainer.actor_rollout_wg is workers
    assert called and batch.keys == keys


def test_lost_rollouts_are_counted_in_sessions(monkeypatch):
    _, _, metrics = balanced(monkeypatch, KEYS)
    assert metrics["credit/rollouts_failed"] == 0
    with pytest.raises(IntegrityError, match="1 of 5 rollouts"):
        balanced(monkeypatch, KEYS, expected=5)


def test_verls_filter_drops_the_questions_whose_rollouts_tie_however_many_outputs_they_have(monkeypatch):
    """Its scores are those of outputs, which are equal in a rollout."""
    store = FakeStore().install(monkeypatch)
    scores = {
        "tied_0_0": 1.0,
        "tied_1_0": 1.0,
        "tied_1_1": 1.0,
        "mixed_0_0": 0.0,
        "mixed_1_0": 1.0,
        "mixed_1_1": 1.0,
    }
    fields = TensorDict({"rm_scores": nested([[score] for score in scores.values()])}, batch_size=len(scores))
    store.kv_batch_put([*scores], "train", fields)
    buffer = ReplayBuffer(
        "sync", {}, None, "drop", {}, refill_fn=print, filter_groups_metric="reward", train_batch_size=1
    )
    buffer.partitions["train"] = {key: {} for key in scores}
    buffer.finished_keys["train"] = {"tied", "mixed"}
    assert buffer._dapo_filtered_keys("train") == ({"tied"}, {1.0: 1})
