"""`verl-credit prepare check`: a file of rows without a recipe."""

import pytest

from kit.byte_world import make_tokenizer
from kit.preflight import GOOD, different, write
from verl_credit.cli import main
from verl_credit.turns.rollout.search.wire import SCHEMA

TEMPLATE = (
    "{% for t in tools or [] %}[{{ t.function.name }}]{% endfor %}{% for m in messages %}"
    "{% if m.role == 'system' %}{{ raise_exception('no system\nrole') }}{% endif %}<|im_start|>{{ m.content }}<|im_end|>"
    "{% endfor %}"
)
SEARCH = f"[{SCHEMA['function']['name']}]"
SYSTEM = {**GOOD, "prompt": [{"role": "system", "content": "x"}, *GOOD["prompt"]]}


@pytest.fixture
def model(tmp_path):
    tokenizer = make_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(tmp_path / "policy")
    return str(tmp_path / "policy")


def tokens(text):
    return len(make_tokenizer()(text, add_special_tokens=False)["input_ids"])


def check(*arguments):
    return main(["prepare", "check", *map(str, arguments)])


def test_a_row_is_shown_as_the_policy_sees_it(tmp_path, model, capsys):
    rows = [{**row, "reward_model": {"ground_truth": 42}} for row in different(3)]
    file, asks = write(tmp_path / "rows.parquet", rows), rows[0]["prompt"][0]["content"]
    assert check(file, "--model", model) == 0
    assert capsys.readouterr().out.splitlines() == [
        "3 rows can train",
        f"{file} row 0, {len(SEARCH) + tokens(asks) + 2} tokens with the chat template of {model} and the search tool:",
        f"{SEARCH}<|im_start|>{asks}<|im_end|>",
        "gold answers, read from <answer>..</answer>: '42'",
    ]


def test_a_row_of_an_environment_is_shown_without_the_search_tool(tmp_path, model, capsys):
    row = {**GOOD, "agent_name": "env_agent", "extra_info": {"index": 0, "environment": {"seed": 3}}}
    assert check(write(tmp_path / "rows.parquet", [row]), "--model", model) == 0
    assert "no tool" in (said := capsys.readouterr().out) and SEARCH not in said and "seed 3" in said


def test_without_searches_the_prompt_has_to_say_how_an_answer_is_written(tmp_path, model, capsys):
    assert check(write(tmp_path / "rows.parquet", [GOOD]), "--no-search") == 4
    assert "row 0: reward_model.ground_truth={'target': ['a']} has no form" in capsys.readouterr().out
    boxed = {**GOOD, "reward_model": {"ground_truth": {"target": ["a"], "form": "boxed"}}}
    assert check(write(tmp_path / "rows.parquet", [boxed]), "--no-search", "--model", model) == 0
    said = capsys.readouterr().out
    assert SEARCH not in said and "and no tool:" in said and "read from \\boxed{..}" in said


@pytest.mark.parametrize(
    "row, said",
    [
        ({**GOOD, "agent_name": "tool_agent"}, "rows.parquet row 0: agent_name='tool_agent'"),
        ({**GOOD, "sampling": "greedy"}, "prepare check: "),
        (SYSTEM, "the chat template cannot write this prompt (TemplateError: no system)"),
    ],
)
def test_what_cannot_train_is_one_line_and_exit_code_4(tmp_path, model, capsys, row, said):
    assert check(write(tmp_path / "rows.parquet", [row]), "--model", model) == 4
    printed = capsys.readouterr().out
    assert said in printed and printed.count("\n") == 1


SEARCH_R1 = (
    "Answer the given question. You must conduct reasoning inside <think> and </think> first every time you get new "
    "information. After reasoning, if you find you lack some knowledge, you can call a search engine by <search> query "
    "</search> and it will return the top searched results between <information> and </information>. If you find no further "
    "external knowledge needed, you can directly provide the answer inside <answer> and </answer>. For example, <answer> "
    "Beijing </answer>. Question: who wrote it?\n"
)


def test_search_r1_s_own_file_is_told_what_the_loop_reads_and_prepare_makes_rows_of_it(tmp_path, capsys):
    """Its released parquet, with its columns."""
    row = {
        "id": "train_0",
        "question": "who wrote it?",
        "golden_answers": ["Ann Lee"],
        "data_source": "nq",
        "prompt": [{"role": "user", "content": SEARCH_R1}],
        "ability": "fact-reasoning",
        "reward_model": {"style": "rule", "ground_truth": {"target": ["Ann Lee"]}},
        "extra_info": {"index": 0, "split": "train"},
        "metadata": None,
    }
    file = write(tmp_path / "train.parquet", [row])
    assert check(file) == 4
    said = capsys.readouterr().out
    assert said.count("\n") == 1 and "every call would be lost" in said and "prepare qa --source" in said
    assert "first " + file + " row 0: the prompt asks for calls as '<search> query </search>'" in said
    assert main(["prepare", "qa", "--source", file, "--out", str(tmp_path / "out")]) == 0
    assert check(tmp_path / "out" / "train.parquet") == 0
    assert "prepare check:" not in capsys.readouterr().out
    # a parser of the user's own may read the tag
    assert check(file, "--format", "my_search_tags") == 0


def test_a_file_and_a_model_that_are_not_there_are_named(tmp_path, capsys):
    assert check(tmp_path / "none.parquet") == 4
    assert capsys.readouterr().out == f"prepare check: {tmp_path}/none.parquet does not exist\n"
    assert check(write(tmp_path / "rows.parquet", [GOOD]), "--model", tmp_path) == 4
    assert "no tokenizer can be loaded from there" in capsys.readouterr().out
