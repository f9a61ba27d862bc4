"""Calls in the text of a turn: what our readers read, and how many calls a turn of any format shows."""

import json
import random

import pytest

from kit.each import each
from kit.thinking import CALLS, call_in
from verl_credit.turns.rollout.tool_calls import READERS, shown_calls

PLAIN = {"query": "a"}
LIST = '[TOOL_CALLS] [{"name": "f", "arguments": {"query": "a"}, "id": "abcDEF123"}, {"name": "g", "arguments": 1}]</s>'


def read(form, text):
    turn = READERS[form](text)
    calls = [(call.name, json.loads(call.arguments), call.id) for call in turn.calls]
    return calls, turn.opened, turn.closed, turn.content


@each(
    "form, text, calls, opened, closed, content",
    [
        ("llama3", '{"name": "f", "parameters": {"query": "a"}}<|eot_id|>', [("f", PLAIN)], 1, 1, ""),
        ("llama3", '<|python_tag|>{"name": "f", "parameters": {"query": "a"}}<|eom_id|>', [("f", PLAIN)], 1, 1, ""),
        ("llama3", 'So {"type": "function", "name": "f", "parameters": {"query": "a"}}', [("f", PLAIN)], 1, 1, "So "),
        ("llama3", '{"name": "f", "arguments": {"query": "a"}}; {"name": "g", "parameters": 1}', [("f", PLAIN), ("g", 1)],
         2, 2, ""),
        ("llama3", '<|python_tag|>f.call(query="a")<|eom_id|>', [], 1, 0, ""),
        ("llama3", '{"name": "f", "parameters": {"query": "a"', [], 1, 0, ""),
        ("llama3", '{"name": "f"}', [], 1, 1, ""),
        ("llama3", '{"name": 3, "parameters": {}}', [], 1, 1, ""),
        ("llama3", "{" + '"name":{' * 5000, [], 1, 0, ""),
        ("llama3", 'I know: {"query": "a"}<|eot_id|>', [], 0, 0, 'I know: {"query": "a"}<|eot_id|>'),
        ("llama3", '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>', [], 0, 0, None),
        ("mistral", LIST, [("f", PLAIN, "abcDEF123"), ("g", 1, "call00001")], 2, 2, ""),
        ("mistral", 'So[TOOL_CALLS]f[ARGS]{"query": "a"}[TOOL_CALLS]g[CALL_ID]abcDEF123[ARGS]1</s>',
         [("f", PLAIN, "call00000")], 2, 1, "So"),
        ("mistral", '[TOOL_CALLS]f[CALL_ID]abcDEF123[ARGS]{"query": "a"}', [("f", PLAIN, "abcDEF123")], 1, 1, ""),
        ("mistral", '[TOOL_CALLS]f{"query": "a"}', [("f", PLAIN, "call00000")], 1, 1, ""),
        ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": {}, "id": "short"}]', [("f", {}, "call00000")], 1, 1, ""),
        ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": {"query"', [], 1, 0, ""),
        ("mistral", "[TOOL_CALLS][]", [], 1, 0, ""),
        ("mistral", "[TOOL_CALLS]", [], 1, 0, ""),
        ("mistral", '[TOOL_CALLS][1, {"name": "f"}]', [], 2, 2, ""),
        ("mistral", '[{"name": "f", "arguments": {}}]', [], 0, 0, None),
    ],
)  # fmt: skip
def test_a_reader_reads_what_its_family_writes_and_nothing_else(form, text, calls, opened, closed, content):
    found = read(form, text)
    expected = [(name, arguments, id[0] if id else None) for name, arguments, *id in calls]
    assert found == (expected, opened, closed, text if content is None else content)


def test_any_query_is_read_back():
    draw = random.Random(0)
    for _ in range(300):
        query = "".join(draw.choices("a\"'\\{}[]()\n\t é\u2028;,", k=draw.randrange(12)))
        given = {"query": query}
        for form, text in {
            "llama3": json.dumps({"name": "f", "parameters": given}, ensure_ascii=draw.random() < 0.5),
            "mistral": f"[TOOL_CALLS]f[ARGS]{json.dumps(given)}",
        }.items():
            assert [one[:2] for one in read(form, text)[0]] == [("f", given)], (form, query)


@pytest.mark.parametrize("form", CALLS)
def test_calls_are_counted_in_every_format(form):
    call = call_in(form)
    for n in range(4):
        assert shown_calls("text " + " and ".join(call(f"q{k}") for k in range(n)), form) == (n, n)
    assert shown_calls("<answer>a [list] and {json: 1} to=b</answer>", form) == (0, 0)
    assert shown_calls("<tool_call>{broken</tool_call>", form) == (
        1,
        1,
    )  # Hermes' tags are seen in any format
    cut = call("@")[: call("@").index("@")]
    assert shown_calls(call("x") + "\n" + cut, form) == (2, 1)


def test_a_format_of_the_user_s_own_has_hermes_tags():
    assert shown_calls("<tool_call>a</tool_call><tool_call>", "my_own") == (2, 1)


def test_a_mark_around_several_calls_is_one_where_it_holds_none():
    empty = "<minimax:tool_call>what</minimax:tool_call>"
    two = '<minimax:tool_call>\n<invoke name="f"></invoke><invoke name="f"></invoke></minimax:tool_call>'
    assert shown_calls(empty, "minimax")[0] == 1 and shown_calls(two, "minimax") == (2, 2)
    assert shown_calls("<|tool_calls_section_begin|>what", "kimi") == (1, 0)
