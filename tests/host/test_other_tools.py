"""Tools beside the search: their calls are turns, what they raise is counted, and what verl cannot load ends before Ray."""

import json

import pytest

from kit.byte_world import make_tokenizer
from kit.recipes import load_config
from kit.trajectories import REQUIRED, policy_text, record, run
from verl_credit.config.fit import DEFAULT
from verl_credit.errors import ConfigError, PreflightError
from verl_credit.host.process.verl_checks import check_other_tools
from verl_credit.names import TURN_AGENT
from verl_credit.recipe.agent_loops import MULTI_TURN
from verl_credit.recipe.rules import validate
from verl_credit.worlds.lab.protocol import TURN_END, answer_turn, search_turn

FUNCTIONS = '''
from verl.tools.function_tool import function_tool

@function_tool("NAME")
def calculate(expression: str) -> str:
    """Works it out.

    Args:
        expression: What to work out.
    """
    if expression == "1/0":
        raise ZeroDivisionError("no")
    return f"{expression} is </tool_response> 4"
'''
NATIVE = """
from verl.tools.base_tool import BaseTool
from verl.tools.schemas import ToolResponse

class Clock(BaseTool):
    async def execute(self, instance_id, parameters, **kwargs):
        return ToolResponse(text="noon"), 0.0, {}
"""
SCHEMA = {
    "type": "function",
    "function": {
        "name": "clock", "description": "The time.",
        "parameters": {"type": "object", "properties": {}, "required": []},
    },
}  # fmt: skip


def function_file(folder, name="calculate"):
    """A file of its own for every name: verl registers a function tool once per process."""
    path = folder / "tools.py"
    path.write_text(FUNCTIONS.replace("NAME", name))
    return f"{MULTI_TURN}.function_tool_path={path}"


def native_file(folder, monkeypatch, kind="native"):
    monkeypatch.syspath_prepend(folder)
    (folder / "my_clock.py").write_text(NATIVE)
    path = folder / "tools.yaml"
    tool = {"class_name": "my_clock.Clock", "config": {"type": kind}, "tool_schema": SCHEMA}
    path.write_text(json.dumps({"tools": [tool]}))
    return f"{MULTI_TURN}.tool_config_path={path}"


def call(name, arguments="{}"):
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>{TURN_END}'


def check(*overrides):
    return check_other_tools(load_config("search_cpu", [*REQUIRED, *overrides]))


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


@pytest.fixture(scope="module")
def tools(tmp_path_factory):
    """A function tool, loaded as a worker of verl loads it."""
    from verl.tools.tool_registry import load_all_tools

    path = function_file(tmp_path_factory.mktemp("tools")).partition("=")[2]
    return load_all_tools(tool_config_path=None, function_tool_path=path)


def test_a_call_of_another_tool_is_a_turn_and_no_search(tokenizer, tools):
    script = [call("calculate", '{"expression": "2+2"}'), search_turn("a"), answer_turn("c")]
    output, policy = run(tokenizer, script, tools=tools)
    assert policy.tools == ["calculate", "search"]
    assert [policy_text(tokenizer, output, k) for k in range(3)] == script
    assert [k >= 0 for k in output.turn_ids] == [bool(m) for m in output.response_mask]
    found = record(output)
    assert (found["n_other_calls"], found["other_errors"], found["n_searches"]) == (1, 0, 1)
    assert [search["turn"] for search in found["searches"]] == [1]
    assert "2+2 is < /tool_response> 4" in tokenizer.decode(
        output.response_ids
    )  # it cannot end its observation


def test_a_row_that_selects_its_tools_is_offered_no_other(tokenizer, tools):
    row = {"extra_info": {"tool_selection": ["calculate"]}}
    output, _ = run(tokenizer, [search_turn("a"), answer_turn("c")], tools=tools, **row)
    assert "there is no tool 'search'; available: calculate." in tokenizer.decode(output.response_ids)
    assert (record(output)["bad_calls"], record(output)["n_searches"]) == (1, 0)


def test_tools_that_verl_loads_are_named(tmp_path, monkeypatch):
    assert check() == []
    (said,) = check(function_file(tmp_path, "calculate_too"), native_file(tmp_path, monkeypatch))
    assert "tools beside the search: clock, calculate_too;" in said


def test_tools_that_verl_cannot_load_are_refused(tmp_path, monkeypatch):
    with pytest.raises(PreflightError, match=r"tools.yaml: .*'mcp'"):
        check(native_file(tmp_path, monkeypatch, "mcp"))
    with pytest.raises(PreflightError, match=f"{MULTI_TURN}.function_tool_path=.*nowhere.py"):
        check(f"{MULTI_TURN}.function_tool_path={tmp_path}/nowhere.py")
    (tmp_path / "empty.py").write_text("")
    with pytest.raises(PreflightError, match="empty.py.*no tool"):
        check(f"{MULTI_TURN}.function_tool_path={tmp_path}/empty.py")


def test_a_tool_called_as_the_search_tool_is_refused(tmp_path):
    with pytest.raises(PreflightError, match="called 'search'"):
        check(function_file(tmp_path, "search"))


@pytest.mark.slow
def test_tools_that_nothing_could_call_are_refused(tmp_path):
    overrides = ["credit=grpo", "search.max_searches=0", function_file(tmp_path)]
    with pytest.raises(ConfigError, match="with search.max_searches=0") as error:
        validate(load_config("search_cpu", [*REQUIRED, *overrides]))
    key = f"{MULTI_TURN}.function_tool_path"
    assert (error.value.key, error.value.value) == (key, overrides[-1].partition("=")[2])
    assert f"{DEFAULT}={TURN_AGENT}" in error.value.accepted and f"{key}=null" in error.value.accepted
