"""The agent loop of an environment on scripted policies: a turn is a step, and its record has what the environment gave."""

import pytest

from kit.byte_world import make_tokenizer
from kit.env_play import END, play, scored
from kit.environments import FAULTY
from kit.in_process import Here
from kit.trajectories import policy_text, record
from verl_credit.host.rollout import env_agent
from verl_credit.names import TURN_REWARDS
from verl_credit.worlds.doorkey.dialogue import Dialogue, doorkey_tokenizer
from verl_credit.worlds.doorkey.moves import ACTIONS
from verl_credit.worlds.lab.warm_start import encode_demo


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


@pytest.fixture(autouse=True)
def pools(monkeypatch):
    """The pools that loops made, in this process."""
    made = []
    monkeypatch.setattr(env_agent, "Pool", lambda *args, **more: made.append(Here(*args, **more)) or made[-1])
    monkeypatch.setattr(env_agent.EnvAgentLoop, "_pools", {})
    return made


def rewards(output):
    return [call["reward"] for call in record(output)["calls"]]


def test_every_turn_is_a_step_and_the_last_one_too(tokenizer, pools):
    output, policy = play(tokenizer, ["right", "left", "right", "right"])
    found = record(output)
    assert found["stop_reason"] == "done" and found["states"] == ["s0", "s1", "s0", "s1"]
    assert found["signals"] == {"progress": [0.5, 0.0, 0.5]}
    assert rewards(output) == [-0.125, -0.125, -0.125, 1.0] and pools[0].actions == [
        "right",
        "left",
        "right",
        "right",
    ]
    assert output.extra_fields[TURN_REWARDS] == [-0.125, -0.125, -0.125]
    assert found["environment"] == {
        "return": 0.625,
        "last": 1.0,
        "success": 1.0,
        "score": 1.0,
        "steps": 4.0,
        "cut": 0,
    }
    expected = {"score": 1.0, "em": 1.0, "return": 0.625, "steps": 4.0, "bad_actions": 0.0, "tool_fault": 0.0}
    assert scored(output) == expected
    assert pools[0].closed == pools[0].opened == [0]
    prompt = tokenizer.decode(policy.requests[0][0])
    assert "Who?" in prompt and prompt.rstrip().endswith("assistant")
    assert "room 0 of 2\nActions: left, right<|im_end|>" in prompt


def test_the_tokens_are_the_policys_own_between_the_templates(tokenizer):
    output, _ = play(tokenizer, ["right", "right"])
    assert [policy_text(tokenizer, output, turn) for turn in (0, 1)] == [f"right{END}"] * 2
    assert output.response_mask == [int(turn >= 0) for turn in output.turn_ids]
    whole = tokenizer.decode(output.response_ids)
    said = "room 1 of 2\nActions: left, right"
    assert whole == f"right{END}\n<|im_start|>user\n{said}{END}\n<|im_start|>assistant\nright{END}"


@pytest.mark.parametrize("bad", ["jump", "", "right and left", "<think>right</think>", "<think>right"])
def test_an_invalid_action_moves_nothing_uses_a_step_and_is_told(tokenizer, pools, bad):
    output, _ = play(tokenizer, [bad, "right", "right"])
    found = record(output)
    assert pools[0].actions == ["right", "right"] and found["bad_calls"] == 1
    assert rewards(output) == [None, -0.125, 1.0] and output.extra_fields[TURN_REWARDS] == [None, -0.125]
    assert found["states"] == ["s0", "s0", "s1"] and found["signals"]["progress"] == [0.0, 0.5]
    assert "There is no such action.\nActions: left, right" in tokenizer.decode(output.response_ids)


def test_a_turn_that_its_budget_cut_is_no_action(tokenizer, pools):
    """``right`` may have become another action."""
    play(tokenizer, ["right~"], "search.max_new_tokens=5", "environment.max_steps=1")
    assert pools[0].actions == []
    play(tokenizer, ["right"], "search.max_new_tokens=6", "environment.max_steps=1")
    assert pools[0].actions == ["right"]


def test_an_invalid_action_may_have_a_reward_and_may_end_the_rollout(tokenizer, pools):
    told = ("environment.outcome=return", "environment.invalid_reward=-1")
    output, _ = play(tokenizer, ["jump", "right", "right"], *told)
    assert rewards(output) == [-1.0, -0.125, 1.0] and scored(output)["score"] == -0.125
    output, policy = play(tokenizer, ["right", "jump"], *told, "environment.invalid=end")
    assert record(output)["stop_reason"] == "bad_call" and len(policy.requests) == 2
    assert scored(output) == {"score": -1.125, "em": 0.0, "return": -1.125, "steps": 2.0, "bad_actions": 1.0,
                              "tool_fault": 0.0}  # fmt: skip


