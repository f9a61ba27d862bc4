"""A chat template that hides the tool, or what it returned, is refused with the model's path before anything starts."""

import json

import pytest
from omegaconf import OmegaConf

from kit.byte_world import make_tokenizer
from kit.call_templates import FAMILIES
from kit.recipes import load_config
from verl_credit.config.fit import DEFAULT
from verl_credit.errors import ConfigError, PreflightError
from verl_credit.host.process.template_check import check_template
from verl_credit.recipe.agent_loops import AT_ONCE, FORMAT, MULTI_TURN
from verl_credit.recipe.doctor.lengths import PromptMeter
from verl_credit.recipe.rules import validate
from verl_credit.worlds.lab.protocol import CHAT_TEMPLATE

TOOLS = "{% for t in tools or [] %}{{ t | tojson }}\n{% endfor %}"
HEAD = "<|im_start|>{{ m.role }}\n"
CALLS = (
    "{% for c in m.tool_calls or [] %}<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}'
    "\n</tool_call>{% endfor %}"
)
HEADER = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"


FUNCTION = '''
from verl.tools.function_tool import function_tool

@function_tool("weigh")
def weigh(thing: str) -> str:
    """Weighs it.

    Args:
        thing: What to weigh.
    """
    return "1 kg"
'''


def loop(body):
    return "{% for m in messages %}" + body + "{% endfor %}"


WHOLE = TOOLS + loop(HEAD + "{{ m.content }}" + CALLS + "<|im_end|>\n") + HEADER
NO_TOOLS = WHOLE.removeprefix(TOOLS)
NO_RESULT = WHOLE.replace(HEAD, "{% if m.role != 'tool' %}" + HEAD).replace(
    "<|im_end|>\n", "<|im_end|>\n{% endif %}"
)
RAISES = WHOLE.replace(
    HEAD, "{% if m.role == 'tool' %}{{ raise_exception('no role tool') }}{% endif %}" + HEAD
)
# Writes the whole dialogue anew when a result comes: nothing can be appended.
REWRITES = "{{ messages | length }}" + WHOLE
THINKS = (
    WHOLE + "{% if add_generation_prompt and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}"
)


def check(template, *overrides, model="acme/policy"):
    tokenizer = make_tokenizer()
    if template is not None:
        tokenizer.chat_template = template
    config = load_config("search_cpu", [f"actor_rollout_ref.model.path={model}", *overrides])
    return check_template(config, PromptMeter(tokenizer, config))


@pytest.mark.parametrize("template", [WHOLE, THINKS])
def test_a_template_that_writes_tools_and_their_results_passes(template):
    assert check(template).startswith("the search tool and what a search returns")
    check(template, "+data.apply_chat_template_kwargs.enable_thinking=false")


@pytest.mark.parametrize(
    "template, said",
    [
        (NO_TOOLS, "writes the same text with and without the search tool, .*search.require_schema=false"),
        (None, "writes the same text with and without"),  # the lab's own
        (NO_RESULT, "leaves out what a search returns .*'<|im_start|>assistant"),
        (RAISES, "cannot write what a search returns .*TemplateError: no role tool"),
        (REWRITES, "cannot write what a search returns .*suffix diff failed.*verl only appends"),
        ("{{ messages.nobody.knows }}", "cannot write a question: UndefinedError"),
    ],
)
def test_a_template_that_does_not_is_refused_with_the_model_and_the_reason(template, said):
    with pytest.raises(
        PreflightError, match=rf"model.path=acme/policy: the chat template \(acme/policy\) {said}"
    ):
        check(template)
    assert check(template, "search.max_searches=0") == ""  # there is no tool


def test_tools_of_the_recipe_are_written_where_nothing_searches(tmp_path):
    (tmp_path / "tools.py").write_text(FUNCTION)
    own = (
        "search.max_searches=0",
        f"{DEFAULT}=turn_agent",
        f"{MULTI_TURN}.function_tool_path={tmp_path}/tools.py",
    )
    assert check(WHOLE, *own).startswith(
        "the recipe's tools and what a tool returns; auto: multi_turn.format=hermes"
    )
    with pytest.raises(PreflightError, match="the same text with and without the recipe's tools"):
        check(NO_TOOLS, *own)
    with pytest.raises(PreflightError, match="leaves out what a tool returns"):
        check(NO_RESULT, *own)


OWN_CALL = "{% for c in m.tool_calls or [] %}<search>{{ c.function.arguments.query }}</search>{% endfor %}"


def test_a_call_that_no_parser_of_verl_reads_is_refused():
    with pytest.raises(PreflightError, match="'.*<search>mouth of the river Nile</search>.*no parser reads"):
        check(WHOLE.replace(CALLS, OWN_CALL))


def test_a_template_that_cannot_write_the_whole_dialogue_is_refused():
    """verl's builder writes the result alone behind the ids that it has."""
    raises = "{% if messages | length > 2 and tools %}{{ raise_exception('too long') }}{% endif %}"
    with pytest.raises(PreflightError, match="cannot write .*TemplateError: too long"):
        check(raises + WHOLE)


