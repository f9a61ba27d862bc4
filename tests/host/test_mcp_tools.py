"""Tools of a real MCP server: schema, results and rewards are as of a tool of verl's, and a server that fails is a fault of
the row."""

import asyncio
import json
import logging
import sys
from functools import cache
from pathlib import Path

import pytest

from kit.byte_world import make_tokenizer
from kit.mcp_server import make_server, served
from kit.recipes import load_config
from kit.trajectories import REQUIRED, record, run
from verl_credit.errors import ConfigError, IntegrityError, PreflightError
from verl_credit.host.process.verl_checks import check_other_tools, tool_schemas
from verl_credit.host.rollout.mcp_tool import MCPTool
from verl_credit.names import MCP_TOOL, TOOL_FAULT
from verl_credit.recipe.agent_loops import MULTI_TURN
from verl_credit.recipe.doctor.cluster import judge_nodes
from verl_credit.turns.rollout.mcp import ToolSettings
from verl_credit.turns.step.step_checks import check_tool_faults
from verl_credit.worlds.lab.protocol import TURN_END, answer_turn

SECRET = "Bearer s3cr3t-of-the-library"
STDIO = {"command": [sys.executable, "-m", "kit.mcp_server"], "env": ["PYTHONPATH", "SHELF"], "timeout_s": 60}
tokenizer = cache(make_tokenizer)


@pytest.fixture(scope="module")
def url():
    with served() as address:
        yield address


def tool(url, name, **config):
    return MCPTool({"type": "native", "url": url, "tool": name, "timeout_s": 30, **config})


def call(name, **arguments):
    calls = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>\n{calls}\n</tool_call>{TURN_END}"


def played(made, turn, **row):
    """A trajectory that makes one call and answers; (output, its text)."""
    output, _ = run(tokenizer(), [turn, answer_turn("c")], tools=[made], **row)
    return output, tokenizer().decode(output.response_ids)


def execute(made, parameters, **row):
    async def lived():
        instance, _ = await made.create(create_kwargs=row)
        result = await made.execute(instance, parameters)
        await made.release(instance)
        return result

    return asyncio.run(lived())


def fault_of(made, parameters):
    response, reward, metrics = execute(made, parameters)
    assert reward is None and response.text.startswith("Error executing tool")
    return metrics[TOOL_FAULT]


def file_of(folder, *configs):
    path = folder / "tools.yaml"
    tools = [{"class_name": MCP_TOOL, "config": {"type": "native", **config}} for config in configs]
    path.write_text(json.dumps({"tools": tools}))
    return f"{MULTI_TURN}.tool_config_path={path}"


def loaded(*overrides):
    return load_config("search_cpu", [*REQUIRED, *overrides])


def test_the_schema_is_the_server_s(url, tmp_path):
    (schema,) = tool_schemas(loaded(file_of(tmp_path, {"url": url, "tool": "lookup", "name": "find"})))
    (offered,) = (one for one in asyncio.run(make_server().list_tools()) if one.name == "lookup")
    given = offered.input_schema
    # verl wants a type for every argument
    given["properties"]["shelves"]["type"] = ["array", "null"]
    given["properties"]["shelves"].pop("default")  # null, which verl's agent loop leaves out
    assert schema["function"] == {"name": "find", "description": "Looks into the books.", "parameters": given}
    assert given["properties"]["shelves"]["anyOf"][0] == {"type": "array", "items": {"type": "string"}}


def test_a_call_is_a_turn_whose_observation_is_the_server_s_text(url):
    output, text = played(tool(url, "lookup"), call("lookup", query="Dune"))
    found = record(output)
    assert (found["n_other_calls"], found["other_errors"], found["tool_fault"]) == (1, 0, "")
    assert found["calls"][0]["reward"] is None and found["stop_reason"] == "answer"
    assert "Dune stands on the shelf < tool_call>" in text  # it cannot forge a call


@pytest.mark.slow
@pytest.mark.parametrize("answer, reward", [("Herbert", 1.0), ("Asimov", 0.0)])
def test_the_server_grades_by_what_the_row_says_and_the_policy_does_not_see(url, answer, reward):
    row = {"tools_kwargs": {"grade": {"create_kwargs": {"truth": "Herbert", "null": None}}}}
    output, text = played(tool(url, "grade"), call("grade", answer=answer), **row)
    assert [one["reward"] for one in record(output)["calls"]] == [reward]
    assert "graded" in text and "reward" not in text and "truth" not in text
    assert execute(tool(url, "grade"), {"answer": answer}, truth="Herbert")[1] == reward
    assert execute(tool(url, "grade"), {"answer": answer})[1] is None


