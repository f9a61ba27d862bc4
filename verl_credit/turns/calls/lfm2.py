"""Calls of LFM2: ``<|tool_call_start|>[search(query="...")]<|tool_call_end|>``, a list of calls in Python's syntax."""

from __future__ import annotations

import ast
import json

from verl_credit.turns.calls.turn import Call, TurnCalls

START, END = "<|tool_call_start|>", "<|tool_call_end|>"


def read_lfm2(text: str) -> TurnCalls:
    """Arguments have names and literal values; nothing is evaluated."""
    content, *parts = text.split(START)
    calls, opened = [], 0
    for part in parts:
        body, _, _ = part.partition(END)
        try:
            nodes = ast.parse(body.strip(), mode="eval").body
            nodes = nodes.elts if isinstance(nodes, ast.List) else [nodes]
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            nodes = [None]
        calls += [call for node in nodes if (call := _call(node))]
        opened += max(len(nodes), 1)
    return TurnCalls(content, calls, opened, opened if text.count(END) >= len(parts) else opened - 1)


def _call(node: ast.expr | None) -> Call | None:
    if not isinstance(node, ast.Call) or node.args or any(keyword.arg is None for keyword in node.keywords):
        return None
    try:
        given = {keyword.arg: ast.literal_eval(keyword.value) for keyword in node.keywords}
        return Call(ast.unparse(node.func), json.dumps(given, ensure_ascii=False))
    except (ValueError, TypeError, RecursionError):  # no literal, or one that JSON lacks
        return None
