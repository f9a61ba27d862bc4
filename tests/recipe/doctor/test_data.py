"""Rows that cannot train, and files that cannot be read, are refused before Ray, with file, row and value."""

import inspect
import random
from dataclasses import replace

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

from kit.preflight import GOOD, write
from kit.recipes import load_config
from verl_credit.errors import PreflightError
from verl_credit.recipe.compose import unchecked_config
from verl_credit.recipe.doctor.checks import CHECKS, examine
from verl_credit.recipe.doctor.context import Context
from verl_credit.recipe.doctor.data import LOOP_FILE, STEERING, TRAIN, VAL, Reads, read_rows
from verl_credit.recipe.doctor.status import Status

USER = {"role": "user", "content": "q"}


def asked(*messages):
    return {**GOOD, "prompt": list(messages)}


def answered(truth):
    return {**GOOD, "reward_model": {"ground_truth": truth}}


def selecting(tools):
    return {**GOOD, "extra_info": {"index": 0, "tool_selection": tools}}


def without(column):
    return {name: value for name, value in GOOD.items() if name != column}


def refused(tmp_path, rows, key="data.train_files"):
    """The one line."""
    with pytest.raises(PreflightError) as caught:
        read_rows(write(tmp_path / "rows.parquet", rows), key)
    said = str(caught.value)
    assert "\n" not in said and "rows.parquet" in said
    return said


@pytest.mark.parametrize("key", ["data.train_files", "data.val_files"])
@pytest.mark.parametrize(
    "row, said",
    [
        (answered({"target": [""]}), "reward_model.ground_truth is {'target': ['']}: expected {'target'"),
        (answered({"target": {"a": "b"}}), "reward_model.ground_truth is {'target': {'a': 'b'}}: expected"),
        (answered(True), "reward_model.ground_truth is True: expected"),
        (
            answered({"target": "['a', 'b"}),
            "reward_model.ground_truth is {'target': \"['a', 'b\"}: expected {'target': [gold, ...]} with at least one "
            "non-empty gold answer, text or number; \"['a', 'b\" begins as a list of answers does and cannot be read as one",
        ),
        (
            answered({"target": ["a"], "form": "box"}),
            "reward_model.ground_truth.form is 'box': expected one of tag, boxed",
        ),
        ({**GOOD, "reward_model": None}, "reward_model=None: expected {'ground_truth'"),
        ({**GOOD, "reward_model": "72"}, "reward_model='72': expected {'ground_truth'"),
        ({**GOOD, "data_source": None}, "data_source=None: expected the name of the row's data set"),
        ({**GOOD, "data_source": 3}, "data_source=3: expected"),
        ({**GOOD, "data_source": " "}, "data_source=' ': expected"),
        ({**GOOD, "agent_name": "tool_agent"}, "agent_name='tool_agent': expected 'search_agent'"),
        ({**GOOD, "agent_name": None}, "agent_name=None: expected 'search_agent'"),
        (selecting("search"), "extra_info.tool_selection='search': expected a list of names of tools"),
        (
            selecting(["serach"]),
            "extra_info.tool_selection=['serach']: no tool is called 'serach'; expected some of search",
        ),
        (selecting([{"a": 1}]), "extra_info.tool_selection=[{'a': 1}]: no tool is called {'a': 1}"),
        (asked(), "empty prompt"),
        ({**GOOD, "prompt": None}, "empty prompt"),
        ({**GOOD, "prompt": "Who?"}, "prompt='Who?': expected a list of messages with role and content"),
        ({**GOOD, "prompt": ["Who?"]}, "prompt[0].role=None: expected one of system, user, assistant, tool"),
        (asked(USER, {"role": "wizard", "content": "x"}), "prompt[1].role='wizard': expected one of system,"),
        (
            asked({"role": "developer", "content": "x"}, USER),
            "prompt[0].role='developer'",
        ),
        (asked(USER, {"role": "assistant", "content": None}), "prompt[1].content=None: expected text"),
        (asked({"role": "user", "content": 5}), "prompt[0].content=5: expected text"),
        (asked({"role": "user"}), "prompt[0].content=None: expected text"),
        (asked({"role": "assistant", "content": "x"}), "prompt: no message of the role user asks anything"),
        (asked({"role": "user", "content": " "}), "prompt: no message of the role user asks anything"),
    ],
)
def test_a_row_that_cannot_train_is_named_with_its_value(tmp_path, row, said, key):
    assert f"rows.parquet row 0: {said}" in refused(tmp_path, [row], key)


