"""Small chat templates of our own, each with its family's header, call, and role of a tool's result.

They write the family's form, and what its published template demands of a dialogue (ids, one call a message)."""

from __future__ import annotations

from dataclasses import dataclass

from tokenizers import AddedToken

from kit.byte_world import make_tokenizer

_TOOLS = "{% for t in tools or [] %}{{ t | tojson }}\n{% endfor %}"
_RAISE = "{{ raise_exception('%s') }}"
_NINE = (
    "{% if x.id is not defined or x.id | length != 9 %}" + _RAISE % "ids have nine characters" + "{% endif %}"
)


def _chat(head: str, end: str, call: str, result: str, *, start: str = "", opened: str = "") -> str:
    """``head``: begins a message of role ``r``; ``call``: of a message ``m``; ``result``: a message of a tool;
    ``opened``: ends the header of the next turn."""
    return (
        f"{start}{_TOOLS}{{% for m in messages %}}{{% if m.role == 'tool' %}}{result}{{% else %}}"
        f"{{% set r = m.role %}}{head}"
        f"{{% if m.tool_calls %}}{call}{{% else %}}{{{{ m.content }}}}{{% endif %}}{end}{{% endif %}}{{% endfor %}}"
        f"{{% if add_generation_prompt %}}{{% set r = 'assistant' %}}{head}{opened}{{% endif %}}"
    )


@dataclass(frozen=True)
class Family:
    template: str
    form: str
    """What ``auto`` is."""
    call: str
    """A call as its models write it, with {} for the query."""
    ends: str
    """The end of a turn."""
    model_type: str = "none"
    special: tuple[str, ...] = ()
    one_call: bool = False

    def tokenizer(self):
        tokenizer = make_tokenizer()
        tokenizer.add_tokens([AddedToken(name, special=True, normalized=False) for name in self.special])
        tokenizer.chat_template = self.template
        return tokenizer

    def turn(self, *queries: str) -> str:
        return "".join(self.call.replace("{}", query) for query in queries) + self.ends


_CHATML, _CHATML_END = "<|im_start|>{{ r }}\n", "<|im_end|>\n"
_EACH = "{% for c in m.tool_calls %}{% set f = c.function %}"
_JSON = '{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}'
_CODER = (
    _EACH + "<tool_call>\n<function={{ f.name }}>\n{% for k, v in f.arguments.items() %}"
    "<parameter={{ k }}>\n{{ v }}\n</parameter>\n{% endfor %}</function>\n</tool_call>{% endfor %}"
)
_RESPONSE = "<|im_start|>user\n<tool_response>\n{{ m.content }}\n</tool_response><|im_end|>\n"
_HERMES = _EACH + "<tool_call>\n" + _JSON + "\n</tool_call>{% endfor %}"
_LLAMA = (
    "{% if m.tool_calls | length != 1 %}"
    + _RAISE % "one call a message"
    + "{% endif %}{% set f = m.tool_calls[0].function %}"
    '{"name": "{{ f.name }}", "parameters": {{ f.arguments | tojson }}}'
)
_LLAMA_HEAD = "<|start_header_id|>{{ r }}<|end_header_id|>\n\n"
_INST = "{% if r == 'user' %}[INST]{{ m.content }}[/INST]{% endif %}"
_MISTRAL = {
    "list": "[TOOL_CALLS][" + _EACH + "{% set x = c %}" + _NINE
    + '{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}, "id": "{{ c.id }}"}'
    "{{ ', ' if not loop.last }}{% endfor %}]",
    "args": _EACH + "[TOOL_CALLS]{{ f.name }}[ARGS]{{ f.arguments | tojson }}{% endfor %}",
}  # fmt: skip
_MISTRAL_RESULT = {
    "list": '{% set x = {"id": m.tool_call_id} %}' + _NINE
    + '[TOOL_RESULTS]{"content": {{ m.content }}, "call_id": "{{ m.tool_call_id }}"}[/TOOL_RESULTS]',
    "args": "[TOOL_RESULTS]{{ m.content }}[/TOOL_RESULTS]",
}  # fmt: skip
_GLM = (
    _EACH + "<tool_call>{{ f.name }}\n{% for k, v in f.arguments.items() %}<arg_key>{{ k }}</arg_key>\n"
    "<arg_value>{{ v }}</arg_value>\n{% endfor %}</tool_call>{% endfor %}"
)
_OSS_HEAD = "<|start|>{{ r }}"
_OSS = (
    "{% set f = m.tool_calls[0].function %} to=functions.{{ f.name }}<|channel|>commentary json<|message|>"
    "{{ f.arguments | tojson }}<|call|>"
)


