"""The form in which three families write a dialogue with a search, and a tiny model of each.

A form says the same things as the lab's own (`verl_credit/worlds/lab/protocol.py`): a question, a call, what the search
returns, an answer. The templates are ours; the marks and their order are the families'.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass

from tokenizers import AddedToken
from transformers import GptOssConfig, LlamaConfig, PreTrainedTokenizerFast, Qwen3_5TextConfig

from verl_credit.worlds.lab.demos import Segment
from verl_credit.worlds.lab.protocol import make_tokenizer

SIZE = {
    "hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "intermediate_size": 256,
    "tie_word_embeddings": True, "initializer_range": 0.06, "max_position_embeddings": 1024,
}  # fmt: skip

_TURN = re.compile(r"^(?:<think>(?P<thought>.*?)</think>\n)?(?P<rest>.*)<\|im_end\|>$", re.DOTALL)
_QUERY = re.compile(
    r'<tool_call>\n\{"name": "search", "arguments": \{"query": "(.*)"\}\}\n</tool_call>', re.DOTALL
)
_SEEN = re.compile(r"<tool_response>\n(.*)\n</tool_response>", re.DOTALL)
_ASKED = re.compile(r"<\|im_start\|>user\n(.*)<\|im_end\|>", re.DOTALL)


@dataclass(frozen=True)
class Form:
    """How a family writes a dialogue. ``end``: the token that ends a turn with an answer, ``call_end``: with a call."""

    special: tuple[str, ...]
    pieces: tuple[str, ...]
    template: str
    config: Callable
    layers: int
    question: str
    thought: str
    call: str
    answer: str
    seen: str
    end: str
    pad: str
    json_pages: bool = False

    def rewrite(self, segments: list[Segment]) -> list[Segment]:
        """A demonstration of the lab in this form."""
        first, *rest = segments
        texts = [(self.question.replace("{text}", _ASKED.search(first[0])[1]), False)]
        for text, by_policy in rest:
            if by_policy:
                texts.append((self._turn(text), True))
            else:
                pages = _SEEN.search(text)[1]
                texts.append(
                    (self.seen.replace("{text}", json.dumps(pages) if self.json_pages else pages), False)
                )
        return texts

    def _turn(self, text: str) -> str:
        turn = _TURN.match(text)
        called = _QUERY.match(turn["rest"])
        thought = self.thought.replace("{text}", turn["thought"] or "")
        return thought + (
            self.call.replace("{text}", called[1]) if called else self.answer.replace("{text}", turn["rest"])
        )

    def tokenizer(self, names) -> PreTrainedTokenizerFast:
        """The lab's tokenizer with the family's control tokens."""
        tokenizer = make_tokenizer(names, pieces=self.pieces)
        tokenizer.add_special_tokens(
            {
                "additional_special_tokens": [
                    AddedToken(t, special=True, normalized=False) for t in self.special
                ]
            }
        )
        tokenizer.eos_token, tokenizer.pad_token = self.end, self.pad
        tokenizer.chat_template = self.template
        return tokenizer


CHATML = """\
{%- for message in messages -%}
{%- if message.role == 'tool' -%}
{{ '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
{%- else -%}
{{ '<|im_start|>' + message.role + '\\n' }}
{%- if message.role == 'assistant' -%}
{{ '<think>\\n' + (message.reasoning_content or '') + '\\n</think>\\n\\n' }}{%- endif -%}
{{ message.content or '' }}
{%- for call in message.tool_calls or [] -%}
{%- set function = call.function or call -%}
{{ '<tool_call>\\n<function=' + function.name + '>\\n' }}
{%- for name, value in function.arguments | items -%}
{{ '<parameter=' + name + '>\\n' + value + '\\n</parameter>\\n' }}
{%- endfor -%}
{{ '</function>\\n</tool_call>' }}
{%- endfor -%}
{{ '<|im_end|>\\n' }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n<think>\\n' }}{%- endif -%}
"""

HEADERS = """\
{{- '<|begin_of_text|>' -}}
{%- for message in messages -%}
{%- if message.tool_calls -%}
{%- if message.tool_calls | length > 1 -%}{{ raise_exception('one call a message') }}{%- endif -%}
{%- set function = message.tool_calls[0].function -%}
{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n{"name": "' + function.name + '", "parameters": ' }}
{{- function.arguments | tojson -}}{{ '}<|eot_id|>' }}
{%- else -%}
{%- set role = 'ipython' if message.role == 'tool' else message.role -%}
{{ '<|start_header_id|>' + role + '<|end_header_id|>\\n\\n' + (message.content or '') + '<|eot_id|>' }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif -%}
"""

HARMONY = """\
{%- for message in messages -%}
{%- if message.role == 'tool' -%}
{{ '<|start|>functions.search to=assistant<|channel|>commentary<|message|>' }}{{ message.content | tojson }}{{ '<|end|>' }}
{%- elif message.tool_calls -%}
{%- set function = message.tool_calls[0].function -%}
{{ '<|start|>assistant to=functions.' + function.name + '<|channel|>commentary json<|message|>' }}
{{- function.arguments | tojson -}}{{ '<|call|>' }}
{%- elif message.role == 'assistant' -%}
{{ '<|start|>assistant<|channel|>final<|message|>' + (message.content or '') + '<|return|>' }}
{%- else -%}
{{ '<|start|>' + message.role + '<|message|>' + (message.content or '') + '<|end|>' }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|start|>assistant' }}{%- endif -%}
"""

FORMS = {
    "qwen3_5": Form(
        special=(), pieces=("<function=search>", "</function>", "<parameter=query>", "</parameter>"), template=CHATML,
        config=lambda **ids: Qwen3_5TextConfig(
            **SIZE, **ids, num_hidden_layers=4, linear_num_value_heads=4, linear_num_key_heads=2,
            linear_key_head_dim=32, linear_value_head_dim=32,
            layer_types=["linear_attention", "full_attention"] * 2,
        ),
        layers=4,
        question="<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n<think>\n",
        thought="{text}\n</think>\n\n",
        call="<tool_call>\n<function=search>\n<parameter=query>\n{text}\n</parameter>\n</function>\n</tool_call><|im_end|>",
        answer="{text}<|im_end|>",
        seen="\n<|im_start|>user\n<tool_response>\n{text}\n</tool_response><|im_end|>\n<|im_start|>assistant\n<think>\n",
        end="<|im_end|>", pad="<|endoftext|>",
    ),
    "llama": Form(
        special=("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        pieces=('{"name": "search", "parameters": {"query": "', '"}}'), template=HEADERS,
        config=lambda **ids: LlamaConfig(**SIZE, **ids, num_hidden_layers=3),
        layers=3,
        question="<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\n{text}<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
        thought="",
        call='{"name": "search", "parameters": {"query": "{text}"}}<|eot_id|>',
        answer="{text}<|eot_id|>",
        seen="<|start_header_id|>ipython<|end_header_id|>\n\n{text}<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
        end="<|eot_id|>", pad="<|endoftext|>",
    ),
    "gpt_oss": Form(
        special=("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|call|>", "<|return|>"),
        pieces=('{"query": "', '"}'), template=HARMONY,
        config=lambda **ids: GptOssConfig(
            **SIZE, **ids, num_hidden_layers=4, num_local_experts=4, num_experts_per_tok=2, sliding_window=64,
        ),
        layers=4,
        question="<|start|>user<|message|>{text}<|end|><|start|>assistant",
        thought="<|channel|>analysis<|message|>{text}<|end|><|start|>assistant",
        call='<|channel|>commentary to=functions.search <|constrain|>json<|message|>{"query": "{text}"}<|call|>',
        answer="<|channel|>final<|message|>{text}<|return|>",
        seen="<|start|>functions.search to=assistant<|channel|>commentary<|message|>{text}<|end|><|start|>assistant",
        end="<|return|>", pad="<|endoftext|>", json_pages=True,
    ),
}  # fmt: skip
