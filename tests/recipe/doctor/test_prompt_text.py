"""What the chat template writes before a scored answer, and the date in its prompts, are decided and told before Ray."""

from datetime import datetime
from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf

from kit import chat_templates as forms
from kit.recipes import load_config
from verl_credit.cli.train import start
from verl_credit.config.settings import CreditSettings
from verl_credit.recipe.compose import recipes_folder
from verl_credit.recipe.doctor import prompt_text
from verl_credit.recipe.doctor.context import Context
from verl_credit.recipe.doctor.data import TRAIN
from verl_credit.recipe.doctor.prompt_text import check_date, check_prefix
from verl_credit.recipe.doctor.result import Status
from verl_credit.records.run.state import deciding_keys, describe_resume, save_state
from verl_credit.turns.requests import AnswerWriter

THOUGHT = forms.EMPTY_THOUGHT
ROW = SimpleNamespace(prompt=[{"role": "user", "content": "Who?"}])
QUIET = "+data.apply_chat_template_kwargs.enable_thinking=false"
MODEL = "actor_rollout_ref.model.path=x"
PREFIX = "algorithm.info_gain_prefix"


def context_of(template, *overrides, recipe="search_cpu"):
    config = load_config(recipe, ["data.train_files=x", "data.val_files=x", MODEL, *overrides])
    context = Context(None, config)
    context._rows[TRAIN] = [ROW]
    context.__dict__["_tokenizer"] = forms.tokenizer_with(template)
    return context


@pytest.mark.parametrize(
    "template, overrides, prefix, before",
    [
        (forms.CHATML, (), "", "<|im_start|>assistant\n"),
        (forms.LLAMA, (), "", "assistant<|end_header_id|>\n\n"),
        (forms.MISTRAL, (), "", "[/INST]"),
        (forms.QWEN3, (), THOUGHT, f"<|im_start|>assistant\n{THOUGHT}"),
        (forms.QWEN3, (QUIET,), "", f"<|im_start|>assistant\n{THOUGHT}"),
        (forms.THINKING, (), "\n</think>\n\n", f"<|im_start|>assistant\n{THOUGHT}"),
        (forms.QWEN35, (), "\n</think>\n\n", f"<|im_start|>assistant\n{THOUGHT}"),
        (forms.QWEN35, (QUIET,), "", f"<|im_start|>assistant\n{THOUGHT}"),
        (forms.NEMOTRON, (), "\n</think>\n\n", f"<|im_start|>assistant\n{THOUGHT}"),
        (forms.GLM, (), "\n<think></think>\n", "<|assistant|>\n<think></think>\n"),
        (forms.GPT_OSS, (), "<|channel|>final<|message|>", "<|start|>assistant<|channel|>final<|message|>"),
    ],
)
def test_the_template_decides_the_text_before_the_answer(template, overrides, prefix, before):
    context = context_of(template, *overrides)
    found = check_prefix(context)
    assert found.status is Status.PASS and context.answer_prefix == prefix
    shown = before.replace("\n", "\\n") + "<answer>{answer}</answer>' after a question"
    assert shown in found.found and found.found.endswith(f"({PREFIX}='auto')")
    # A worker that is given auto decides as the start does.
    assert AnswerWriter(context.tokenizer, context.settings).prefix == prefix


@pytest.mark.parametrize(
    "template, given, status",
    [
        (forms.QWEN3, THOUGHT, Status.PASS),
        (forms.QWEN3, "", Status.WARN),  # scored without the empty thought
        (forms.QWEN35, THOUGHT, Status.WARN),  # a second opening mark
        (forms.QWEN35, "", Status.WARN),  # inside the open thought
        (forms.GPT_OSS, "", Status.WARN),
        (forms.CHATML, "So: ", Status.PASS),
        (forms.CHATML, "<think>\n", Status.WARN),
    ],
)
def test_a_prefix_of_the_user_s_is_shown_and_kept(template, given, status):
    context = context_of(template)
    OmegaConf.update(context.config, PREFIX, given)
    found = check_prefix(context)
    header = "assistant\\n" if template is not forms.GPT_OSS else "<|start|>assistant"
    shown = header + ("<think>\\n" if template is forms.QWEN35 else "") + repr(given)[1:-1]
    assert f"{shown}<answer>{{answer}}</answer>'" in found.found
    assert (found.status, context.answer_prefix) == (status, given)
    assert (f"{PREFIX}=auto takes that text" in found.found) == (status is Status.WARN)


