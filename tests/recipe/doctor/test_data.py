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


def refused(tmp_path, rows):
    """The one line."""
    with pytest.raises(PreflightError) as caught:
        read_rows(write(tmp_path / "rows.parquet", rows), TRAIN)
    said = str(caught.value)
    assert "\n" not in said and "rows.parquet" in said
    return said


@pytest.mark.parametrize(
    "row, said",
    [
        (answered({"target": [""]}), "reward_model.ground_truth is {'target': ['']}: expected {'target'"),
        (answered(True), "reward_model.ground_truth is True: expected"),
        (
            answered({"target": ["a"], "form": "box"}),
            "reward_model.ground_truth.form is 'box': expected one of tag, boxed",
        ),
        ({**GOOD, "reward_model": None}, "reward_model=None: expected {'ground_truth'"),
        ({**GOOD, "data_source": 3}, "data_source=3: expected"),
        ({**GOOD, "data_source": " "}, "data_source=' ': expected"),
        ({**GOOD, "agent_name": None}, "agent_name=None: expected 'search_agent'"),
        (selecting("search"), "extra_info.tool_selection='search': expected a list of names of tools"),
        (selecting(["serach"]), "extra_info.tool_selection=['serach']: no tool is called 'serach'; expected"),
        (asked(), "empty prompt"),
        ({**GOOD, "prompt": None}, "empty prompt"),
        ({**GOOD, "prompt": "Who?"}, "prompt='Who?': expected a list of messages with role and content"),
        ({**GOOD, "prompt": ["Who?"]}, "prompt[0].role=None: expected one of system, user, assistant, tool"),
        (asked({"role": "developer", "content": "x"}, USER), "prompt[0].role='developer'"),
        (asked(USER, {"role": "assistant", "content": None}), "prompt[1].content=None: expected text"),
        (asked({"role": "user", "content": 5}), "prompt[0].content=5: expected text"),
        (asked({"role": "assistant", "content": "x"}), "prompt: no message of the role user asks anything"),
        (asked({"role": "user", "content": " "}), "prompt: no message of the role user asks anything"),
    ],
)
def test_a_row_that_cannot_train_is_named_with_its_value(tmp_path, row, said):
    assert f"rows.parquet row 0: {said}" in refused(tmp_path, [row])


@pytest.mark.parametrize(
    "row, said",
    [
        (
            {"question": "x"},
            "lacks the columns ['data_source', 'prompt', 'reward_model']; it has ['question']",
        ),
        ({**GOOD, "extra_info": "x"}, "extra_info is of the type string: expected a mapping"),
        ({**GOOD, "sampling": "greedy", "uid": "1"}, "has the columns ['sampling', 'uid']"),
        ({**GOOD, "response_mask": [1]}, "has the columns ['response_mask']"),
    ],
)
def test_columns_that_a_run_cannot_use_are_refused(tmp_path, row, said):
    assert said in refused(tmp_path, [row])


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


def test_the_names_of_columns_and_loops_are_the_recipes(tmp_path):
    renamed = {("messages" if name == "prompt" else name): value for name, value in GOOD.items()}
    file = write(tmp_path / "rows.parquet", [renamed] * 8)
    given = [f"{TRAIN}={file}", f"{VAL}={file}", "data.prompt_key=messages", "data.train_batch_size=8"]
    config = load_config("lab", given)
    assert [row.prompt for row in Context(None, config).rows(TRAIN)] == [GOOD["prompt"]] * 8
    config.actor_rollout_ref.rollout.agent.default_agent_loop = "tool_agent"
    with pytest.raises(PreflightError, match="default_agent_loop=tool_agent: .* no column agent_name"):
        Context(None, config).rows(VAL)
    with pytest.raises(PreflightError, match=r"lacks the columns \['chat'\] \(data.prompt_key=chat\)"):
        read_rows(file, TRAIN, Reads(prompt_key="chat"))
    named = write(tmp_path / "named.parquet", [{**GOOD, "agent_name": "search_agent"}])
    assert len(read_rows(named, TRAIN, Reads(default_loop="single_turn_agent"))) == 1


CALL = [{"function": {"name": "search"}}]


@pytest.mark.parametrize(
    "row",
    [
        answered(42),
        answered({"target": 7}),
        {**GOOD, "extra_info": None},
        selecting(["search"]),
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
    "agents, name, said",
    [
        (("turn_agent",), "search_agent", "expected 'turn_agent'.* no tool that search_agent could call"),
        (("turn_agent", "my_agent"), "search_agent", "expected 'turn_agent' or 'my_agent'"),
        (("search_agent",), "his", "expected 'search_agent'.*agent_loop_config_path"),
    ],
)
def test_a_row_names_an_agent_loop_that_the_recipe_can_use(tmp_path, agents, name, said):
    def read(loop):
        return read_rows(
            write(tmp_path / "r.parquet", [{**GOOD, "agent_name": loop}]), "k", Reads(agents=agents)
        )

    assert [len(read(loop)) for loop in agents] == [1] * len(agents)
    with pytest.raises(PreflightError, match=f"row 0: agent_name='{name}': {said}"):
        read(name)


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


def test_files_without_enough_rows_or_that_are_no_data(tmp_path):
    empty, text, one, twice = (
        tmp_path / name for name in ("empty.parquet", "train.jsonl", "a.parquet", "twice.parquet")
    )
    table = pa.Table.from_pylist([GOOD])
    parquet.write_table(table.slice(0, 0), empty)
    parquet.write_table(table.append_column("data_source", table["data_source"]), twice)
    text.write_text("{}")
    write(one, [GOOD])
    for files, said in [
        (None, "give a parquet file"),
        (str(tmp_path / "nowhere.parquet"), r"data.train_files: .*nowhere.parquet does not exist"),
        ([str(empty)], "holds no rows"),
        (str(text), "is not a parquet file"),
        (str(one), "holds 1 rows; at least 8 are needed"),
        (str(twice), "twice.parquet is not a parquet file, or is damaged: .*duplicate"),
    ]:
        with pytest.raises(PreflightError, match=said):
            read_rows(files, TRAIN, at_least=8)
    both = [str(one), str(one)]
    assert [row.where for row in read_rows(both, "k")] == [f"{file} row 0" for file in both]


@pytest.mark.slow
def test_a_damaged_file_is_one_line_with_its_name(tmp_path):
    rows = [asked({"role": "user", "content": f"Où est-ce, {n}?"}) for n in range(200)]
    file = tmp_path / "rows.parquet"
    write(file, rows)
    whole, draw, damaged = file.read_bytes(), random.Random(0), 0
    for _ in range(100):
        raw = bytearray(whole)
        for _ in range(draw.choice([1, 3, 20])):
            raw[draw.randrange(4, len(raw))] = draw.randrange(256)
        file.write_bytes(raw)
        try:
            read_rows(str(file), "data.train_files")
        except PreflightError as error:
            assert str(file) in str(error) and "\n" not in str(error)
            damaged += 1
    assert damaged > 60