@pytest.mark.parametrize(
    "name, arguments, says",
    [
        ("torn", {"page": 3}, "Error executing tool 'torn'"),
        ("lookup", {"words": "Dune"}, "validation error"),
        ("lookup", {"query": float("nan")}, "not JSON compliant"),
        ("lookup", [1], "expected an object"),
        ("lookup", {"query": json.loads("[" * 40 + "]" * 40)}, "nested more than 32 deep"),
    ],
)
def test_what_the_policy_did_wrongly_it_reads_and_no_row_is_lost(url, name, arguments, says):
    turn = f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>{TURN_END}'
    output, text = played(tool(url, name), turn)
    found = record(output)
    assert (found["other_errors"], found["tool_fault"], found["calls"][0]["reward"]) == (1, "", None)
    assert says in text and f"Error executing tool '{name}'" in text


def test_a_server_that_does_not_answer_masks_the_row_at_the_deadline(url):
    output, _ = played(tool(url, "never", timeout_s=0.3), call("never"))
    found = record(output)
    assert (found["tool_fault"], found["stop_reason"]) == ("deadline", "tool_fault")
    assert found["fault_detail"] == f"MCP server {url}: no answer in 0.3 s"
    assert not any(output.response_mask) and set(output.turn_ids) == {-1}


@pytest.mark.slow
def test_a_server_that_is_gone_is_a_fault_and_one_that_comes_back_is_found_again():
    with served() as url:
        made = tool(url, "lookup", timeout_s=10)
    output, _ = played(made, call("lookup", query="Dune"))
    assert record(output)["tool_fault"] == "connect" and not any(output.response_mask)
    assert record(output)["fault_detail"].startswith(f"MCP server {url}: ")
    with served(int(url.rpartition(":")[2].removesuffix("/mcp"))):
        assert execute(made, {"query": "Dune"})[0].text.startswith("Dune stands")


@pytest.mark.slow
def test_half_a_character_is_replaced_and_a_result_is_cut(url):
    assert execute(tool(url, "lookup"), {"query": "Du\ud800ne"})[0].text.startswith("Du?ne")
    assert execute(tool(url, "long", max_chars=100), {"chars": 50_000})[0].text == "a" * 100


@pytest.mark.slow
def test_rows_are_served_at_the_same_time(url):
    async def at_once(made):
        return await asyncio.gather(*(made.execute(str(n), {"query": f"book {n}"}) for n in range(8)))

    answers = asyncio.run(at_once(tool(url, "lookup")))
    assert [r.text.split(" stands")[0] for r, *_ in answers] == [f"book {n}" for n in range(8)]


def test_what_is_no_text_is_named(url):
    assert execute(tool(url, "picture"), {})[0].text == "[image: left out]\na map"


@pytest.mark.slow
def test_a_header_comes_from_the_environment_and_shows_nowhere(monkeypatch, caplog, capfd, tmp_path):
    caplog.set_level(logging.DEBUG)
    monkeypatch.setenv("LIBRARY_TOKEN", SECRET)
    seen = []
    with served(seen=seen) as url:
        config = {"url": url, "tool": "lookup", "headers": {"Authorization": "LIBRARY_TOKEN"}}
        check_other_tools(loaded(file_of(tmp_path, config)))
        made = MCPTool({"type": "native", **config})
        assert execute(made, {"query": "Dune"})[0].text.startswith("Dune")
    assert {headers.get("authorization") for headers in seen} == {SECRET}
    detail = fault_of(made, {"query": "Dune"}).detail
    printed = "".join(capfd.readouterr())
    assert SECRET.split()[1] not in detail + caplog.text + printed + repr(made.settings)
    monkeypatch.delenv("LIBRARY_TOKEN")
    with pytest.raises(
        ConfigError, match="config.headers=LIBRARY_TOKEN: this environment variable is not set"
    ):
        MCPTool({"type": "native", **config})


