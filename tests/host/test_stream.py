"""The agent loop's tokens are the chat template's text of the conversation, for every model type and form of template."""

import json
import logging

import pytest
import torch
from verl.utils.tokenizer.continuous_token import ContinuousTokenBuilder, QwenVLContinuousTokenBuilder
from verl.utils.tokenizer.continuous_token_wiring import create_continuous_token_builder

from kit import chat_templates as forms
from kit.byte_world import make_tokenizer
from kit.recipes import load_config
from kit.settings import settings
from kit.trajectories import run
from verl_credit.errors import PreflightError
from verl_credit.host.process import stream_check
from verl_credit.host.process.stream_check import check_stream, differences
from verl_credit.host.rollout.stream_builder import turn_end
from verl_credit.recipe.doctor.lengths import PromptMeter
from verl_credit.turns.rollout.search.wire import SCHEMA
from verl_credit.turns.score.requests import RowPlanner
from verl_credit.worlds.lab.protocol import answer_turn, search_turn
from verl_credit.worlds.real.multihop import encode

QUIET = {"enable_thinking": False}
CALL = search_turn("river").removesuffix("<|im_end|>")
CLOSED = "\n</think>\n\n"
GLM_CALL = "\n<think></think>\n<tool_call>search\n<arg_key>query</arg_key>\n<arg_value>river</arg_value>\n</tool_call>"
GLM_FORMAT = "actor_rollout_ref.rollout.multi_turn.format=glm"


def pages(query):
    return f"Page 1: about {query}\ntext"


def messages_of(*queries):
    """The conversation of searches for these queries, as the template reads it."""
    messages = [{"role": "user", "content": "Who?"}]
    for query in queries:
        function = {"name": "search", "arguments": {"query": query}}
        calls = [{"type": "function", "function": function}]
        messages += [{"role": "assistant", "content": "", "tool_calls": calls}]
        messages += [{"role": "tool", "content": pages(query)}]
    return messages


def whole(tokenizer, messages):
    return tokenizer.apply_chat_template(messages, tools=[SCHEMA], tokenize=False, add_generation_prompt=True)


@pytest.mark.parametrize("model_type", ["llama", "mistral", "smollm3", "lfm2", "nemotron_h", "qwen3", None])
@pytest.mark.parametrize("template", [forms.CHATML, forms.NO_SEPARATOR])
def test_the_stream_is_the_template_s_text_for_every_model_type(template, model_type):
    tokenizer = forms.tokenizer_with(template)
    script = [search_turn("a"), search_turn("b"), answer_turn("x")]
    output, _ = run(tokenizer, script, model_type=model_type)
    text = tokenizer.decode([*output.prompt_ids, *output.response_ids])
    assert text == whole(tokenizer, messages_of("a", "b")) + script[2]


def test_rollouts_of_a_worker_render_a_dialogue_once(monkeypatch):
    tokenizer, rendered = forms.tokenizer_with(forms.CHATML), []
    render = ContinuousTokenBuilder._render_tokens

    def counted(self, messages, **asked):
        rendered.append(json.dumps([messages, asked]))
        return render(self, messages, **asked)

    monkeypatch.setattr(ContinuousTokenBuilder, "_render_tokens", counted)
    script = [search_turn("a"), search_turn("b"), answer_turn("x")]
    first, _ = run(tokenizer, script, model_type="llama")
    assert len(rendered) == len(set(rendered))
    before = len(rendered)
    again, _ = run(tokenizer, script, model_type="llama")
    assert len(rendered) == before
    assert (again.prompt_ids, again.response_ids) == (first.prompt_ids, first.response_ids)


def test_a_template_that_changes_is_rendered_anew():
    tokenizer = forms.tokenizer_with(forms.CHATML)
    script = [search_turn("a"), answer_turn("x")]
    for template in (forms.CHATML, forms.NO_SEPARATOR, forms.CHATML):
        tokenizer.chat_template = forms.tokenizer_with(template).chat_template
        output, _ = run(tokenizer, script, model_type="llama")
        text = tokenizer.decode([*output.prompt_ids, *output.response_ids])
        assert text == whole(tokenizer, messages_of("a")) + script[1]