@pytest.mark.parametrize(
    "row, said",
    [
        (
            {"question": "x"},
            "lacks the columns ['data_source', 'prompt', 'reward_model']; it has ['question']",
        ),
        (without("data_source"), "lacks the columns ['data_source']"),
        ({**GOOD, "extra_info": "x"}, "extra_info is of the type string: expected a mapping"),
        ({**GOOD, "extra_info": [1]}, "extra_info is of the type list"),
        (
            {**GOOD, "sampling": "greedy", "uid": "1"},
            "has the columns ['sampling', 'uid'], which verl would hand",
        ),
        ({**GOOD, "session_id": 1}, "has the columns ['session_id']"),
        ({**GOOD, "response_mask": [1]}, "has the columns ['response_mask']"),
    ],
)
def test_columns_that_a_run_cannot_use_are_refused(tmp_path, row, said):
    assert said in refused(tmp_path, [row]) and said in refused(tmp_path, [row], "data.val_files")


def test_every_argument_and_every_field_of_an_agent_loop_is_a_steering_column():
    from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopWorker
    from verl.experimental.agent_loop.tool_agent_loop import ToolAgentLoop

    from verl_credit.host.rollout.agent_loop import TurnAgentLoopOutput

    given = {
        name: [1] for name in ("prompt_ids", "response_ids", "response_mask", "turn_ids", "response_logprobs")
    }
    output = TurnAgentLoopOutput(
        **given,
        reward_score=1.0,
        num_turns=1,
        routed_experts=[[[1]]],
        metrics=AgentLoopMetrics(),
        extra_fields={"teacher_ids": [1], "teacher_logprobs": [0.5]},
        mm_processor_kwargs={},
        mm_processor_output=[],
    )
    taken = set(output.as_dict())
    for function in (AgentLoopWorker._run_agent_loop, ToolAgentLoop.run):
        taken |= set(inspect.signature(function).parameters)
    taken -= {"_ray_trace_ctx"}  # Ray adds it to a class that another test has made an actor of
    assert taken - STEERING == {"self", "kwargs", "agent_name"}


def test_the_prompts_are_in_the_column_that_the_recipe_names(tmp_path):
    renamed = {("messages" if name == "prompt" else name): value for name, value in GOOD.items()}
    file = write(tmp_path / "rows.parquet", [renamed])
    (row,) = read_rows(file, "data.train_files", Reads(prompt_key="messages"))
    assert row.prompt == GOOD["prompt"]
    with pytest.raises(PreflightError, match=r"row 0: messages\[0\].role='wizard'"):
        wrong = {**renamed, "messages": [{"role": "wizard", "content": "x"}]}
        read_rows(write(tmp_path / "rows.parquet", [wrong]), "data.train_files", Reads(prompt_key="messages"))
    with pytest.raises(PreflightError, match=r"lacks the columns \['chat'\] \(data.prompt_key=chat\)"):
        read_rows(file, "data.train_files", Reads(prompt_key="chat"))


def test_rows_that_name_no_loop_take_the_default_one(tmp_path):
    plain = write(tmp_path / "plain.parquet", [GOOD])
    named = write(tmp_path / "named.parquet", [{**GOOD, "agent_name": "search_agent"}])
    with pytest.raises(PreflightError) as caught:
        read_rows(plain, "data.train_files", Reads(default_loop="single_turn_agent"))
    assert str(caught.value).startswith(
        f"actor_rollout_ref.rollout.agent.default_agent_loop=single_turn_agent: {plain} has no column agent_name"
    )
    assert len(read_rows(named, "data.train_files", Reads(default_loop="single_turn_agent"))) == 1


