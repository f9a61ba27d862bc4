"""Windowed prompts of an environment: what each row reads and records; their credit is that of one growing dialogue."""

import pytest
import torch
from transfer_queue import KVBatchMeta

from kit.byte_world import make_tokenizer
from kit.env_play import END, play, scored
from kit.environments import FAULTY
from kit.fake_store import FakeStore
from kit.in_process import Here
from kit.settings import settings
from kit.trajectories import record
from kit.turn_rows import estimate, step_inputs
from verl_credit.host.rollout import env_agent
from verl_credit.host.step.store import fetch_turn_batch
from verl_credit.names import TURN_REWARDS
from verl_credit.turns.rollout.sessions import joined
from verl_credit.turns.step.signals.built_in import signals_of
from verl_credit.turns.step.step_metrics import credit_metrics, row_metrics

LONG = ("+environment.kwargs.length=3", "environment.max_steps=7", "data.max_response_length=900")
SCRIPTS = (
    ["right", "left", "right", "right", "right"],
    ["right", "jump", "right", "right"],
    ["left"] * 7,
    ["right", "left", "left", "right", "left", "right", "left"],
)
"""A detour, an invalid action, and two rollouts that the limit ends."""


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


@pytest.fixture(autouse=True)
def pools(monkeypatch):
    monkeypatch.setattr(env_agent, "Pool", Here)
    monkeypatch.setattr(env_agent.EnvAgentLoop, "_pools", {})


def said(role, text):
    return f"<|im_start|>{role}\n{text}{END}\n"


def seen(room):
    return f"room {room} of 3\nActions: left, right"


@pytest.mark.parametrize("window", [0, 1, 2, 9])
def test_a_prompt_has_the_task_the_last_steps_and_what_is_left_out(tokenizer, window):
    """Before a step is left out, the prompt is that of the growing dialogue."""
    outputs, policy = play(tokenizer, SCRIPTS[0], f"environment.window={window}", *LONG)
    rooms, begin = [0, 1, 0, 1, 2], "<|im_start|>assistant\n"
    for turn, (output, (asked, _)) in enumerate(zip(outputs, policy.requests, strict=True)):
        out = max(turn - window, 0)
        gap = f"\n\n[Steps left out here: {out}]\n\n{seen(rooms[out])}" if out else ""
        steps = [
            said("assistant", SCRIPTS[0][step]) + said("user", seen(rooms[step + 1]))
            for step in range(out, turn)
        ]
        expected = said("user", "Who?") + said("user", seen(0) + gap) + "".join(steps) + begin
        assert tokenizer.decode(output.prompt_ids).endswith(expected) and output.prompt_ids == asked
        assert tokenizer.decode(output.response_ids) == SCRIPTS[0][turn] + END
        assert output.turn_ids == [0] * len(output.response_ids) and all(output.response_mask)
        assert len(output.response_logprobs or output.response_ids) == len(output.response_ids)


def test_each_record_has_its_turn_and_the_last_one_the_rollout(tokenizer):
    outputs, _ = play(tokenizer, SCRIPTS[1], "environment.window=1", *LONG, params={"logprobs": True})
    records = [record(output) for output in outputs]
    assert [one["states"] for one in records] == [["s0"], ["s1"], ["s1"], ["s2"]]
    assert [[(call["turn"], call["arguments"]) for call in one["calls"]] for one in records] == [
        [(0, "right")], [(0, "")], [(0, "right")], [(0, "right")],
    ]  # fmt: skip
    assert [output.extra_fields[TURN_REWARDS] for output in outputs] == [[-0.125], [None], [-0.125], []]
    assert [one["bad_calls"] for one in records] == [0, 0, 0, 1] and all(
        len(one["versions"]) == 1 for one in records
    )
    expected = {"score": 1.0, "em": 1.0, "return": 0.75, "steps": 4.0, "bad_actions": 1.0, "tool_fault": 0.0}
    assert scored(outputs[-1]) == expected
    assert [output.response_logprobs for output in outputs] == [
        [-0.5] * len(output.response_ids) for output in outputs
    ]


