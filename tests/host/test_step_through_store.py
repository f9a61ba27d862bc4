"""A step's credit from the rows in the store to the rows in the store, by verl's own methods and ours, without Ray."""

import pytest
import torch
from verl.trainer.ppo.v1.replay_buffer import ReplayBufferAsync
from verl.trainer.ppo.v1.trainer_base import PPOTrainer

from kit.recipes import load_config
from kit.stored_step import STEP, StoredStep
from verl_credit.host.step.async_trainers import CreditColocateAsync, CreditSeparateAsync
from verl_credit.host.step.trainer import CreditTrainer
from verl_credit.names import CLIP_SCALE, TURN_IDS
from verl_credit.records.run.rollouts import read_samples
from verl_credit.records.run.table_files import TURNS, read_table, table_path


@pytest.fixture
def stored(tmp_path, monkeypatch):
    return StoredStep(tmp_path, monkeypatch)


@pytest.fixture
def step(stored):
    return stored.make


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


@pytest.mark.slow
def test_a_column_of_the_data_file_rewards_turns_as_tools_do(step):
    """The rows have the same numbers in both."""
    of_tools, field = step(CreditTrainer)
    advantages = [row.tolist() for row in field("advantages")]
    of_column, field = step(CreditTrainer, "algorithm.turn_signal=column:of_turns")
    assert [row.tolist() for row in field("advantages")] == advantages
    assert of_column["credit/turn_reward/turns"] == of_tools["credit/turn_reward/turns"] == 4


@pytest.mark.slow
@pytest.mark.parametrize("signal", ["tool_reward", "none"])
def test_turn_ids_that_our_loops_wrote_are_written_again_only_in_a_filled_batch(stored, signal):
    """verl's copy has the ids of the row that it was made from, and another length. Real rows come out bit for bit."""
    found = []
    for filled in (False, True):
        stored.kept.calls.clear()
        _, field = stored.make(CreditTrainer, f"algorithm.turn_signal={signal}", filled=filled)
        assert (
            stored.kept.calls.count(("written", TURN_IDS)) == 1 + filled
        )  # the agent loops' write is the first
        assert stored.kept.calls.count(("read", TURN_IDS)) == 1
        columns = [field(name)[:4] for name in ("advantages", CLIP_SCALE, TURN_IDS)]
        found.append([row.tolist() for rows in columns for row in rows])
        assert {row.dtype for row in field(TURN_IDS)} == {torch.int16}
    assert found[0] == found[1]


def test_samples_of_the_step_are_kept(step, tmp_path):
    step(CreditTrainer)
    kept, _ = read_samples(tmp_path)
    assert [row["step"] for row in kept] == [STEP] * 2  # of the one group that is kept
    assert all([turn["text"] for turn in row["turns"]] == ["call", "done"] for row in kept)


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


@pytest.mark.parametrize("key, of_writer", [("rollout_is=token", False), ("bypass_mode=true", True)])
def test_verls_correction_keeps_verls_ratio_and_without_a_forward_none_is_measured(step, key, of_writer):
    own = "trainer.v1.trainer_mode=credit_colocate_async", f"algorithm.rollout_correction.{key}"
    metrics, field = step(CreditColocateAsync, *own)
    assert all(((row == -0.5) == of_writer).all() for row in field("old_log_probs"))
    assert metrics["credit/staleness/oldest"] == 2
    if of_writer:
        assert not any("ratio_off" in name for name in metrics)
    else:
        assert field("rollout_is_weights")


@pytest.mark.slow
@pytest.mark.parametrize("scorer", ["branch", "rows"])
def test_every_update_between_two_syncs_is_scored_by_the_weights_of_the_last_sync(stored, scorer):
    gains = "algorithm.turn_signal=auto", f"algorithm.info_gain_scorer={scorer}"
    own = "trainer.v1.trainer_mode=credit_separate_async"
    if scorer == "branch":  # rides on the forward, which the workers here do not offer
        stored.make(CreditSeparateAsync, own, updates=2)
        assert stored.workers.asked == [(0, True)] * 3
    else:
        stored.make(CreditSeparateAsync, own, *gains, updates=2)
        assert stored.workers.asked == [(0, True), (0, False)] * 3
    assert stored.workers.version == 2  # those of the update are back


def test_of_finished_prompts_of_a_step_the_same_are_taken_in_every_process(monkeypatch):
    kept = {"trainer_mode": "colocate_async", "trainer_config": None, "sampler_kwargs": None}
    buffer = ReplayBufferAsync(max_off_policy_threshold=8, max_off_policy_strategy="drop", **kept)
    monkeypatch.setattr(PPOTrainer, "_build_replay_buffer", lambda self: buffer)
    monkeypatch.setattr(PPOTrainer, "__init__", lambda self, config: setattr(self, "config", config))
    CreditColocateAsync(
        load_config("lab", ["trainer.v1.trainer_mode=credit_colocate_async"])
    )._build_replay_buffer()
    prompts = [f"{number:02}" for number in range(40)]
    buffer.prompt_global_steps["train"] = {uid: 1 if uid > "35" else 2 for uid in prompts}
    taken, *_ = buffer._select_prompt_uids("train", set(prompts), 6)
    assert taken == ["36", "37", "38", "39", "00", "01"]  # the oldest first