def test_the_checks_read_the_names_from_the_recipe(tmp_path):
    renamed = {("messages" if name == "prompt" else name): value for name, value in GOOD.items()}
    given = [f"{key}={write(tmp_path / 'rows.parquet', [renamed] * 8)}" for key in (TRAIN, VAL)]
    config = load_config("lab", [*given, "data.prompt_key=messages", "data.train_batch_size=8"])
    assert len(Context(None, config).rows(TRAIN)) == 8
    config.actor_rollout_ref.rollout.agent.default_agent_loop = "tool_agent"
    with pytest.raises(PreflightError, match="default_agent_loop=tool_agent: .* no column agent_name"):
        Context(None, config).rows(VAL)


CALL = [{"function": {"name": "search"}}]


@pytest.mark.parametrize(
    "row",
    [
        answered(42),
        answered({"target": 7}),
        {**GOOD, "extra_info": None},
        selecting(["search"]),
        selecting([]),
        selecting(None),
        {**GOOD, "agent_name": "search_agent", "question": "a column of the user's own"},
        asked({"role": "system", "content": ""}, USER),
        asked(
            USER, {"role": "assistant", "content": None, "tool_calls": CALL}, {"role": "tool", "content": "x"}
        ),
        asked({"role": "user", "content": [{"type": "text", "text": "q"}]}),
    ],
)
def test_a_row_that_can_train_is_taken(tmp_path, row):
    assert len(read_rows(write(tmp_path / "rows.parquet", [row, row]), "data.train_files")) == 2


@pytest.mark.parametrize(
    "agents, said",
    [
        (
            ("turn_agent",),
            "expected 'turn_agent'.* no tool that search_agent could call",
        ),
        (("turn_agent", "my_agent"), "expected 'turn_agent' or 'my_agent'"),
    ],
)
def test_a_row_names_an_agent_loop_that_the_recipe_can_use(tmp_path, agents, said):
    def file(name):
        return write(tmp_path / "rows.parquet", [{**GOOD, "agent_name": name}])

    assert [len(read_rows(file(name), "k", Reads(agents=agents))) for name in agents] == [1] * len(agents)
    with pytest.raises(PreflightError, match=f"row 0: agent_name='search_agent': {said}"):
        read_rows(file("search_agent"), "k", Reads(agents=agents))
    with pytest.raises(PreflightError, match=r"agent_name='his': .*agent_loop_config_path"):
        read_rows(file("his"), "k", Reads(agents=agents))
    with pytest.raises(
        PreflightError, match="'turn_agent': expected 'search_agent'.* no tool that turn_agent could call"
    ):
        read_rows(file("turn_agent"), "k", Reads(agents=("search_agent",)))


def test_the_refusal_of_verls_own_loop_says_how_ours_takes_its_rows(tmp_path):
    """verl's preparation of GSM8K with tools writes that name; a file of loops gives it to ours."""
    file = write(tmp_path / "rows.parquet", [{**GOOD, "agent_name": "tool_agent"}])
    with pytest.raises(PreflightError) as caught:
        read_rows(file, "k", Reads(agents=("turn_agent",)))
    line = str(caught.value).partition(f"{LOOP_FILE} lists loops of other names: ")[2]
    (tmp_path / "loops.yaml").write_text(f"{line}\n")
    given = ["search.max_searches=0", f"data.train_files={file}", "data.train_batch_size=1"]
    given += [
        "actor_rollout_ref.rollout.multi_turn.tool_config_path=t.yaml",
        f"{LOOP_FILE}={tmp_path}/loops.yaml",
    ]
    config = unchecked_config("lab", [*given, "reward.custom_reward_function.path=null"])
    assert Context(None, config).rows(TRAIN)[0].agent == "tool_agent"