def read(monkeypatch, rollouts):
    """The batch as the trainer reads it, of rollouts whose outputs verl's worker wrote."""
    rows = {f"u_{n}_{k}": row for n, one in enumerate(rollouts) for k, row in enumerate(one)}
    kept = FakeStore().install(monkeypatch)
    others = {"reward_model": {"ground_truth": ""}, "extra_info": {}}
    kept.rows = {("train", key): row.as_dict() | others for key, row in rows.items()}
    return fetch_turn_batch(KVBatchMeta(keys=[*rows], tags=[{} for _ in rows], partition_id="train"))


def rollouts(tokenizer, *overrides):
    played = [play(tokenizer, script, *LONG, *overrides)[0] for script in SCRIPTS]
    return [one if isinstance(one, list) else [one] for one in played]


STEPS = {"turn_signal": "tool_reward"}
CREDITS = [
    {"info_gain_norm_mode": "none"},
    {"info_gain_norm_mode": "turn_gae", "turn_values": "state", "lam": 0.9},
    {"info_gain_norm_mode": "turn_gae", "turn_values": "column:progress", "lam": 0.5, "gamma": 0.9},
    {"info_gain_norm_mode": "turn_gae", "turn_values": "group"} | STEPS,
    {"info_gain_norm_mode": "gigpo"} | STEPS,
    {"info_gain_norm_mode": "leave_one_out"} | STEPS,
]


@pytest.mark.parametrize("changes", CREDITS, ids=lambda one: "-".join(map(str, one.values())))
@pytest.mark.parametrize("window", [0, 2])
def test_equal_steps_have_the_credit_of_the_growing_dialogue(monkeypatch, tokenizer, changes, window):
    found = []
    for given in ((), (f"environment.window={window}",)):
        played = rollouts(tokenizer, *given)
        turns = read(monkeypatch, played)
        together = joined(turns)
        gains, outcomes = [[]] * len(SCRIPTS), [1.0, 1.0, 0.0, 0.0]
        inputs = step_inputs(together, gains, signals=signals_of(settings(**changes)), **changes)
        of_rows = [outcomes[int(key.split("_")[1])] for key in turns.keys]
        step = estimate(inputs, turns, of_rows, ["u"] * len(of_rows))
        own = turns.turn_ids_B_T >= 0
        advantages = {
            (session, k): value
            for session in range(len(SCRIPTS))
            for k, value in enumerate(
                torch.cat(
                    [
                        step.advantage_B_T[row][own[row]]
                        for row, key in enumerate(turns.keys)
                        if f"u_{session}_" in key
                    ]
                ).tolist()
            )
        }
        metrics = row_metrics(together) | credit_metrics(step, len(SCRIPTS))
        found.append((len(turns.keys), advantages, metrics))
    (rows, growing, of_growing), (steps, windowed, of_windowed) = found
    assert (rows, steps) == (4, 23) and any(growing.values())
    assert windowed == pytest.approx(growing, abs=1e-7, rel=0) and of_windowed == pytest.approx(
        of_growing, abs=1e-7
    )


def test_a_fault_leaves_one_row_without_a_mask(tokenizer):
    task = {"seed": 0, "options": {"fault": "raises"}}
    output, _ = play(tokenizer, ["left", "left", "right"], "environment.window=1", task=task, path=FAULTY)
    assert record(output)["tool_fault"] == "env_raised" and not any(output.response_mask)
    assert len(output.response_mask) == len(output.response_ids) == len(output.turn_ids)


def test_a_later_prompt_that_does_not_fit_ends_the_rollout(tokenizer):
    """No token of it is sent, and a turn that fills its row ends nothing."""
    room = ("environment.window=2", "data.max_prompt_length=150")
    outputs, policy = play(tokenizer, ["right"] * 3, *LONG, *room)
    assert record(outputs[-1])["stop_reason"] == "length" and len(policy.requests) == len(outputs) == 2
    full = ("environment.window=0", "data.max_response_length=4", "search.max_new_tokens=4")
    outputs, _ = play(tokenizer, ["right"] * 7, *LONG[:2], *full)
    assert len(outputs) == 7 and record(outputs[-1])["stop_reason"] == "truncated"
    assert record(outputs[-1])["bad_calls"] == 7