def test_what_is_inserted_is_not_the_policy_s():
    tokenizer = forms.tokenizer_with(forms.CHATML)
    output, _ = run(tokenizer, [search_turn("a"), answer_turn("x")], model_type="llama")
    own = [token for token, mask in zip(output.response_ids, output.response_mask, strict=True) if mask]
    assert tokenizer.decode(own) == search_turn("a") + answer_turn("x")
    turns = [0] * len(tokenizer.encode(search_turn("a"))) + [1] * len(tokenizer.encode(answer_turn("x")))
    assert [turn for turn in output.turn_ids if turn >= 0] == turns
    assert [turn >= 0 for turn in output.turn_ids] == [bool(mask) for mask in output.response_mask]
    log_probs = zip(output.response_logprobs, output.response_mask, strict=True)
    assert all((log_prob == 0) == (not mask) for log_prob, mask in log_probs)


def test_nothing_is_inserted_after_a_turn_that_did_not_end():
    tokenizer = forms.tokenizer_with(forms.CHATML)
    output, _ = run(tokenizer, [CALL, answer_turn("x")], model_type="llama")
    assert CALL + "<|im_start|>user" in tokenizer.decode(output.response_ids)


def test_real_cpu_writes_its_rollouts_as_its_demonstrations():
    template = load_config("real_cpu", ["real.questions=x"]).actor_rollout_ref.model.custom_chat_template
    tokenizer = make_tokenizer()
    tokenizer.chat_template = template
    answer = {"role": "assistant", "content": "<answer>x</answer>"}
    ids, by_policy = encode([*messages_of("a", "b"), answer], tokenizer, template)
    script = [search_turn("a"), search_turn("b"), answer_turn("x")]
    output, _ = run(tokenizer, script, model_type="llama")
    assert [*output.prompt_ids, *output.response_ids] == ids
    assert output.response_mask == by_policy[len(output.prompt_ids) :]
    verls = create_continuous_token_builder(tokenizer, hf_model_type="llama")
    assert turn_end(verls) == (tokenizer.eos_token_id, tokenizer.encode("\n"))


@pytest.mark.parametrize(
    "template, model_type, call, header, prefix",
    [
        (forms.CHATML, "llama", search_turn("river"), "\n<|im_start|>assistant\n", ""),
        (
            forms.QWEN35,
            "qwen3_5",
            CLOSED + search_turn("river"),
            "\n<|im_start|>assistant\n<think>\n",
            CLOSED,
        ),
        (forms.MISTRAL, "mistral", CALL + "</s>", "", ""),
        # GLM stops at the token with which the result begins.
        (forms.GLM, "glm4_moe", GLM_CALL + "<|observation|>", "<|assistant|>", "\n<think></think>\n"),
    ],
)
@pytest.mark.parametrize("context", ["observation", "call"])
def test_answers_are_scored_where_the_template_ends_a_context(
    template, model_type, call, header, prefix, context
):
    tokenizer = forms.tokenizer_with(template)
    parser = GLM_FORMAT if template is forms.GLM else GLM_FORMAT.replace("glm", "hermes")
    output, _ = run(tokenizer, [call, "<answer>x</answer>"], parser, model_type=model_type)
    ids, mask = (output.prompt_ids, output.response_ids), torch.tensor(output.response_mask)
    of_trainer = torch.where(mask.bool(), torch.tensor(output.turn_ids), -1)  # `fetch_turn_batch`
    planner = RowPlanner(tokenizer, settings(info_gain_context=context))
    prior, after = planner.requests(0, *ids, of_trainer, ("x",))
    texts = [
        tokenizer.decode([*ids[0], *ids[1]][: request.base] + list(request.answer.token_ids))
        for request in (prior, after)
    ]
    prompt = whole(tokenizer, messages_of())
    assert texts[0] == f"{prompt}{prefix}<answer>x</answer>"
    written = call.removesuffix("<|observation|>") + header
    if context == "observation":
        written = tokenizer.decode(ids[1]).removesuffix("<answer>x</answer>")
    assert texts[1] == f"{prompt}{written}{prefix}<answer>x</answer>"


# --- before Ray ---


def checked(template, model_type, tmp_path, builder=None, **arguments):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    given = [f"+data.apply_chat_template_kwargs.{name}={value}" for name, value in arguments.items()]
    config = load_config("search_cpu", [f"actor_rollout_ref.model.path={tmp_path}", *given])
    tokenizer = forms.tokenizer_with(template)
    return check_stream(config, PromptMeter(tokenizer, config), builder and builder(tokenizer))


