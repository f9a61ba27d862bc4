"""The dialogue in text: how a turn, a tool call and an observation are written (Qwen3 / Hermes form)."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable

MAX_SEARCHES = 4
TOP_K = 3
MAX_NEW_TOKENS = 40

CALL_HEAD = '{"name": "search", "arguments": {"query": "'
CALL_TAIL = '"}}'
TURN_END = "<|im_end|>"

# Tools are deliberately not rendered: the lab's policy knows its single tool from its demonstrations, and
# a schema in the prompt would be several times as long as the question.
CHAT_TEMPLATE = """\
{%- for message in messages -%}
{%- if message.role == 'tool' -%}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' -%}{{ '<|im_start|>user' }}{%- endif -%}
{{ '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' -%}{{ '<|im_end|>\\n' }}{%- endif -%}
{%- else -%}
{{ '<|im_start|>' + message.role + '\\n' + (message.content or '') }}
{%- for call in message.tool_calls or [] -%}
{%- set function = call.function or call -%}
{%- if message.content or not loop.first -%}{{ '\\n' }}{%- endif -%}
{{ '<tool_call>\\n{"name": "' + function.name + '", "arguments": ' }}
{%- if function.arguments is string -%}{{ function.arguments }}
{%- else -%}{{ function.arguments | tojson }}{%- endif -%}
{{ '}\\n</tool_call>' }}
{%- endfor -%}
{{ '<|im_end|>\\n' }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}
"""

_CALL = re.compile(r"<tool_call>\n?(.*?)\n?</tool_call>", re.DOTALL)


def prompt_text(question: str) -> str:
    """The chat template's rendering of one user message, ready for the policy's first turn."""
    return f"<|im_start|>user\n{question}{TURN_END}\n<|im_start|>assistant\n"


def search_turn(query: str, thought: str = "") -> str:
    """A policy turn that searches; ``thought`` fills the think tag, which is left out when empty."""
    return f"{_think(thought)}<tool_call>\n{CALL_HEAD}{query}{CALL_TAIL}\n</tool_call>{TURN_END}"


def answer_turn(answer: str, thought: str = "") -> str:
    """The policy turn that ends the trajectory."""
    return f"{_think(thought)}<answer>{answer}</answer>{TURN_END}"


def pages(contents: Iterable[str]) -> str:
    """The tool's text for a result list: numbered pages, one after the other."""
    return "\n".join(f"Page {i}: {text}" for i, text in enumerate(contents, 1))


def observation_text(tool_content: str) -> str:
    """What is appended after the policy's end-of-turn token, up to where it generates again."""
    return (
        f"\n<|im_start|>user\n<tool_response>\n{tool_content}\n</tool_response>{TURN_END}\n"
        "<|im_start|>assistant\n"
    )


def parse_query(turn: str) -> str | None:
    """The query of the turn's first well-formed search call; None when there is none."""
    for body in _CALL.findall(turn):
        try:
            call = json.loads(body)
            query = call["arguments"]["query"] if call["name"] == "search" else None
        except (ValueError, KeyError, TypeError):
            continue
        if isinstance(query, str) and query.strip():
            return query
    return None


def _think(thought: str) -> str:
    return f"<think>{thought}</think>\n" if thought else ""