def test_an_answer_without_a_form_is_what_a_reward_function_of_ones_own_makes_of_it(tmp_path):
    file = write(tmp_path / "rows.parquet", [answered("72")])
    with pytest.raises(PreflightError, match="'72' has no form"):
        read_rows(file, "k", Reads(searches=False))
    assert read_rows(file, "k", Reads(searches=False, our_reward=False))[0].truth == "72"


def test_rows_that_a_dataset_class_makes_are_not_read_and_that_is_no_secret(tmp_path):
    write(tmp_path / "rows.parquet", [{"problem": "6 x 7?", "answer": "42"}])
    own = ["data.custom_cls.path=mine.py", "data.custom_cls.name=Mine"]
    config = unchecked_config("lab", [*own, f"data.train_files={tmp_path}/rows.parquet"])
    data, prompts = (check for check in CHECKS if check.name in (TRAIN, f"prompts of {TRAIN}"))
    given, lengths = examine(Context(None, config), [replace(data, needs=()), replace(prompts, needs=())])
    assert (
        given.status is Status.WARN
        and "data.custom_cls.path=mine.py: that class makes the rows" in given.found
    )
    assert lengths.status is Status.SKIP and "mine.py" in lengths.found


def test_a_column_of_one_file_is_null_in_the_others(tmp_path):
    """verl joins the files."""
    named = write(tmp_path / "named.parquet", [{**GOOD, "agent_name": "search_agent"}])
    plain = write(tmp_path / "plain.parquet", [GOOD])
    assert len(read_rows([plain, plain], "k")) == 2
    with pytest.raises(PreflightError, match="plain.parquet row 0: agent_name=None: .* no such column"):
        read_rows([named, plain], "data.train_files")


def test_missing_and_empty_data(tmp_path):
    with pytest.raises(PreflightError, match=r"data.train_files: .*nowhere.parquet does not exist"):
        read_rows(str(tmp_path / "nowhere.parquet"), "data.train_files")
    empty = tmp_path / "empty.parquet"
    parquet.write_table(pa.Table.from_pylist([GOOD]).slice(0, 0), empty)
    with pytest.raises(PreflightError, match="holds no rows"):
        read_rows([str(empty)], "data.val_files")
    files = [write(tmp_path / name, [GOOD]) for name in ("a.parquet", "b.parquet")]
    assert [row.where for row in read_rows(files, "k")] == [f"{file} row 0" for file in files]


def test_files_that_are_no_data(tmp_path):
    (tmp_path / "train.jsonl").write_text("{}")
    with pytest.raises(PreflightError, match="is not a parquet file"):
        read_rows(str(tmp_path / "train.jsonl"), "data.train_files")
    with pytest.raises(PreflightError, match="give a parquet file"):
        read_rows(None, "data.train_files")
    with pytest.raises(PreflightError, match="holds 1 rows; at least 8 are needed"):
        read_rows(write(tmp_path / "a.parquet", [GOOD]), "data.train_files", at_least=8)


def test_two_columns_of_one_name_are_refused(tmp_path):
    table, file = pa.Table.from_pylist([GOOD]), tmp_path / "twice.parquet"
    parquet.write_table(table.append_column("data_source", table["data_source"]), file)
    with pytest.raises(
        PreflightError, match="twice.parquet is not a parquet file, or is damaged: .*duplicate"
    ):
        read_rows(str(file), TRAIN)


def test_a_damaged_file_is_one_line_with_its_name(tmp_path):
    rows = [asked({"role": "user", "content": f"Où est-ce, {n}?"}) for n in range(200)]
    file = tmp_path / "rows.parquet"
    write(file, rows)
    whole, draw, damaged = file.read_bytes(), random.Random(0), 0
    for _ in range(300):
        raw = bytearray(whole)
        for _ in range(draw.choice([1, 3, 20])):
            raw[draw.randrange(4, len(raw))] = draw.randrange(256)
        file.write_bytes(raw)
        try:
            read_rows(str(file), "data.train_files")
        except PreflightError as error:
            assert str(file) in str(error) and "\n" not in str(error)
            damaged += 1
    assert damaged > 200
