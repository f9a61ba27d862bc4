"""A step's credit from the rows in the store to the rows in the store, by verl's own methods and ours, without Ray."""

import pytest
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict
from verl.trainer.ppo.v1.trainer_base import PPOTrainer

from kit.byte_world import make_tokenizer
from kit.fake_store import FakeStore
from kit.recipes import load_config
from kit.turn_rows import Row, padding_row, turn_batch
from verl_credit.host.step import store
from verl_credit.host.step.async_trainers import CreditColocateAsync
from verl_credit.host.step.trainer import CreditTrainer
from verl_credit.names import CLIP_SCALE, ROW_RECORD, TURN_IDS, TURN_REWARDS
from verl_credit.run.tables import TURNS, read_table, table_path
from verl_credit.turns.book import RowRecord
from verl_credit.turns.signals import signals_of

TURNS_OF_TWO = ("call", "page", "done")
ROWS = [
    Row(TURNS_OF_TWO, turn_rewards=(reward,), record=RowRecord(stop_reason="answer", versions=versions))
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
    "sample_trajectories=2",
]


class Workers:
    """The actors: log-probs that follow from the token's place."""

    def __init__(self, kept: FakeStore):
        self._kept = kept

    def compute_log_prob(self, batch):
        ids = self._kept.kv_batch_get(batch.keys, batch.partition_id, ["input_ids"])["input_ids"]
        log_probs = [-0.1 - 0.01 * torch.arange(len(row)).double() for row in ids.unbind()]
        fields = {
            "log_probs": torch.nested.as_nested_tensor(log_probs, layout=torch.jagged),
            "entropy": torch.nested.as_nested_tensor([-row for row in log_probs], layout=torch.jagged),
        }
        return store.write(batch, fields)


def put(kept: FakeStore, turns):
    """The rows as verl's agent loops write them; the last is a copy of the first that fills the batch."""
    names = [f"{prompt}_{number}_0" for number, prompt in enumerate([*PROMPTS, "pad"])]

    def nested(rows):
        return torch.nested.as_nested_tensor([torch.as_tensor(row) for row in rows], layout=torch.jagged)

    def objects(values):
        return NonTensorStack(*(NonTensorData(value) for value in values))

    n = range(len(names))
    lengths = [len(ids) for ids in turns.response_ids]
    fields = {
        "prompts": nested(turns.prompt_ids),
        "responses": nested(turns.response_ids),
        "input_ids": nested([turns.prompt_ids[row] + turns.response_ids[row] for row in n]),
        "response_mask": nested([turns.response_mask_B_T[row, : lengths[row]] for row in n]),
        TURN_IDS: nested([turns.turn_ids_B_T[row, : lengths[row]] for row in n]),
        "rollout_log_probs": nested([-0.5 * torch.ones(lengths[row]).double() for row in n]),
        "rm_scores": nested([outcome_at_the_end([*OUTCOMES, 1.0][row], lengths[row]) for row in n]),
        "uid": objects([*PROMPTS, "pad"]),
        "reward_model": objects([{"ground_truth": truth} for truth in turns.ground_truths]),
        "extra_info": objects(turns.extra_infos),
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


@pytest.fixture
def step(tmp_path, monkeypatch):
    """Makes the step of a trainer: its metrics, and a field of every row."""
    kept = FakeStore().install(monkeypatch)
    monkeypatch.setattr(PPOTrainer, "__init__", lambda self, config: setattr(self, "config", config))

    def run(kind, *overrides):
        trainer = kind(load_config("lab", [*OVERRIDES, f"run_dir={tmp_path}", *overrides]))
        trainer.tokenizer, trainer.actor_rollout_wg = make_tokenizer(), Workers(kept)
        trainer.global_steps, trainer.total_training_steps, trainer.timing_raw = STEP, 30, {}
        trainer._signals = signals_of(trainer.settings)
        batch, metrics = put(kept, turn_batch([*ROWS, padding_row(ROWS[0])], trainer.tokenizer)), {}
        batch = trainer._compute_advantage(trainer._compute_old_log_prob(batch, metrics), metrics)

        def field(name):
            return list(store.read(batch, name)[name].unbind())

        return metrics, field

    return run


def test_advantages_and_clip_scales_come_to_the_rows(step, tmp_path):
    metrics, field = step(CreditTrainer)
    table = read_table(table_path(tmp_path, TURNS, STEP)).columns
    assert sorted(set(table["row"])) == [0, 1, 2, 3] and metrics["credit/rows_trained"] == 4
    ids, advantages, scales = field(TURN_IDS), field("advantages"), field(CLIP_SCALE)
    for row, turn, advantage, scale in zip(
        *(table[n] for n in ("row", "turn", "advantage", "clip_scale")), strict=True
    ):
        written = ids[row] == turn
        assert written.any()
        assert advantages[row][written].tolist() == pytest.approx([advantage] * int(written.sum()))
        assert scales[row][written].tolist() == pytest.approx([scale] * int(written.sum()))
        assert not advantages[row][ids[row] < 0].any()
    # z of the reward among its prompt's, which is 1 or -1 for two, and of the outcome, which counts for both turns
    expected = [1 + 1, 1, -1 - 1, -1, -1 + 1, 1, 1 - 1, -1]
    assert table["advantage"] == pytest.approx(expected, abs=1e-4)
    assert not any(row.any() for row in advantages[4:])  # what fills the batch


def test_the_ratio_of_a_synchronous_step_is_to_its_own_weights(step):
    metrics, field = step(CreditTrainer)
    assert not any(name.startswith("credit/staleness") for name in metrics)
    assert all((row != -0.5).all() for row in field("old_log_probs"))


def test_the_ratio_of_an_asynchronous_step_is_to_the_weights_that_wrote(step):
    metrics, field = step(CreditColocateAsync, "trainer.v1.trainer_mode=credit_colocate_async")
    assert all((row == -0.5).all() for row in field("old_log_probs"))
    ages = {
        name.removeprefix("credit/staleness/"): value
        for name, value in metrics.items()
        if "staleness" in name
    }
    assert ages["mean"] == pytest.approx((1 + 0 + 0 + 0 + 2 + 2 + 0 + 0) / 8) and ages["oldest"] == 2
    assert ages["turns_of_two_versions"] == 1 and ages["turns_unknown"] == 0
    now = field(
        "log_probs"
    )  # of whole rows: that of the first token of a response is of its prompt's last place
    assert len(now[0]) > len(field("old_log_probs")[0])
    assert ages["ratio_off_at_age_2"] > 0


def test_verls_correction_keeps_verls_ratio(step):
    metrics, field = step(
        CreditColocateAsync,
        "trainer.v1.trainer_mode=credit_colocate_async",
        "algorithm.rollout_correction.rollout_is=token",
    )
    assert all((row != -0.5).all() for row in field("old_log_probs"))
    assert field("rollout_is_weights") and metrics["credit/staleness/oldest"] == 2


def test_without_a_forward_no_ratio_is_measured(step):
    metrics, field = step(
        CreditColocateAsync,
        "trainer.v1.trainer_mode=credit_colocate_async",
        "algorithm.rollout_correction.bypass_mode=true",
    )
    assert all((row == -0.5).all() for row in field("old_log_probs"))
    assert metrics["credit/staleness/oldest"] == 2
    assert not any("ratio_off" in name for name in metrics)
