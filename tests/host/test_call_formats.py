"""Rollouts in each family's form: chat template, call, tool's role, and the keys that the start decides by the template."""

import json

import pytest
from omegaconf import OmegaConf

from kit.call_templates import FAMILIES
from kit.recipes import load_config
from kit.trajectories import policy_text, record, run
from verl_credit.host.process.template_check import check_template
from verl_credit.recipe.agent_loops import AT_ONCE, FORMAT
from verl_credit.recipe.doctor.lengths import PromptMeter
from verl_credit.turns.rollout.reward.qa import compute_score

ANSWER = "<answer>c</answer>"


@pytest.fixture(params=FAMILIES)
def family(request):
    return FAMILIES[request.param]


@pytest.fixture
def tokenizer(family):
    return family.tokenizer()


@pytest.fixture
def played(family, tokenizer, tmp_path):
    """script -> the trajectory, with what `train` decides for this family."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": family.model_type}))
    config = load_config("search_cpu", [f"actor_rollout_ref.model.path={tmp_path}"])
    check_template(config, PromptMeter(tokenizer, config))
    decided = [f"{key}={OmegaConf.select(config, key)}" for key in (FORMAT, AT_ONCE)]
    room = ["search.max_new_tokens=400", "data.max_response_length=3000"]
    return lambda script, *more: run(tokenizer, script, *decided, *room, *more, model_type=family.model_type)


def ended_as(output):
    said = record(output)
    return said["stop_reason"], said["bad_calls"], [search["query"] for search in said["searches"]]


def closed_thought(family):
    return "\n</think>\n\n" if family.template.rstrip().endswith("<think>\n{% endif %}") else ""


def test_searches_and_an_answer(family, tokenizer, played):
    answer = closed_thought(family) + ANSWER + "<|im_end|>"
    output, policy = played([family.turn("a"), family.turn("b"), answer])
    assert ended_as(output) == ("answer", 0, ["a", "b"])
    assert compute_score("x", "", "c", {"credit": record(output)})["em"] == 1.0
    written = [policy_text(tokenizer, output, turn) for turn in range(3)]
    if (
        family.model_type == "glm4_moe"
    ):  # its builder takes the mark that also begins the observation out of the mask
        written = [
            text.removesuffix("<|observation|>") + "<|observation|>" * (k < 2)
            for k, text in enumerate(written)
        ]
    assert written == policy.script
    for page in ("about a", "about b"):
        assert tokenizer.decode(output.response_ids).count(page) == 1


def test_a_call_that_cannot_be_read_is_a_bad_call(family, played):
    whole = family.turn("@")
    broken = whole[: whole.index("@")] + family.ends
    if family.form == "qwen3_coder":  # its parser also reads what is not closed
        broken = whole.replace("<function=search>", "<function")
    output, _ = played([broken])
    assert ended_as(output) == ("bad_call", 1, [])
    output, _ = played([f"I do not know{family.ends}"])
    assert ended_as(output)[1:] == (0, [])


def test_two_calls_in_a_turn_fail_no_rollout(family, played):
    """The second one is made, or counted where the template takes one call a message."""
    call = family.call.replace("{}", "b").rpartition("</think>\n\n")[2]
    both = family.call.replace("{}", "a") + "\n" + call + family.ends
    output, _ = played([both, closed_thought(family) + ANSWER])
    expected = ("answer", 1, ["a"]) if family.one_call else ("answer", 0, ["a", "b"])
    assert ended_as(output) == expected
    output, _ = played([both, closed_thought(family) + ANSWER], f"{AT_ONCE}=1")
    assert ended_as(output) == ("answer", 1, ["a"])


def test_llama_s_turn_ends_at_its_call():
    llama = FAMILIES["llama 3.1"]
    tokenizer, form = llama.tokenizer(), f"{FORMAT}=llama3"
    tagged = "<|python_tag|>" + llama.turn("a")
    output, policy = run(tokenizer, [tagged, ANSWER + "<|eot_id|>"], form, f"{AT_ONCE}=1", model_type="llama")
    assert ended_as(output) == ("answer", 0, ["a"])
    assert policy.requests[0][1]["stop_token_ids"] == [tokenizer.convert_tokens_to_ids("<|eom_id|>")]
    without = FAMILIES["qwen3"].tokenizer()
    _, policy = run(without, [ANSWER], form)
    assert "stop_token_ids" not in policy.requests[0][1]


def test_the_code_of_a_built_in_tool_is_a_bad_call():
    code = '<|python_tag|>search.call(query="a")<|eom_id|>'
    output, _ = run(FAMILIES["llama 3.1"].tokenizer(), [code], f"{FORMAT}=llama3", model_type="llama")
    assert ended_as(output) == ("bad_call", 1, [])


@pytest.mark.parametrize("form, read", [("harmony", ["a"]), ("gpt-oss", [])])
def test_gpt_oss_may_call_without_a_thought(form, read):
    """verl's parser reads only a call that follows a thought in its turn; the other is counted."""
    oss = FAMILIES["gpt-oss"]
    script = [oss.turn("a"), f"<|channel|>final<|message|>{ANSWER}<|end|>"]
    output, _ = run(oss.tokenizer(), script[: 1 + len(read)], f"{FORMAT}={form}", model_type="gpt_oss")
    assert ended_as(output) == (("answer", 0, read) if read else ("bad_call", 1, read))
    thought = "<|channel|>analysis<|message|>to=functions.search, well<|end|><|start|>assistant"
    script[0] = thought + script[0]
    output, _ = run(oss.tokenizer(), script, f"{FORMAT}={form}", model_type="gpt_oss")
    assert ended_as(output) == ("answer", 0, ["a"])
