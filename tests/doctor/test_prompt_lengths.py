"""Prompts longer than their room are refused with row and lengths, as the agent loop would write them."""

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
from verl.utils.tokenizer.continuous_token import ContinuousTokenBuilder

from kit.byte_world import make_tokenizer
from kit.recipes import load_config
from verl_credit.doctor.inputs.prompt_lengths import PromptMeter, check_all_prompts, check_prompts
from verl_credit.doctor.inputs.recipe import check_data_files
from verl_credit.doctor.result import Status
from verl_credit.errors import PreflightError
from verl_credit.search.protocol import SCHEMA

# Writes tools, as the templates of real models do; the tests' tokenizer has a token per byte.
TEMPLATE = (
    "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if brief %}Briefly:{% endif %}{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer():
    made = make_tokenizer()
    made.chat_template = TEMPLATE
    return made


def asked(text):
    return [{"role": "user", "content": text}]


def config(tmp_path, prompts, *overrides, limit=400):
    truth = {"ground_truth": {"target": ["a"]}}
    rows = [{"prompt": p if isinstance(p, list) else asked(p), "reward_model": truth} for p in prompts]
    path = tmp_path / "train.parquet"
    parquet.write_table(pa.Table.from_pylist(rows), path)
    given = [
        f"data.train_files={path}",
        f"data.val_files={path}",
        "actor_rollout_ref.model.path=x",
        "search.url=http://x",
    ]
    return load_config("search_cpu", [*given, f"data.max_prompt_length={limit}", *overrides])


def test_a_prompt_is_counted_as_the_agent_loop_writes_it(tokenizer, tmp_path):
    told = config(tmp_path, ["q"], "+data.apply_chat_template_kwargs.brief=true")
    builder = ContinuousTokenBuilder(tokenizer, chat_template_kwargs={"brief": True})
    for searches in (4, 0):
        told.search.max_searches = searches
        tools = [SCHEMA] if searches else []
        ids = builder.build_initial_tokens(asked("Who wrote <tool_call>?"), tools=tools)
        assert PromptMeter(tokenizer, told).count(asked("Who wrote <tool_call>?")) == len(ids)


def room(tokenizer, told, text):
    """Tokens of the prompt, and of all but its text."""
    n = PromptMeter(tokenizer, told).count(asked(text))
    return n, n - len(text)


def test_a_prompt_that_just_fits_passes_and_one_more_token_is_refused(tokenizer, tmp_path):
    told = config(tmp_path, ["short", "w" * 100, "short"])
    told.data.max_prompt_length, _ = room(tokenizer, told, "w" * 100)
    assert check_prompts(told, "data.train_files", tokenizer) == []
    told.data.max_prompt_length -= 1
    said = (
        r"data.train_files: 1 of 3 prompts are longer than data.max_prompt_length=\d+ tokens \(the longest, .*train.parquet "
        rf"row 1, has {told.data.max_prompt_length + 1}\).*search tool counted.*filter_overlong_prompts=true"
    )
    with pytest.raises(PreflightError, match=said):
        check_prompts(told, "data.train_files", tokenizer)


def test_what_is_left_out_is_counted(tokenizer, tmp_path):
    told = config(tmp_path, ["w" * 900, "short", "w" * 800], "data.filter_overlong_prompts=true", limit=500)
    (line,) = check_prompts(told, "data.train_files", tokenizer)
    assert (
        line.startswith("data.train_files: 2 of 3 prompts are longer")
        and "row 0" in line
        and "left out" in line
    )
    with pytest.raises(PreflightError, match="leaves 1 rows, and at least 2 are needed"):
        check_prompts(told, "data.train_files", tokenizer, at_least=2)


def test_verl_s_filter_does_not_see_the_search_tool(tokenizer, tmp_path):
    told = config(tmp_path, ["w" * 100], "data.filter_overlong_prompts=true")
    told.data.max_prompt_length = room(tokenizer, told, "w" * 100)[0] - 1
    with pytest.raises(PreflightError, match="counts without the search tool's schema"):
        check_prompts(told, "data.train_files", tokenizer)


def test_more_doubtful_prompts_than_are_counted_is_said(tokenizer, tmp_path):
    """Control tokens are many bytes of one token: doubtful by their bytes, short when counted."""
    told = config(tmp_path, ["<tool_call>" * n for n in (60, 50, 40)])
    (line,) = check_prompts(told, "data.train_files", tokenizer, most=2)
    assert (
        line == "data.train_files: the 2 longest of 3 prompts were counted, 1 that may be too long were not"
    )
    assert check_prompts(told, "data.train_files", tokenizer) == []


def test_a_prompt_that_the_template_cannot_write_is_named(tokenizer, tmp_path):
    told = config(tmp_path, [asked("q"), [{"role": "user", "content": None}]])
    tokenizer = make_tokenizer()
    tokenizer.chat_template = TEMPLATE.replace("{{ m.content }}", "{{ m.content.strip() }}")
    with pytest.raises(
        PreflightError, match="train.parquet row 1: the chat template cannot write this prompt"
    ):
        check_prompts(told, "data.train_files", tokenizer)


def test_training_and_validation_are_checked_with_the_model_s_tokenizer(tokenizer, tmp_path):
    told = config(tmp_path, ["short"] * 8)
    tokenizer.save_pretrained(tmp_path / "policy")
    told.actor_rollout_ref.model.path = str(tmp_path / "policy")
    assert check_all_prompts(told) == []
    parquet.write_table(pa.Table.from_pylist([{"prompt": asked("w" * 900)}]), tmp_path / "val.parquet")
    told.data.val_files = [str(tmp_path / "val.parquet")]
    with pytest.raises(PreflightError, match="data.val_files: 1 of 1 prompts"):
        check_all_prompts(told)
    shorter = TEMPLATE.replace("{{ m.content }}", "{{ m.content if m.role == 'tool' else m.content[:5] }}")
    told.actor_rollout_ref.model.custom_chat_template = shorter
    assert check_all_prompts(told) == []


def test_the_doctor_counts_where_it_has_the_tokenizer(tokenizer, tmp_path):
    told = config(tmp_path, ["short"] * 8)
    (train, _) = check_data_files(None, told)
    assert train.status == Status.PASS and "prompt lengths not looked at" in train.found
    tokenizer.save_pretrained(tmp_path / "policy")
    told.actor_rollout_ref.model.path = str(tmp_path / "policy")
    (train, _) = check_data_files(None, told)
    assert train.status == Status.PASS and train.found == "8 rows in 1 files"
    told.data.max_prompt_length = 50
    (train, val) = check_data_files(None, told)
    assert train.status == val.status == Status.FAIL and "8 of 8 prompts are longer" in train.found


def test_a_tokenizer_that_cannot_be_loaded(tmp_path, monkeypatch):
    told = config(tmp_path, ["short"] * 8)
    told.actor_rollout_ref.model.path = str(tmp_path)
    with pytest.raises(PreflightError, match="no tokenizer can be loaded from there"):
        check_all_prompts(told)

    def refuse(*_, **__):
        raise OSError("no network")

    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", refuse)
    told.actor_rollout_ref.model.path = "hub/name"
    (line,) = check_all_prompts(told)
    assert (
        "prompts were not counted: the tokenizer of hub/name cannot be loaded here (OSError: no network)"
        in line
    )
    assert "Whether its chat template writes the search tool was not tried" in line
