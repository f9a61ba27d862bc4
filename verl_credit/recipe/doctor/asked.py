"""What a prompt asks the policy to write, in the forms of published prompts: a call of a tool, and an answer.

Every pattern begins with fixed text, for which Python looks thirty times as fast: a file has 170,000 prompts.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from verl_credit.turns.rollout.reward.qa import BOXED, TAG

READ = {
    "hermes": r"<tool_call>(?!\s*<function=|[^<{]*<arg_key>)",
    "qwen3_coder": r"<function=",
    "glm": r"<arg_key>",
    "seed": r"<seed:tool_call>",
    "minimax": r"<minimax:tool_call>",
    "kimi": r"<\|tool_call_begin\|>",
    "gpt-oss": r"to=functions\.",
    "deepseek_v4": "<\uff5cDSML\uff5c",
    "gemma4": r"<\|tool_call>",
    "llama3": r"{\"name\": [^{}]*\"parameters\":",
    "mistral": r"\[TOOL_CALLS\]",
    "harmony": r"to=functions\.",
}
"""What the parsers of verl and of verl_credit read, by ``multi_turn.format``."""
CALLS = {
    **READ,
    # Search-R1, ReSearch and others; a pair, because HTML has the tag, too
    "tags": r"<(search|web_search|search_query|tool_use|function_calls?)>[^<]*</\1>",
    "tokens": r"<\|begin_of_query\|>|<\|begin_search_query\|>",
    "ReAct": r"Action(?: \d+)?: ?(?:[Ss]earch|\[?[Tt]ool)\b",
}
ANSWERS = {
    TAG: r"<answer>",
    BOXED: r"\\boxed",
    "Final answer": r"Final [Aa]nswer(?: is)?:",
    "final answer": r"final answer(?: is)?:",
    "answer line": r"Answer: ?(?:\$|\\boxed|\[|<)",
    "hashes": r"####(?:[\"'`”.]| ?[<\[{])",  # no heading of Markdown
}
"""Forms of an answer. The first two are those of ``ground_truth.form``."""
SHOWN = {TAG: "<answer>..</answer>", BOXED: "\\boxed{..}"}
_CALLS, _ANSWERS = ({name: re.compile(p) for name, p in forms.items()} for forms in (CALLS, ANSWERS))


class Asked(NamedTuple):
    calls: Mapping[str, str]
    """{form: the first text that asks for it}"""
    answers: Mapping[str, str]


def asked(prompt: list[dict]) -> Asked:
    """What the messages of system and user ask for."""
    text = "\n".join(
        _text(message.get("content")) for message in prompt if message["role"] in ("system", "user")
    )
    return Asked(_found(_CALLS, text), _found(_ANSWERS, text))


def _found(forms: Mapping[str, re.Pattern], text: str) -> dict[str, str]:
    matches = {name: pattern.search(text) for name, pattern in forms.items()}
    return {name: match[0][:40] for name, match in matches.items() if match}


def _text(content: object) -> str:
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else []
    return "\n".join(str(part.get("text") or "") for part in parts if isinstance(part, dict))