def test_a_template_of_the_user_s_that_closes_the_thought_gets_no_second_one():
    context = context_of(forms.THINKING)
    context.config.algorithm.info_gain_template = "</think>\n\n<answer>{answer}</answer>"
    assert check_prefix(context).status is Status.PASS and context.answer_prefix == ""


def test_nothing_is_decided_where_nothing_is_scored():
    context = context_of(forms.QWEN3, "algorithm.info_gain_norm_mode=none")
    assert check_prefix(context).status is Status.SKIP and context.answer_prefix is None


def test_the_qwen3_recipes_score_after_the_empty_thought_as_before():
    """They had it as a fixed value; Qwen3's form of template gives the same text."""
    for file in (recipes_folder() / "model").iterdir():
        assert "info_gain_prefix" not in file.read_text()
    context = context_of(forms.QWEN3, "run_dir=x", recipe="multihop_qwen3_4b")
    check_prefix(context)
    assert context.answer_prefix == THOUGHT


# --- dates ---

DATED = forms.DATED.replace("date_string", "today") + "{{ today }}" + forms.CHATML
FIXED_BY_NONE = "{{ strftime_now('%d %b %Y') }}" + forms.CHATML
IN_ITS_OWN_SYSTEM_TEXT = "{% if messages[0].role != 'system' %}" + FIXED_BY_NONE + "{% endif %}"


@pytest.mark.parametrize(
    "template, said",
    [
        (forms.LLAMA, "+data.apply_chat_template_kwargs.date_string='{}' keeps the date"),
        (DATED, "+data.apply_chat_template_kwargs.today='{}' keeps the date"),
        (FIXED_BY_NONE, "No argument of the template keeps it; a system message in the rows may replace"),
        (
            IN_ITS_OWN_SYSTEM_TEXT,
            "No argument of the template keeps it; a system message in the rows may replace",
        ),
    ],
)
def test_a_date_is_said_with_the_key_that_keeps_it(template, said, monkeypatch):
    monkeypatch.setattr(prompt_text, "datetime", SimpleNamespace(now=lambda: datetime(2026, 11, 26)))
    context = context_of(template)
    found = check_date(context)
    assert found.status is Status.WARN and said.format("26 Nov 2026") in found.found
    assert "today's date ('26 Nov 2026')" in found.found and context.prompt_date == "26 Nov 2026"


@pytest.mark.parametrize(
    "template, overrides, row",
    [
        (forms.CHATML, (), ROW.prompt),
        (forms.LLAMA, ("+data.apply_chat_template_kwargs.date_string='26 Jul 2024'",), ROW.prompt),
        (IN_ITS_OWN_SYSTEM_TEXT, (), [{"role": "system", "content": "Search."}, *ROW.prompt]),
    ],
)
def test_prompts_without_today_s_date_pass(template, overrides, row):
    context = context_of(template, *overrides)
    context._rows[TRAIN] = [SimpleNamespace(prompt=row)]
    assert check_date(context).status is Status.PASS and context.prompt_date is None


def test_the_configuration_of_an_earlier_run_has_its_date():
    found = check_date(context_of(forms.LLAMA, "prompt_date='1 Jan'"))
    assert "They had '1 Jan' (prompt_date) in the run of this configuration. " in found.found


def test_the_start_writes_both_into_the_run_s_configuration(monkeypatch):
    context = context_of(forms.QWEN3)

    def checked(context, *_):
        context.answer_prefix, context.prompt_date = THOUGHT, "26 Nov 2026"

    monkeypatch.setattr(start, "_check", checked)
    start._preflight(context, None)
    assert CreditSettings.from_config(context.config).algorithm.info_gain_prefix == THOUGHT
    assert deciding_keys(context.config)["prompt_date"] == "26 Nov 2026"


def test_a_resume_on_another_day_says_that_its_prompts_are_others(tmp_path):
    config = load_config("search_cpu", [f"run_dir={tmp_path}", "data.train_files=x", "data.val_files=x"])
    config.trainer.default_local_dir = str(tmp_path)
    OmegaConf.update(config, "prompt_date", "25 Nov 2026")
    folder = tmp_path / "global_step_1"
    folder.mkdir()
    (folder / "data.pt").touch()
    save_state(folder, config, 1, {})
    assert describe_resume(config, 1)[0] == "resume: exact, from step 1"
    OmegaConf.update(config, "prompt_date", "26 Nov 2026")
    said = describe_resume(config, 1)[0]
    assert said == "resume: from step 1, not exact: prompt_date was 25 Nov 2026, is 26 Nov 2026"
