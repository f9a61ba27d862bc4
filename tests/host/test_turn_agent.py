"""The turn agent on scripted policies: verl's tools as verl runs them, what each call earned, and the number of turns."""

import pytest
from verl.tools.function_tool import FunctionTool
from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse

from kit.byte_world import make_tokenizer
from kit.tools import Tool, schema, turn
from kit.trajectories import record, run
from verl_credit.names import TURN_REWARDS
from verl_credit.worlds.lab.protocol import TURN_END, answer_turn, search_turn

TURNS = "actor_rollout_ref.rollout.multi_turn.max_assistant_turns"
ALONE = ("search.max_searches=0", "search.url=null", "algorithm.info_gain_norm_mode=none")


def function(name, returned):
    return FunctionTool(name, lambda answer: returned, OpenAIFunctionToolSchema.model_validate(schema(name)))


def earned(output):
    return [(made["turn"], made["reward"]) for made in record(output)["calls"]]


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


def play(tokenizer, script, *overrides, **given):
    return run(tokenizer, script, *ALONE, *overrides, agent="turn_agent", **given)


@pytest.mark.parametrize("told", [None, {"judge": None}, {"judge": {"create_kwargs": None}}, {"other": {}}])
def test_a_null_of_a_parquet_file_is_nothing_said_of_the_tool(tokenizer, told):
    output, _ = play(tokenizer, [turn("good"), answer_turn("c")], tools=[Tool(good=1)], tools_kwargs=told)
    assert earned(output) == [(0, 1.0)] and record(output)["other_errors"] == 0


def test_parallel_calls_keep_their_order_and_their_rewards_are_summed(tokenizer):
    tool = Tool(slow=0.5, good=0.25, silent=None)
    script = [turn("slow", "good", "silent"), turn("silent"), answer_turn("c")]
    output, _ = play(tokenizer, script, "search.max_new_tokens=400", tools=[tool])
    assert earned(output) == [(0, 0.5), (0, 0.25), (0, None), (1, None)]
    assert output.extra_fields[TURN_REWARDS] == [0.75, None]
    assert output.extra_fields["tool_rewards"] == [0.5, 0.25]  # verl's own list


@pytest.mark.parametrize(
    "returned, reward",
    [("text", None), (("text",), None), (("text", None), None), (("text", 0.0), 0.0), (("text", -1, {"m": 1}), -1.0),
     ({"a": 1}, None), (ToolResponse(text="t"), None)],
)  # fmt: skip
def test_a_function_without_a_reward_has_none_and_not_zero(tokenizer, returned, reward):
    output, _ = play(tokenizer, [turn("x", name="f"), answer_turn("c")], tools=[function("f", returned)])
    assert earned(output) == [(0, reward)] and output.extra_fields[TURN_REWARDS] == [reward]


def test_calls_that_fail_or_are_refused_have_no_reward(tokenizer):
    tool = Tool(bad=RuntimeError("no"), good=1)
    script = [turn("bad"), turn("x", name="nobody"), turn("good"), answer_turn("c")]
    output, _ = play(tokenizer, script, tools=[tool])
    assert earned(output) == [(0, None), (1, None), (2, 1.0)]
    assert output.extra_fields[TURN_REWARDS] == [None, None, 1.0]
    assert (record(output)["other_errors"], record(output)["bad_calls"]) == (1, 1)


@pytest.mark.parametrize("reward", [float("nan"), float("inf"), "0.5", [1.0], {}])
def test_a_reward_that_is_no_number_stops_the_rollout(tokenizer, reward):
    with pytest.raises(ValueError, match=r"turn 1: .*'judge'.*finite number, or None"):
        play(tokenizer, [turn("fine"), turn("odd")], tools=[Tool(fine=True, odd=reward)])


def test_the_search_has_no_reward_of_its_own(tokenizer):
    output, _ = run(tokenizer, [search_turn("a"), turn("good"), answer_turn("c")], tools=[Tool(good=1)])
    assert (
        earned(output) == [(0, None), (1, 1.0)]
        and record(output)["calls"][0]["arguments"] == '{"query": "a"}'
    )
    assert output.extra_fields[TURN_REWARDS] == [None, 1.0]
    assert output.extra_fields["tool_rewards"] == [1.0]


def test_the_text_of_a_call_can_be_sent_whatever_the_policy_wrote(tokenizer):
    script = [f'<tool_call>\n{{"name": "\\ud800", "arguments": {{"a": "\\ud800"}}}}\n</tool_call>{TURN_END}']
    output, _ = play(tokenizer, [*script, answer_turn("c")])
    (made,) = record(output)["calls"]
    assert made["name"] == "?" and made["arguments"].encode()


def test_turns_end_where_verls_key_says_or_where_the_policy_stops_calling(tokenizer):
    script, tools = [turn("good")] * 5 + [answer_turn("c")], [Tool(good=1)]
    output, policy = play(tokenizer, script, tools=tools)  # null: no limit
    assert max(output.turn_ids) == 5 and record(output)["stop_reason"] == "answer"
    output, policy = play(tokenizer, script, f"{TURNS}=2", tools=tools)
    assert len(policy.requests) == 2 and record(output)["stop_reason"] == "max_turns"
    assert earned(output) == [(0, 1.0)] == [(0, *output.extra_fields[TURN_REWARDS])]
    assert record(output)["bad_calls"] == 0
    ends = "actor_rollout_ref.rollout.multi_turn.max_user_turns=1"
    output, policy = play(tokenizer, script, ends, tools=tools)
    assert len(policy.requests) == 2 and record(output)["stop_reason"] == "max_turns"


def test_what_the_last_turns_call_earned_is_no_turn_reward(tokenizer):
    """Its observation does not fit, so that the row ends with it: it stands where the answer would."""
    tool = Tool(good=1)
    width = len(tokenizer(turn("good"), add_special_tokens=False)["input_ids"])
    room = ("search.max_new_tokens=100", f"data.max_response_length={width + 20}")
    output, _ = play(tokenizer, [turn("good")], *room, tools=[tool])
    assert record(output)["stop_reason"] == "length" and earned(output) == [(0, 1.0)]
    assert output.extra_fields[TURN_REWARDS] == []


async def judge(trajectory):
    return [len(turn.observation) > 0 for turn in trajectory.tool_turns]


def test_a_judge_is_asked_in_training_and_not_in_an_evaluation(tokenizer):
    given = {
        "agent": "turn_agent",
        "tools": [Tool(good=1)],
        "reward_model": {"ground_truth": {"target": ["c"]}},
    }
    script, signal = [turn("good"), answer_turn("c")], f"algorithm.turn_signal={__name__}.judge"
    trained, _ = run(tokenizer, script, signal, **given)
    assert record(trained)["signals"] == {f"{__name__}.judge": [1.0]}
    evaluated, _ = run(tokenizer, script, signal, sampling="greedy", **given)
    assert record(evaluated)["signals"] == {}