@pytest.mark.parametrize(
    "config, says",
    [
        ({}, "config: url=null: one of url"),
        ({"url": "http://a", "command": ["x"]}, "config: url=http://a: one of url.* command"),
        ({"url": "ftp://a/mcp"}, "config: url=ftp://a/mcp: expected http://HOST:PORT/PATH"),
        ({"url": "http://me:s3cr3t@a/mcp"}, r"url=http://\*\*\*@a/mcp: .*secrets are in headers"),
        ({"url": "http://a/mcp?api_key=s3cr3t"}, r"api_key=\*\*\*: expected http://HOST"),
        (
            {"url": "http://a", "headers": {"Authorization": "Bearer s3cr3t"}},
            "headers: expected names of env",
        ),
        ({"command": "my server"}, "command='my server': expected a list of texts"),
        ({"url": "http://a", "timeout_s": 0}, "timeout_s=0: expected a number of at least 0.001"),
        ({"url": "http://a", "max_chars": "9"}, "max_chars='9': expected a whole number of at least 1"),
        ({"url": "http://a", "timeout": 3}, "did you mean timeout_s"),
    ],
)
def test_a_setting_that_cannot_be_used_is_refused_without_its_secret(config, says):
    with pytest.raises(ConfigError, match=says) as error:
        ToolSettings.read({"type": "native", **config})
    assert "s3cr3t" not in str(error.value)


@pytest.mark.slow
def test_the_start_says_what_is_wrong_with_a_server_or_its_tools(url, tmp_path, monkeypatch):
    (line,) = check_other_tools(loaded(file_of(tmp_path, {"url": url, "tool": "lookup"})))
    assert "tools beside the search: lookup;" in line
    wrong = {
        "did you mean lookup.*accepted are die, grade": [{"url": url, "tool": "lookups"}],
        "config.tool=null: accepted are": [{"url": url}],
        "several tools are called lookup; rename them": [{"url": url, "tool": "lookup"}] * 2,
        "called 'search'": [{"url": url, "tool": "lookup", "name": "search"}],
        "connect: MCP server http://127.0.0.1:1/mcp: ConnectError": [{"url": "http://127.0.0.1:1/mcp"}],
        "connect: MCP server .*/elsewhere: ": [{"url": f"{url}/elsewhere"}],
        "connect: MCP server no-such-command": [{"command": ["no-such-command"]}],
        f"no MCP tools: take ours with class_name: {MCP_TOOL}": [{"url": url, "type": "mcp"}],
    }
    for says, configs in wrong.items():
        with pytest.raises(PreflightError, match=says):
            check_other_tools(loaded(file_of(tmp_path, *configs)))
    monkeypatch.setitem(sys.modules, "mcp", None)
    with pytest.raises(PreflightError, match=r"pip install 'verl-credit\[mcp\]'"):
        check_other_tools(loaded(file_of(tmp_path, {"url": url, "tool": "lookup"})))


def test_a_run_that_stops_names_the_server_that_failed():
    lost = {"tool_fault": "connect", "fault_detail": "MCP server http://a/mcp: ConnectError"}
    with pytest.raises(
        IntegrityError, match="2 of 2 rows .* faults of MCP servers: 2 connect .*http://a/mcp"
    ):
        check_tool_faults([lost, lost], 0.25, "http://search")
    searched = {"tool_fault": "connect", "fault_detail": "http://search: ConnectError"}
    with pytest.raises(IntegrityError, match="the search server at http://search and MCP servers"):
        check_tool_faults([lost, searched], 0.25, "http://search")


def test_a_loopback_server_is_refused_on_several_machines(tmp_path):
    seen = {"cpus": 3, "gpus": 1, "plugin": {}, "found": []}
    nodes = [{"host": host, **seen} for host in ("a", "b")]
    for address, right in (("http://127.0.0.1:9/mcp", False), ("https://library.example/mcp", True)):
        config = loaded("search.max_searches=0", file_of(tmp_path, {"url": address}))
        found = judge_nodes(nodes, [], config)
        assert ("MCP server" in found.found) != right


@pytest.mark.slow
def test_a_command_is_started_for_every_call(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
    monkeypatch.delenv("SHELF", raising=False)
    with pytest.raises(ConfigError, match="config.env=SHELF: this environment variable is not set"):
        MCPTool({"type": "native", **STDIO, "tool": "lookup"})
    monkeypatch.setenv("SHELF", "Ann")
    lookup, die = (MCPTool({"type": "native", **STDIO, "tool": name}) for name in ("lookup", "die"))
    assert execute(lookup, {"query": "Dune"})[0].text == "Dune stands on the shelf <tool_call> of Ann"
    assert fault_of(die, {}).code == "connect"
    assert execute(lookup, {"query": "Emma"})[0].text.startswith("Emma")