def test_a_thought_is_no_action_and_what_follows_it_is(tokenizer, pools):
    output, _ = play(tokenizer, ["<think>left?</think>\nright", "right"])
    assert pools[0].actions == ["right", "right"] and record(output)["stop_reason"] == "done"


def last_word(text):
    words = text.split()
    return words[-1] if words else None


@pytest.mark.parametrize(
    "form, text, action",
    [
        ("tag", "I go <action>left</action>, no, <action> right </action> now", "right"),
        ("tag", "right", None),
        (f"{__name__}.last_word", "I go right", "right"),
        (f"{__name__}.last_word", "", None),
    ],
)
def test_the_form_of_an_action(tokenizer, pools, form, text, action):
    play(
        tokenizer, [text], f"environment.action={form}", "environment.max_steps=1", "search.max_new_tokens=80"
    )
    assert pools[0].actions == ([action] if action else [])


def test_the_limits_of_a_rollout(tokenizer):
    output, policy = play(tokenizer, ["left"] * 9)
    assert record(output)["stop_reason"] == "truncated" and len(policy.requests) == 6
    assert scored(output)["em"] == 0 and scored(output)["steps"] == 6
    room = ("data.max_response_length=100", "environment.max_steps=2", "+environment.kwargs.length=9")
    output, _ = play(tokenizer, ["right"] * 9, *room)  # the next observation does not fit
    found = record(output)
    assert found["stop_reason"] in ("length", "truncated") and len(found["calls"]) == len(found["states"])
    assert max(output.turn_ids) == len(found["calls"]) - 1


@pytest.mark.slow
def test_a_success_that_nobody_says_is_asked_for(tokenizer):
    silent = ("+environment.kwargs.says=false",)
    for outcome in "success", "return", "last":
        with pytest.raises(ValueError, match=r"environment\.success_at=None"):
            play(tokenizer, ["right", "right"], *silent, f"environment.outcome={outcome}")
    output, _ = play(tokenizer, ["right", "right"], *silent, "environment.success_at=0.875")
    assert scored(output)["em"] == scored(output)["score"] == 1
    output, _ = play(tokenizer, ["left", "right", "right"], *silent, "environment.success_at=0.875")
    assert scored(output)["em"] == 0
    output, _ = play(
        tokenizer, ["right", "right"], *silent, "environment.outcome=return", "environment.success_at=0.9"
    )
    assert (scored(output)["em"], scored(output)["score"]) == (0, 0.875)
    assert scored(play(tokenizer, ["left"] * 6, *silent)[0])["em"] == 0  # a limit is no end of the task


def test_turn_rewards_and_the_last_reward_are_the_return(tokenizer):
    signal = ("algorithm.info_gain_norm_mode=turn-group-v1d", "algorithm.turn_signal=tool_reward")
    output, _ = play(tokenizer, ["right", "right"], *signal, "environment.outcome=last")
    assert (
        sum(output.extra_fields[TURN_REWARDS]) + scored(output)["score"] == scored(output)["return"] == 0.875
    )


def test_faults_of_the_environment_mask_the_row_out(tokenizer, pools):
    for kind, code, detail in (
        ("raises", "env_raised", "no such door"),
        ("none", "env_bad_answer", "NoneType"),
    ):
        task = {"seed": 0, "options": {"fault": kind, "absent": None}}
        output, _ = play(tokenizer, ["left", "right"], task=task, path=FAULTY)
        found = record(output)
        assert (found["tool_fault"], found["stop_reason"]) == (code, "tool_fault") and detail in found[
            "fault_detail"
        ]
        assert set(output.turn_ids) == {-1} and not any(output.response_mask)
        assert scored(output)["tool_fault"] == 1 and pools[-1].closed


def test_a_reset_that_fails_is_an_error_of_the_rollout(tokenizer):
    task = {"seed": 3, "options": {"fault": "raises", "at_reset": True}}
    with pytest.raises(RuntimeError, match=r"environment\.path=.*Faulty, seed 3.*no such door"):
        play(tokenizer, ["right"], task=task, path=FAULTY)
    for task in ({}, {"options": {}}):
        with pytest.raises(ValueError, match=r"extra_info\.environment=.*seed"):
            play(tokenizer, ["right"], task=task)


def test_a_row_with_the_first_observation_is_compared_with_it(tokenizer):
    first = "room 0 of 2\nActions: left, right"
    output, policy = play(tokenizer, ["right", "right"], task={"seed": 0, "observation": first})
    assert record(output)["stop_reason"] == "done" and "room 0" not in tokenizer.decode(policy.requests[0][0])
    output, _ = play(tokenizer, ["right"], task={"seed": 1, "observation": first})
    found = record(output)
    assert found["tool_fault"] == "env_differs" and "room 1 of 2" in found["fault_detail"]


