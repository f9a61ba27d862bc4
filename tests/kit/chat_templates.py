"""Chat templates of our own, in the forms of the model families: their turns, calls, results, thoughts."""

from __future__ import annotations

from kit.byte_world import make_tokenizer

SPECIAL = (
    *("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),  # Llama
    *("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),  # GLM
    *("[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "</s>"),  # Mistral
    *("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>"),  # gpt-oss
)
EMPTY_THOUGHT = "<think>\n\n</think>\n\n"
TOOLS = "{% for tool in tools or [] %}{{ tool | tojson }}\n{% endfor %}"
HERMES = (
    "{% for call in m.tool_calls or [] %}<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}'
    "\n</tool_call>{% endfor %}"
)
QUIET = "{% if enable_thinking is defined and enable_thinking is false %}" + EMPTY_THOUGHT + "{% endif %}"
# Qwen3: the thought of an assistant's turn after the last question, an empty one where it has none and is the last message.
THOUGHT = (
    "{% if loop.index0 > ns.asked and (loop.last or m.reasoning_content) %}"
    "<think>\n{{ m.reasoning_content or '' }}\n</think>\n\n{% endif %}"
)
ASKED = (
    "{% set ns = namespace(asked=0) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set ns.asked = loop.index0 %}{% endif %}{% endfor %}"
)


def chatml(*, thought: str = "", header: str = "", after: str = "\n") -> str:
    """``thought``: before an assistant's text. ``header``: after the generation prompt. ``after``: after a turn's end."""
    end = "<|im_end|>" + after
    return (
        f"{ASKED}<|im_start|>system\n{TOOLS}{end}"
        "{% for m in messages %}{% if m.role == 'tool' %}"
        "<|im_start|>user\n<tool_response>\n{{ m.content }}\n</tool_response>" + end + "{% else %}"
        "<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}" + thought + "{% endif %}{{ m.content }}"
        f"{HERMES}{end}{{% endif %}}{{% endfor %}}"
        f"{{% if add_generation_prompt %}}<|im_start|>assistant\n{header}{{% endif %}}"
    )


CHATML = chatml()
NO_SEPARATOR = chatml(after="")  # Phi-4
QWEN3 = chatml(thought=THOUGHT, header=QUIET)
THINKING = chatml(thought=THOUGHT, header="<think>\n")  # Qwen3-*-Thinking-2507
QWEN35 = chatml(thought=THOUGHT, header=QUIET.replace("{% endif %}", "{% else %}<think>\n{% endif %}"))
NEMOTRON = chatml(thought="<think></think>", header="<think>\n")
DATED = "{% if date_string is not defined %}{% set date_string = strftime_now('%d %b %Y') %}{% endif %}"
LLAMA = (
    DATED
    + "<|start_header_id|>system<|end_header_id|>\n\nToday Date: {{ date_string }}\n\n"
    + TOOLS
    + "<|eot_id|>{% for m in messages %}"
    "<|start_header_id|>{{ 'ipython' if m.role == 'tool' else m.role }}<|end_header_id|>\n\n"
    "{{ m.content }}{% for call in m.tool_calls or [] %}"
    '{"name": "{{ call.function.name }}", "parameters": {{ call.function.arguments | tojson }}}'
    "{% endfor %}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
MISTRAL = (  # no text marks the policy's turn
    TOOLS + "{% for m in messages %}{% if m.role == 'tool' %}[TOOL_RESULTS]{{ m.content }}[/TOOL_RESULTS]"
    "{% elif m.role == 'assistant' %}{% for call in m.tool_calls or [] %}[TOOL_CALLS]"
    '[{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}]'
    "{% endfor %}{{ m.content }}</s>{% else %}[INST]{{ m.content }}[/INST]{% endif %}{% endfor %}"
)
GLM = (
    "[gMASK]<sop>{% if tools %}<|system|>\n" + TOOLS + "{% endif %}{% for m in messages %}"
    "{% if m.role == 'tool' %}{% if loop.previtem is not defined or loop.previtem.role != 'tool' %}"
    "<|observation|>{% endif %}{{ '\\n' }}<tool_response>\n{{ m.content }}\n</tool_response>"
    "{% elif m.role == 'assistant' %}<|assistant|>\n<think></think>{{ '\\n' + m.content if m.content else '' }}"
    "{% for call in m.tool_calls or [] %}{{ '\\n<tool_call>' + call.function.name }}\n"
    "{% for k, v in call.function.arguments.items() %}<arg_key>{{ k }}</arg_key>\n<arg_value>{{ v }}</arg_value>\n"
    "{% endfor %}</tool_call>{% endfor %}{% else %}<|{{ m.role }}|>\n{{ m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% if enable_thinking is defined and not enable_thinking %}"
    "{{ '\\n' }}<think></think>{% endif %}{% endif %}"
)
GPT_OSS = (
    "<|start|>system<|message|>" + TOOLS + "<|end|>{% for m in messages %}{% if m.role == 'tool' %}"
    "<|start|>functions.search to=assistant<|channel|>commentary<|message|>{{ m.content | tojson }}<|end|>"
    "{% elif m.tool_calls %}{% set call = m.tool_calls[0] %}"
    "<|start|>assistant to=functions.{{ call.function.name }}<|channel|>commentary json<|message|>"
    "{{ call.function.arguments | tojson }}<|call|>"
    "{% elif m.role == 'assistant' %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}<|return|>"
    "{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)


def tokenizer_with(template: str):
    """A tokenizer of bytes in which the marks of every family above are special tokens."""
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", *SPECIAL]})
    tokenizer.chat_template = template
    return tokenizer
