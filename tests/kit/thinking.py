"""Turns of policies that think, for every parser of verl and of ours: calls as each reads them, thoughts in every form."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from kit.byte_world import make_tokenizer
from verl_credit.turns.rollout.thoughts import FORMS
from verl_credit.worlds.lab.protocol import TURN_END

_DSML = "\uff5cDSML\uff5c"
CALLS = {
    "hermes": '<tool_call>\n{{"name": "search", "arguments": {{"query": "{}"}}}}\n</tool_call>',
    "qwen3_coder": "<tool_call>\n<function=search>\n<parameter=query>\n{}\n</parameter>\n</function>\n</tool_call>",
    "glm": "<tool_call>search\n<arg_key>query</arg_key>\n<arg_value>{}</arg_value>\n</tool_call>",
    "seed": "<seed:tool_call><function=search><parameter=query>{}</parameter></function></seed:tool_call>",
    "minimax": '<minimax:tool_call><invoke name="search"><parameter name="query">{}</parameter></invoke>'
    "</minimax:tool_call>",
    "kimi": "<|tool_calls_section_begin|><|tool_call_begin|>functions.search:0<|tool_call_argument_begin|>"
    '{{"query": "{}"}}<|tool_call_end|><|tool_calls_section_end|>',
    "deepseek_v4": f'<{_DSML}tool_calls>\n<{_DSML}invoke name="search">\n<{_DSML}parameter name="query" string="true">{{}}'
    f"</{_DSML}parameter>\n</{_DSML}invoke>\n</{_DSML}tool_calls>",
    "gpt-oss": "<|start|>assistant<|channel|>commentary to=functions.search <|constrain|>json<|message|>"
    '{{"query": "{}"}}<|call|>',
    "harmony": "<|channel|>commentary to=functions.search <|constrain|>json<|message|>"
    '{{"query": "{}"}}<|call|>',
    "llama3": '{{"name": "search", "parameters": {{"query": "{}"}}}}',
    "mistral": '[TOOL_CALLS]search[ARGS]{{"query": "{}"}}',
    "gemma4": '<|tool_call>call:search{{query:<|"|>{}<|"|>}}<tool_call|>',
}
FORM = "actor_rollout_ref.rollout.multi_turn.format={}"
SPECIAL = [
    *("[THINK]", "[/THINK]", "<|channel>", "<channel|>", "<|channel|>", "<|message|>", "<|end|>", "<|start|>", "<|call|>"),
    *("<|constrain|>", "<|return|>", "<|tool_call>", "<tool_call|>", '<|"|>'),
    *("[TOOL_CALLS]", "[ARGS]", "<|tool_call_start|>", "<|tool_call_end|>"),
]  # fmt: skip


def call_in(parser: str) -> Callable[[str], str]:
    """query -> the call as ``parser`` reads it."""
    return CALLS[parser].format


def thought_in(form: str, text: str) -> str:
    return f"{form}{text}{FORMS[form]}"


@cache
def thinking_tokenizer(opened: str = "", *, special: bool = True):
    """``opened``: what the template's generation prompt ends with. ``special``: marks that models have as special tokens."""
    tokenizer = make_tokenizer()
    if special:
        tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", *SPECIAL]})
    head = "<|im_start|>assistant\\n' }}{%- endif -%}"
    assert tokenizer.chat_template.count(head) == 1
    opened = opened.replace("\n", "\\n")
    tokenizer.chat_template = tokenizer.chat_template.replace(head, head.replace("' }}", f"{opened}' }}}}"))
    return tokenizer


def ended(text: str) -> str:
    return text + TURN_END