@pytest.mark.slow
def test_a_policy_that_knows_its_tool_needs_no_schema_but_its_results():
    for template in (CHAT_TEMPLATE, NO_TOOLS, None):
        check(template, "search.require_schema=false")
    with pytest.raises(PreflightError, match="leaves out what a search returns"):
        check(NO_RESULT.removeprefix(TOOLS), "search.require_schema=false")
    with pytest.raises(ConfigError) as caught:
        validate(load_config("lab", ["search.require_schema=1"]))
    assert (caught.value.key, caught.value.value) == ("search.require_schema", 1)


def test_the_model_s_family_writes_the_results(tmp_path):
    """verl appends them by family: Qwen's wants a newline of one token."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    check(WHOLE, model=tmp_path)
    tokenizer = make_tokenizer()
    tokenizer.chat_template = WHOLE
    config = load_config("search_cpu", [f"actor_rollout_ref.model.path={tmp_path}"])
    meter = PromptMeter(tokenizer, config)
    encode = tokenizer.encode
    tokenizer.encode = lambda text, **options: encode(text * 2, **options)
    with pytest.raises(PreflightError, match="newline to tokenize to one token"):
        check_template(config, meter)


def decided(config):
    return OmegaConf.select(config, FORMAT), OmegaConf.select(config, AT_ONCE)


def of_family(name, tmp_path, *overrides):
    """(what the check says, the keys afterwards) for a family of `kit.call_templates`."""
    family = FAMILIES[name]
    (tmp_path / "config.json").write_text(json.dumps({"model_type": family.model_type}))
    config = load_config("search_cpu", [f"actor_rollout_ref.model.path={tmp_path}", *overrides])
    said = check_template(config, PromptMeter(family.tokenizer(), config))
    return said, decided(config)


@pytest.mark.parametrize("name", FAMILIES)
def test_auto_is_the_parser_that_reads_the_template_s_call(name, tmp_path):
    family, most = FAMILIES[name], 1 if FAMILIES[name].one_call else 4
    said, keys = of_family(name, tmp_path)
    assert keys == (family.form, most)
    assert f"; auto: multi_turn.format={family.form}, multi_turn.max_parallel_calls={most}" in said
    assert ("takes one call a message" in said) == family.one_call
    said, keys = of_family(name, tmp_path, f"{FORMAT}={family.form}", f"{AT_ONCE}=1")
    assert keys == (family.form, 1) and "auto" not in said


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_a_wrong_format_is_refused_for_every_family_that_writes_its_calls(name, tmp_path):
    own = FAMILIES[name].form
    for form in {family.form for family in FAMILIES.values()} - {own}:
        said = f"{FORMAT}={form} does not read.*set it to auto or {own}"
        if (name, form) == (
            "mistral nemo",
            "llama3",
        ):  # it reads the objects in the list, and gives calls no id
            said = "cannot write what a search returns .*ids have nine characters"
        with pytest.raises(PreflightError, match=said):
            of_family(name, tmp_path, f"{FORMAT}={form}")


def test_gpt_oss_may_have_verl_s_own_parser(tmp_path):
    """It reads what the model writes after a thought, and not what the template writes."""
    assert of_family("gpt-oss", tmp_path, f"{FORMAT}=gpt-oss")[1] == ("gpt-oss", 4)


def test_several_calls_are_refused_for_a_template_that_takes_one(tmp_path):
    with pytest.raises(
        PreflightError,
        match="one call a message .TemplateError: one call a message.*calls=4; set it to 1 or auto",
    ):
        of_family("llama 3.1", tmp_path, f"{AT_ONCE}=4")


def test_a_template_that_leaves_out_the_second_result_takes_one_call():
    first = WHOLE.replace(HEAD, "{% if m.role != 'tool' or loop.previtem.role != 'tool' %}" + HEAD).replace(
        "<|im_end|>\n", "<|im_end|>\n{% endif %}"
    )
    assert "multi_turn.max_parallel_calls=1; it takes one call a message" in check(first)


def test_auto_needs_a_template_that_writes_the_call():
    with pytest.raises(
        PreflightError,
        match="leaves the call out of a dialogue.*set .*format=auto to the policy's format: hermes, ",
    ):
        check(WHOLE.replace(CALLS, ""))
    assert check(WHOLE.replace(CALLS, ""), f"{FORMAT}=hermes").startswith("the search tool and")


def test_a_template_that_reads_its_tools_is_not_rendered_without_them(tmp_path):
    with pytest.raises(
        PreflightError, match="cannot write a question without tools .*set data.filter_overlong_prompts=false"
    ):
        of_family("hermes tool_use", tmp_path, "data.filter_overlong_prompts=true")


def test_the_reason_is_the_template_s_own(tmp_path):
    """verl's builder renders again after an exception, and that one says nothing of the cause."""
    raises = WHOLE.replace(
        HEAD, "{% if m.role == 'tool' and not m.name %}{{ raise_exception('no name') }}{% endif %}" + HEAD
    )
    with pytest.raises(PreflightError, match="cannot write what a search returns .*TemplateError: no name"):
        check(raises.replace("{{ m.content }}", "{{ m.content + '' }}"))