def test_a_prompt_that_does_not_fit_is_refused(tokenizer):
    with pytest.raises(ValueError, match=r"data\.max_prompt_length=40.*tokens"):
        play(tokenizer, ["right"], "data.max_prompt_length=40")


def test_a_rollout_is_repeated_from_its_turns(tokenizer):
    slips = ("+environment.kwargs.length=3", "+environment.kwargs.slip=0.5")
    whole, _ = play(tokenizer, ["right"] * 6, *slips, task={"seed": 4})
    ids = [
        [token for token, turn in zip(whole.response_ids, whole.turn_ids, strict=True) if turn == k]
        for k in (0, 1)
    ]
    again, policy = play(tokenizer, ["right"] * 6, *slips, task={"seed": 4}, credit_replay=str(ids))
    assert again.response_ids == whole.response_ids and again.turn_ids == whole.turn_ids
    assert len(policy.requests) == max(whole.turn_ids) + 1 - 2


def test_control_tokens_of_an_observation_are_taken_out(tokenizer):
    task = {"seed": 0, "options": {"fault": {"fields": {"observation": "a<|im_end|>b"}}}}
    output, _ = play(tokenizer, ["right"] * 6, task=task, path=FAULTY)
    assert tokenizer.decode(output.response_ids).count(END) == 2 * max(output.turn_ids) + 1
    first = f"a{END}b\nActions: left, right"
    task["options"]["fault"]["fields"] |= {"actions": ["left", "right"]}
    task = task | {"observation": first, "options": task["options"] | {"at_reset": True}}
    _, policy = play(tokenizer, ["left"] * 6, task=task, path=FAULTY, question=first)
    assert "user\na< |im_end|>b\nActions: left, right<|im_end|>" in tokenizer.decode(policy.requests[0][0])


def test_what_an_environment_did_not_understand_is_invalid_and_may_still_be_the_end(tokenizer, pools):
    task = {"seed": 0, "options": {"fault": {"fields": {"observation": "Pardon?", "valid": False}}}}
    output, _ = play(tokenizer, ["right"] * 6, task=task, path=FAULTY)
    found = record(output)
    assert (found["bad_calls"], found["stop_reason"], {*rewards(output)}) == (6, "truncated", {None})
    assert "Pardon?\nActions: left, right" in tokenizer.decode(output.response_ids) and {
        *found["states"]
    } == {"s0"}
    wrong = task["options"]["fault"]["fields"]
    wrong |= {"reward": -0.25, "actions": ["right", "up"], "state": "s9", "progress": 0.25}
    output, _ = play(tokenizer, ["right", "right", "left"], "environment.max_steps=3", task=task, path=FAULTY)
    found = record(output)
    assert rewards(output) == [-0.25, -0.25, None] and found["states"] == ["s0", "s9", "s9"]
    assert found["signals"] == {"progress": [0.25, 0.25]}
    assert "Pardon?\nActions: right, up" in tokenizer.decode(output.response_ids)
    task["options"]["fault"]["fields"] |= {"terminated": True, "success": False, "reward": -0.5}
    output, policy = play(tokenizer, ["right"] * 6, task=task, path=FAULTY)
    assert (len(policy.requests), rewards(output), record(output)["stop_reason"]) == (1, [-0.5], "done")
    assert record(output)["bad_calls"] == 1


def test_the_demonstrations_of_doorkey_are_this_loops_dialogue():
    """The tokens of a rollout, mask included, are those that the built policy has imitated; "jump" is no action."""
    tokenizer = doorkey_tokenizer()
    script, task = ["left", "jump", "forward", "right", "forward", "toggle"], {"seed": 3}
    names = {"id": "MiniGrid-DoorKey-6x6-v0", "actions": f"[{','.join(ACTIONS)}]"}
    kwargs = [f"+environment.kwargs.{name}={value}" for name, value in names.items()]
    output, policy = play(tokenizer, script, *kwargs, task=task, path="minigrid")
    shown = Dialogue(6, task["seed"], tokenizer)
    for text in script:
        shown.act(text)
    demo = encode_demo(shown.segments[1:-1], tokenizer, set(), 1.0)
    assert output.response_ids == demo.ids_T.tolist() and output.response_mask == demo.weight_T.tolist()
    prompt = tokenizer.decode(policy.requests[0][0])
    assert prompt.endswith(shown.segments[0][0].partition("<|im_end|>\n")[2])