def _mistral(form: str, call: str) -> Family:
    template = (
        f"{_TOOLS}{{% for m in messages %}}{{% set r = m.role %}}{{% if r == 'tool' %}}{_MISTRAL_RESULT[form]}"
        f"{{% elif m.tool_calls %}}{_MISTRAL[form]}<|im_end|>{{% elif r == 'assistant' %}}{{{{ m.content }}}}<|im_end|>"
        f"{{% else %}}{_INST}{{% endif %}}{{% endfor %}}"
    )
    marks = ("[INST]", "[/INST]", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]")
    return Family(template, "mistral", call, "<|im_end|>", "mistral", marks)


_CODER_CALL = "<tool_call>\n<function=search>\n<parameter=query>\n{}\n</parameter>\n</function>\n</tool_call>"
_HERMES_CALL = '<tool_call>\n{"name": "search", "arguments": {"query": "{}"}}\n</tool_call>'
_LLAMA_MARKS = ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>", "<|python_tag|>")
FAMILIES = {
    "qwen3": Family(_chat(_CHATML, _CHATML_END, _HERMES, _RESPONSE), "hermes", _HERMES_CALL, "<|im_end|>", "qwen3"),
    # Its header opens a thought.
    "qwen3.5": Family(
        _chat(_CHATML, _CHATML_END, _CODER, _RESPONSE, opened="<think>\n"),
        "qwen3_coder", "no\n</think>\n\n" + _CODER_CALL, "<|im_end|>", "qwen3_5",
    ),
    # Reads its tools without asking whether it has some.
    "hermes tool_use": Family(
        _chat(_CHATML, _CHATML_END, _HERMES, _RESPONSE, start="{{ tools[0].function.name }}"),
        "hermes", _HERMES_CALL, "<|im_end|>", "llama",
    ),
    "llama 3.1": Family(
        _chat(_LLAMA_HEAD, "<|eot_id|>", _LLAMA, "<|start_header_id|>ipython<|end_header_id|>\n\n{{ m.content }}<|eot_id|>"),
        "llama3", '{"name": "search", "parameters": {"query": "{}"}}', "<|eom_id|>", "llama", _LLAMA_MARKS, one_call=True,
    ),
    "mistral nemo": _mistral(
        "list", '[TOOL_CALLS][{"name": "search", "arguments": {"query": "{}"}, "id": "abcDEF123"}]'
    ),
    "mistral small": _mistral("args", '[TOOL_CALLS]search[ARGS]{"query": "{}"}'),
    "glm 4.5": Family(
        _chat("<|{{ r }}|>\n", "", _GLM, "<|observation|>\n<tool_response>\n{{ m.content }}\n</tool_response>"),
        "glm", "<tool_call>search\n<arg_key>query</arg_key>\n<arg_value>{}</arg_value>\n</tool_call>", "<|observation|>",
        "glm4_moe", ("<|user|>", "<|assistant|>", "<|observation|>"),
    ),
    "gpt-oss": Family(
        _chat(_OSS_HEAD, "<|end|>", _OSS, "<|start|>functions to=assistant<|message|>{{ m.content }}<|end|>"),
        "harmony", '<|channel|>commentary to=functions.search <|constrain|>json<|message|>{"query": "{}"}<|call|>', "",
        "gpt_oss", ("<|start|>", "<|end|>", "<|channel|>", "<|message|>", "<|call|>", "<|constrain|>"),
    ),
}  # fmt: skip
"""By the family whose form it is."""
