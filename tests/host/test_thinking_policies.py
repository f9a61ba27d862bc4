"""The agent loops on policies that think: a call or an answer in a thought does not count, with every parser of verl."""

import pytest

from kit.thinking import CALLS, FORM, call_in, ended, thinking_tokenizer, thought_in
from kit.trajectories import policy_text, record, run
from verl_credit.recipe.doctor.asked import READ
from verl_credit.turns.rollout.reward.qa import compute_score
from verl_credit.turns.rollout.thoughts import FORMS
from verl_credit.turns.rollout.tool_calls import MARKS, READERS
from verl_credit.worlds.lab.protocol import answer_turn, search_turn

ANSWER = "<answer>c</answer>"
LONG = ("search.max_new_tokens=600", "data.max_response_length=4000")
INCLUDED = "search.include_reasoning=true"
OWN_FORM = {
    "gpt-oss": "<|channel|>analysis<|message|>",
    "gemma4": "<|channel>thought\n",
    "seed": "<seed:think>",
    "harmony": "<|channel|>analysis<|message|>",
}
CASES = [(parser, form) for parser in CALLS for form in {"<think>": 0, OWN_FORM.get(parser, "[THINK]"): 0}]
COMMON = [pytest.param(*case, marks=[pytest.mark.slow] * (case[1] != "<think>")) for case in CASES]


def queries(output) -> list[str]:
    return [search["query"] for search in record(output)["searches"]]


def ended_as(output) -> tuple:
    said = record(output)
    return said["stop_reason"], said["bad_calls"], queries(output)


def em(output) -> float:
    return compute_score("x", "", "c", {"credit": record(output)})["em"]


def test_the_tables_have_every_parser_of_verl_and_of_ours():
    from verl.experimental.agent_loop.tool_parser import ToolParser

    from verl_credit.host.rollout import tool_parsers  # noqa: F401  (the import registers ours)

    known = {name for name, one in ToolParser._registry.items() if one.__module__.startswith("verl")}
    assert known == set(CALLS) == {*MARKS, *READERS} == set(READ)


@pytest.mark.parametrize("parser, form", CASES)
def test_a_call_that_is_only_thought_is_no_call(parser, form):
    tokenizer, call, parsed = thinking_tokenizer(), call_in(parser), FORM.format(parser)
    thought = thought_in(form, f"I could write {call('x')} or <answer>d</answer> but I know it.")
    output, policy = run(tokenizer, [ended(thought + ANSWER)], *LONG, parsed)
    assert ended_as(output) == ("answer", 0, []) and em(output) == 1.0
    assert set(output.turn_ids) == {0} and all(output.response_mask)
    assert policy_text(tokenizer, output, 0) == policy.script[0]

    output, policy = run(tokenizer, [ended(thought + call("y")), ended(ANSWER)], *LONG, parsed)
    assert ended_as(output) == ("answer", 0, ["y"])
    assert [policy_text(tokenizer, output, turn) for turn in (0, 1)] == policy.script


@pytest.mark.parametrize("parser, form", COMMON)
def test_with_include_reasoning_the_call_is_made(parser, form):
    if form.startswith("<|channel|>"):
        return  # verl's own parser leaves out the thoughts of gpt-oss
    script = [ended(thought_in(form, call_in(parser)("x")) + ANSWER), ended(ANSWER)]
    output, _ = run(thinking_tokenizer(), script, *LONG, FORM.format(parser), INCLUDED)
    assert ended_as(output) == ("answer", 0, ["x"])
    output, _ = run(thinking_tokenizer(), [ended(thought_in(form, ANSWER))], *LONG, INCLUDED)
    assert record(output)["stop_reason"] == "answer" and ANSWER in record(output)["final_text"]


@pytest.mark.parametrize("parser, form", COMMON)
def test_nothing_counts_in_a_thought_that_never_closes(parser, form):
    tokenizer, inside = thinking_tokenizer(), form + call_in(parser)("x") + ANSWER
    output, _ = run(tokenizer, [ended(inside)], *LONG, FORM.format(parser))
    assert ended_as(output) == ("no_answer", 0, []) and em(output) == 0.0
    output, _ = run(tokenizer, [inside + "y" * 600], *LONG, FORM.format(parser))
    assert ended_as(output) == ("turn_length", 0, [])
    script = [ended(call_in(parser)("y")), inside + "y" * 600]
    output, _ = run(tokenizer, script, LONG[0], "data.max_response_length=500", FORM.format(parser))
    assert ended_as(output) == ("length", 0, ["y"]) and em(output) == 0.0


@pytest.mark.parametrize("parser, form", COMMON)
def test_a_template_may_open_the_thought(parser, form):
    """The closing mark alone ends it, in the first turn and after an observation."""
    call, parsed, close = call_in(parser), FORM.format(parser), FORMS[form]
    tokenizer = thinking_tokenizer(form if form.endswith("\n") else form + "\n")
    script = [f"{call('x')} no {close}{call('y')}", f"<answer>d</answer>{call('z')}{close}{ANSWER}"]
    output, policy = run(tokenizer, [ended(turn) for turn in script], *LONG, parsed)
    assert ended_as(output) == ("answer", 0, ["y"]) and em(output) == 1.0
    assert [policy_text(tokenizer, output, turn) for turn in (0, 1)] == policy.script
    output, _ = run(tokenizer, [ended(call("x") + ANSWER)], *LONG, parsed)
    assert ended_as(output) == ("no_answer", 0, [])
    if form in ("<think>", "<seed:think>"):  # the opening mark as text
        plain = thinking_tokenizer(form + "\n", special=False)
        output, _ = run(plain, [ended(f"{ANSWER}{close}")], *LONG)
        assert ended_as(output) == ("no_answer", 0, [])


def test_the_row_is_the_same_whether_thoughts_count():
    """Where no thought holds a call, the key changes neither a token nor a mask."""
    script = [search_turn("a", "wait let me"), search_turn("b", "so"), answer_turn("c", "<tool_call>")]
    rows = [run(thinking_tokenizer(), script, *LONG, *key)[0] for key in ((), (INCLUDED,))]
    for name in ("prompt_ids", "response_ids", "response_mask", "turn_ids", "response_logprobs"):
        assert getattr(rows[0], name) == getattr(rows[1], name), name


def test_an_engine_without_a_token_for_the_first_turn_is_named_with_its_row():
    named = r"row \('train', 1, 'u'\), rollout 0: the engine \(\S+rollout\.name=hf\) returned no token .*\(stop reason "
    with pytest.raises(RuntimeError, match=named + r"'aborted'\)"):
        run(thinking_tokenizer(), [""])


@pytest.mark.parametrize("tools", [1, 2])
def test_an_engine_without_a_token_later_makes_no_search_the_answer_turn(tools):
    script = [search_turn("a"), search_turn("b")][:tools]
    output, policy = run(thinking_tokenizer(), [*script, ""])
    said = record(output)
    assert (said["stop_reason"], said["tool_fault"]) == ("tool_fault", "engine_no_token")
    assert not any(output.response_mask) and set(output.turn_ids) == {-1}
    assert len(output.response_ids) == len(output.turn_ids) and len(policy.requests) == tools + 1
