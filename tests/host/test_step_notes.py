"""What the trainer says of a step whose credit reaches few turns: the warnings exist for it alone."""

import json
from dataclasses import replace

import pytest
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync

from kit.byte_world import make_tokenizer
from kit.recipes import load_config
from kit.turn_rows import Row, estimate, step_inputs, turn_batch
from verl_credit.errors import IntegrityError
from verl_credit.host.step import estimator, store, trainer
from verl_credit.records.run.events import unlikely_answers_note
from verl_credit.records.run.files import EVENTS
from verl_credit.turns.step.signals.signal import turns_with, turns_without

ROWS = [Row(("call", "page", "call", "page", "done"))] * 2 + [Row(("call", "page", "done"))] * 2
GROUPS, OUTCOMES = [0, 0, 1, 1], [1.0, 0.0, 1.0, 0.0]
KNOWN, UNKNOWN = [[0.5, 0.1], [0.2, 0.3], [0.3], [0.1]], [[0.5, None], [0.2, None], [0.3], [0.1]]


@pytest.fixture
def steps(tmp_path, monkeypatch):
    """(Notes of these steps by kind, their metrics)."""
    tokenizer = make_tokenizer()
    monkeypatch.setattr(store, "write_tokens", lambda batch, *_: batch)
    monkeypatch.setattr(trainer, "keep_turns", lambda *_: None)

    def run(mode, *gains, signal="info_gain", overrides=(), planning=()):
        turns, metrics = turn_batch(ROWS, tokenizer), {}
        own = [f"run_dir={tmp_path}", "keep_rollouts.steps=0", f"algorithm.info_gain_norm_mode={mode}"]

        def estimated(self, batch, metrics):
            """By the registered estimator, with the metrics of signals and planning that the test asks for."""
            step, number = estimator._STEP.get(), made.global_steps
            found = estimate(step.inputs, turns, OUTCOMES, GROUPS)
            said = {turns_with(signal): int(number == 1), turns_without(signal): 6}  # others reward no turn
            if planning:
                said["credit/planning/token_share"] = planning[number - 1]
            step.credit = replace(found, metrics=found.metrics | said)
            return batch

        monkeypatch.setattr(PPOTrainerSync, "_compute_advantage", estimated)
        made = trainer.CreditTrainer(load_config("lab", [*own, *overrides]))
        made._turns, made.host._turns, made.tokenizer = turns, turns, tokenizer
        made.total_training_steps, made.actor_rollout_wg = 9, None
        for number, of in enumerate(gains, start=1):
            made.global_steps = number
            changes = {"info_gain_norm_mode": mode, "turn_signal": signal, "dynamic_clip": False}
            made._inputs = step_inputs(turns, of, **changes)
            made.credit = made._inputs.run
            made._compute_advantage(None, metrics)
        rows = (tmp_path / EVENTS).read_text().splitlines() if (tmp_path / EVENTS).exists() else []
        return {(row := json.loads(line))["kind"]: row["text"] for line in rows}, metrics

    monkeypatch.setattr(PPOTrainerSync, "__init__", lambda self, config: setattr(self, "config", config))
    return run


def test_small_groups_are_said(steps):
    notes, metrics = steps("turn-group", KNOWN)
    assert notes.keys() == {"small_groups"} and metrics["credit/turn_groups_of_two"] == 3


def test_gains_that_are_rounding_are_said_and_gold_answers_that_solved_rows_do_not_expect(steps):
    """As with a template that is not the form of the policy's answers: 4e-9 in solved rows."""
    tiny = [[gain * 1e-7 for gain in of] for of in KNOWN]
    assert "no_gains" not in steps("turn-group", [[1e-5, 0.0], *tiny[1:]])[0]
    notes, _ = steps("turn-group", tiny)
    assert "no information gain is above 1e-06 in size (the largest is 5e-08)" in notes["no_gains"]
    assert "algorithm.turn_signal=tool_reward" in notes["no_gains"]
    likely = unlikely_answers_note(4e-9, 1, "<answer>{}</answer>")
    assert "in step 1 solved rollouts give the gold answer a probability of 4e-09" in likely
    assert (
        "algorithm.info_gain_template='<answer>{}</answer>'" in likely and "turn_signal=tool_reward" in likely
    )
    assert unlikely_answers_note(0.01, 1, "") is None and unlikely_answers_note(None, 1, "") is None


def test_rows_that_a_mode_leaves_out_are_said(steps):
    notes, metrics = steps("leave_one_out", UNKNOWN)
    assert "50% of the rows lack" in notes["rows_left_out"] and metrics["credit/rows_left_out"] == 0.5
    assert not steps("leave_one_out", KNOWN)[1]["credit/rows_left_out"]


def test_a_signal_that_gives_nothing_any_more_is_said_and_then_stops_the_run(steps):
    tolerated = ["algorithm.turn_signal=tool_reward", "faults.max_unrewarded_steps=1"]
    notes, _ = steps("turn-group", KNOWN, KNOWN, signal="tool_reward", overrides=tolerated)
    assert "in step 2 turn signal 'tool_reward' gave none of the 6" in notes["no_rewards"]
    with pytest.raises(IntegrityError, match="'tool_reward' .* 2 steps in a row"):
        steps("turn-group", KNOWN, KNOWN, KNOWN, signal="tool_reward", overrides=tolerated)


def test_a_run_whose_first_step_has_no_planning_token_is_stopped(steps):
    with pytest.raises(IntegrityError, match="planning.detector=.* none in the first step"):
        steps("turn-group", KNOWN, planning=[0.0])
    steps("turn-group", KNOWN, KNOWN, planning=[0.1, 0.0])  # later the policy may write none