@pytest.mark.parametrize(
    "template, model_type",
    [
        (forms.CHATML, "llama"),
        (forms.NO_SEPARATOR, "phi3"),
        (forms.NO_SEPARATOR, "qwen3"),
        (forms.QWEN3, "qwen3"),
        (forms.THINKING, "qwen3"),
        (forms.QWEN35, "qwen3_5"),
        (forms.LLAMA, "llama"),
        (forms.MISTRAL, "mistral"),
        (forms.GLM, "glm4_moe"),
        (forms.GPT_OSS, "gpt_oss"),
    ],
)
def test_a_stream_that_is_the_template_s_text_passes_without_a_word(template, model_type, tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        assert checked(template, model_type, tmp_path) == []
    assert not caplog.records


@pytest.mark.parametrize("template, model_type", [(forms.QWEN3, "qwen3"), (forms.QWEN35, "qwen3_5")])
def test_thoughts_that_the_template_drops_are_a_warning(template, model_type, tmp_path):
    (line,) = checked(template, model_type, tmp_path, **QUIET)
    assert "<think>" in line


def test_a_separator_that_is_lost_is_refused(tmp_path):
    """With verl's own builder, as before the loop followed the template."""
    with pytest.raises(PreflightError) as caught:
        checked(forms.CHATML, "llama", tmp_path, ContinuousTokenBuilder)
    said = str(caught.value)
    assert f"model.path={tmp_path}: the chat template writes '\\n' after " in said
    assert "<|im_end|>'" in said and "custom_chat_template" in said


def test_a_family_of_verl_s_table_that_writes_another_template_is_refused(tmp_path):
    """GLM's builder inserts nothing, whatever the template writes."""
    with pytest.raises(PreflightError, match=r"writes '\\n' after .*<\|im_end\|>'"):
        checked(forms.CHATML, "glm4_moe", tmp_path)


def test_a_template_to_which_nothing_can_be_appended_is_refused(tmp_path):
    with pytest.raises(PreflightError, match="cannot write what a call returns after .*suffix diff failed"):
        checked("{{ messages | length }}" + forms.CHATML, "llama", tmp_path)


def test_a_template_that_writes_one_call_alone_cannot_be_compared(tmp_path):
    """The loop appends a result all the same: verl writes it after a call of its own."""
    once = "{% if messages | length > 4 %}{{ raise_exception('one call') }}{% endif %}"
    (line,) = checked(once + forms.CHATML, "llama", tmp_path)
    assert (
        line.startswith("the chat template cannot write a conversation with two calls: ")
        and "one call" in line
    )


@pytest.mark.parametrize(
    "stream, whole, lost",
    [
        ("qPPcc", "qPPcc", []),
        ("qPPccP", "qPPxccP", [True]),
        ("qPPcc", "qPPccx", [False]),
        ("qPPcc", "qxPPcc", [False]),  # the policy writes its turn as it likes
        ("qPPcc", "qPxPcc", [False]),
        ("qPPyc", "qPPc", [False]),
        ("qPPyc", "qPPxc", [False]),
    ],
)
def test_what_the_template_alone_writes_after_a_turn_is_lost(stream, whole, lost):
    own = [letter == "P" for letter in stream]
    found = differences(*([*map(ord, stream)], own, [*map(ord, whole)]), lambda ids: "".join(map(chr, ids)))
    assert [is_lost for _, is_lost in found] == lost


class Processor:
    """Stands in for Qwen3.5's: it writes with the tokenizer's template, and counts its calls."""

    image_processor, chat_template, n_calls = object(), None, 0

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer

    def apply_chat_template(self, messages, **options):
        return self.tokenizer.apply_chat_template(messages, **options)

    def __call__(self, text, **_):
        self.n_calls += 1
        return {"input_ids": [self.tokenizer.encode(text[0], add_special_tokens=False)]}


@pytest.mark.parametrize("own", [None, forms.QWEN35])
def test_a_model_with_a_processor_is_tried_with_the_builder_of_its_loop(own, tmp_path, monkeypatch):
    made = []
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_5"}))
    (tmp_path / "preprocessor_config.json").write_text("{}")
    tokenizer = forms.tokenizer_with(forms.QWEN35)
    monkeypatch.setattr(
        stream_check, "hf_processor", lambda path, **_: made.append(path) or Processor(tokenizer)
    )
    config = load_config("search_cpu", [f"actor_rollout_ref.model.path={tmp_path}"])
    config.actor_rollout_ref.model.custom_chat_template = own
    builder = stream_check.loop_builder(config, PromptMeter(tokenizer, config))
    assert isinstance(builder, QwenVLContinuousTokenBuilder) and made == [str(tmp_path)]
    assert builder.processor.chat_template == forms.QWEN35
    assert check_stream(config, PromptMeter(tokenizer, config), builder) == []
    assert builder.processor.n_calls
