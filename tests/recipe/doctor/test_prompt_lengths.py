"""Prompts over the limit are refused with row and lengths, as the agent loop would write them."""

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
from omegaconf import OmegaConf
from verl.utils.tokenizer.continuous_token import ContinuousTokenBuilder

from kit.byte_world import make_tokenizer
from kit.machine import FAIL, MACHINE, PASS, SKIP, WARN, says
from kit.recipes import load_config
from verl_credit.errors import PreflightError
from verl_credit.recipe.doctor.checks import CHECKS, examine
from verl_credit.recipe.doctor.context import Context
from verl_credit.recipe.doctor.data import Row
from verl_credit.recipe.doctor.lengths import PromptMeter, count_prompts
from verl_credit.turns.rollout.search.wire import SCHEMA

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


GIVEN = ["data.train_files=x", "data.val_files=x", "actor_rollout_ref.model.path=x", "search.url=http://x"]


@pytest.fixture
def config():
    """A batch of 8 rows, prompts of 400 tokens."""
    return load_config("search_cpu", [*GIVEN, "data.max_prompt_length=400"])


def counted(config, tokenizer, prompts, key="data.val_files", **options):
    rows = [Row(f"x row {n}", p if isinstance(p, list) else asked(p), "a") for n, p in enumerate(prompts)]
    return count_prompts(config, key, rows, tokenizer, **options)


def test_a_prompt_is_counted_as_the_agent_loop_writes_it(tokenizer, config):
    OmegaConf.update(config, "data.apply_chat_template_kwargs.brief", True, force_add=True)
    builder = ContinuousTokenBuilder(tokenizer, chat_template_kwargs={"brief": True})
    for searches in (4, 0):
        config.search.max_searches = searches
        tools = [SCHEMA] if searches else []
        ids = builder.build_initial_tokens(asked("Who wrote <tool_call>?"), tools=tools)
        assert PromptMeter(tokenizer, config).count(asked("Who wrote <tool_call>?")) == len(ids)


def test_a_prompt_that_just_fits_passes_and_one_more_token_is_refused(tokenizer, config):
    prompts = ["short", "w" * 100, "short"]
    config.data.max_prompt_length = PromptMeter(tokenizer, config).count(asked("w" * 100))
    assert counted(config, tokenizer, prompts) == []
    config.data.max_prompt_length -= 1
    limit = config.data.max_prompt_length
    message = (
        rf"data.val_files: 1 of 3 prompts are longer than data.max_prompt_length={limit} tokens \(the longest, x row 1, has "
        rf"{limit + 1}\).*search tool counted.*raise data.max_prompt_length to {limit + 1}.*filter_overlong_prompts=true"
    )
    with pytest.raises(PreflightError, match=message):
        counted(config, tokenizer, prompts)
    config.data.filter_overlong_prompts = True
    with pytest.raises(PreflightError, match="counts without the search tool's schema"):
        counted(config, tokenizer, prompts)


def test_what_is_left_out_is_counted(tokenizer, config):
    prompts = ["w" * 900, "short", "w" * 800]
    config.data.max_prompt_length, config.data.filter_overlong_prompts = 500, True
    (line,) = counted(config, tokenizer, prompts)
    assert (
        line.startswith("data.val_files: 2 of 3 prompts are longer")
        and "row 0" in line
        and "left out" in line
    )
    with pytest.raises(PreflightError, match="data.train_files: .*leaves 1 rows, and at least 8 are needed"):
        counted(config, tokenizer, prompts, "data.train_files")


def test_a_prompt_that_the_template_cannot_write_is_named(config):
    tokenizer = make_tokenizer()
    tokenizer.chat_template = TEMPLATE.replace("{{ m.content }}", "{{ m.content.strip() }}")
    with pytest.raises(PreflightError, match="x row 1: the chat template cannot write this prompt"):
        counted(config, tokenizer, [asked("q"), [{"role": "user", "content": None}]])


LISTED = [check for check in CHECKS if check.name == "tokenizer" or check.name.startswith("prompts")]


def looked_at(config, **options):
    return examine(Context(MACHINE, config, **options), LISTED)


def test_training_and_validation_are_checked_with_the_model_s_tokenizer(tokenizer, config, tmp_path):
    truth = {"ground_truth": {"target": ["a"]}}
    for name, prompts in (("train", ["short"] * 8), ("val", ["w" * 900])):
        rows = [{"data_source": "qa", "prompt": asked(prompt), "reward_model": truth} for prompt in prompts]
        parquet.write_table(pa.Table.from_pylist(rows), tmp_path / f"{name}.parquet")
        config.data[f"{name}_files"] = [f"{tmp_path}/{name}.parquet"]
    model = config.actor_rollout_ref.model
    model.path = str(tmp_path / "policy")
    tokenizer.save_pretrained(model.path)
    loaded, train, val = looked_at(config)
    assert says(loaded, PASS) and says(train, PASS) and says(val, FAIL, "data.val_files: 1 of 1 prompts")
    model.custom_chat_template = TEMPLATE.replace("{{ m.content }}", "{{ m.content[:5] }}")
    assert [result.status for result in looked_at(config)] == [PASS] * 3
    model.custom_chat_template = None
    (tmp_path / "policy/chat_template.jinja").unlink()
    said = f"model.path={model.path}: its tokenizer has no chat template; take an instruct model"
    assert says(looked_at(config)[0], FAIL, said)


@pytest.mark.parametrize("may_fetch, answers", [(True, True), (True, False), (False, True)])
def test_a_tokenizer_that_cannot_be_loaded(config, tmp_path, monkeypatch, may_fetch, answers):
    config.actor_rollout_ref.model.path = str(tmp_path)
    loaded, train, val = looked_at(config)
    assert says(loaded, FAIL, f"model.path={tmp_path}: no tokenizer can be loaded from there")
    assert says(train, SKIP, "see tokenizer") and says(val, SKIP, "see tokenizer")
    tried = []

    def refuse(*_, local_files_only, **__):
        tried.append(local_files_only)
        raise OSError("no network")

    def ask(name):
        if not answers:
            raise OSError("unreachable")

    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", refuse)
    monkeypatch.setattr("verl_credit.recipe.doctor.lengths.ask_hub", ask)
    config.actor_rollout_ref.model.path = "hub/name"
    monkeypatch.setattr(Context, "rows", lambda self, key: [])
    loaded, *prompts = looked_at(config, may_fetch=may_fetch)
    missing = "the tokenizer of hub/name cannot be loaded here (OSError: no network)"
    assert says(loaded, WARN, missing, "its chat template was not tried", "data.max_prompt_length=400")
    assert all(says(result, SKIP, missing) for result in prompts)
    assert tried == [not (may_fetch and answers)]
