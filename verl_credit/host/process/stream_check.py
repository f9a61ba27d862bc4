"""Compares the agent loop's tokens of a conversation with the chat template's, before Ray starts.

A rollout is built turn by turn: the template's prompt, the policy's tokens, the template's text of a result, the policy's
tokens. The conversation here has two calls, and the policy's turns are the template's own. The stream then is the template's
text of the whole conversation, unless the template writes something that the loop cannot append.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from difflib import SequenceMatcher

from omegaconf import DictConfig
from verl.utils.tokenizer import hf_processor
from verl.utils.tokenizer.continuous_token import ContinuousTokenBuilder
from verl.utils.tokenizer.continuous_token_wiring import create_continuous_token_builder

from verl_credit.errors import PreflightError
from verl_credit.host.process.verl_checks import line_of, tool_schemas
from verl_credit.host.rollout.stream_builder import common_start, follow_template, turn_end
from verl_credit.recipe.doctor.model import folders_of
from verl_credit.turns.thoughts import without_thoughts

QUESTION = {"role": "user", "content": "Where does the Nile end?"}
SEARCHES = (
    ("mouth of the river Nile", "The river Nile ends in the sea."),
    ("name of that sea", "The sea is the Mediterranean."),
)
THOUGHT = "I search for it."
PROCESSORS = ("preprocessor_config.json", "processor_config.json")


def loop_builder(config: DictConfig, meter) -> ContinuousTokenBuilder:
    """The builder that the agent loop makes of the run's tokenizer, and of its processor where the model has one."""
    with _without_verls_warnings():
        builder = create_continuous_token_builder(
            meter.tokenizer,
            hf_model_type=meter.model_type,
            chat_template_kwargs=meter.kwargs,
            mm_processor_kwargs=config.data.get("mm_processor_kwargs") or {},
            processor=_processor(config.actor_rollout_ref.model, meter.tokenizer),
        )
    return follow_template(builder)


@contextmanager
def _without_verls_warnings() -> Iterator[None]:
    """verl warns of every model type outside its table, and of every result of gpt-oss; the run's workers log that."""
    verls = logging.getLogger("verl.utils.tokenizer")
    before = verls.level
    verls.setLevel(logging.ERROR)
    try:
        yield
    finally:
        verls.setLevel(before)


def _processor(model: DictConfig, tokenizer):
    """The processor as verl's workers load it; None for a model without one."""
    folders = folders_of(str(model.get("tokenizer_path") or model.path))
    folder = next((one for one in folders for name in PROCESSORS if (one / name).exists()), None)
    if folder is None:
        return None
    processor = hf_processor(str(folder), trust_remote_code=bool(model.get("trust_remote_code")))
    own = model.get("custom_chat_template")
    if processor is not None and (own or not getattr(processor, "chat_template", None)):
        processor.chat_template = own or tokenizer.chat_template
    return processor


def check_stream(config: DictConfig, meter, builder: ContinuousTokenBuilder | None = None) -> list[str]:
    """Returns lines about differences that leave the policy's context whole. Raises PreflightError for a template whose
    text the loop loses, or to which nothing can be appended."""
    model = config.actor_rollout_ref.model
    named = f"actor_rollout_ref.model.path={model.path}: the chat template"
    meter.tools = meter.tools or tool_schemas(config)
    try:
        builder = builder or loop_builder(config, meter)
        with _without_verls_warnings():
            stream, by_policy, whole = two_calls(builder, meter.tools)
    except Exception as error:  # a template may raise any exception
        raise PreflightError(
            f"{named} cannot write a conversation with two calls: {line_of(error)[:300]}"
        ) from error
    decode = meter.tokenizer.decode
    found = list(differences(stream, by_policy, whole, decode))
    if lost := next((text for kind, text in found if kind == LOST), None):
        raise PreflightError(
            f"{named} writes {lost} in a whole conversation, and the agent loop's tokens lack it: the policy would read "
            "another text than the template's. Give a template without it with "
            "actor_rollout_ref.model.custom_chat_template"
        )
    kinds: dict[str, str] = {}
    for kind, text in found:
        kinds.setdefault(kind, text)
    return [f"the agent loop's tokens {kind}: {text}" for kind, text in kinds.items()]


LOST = "lost"
KEPT = "keep thoughts of earlier turns, which the chat template drops from a longer conversation"
MORE = "have text that the chat template does not write in the whole conversation"
OTHER = "differ from the chat template's text of the whole conversation"


def differences(
    stream: Sequence[int], by_policy: Sequence[bool], whole: Sequence[int], decode: Callable
) -> list[tuple[str, str]]:
    """(kind, text) of every place in which the stream is not the whole text. What the policy writes is its own; what stands
    in the whole text alone, before a token that is not the policy's, is lost."""
    found, first = [], by_policy.index(True)
    for change, a, b, c, d in SequenceMatcher(None, stream, whole, autojunk=False).get_opcodes():
        ours, theirs = decode(list(stream[a:b])), decode(list(whole[c:d]))
        place = f"after {decode(list(stream[max(a - 12, 0) : a]))!r}"
        if change == "equal":
            continue
        if change == "insert" and a > first and not (a < len(stream) and by_policy[a]):
            found.append((LOST, f"{theirs!r} {place}"))
        elif change == "delete":
            thought = ours.strip() and not without_thoughts(ours).strip()
            found.append((KEPT if thought else MORE, f"{ours!r} {place}"))
        else:
            found.append((OTHER, f"{ours!r}, and it writes {theirs!r}, {place}"))
    return found


def two_calls(
    builder: ContinuousTokenBuilder, tools: list[dict] | None
) -> tuple[list[int], list[bool], list[int]]:
    """(the loop's tokens, which of them the policy wrote, the template's tokens of the whole conversation)."""
    messages, end = [QUESTION], turn_end(builder)
    stream = builder.build_initial_tokens(messages, tools=tools)
    by_policy = [False] * len(stream)
    for query, result in SEARCHES:
        call, turn = _turn(builder, messages, query, tools, end and end[0])
        called = [*messages, call]
        merged = builder.merge_assistant_tokens(stream, turn)
        by_policy += [True] * len(turn)
        messages = [*called, {"role": "tool", "content": result}]
        merged = builder.merge_context_tokens(called, messages, merged.token_ids, tools=tools)
        mask, _ = builder.align_response_metadata(merged, by_policy)
        stream, by_policy = merged.token_ids, [bool(own) for own in mask]
    return stream, by_policy, builder._render_tokens(messages, add_generation_prompt=True, tools=tools)


def _turn(
    builder: ContinuousTokenBuilder, messages: list[dict], query: str, tools, end: int | None
) -> tuple[dict, list[int]]:
    """The message of a call, and the tokens of the policy that writes it as the template does, up to the turn's end. It
    thinks first, unless the header has closed the thought."""
    before = builder._render_tokens(messages, add_generation_prompt=True, tools=tools)
    function = {"name": "search", "arguments": {"query": query}}
    call = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}
    for message in (call | {"reasoning_content": THOUGHT}, call):
        written = builder._render_tokens([*messages, message], add_generation_prompt=False, tools=tools)
        shared = common_start(before, written)
        if shared == len(before):
            break
    turn = written[shared:]
    if end is not None and end in turn:
        turn = turn[: len(turn) - turn[::-1].index(end)]
    return message, turn
