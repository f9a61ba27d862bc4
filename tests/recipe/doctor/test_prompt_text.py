"""What the chat template writes before a scored answer is decided and told before Ray; a date in its prompts is told."""

from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf

from kit import chat_templates as forms
from kit.recipes import load_config
from verl_credit.cli.train import start
from verl_credit.config.settings import CreditSettings
from verl_credit.recipe.doctor.context import Context
from verl_credit.recipe.doctor.data import TRAIN
from verl_credit.recipe.doctor.inputs import check_date, check_scored_text
from verl_credit.recipe.doctor.status import Status
from verl_credit.records.run.state import describe_resume, save_state
from verl_credit.turns.score.requests import AnswerWriter

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
        (forms.QWEN3, (), THOUGHT, f"<|im_start|>assistant\n{THOUGHT}"),
        (forms.QWEN3, (QUIET,), "", f"<|im_start|>assistant\n{THOUGHT}"),
        (forms.THINKING, (), "\n</think>\n\n", f"<|im_start|>assistant\n{THOUGHT}"),
        (forms.QWEN35, (), "\n</think>\n\n", f"<|im_start|>assistant\n{THOUGHT}"),
        (forms.GLM, (), "\n<think></think>\n", "<|assistant|>\n<think></think>\n"),
        (forms.GPT_OSS, (), "<|channel|>final<|message|>", "<|start|>assistant<|channel|>final<|message|>"),
    ],
)
def test_the_template_decides_the_text_before_the_answer(template, overrides, prefix, before):
    context = context_of(template, *overrides)
    found = check_scored_text(context)
    assert found.status is Status.PASS and context.answer_prefix == prefix
    shown = before.replace("\n", "\\n") + "<answer>{answer}</answer>' after a question"
    assert shown in found.found and found.found.endswith(f"({PREFIX}='auto')")
    # A worker that is given auto decides as the start does.
    assert AnswerWriter(context.tokenizer, context.settings).prefix == prefix


def test_a_template_of_the_user_s_that_closes_the_thought_gets_no_second_one():
    context = context_of(forms.THINKING)
    context.config.algorithm.info_gain_template = "</think>\n\n<answer>{answer}</answer>"
    assert check_scored_text(context).status is Status.PASS and context.answer_prefix == ""


def test_nothing_is_decided_where_nothing_is_scored():
    context = context_of(forms.QWEN3, "algorithm.info_gain_norm_mode=none")
    assert check_scored_text(context).status is Status.SKIP and context.answer_prefix is None


@pytest.mark.parametrize(
    "template, overrides, status",
    [
        (forms.LLAMA, (), Status.WARN),
        ("{{ strftime_now('%d %b %Y') }}" + forms.CHATML, (), Status.WARN),
        (forms.CHATML, (), Status.PASS),
        (forms.LLAMA, ("+data.apply_chat_template_kwargs.date_string='26 Jul 2024'",), Status.PASS),
    ],
)
def test_a_template_that_writes_todays_date_is_warned_of(template, overrides, status):
    assert check_date(context_of(template, *overrides)).status is status


def test_the_start_writes_the_text_into_the_run_s_configuration(monkeypatch):
    context = context_of(forms.QWEN3)
    monkeypatch.setattr(start, "_check", lambda context, *_: check_scored_text(context))
    start._preflight(context, None)
    assert CreditSettings.from_config(context.config).algorithm.info_gain_prefix == THOUGHT


@pytest.mark.slow
def test_a_checkpoint_of_before_resumes_without_the_key_of_the_date(tmp_path):
    config = load_config("search_cpu", [f"run_dir={tmp_path}", "data.train_files=x", "data.val_files=x"])
    config.trainer.default_local_dir = str(tmp_path)
    folder = tmp_path / "global_step_1"
    folder.mkdir()
    (folder / "data.pt").touch()
    for date, line in ((None, "exact, from step 1"), ("25 Nov", "nothing reads prompt_date any more")):
        before = OmegaConf.create({**OmegaConf.to_container(config), "prompt_date": date})
        save_state(folder, before, 1, {})
        assert line in describe_resume(config, 1)[0]
