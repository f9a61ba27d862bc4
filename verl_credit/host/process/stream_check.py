"""Compares the agent loop's tokens of a conversation with the chat template's, before Ray starts.

A rollout is built turn by turn: the template's prompt, the policy's tokens, the template's text of a result, the policy's
tokens. In the conversation here the policy's turns, two calls, are the template's own: the stream is the template's text of
the whole conversation, unless the template writes something that the loop cannot append.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from difflib import SequenceMatcher

from omegaconf import DictConfig
from verl.experimental.agent_loop.tool_parser import ToolParser
from verl.utils.tokenizer import hf_processor
from verl.utils.tokenizer.continuous_token import ContinuousTokenBuilder
from verl.utils.tokenizer.continuous_token_wiring import create_continuous_token_builder

from verl_credit.errors import PreflightError
from verl_credit.host.process.verl_checks import reason_of, tool_schemas
from verl_credit.host.rollout.stream_builder import common_start, follow_template, turn_end
from verl_credit.recipe.model_files import folders_of

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
    """verl warns of every model type outside its table, of every result of gpt-oss, and of a call that it cannot read."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)


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
    """Returns lines about differences that leave the policy's turns whole. Raises PreflightError for a template to which
    nothing can be appended, or whose text after a turn the loop would lose."""
    model = config.actor_rollout_ref.model
    named = f"actor_rollout_ref.model.path={model.path}: the chat template"
    instead = "give another template with actor_rollout_ref.model.custom_chat_template"
    meter.tools = meter.tools or tool_schemas(config)
    try:
        builder = builder or loop_builder(config, meter)
        with _without_verls_warnings():
            stream, by_policy, whole = two_calls(builder, meter.tools, _call_id(config, meter.tokenizer))
    except CannotAppend as error:
        raise PreflightError(f"{named} {error}; {instead}") from error
    except Exception as error:  # a template may raise any exception
        return [f"the chat template cannot write a conversation with two calls: {reason_of(error)}"]
    found = list(differences(stream, by_policy, whole, meter.tokenizer.decode))
    if lost := next((text for text, is_lost in found if is_lost), None):
        why = "in a whole conversation, and the agent loop's tokens lack it"
        raise PreflightError(f"{named} writes {lost} {why}; {instead}")
    return [f"the agent loop's tokens differ from the chat template's text: {text}" for text, _ in found[:1]]


class CannotAppend(ValueError):
    """verl's builder cannot write the first prompt, or what follows a call."""


def differences(
    stream: Sequence[int], by_policy: Sequence[bool], whole: Sequence[int], decode: Callable
) -> Iterator[tuple[str, bool]]:
    """Yields (text, whether it is lost) of every place in which the stream is not the whole text. What the whole text alone
    has after a turn of the policy is lost: every later turn would begin in another text."""
    for change, a, b, c, d in SequenceMatcher(None, stream, whole, autojunk=False).get_opcodes():
        if change == "equal":
            continue
        ours, theirs = decode(list(stream[a:b])), decode(list(whole[c:d]))
        before, after = a > 0 and by_policy[a - 1], a < len(stream) and by_policy[a]
        place = f"after {decode(list(stream[max(a - 12, 0) : a]))!r}"
        yield f"{theirs!r} {f'for {ours!r} ' * (a < b)}{place}", change == "insert" and before and not after


def two_calls(
    builder: ContinuousTokenBuilder, tools: list[dict] | None, call_id: Callable[[list[int]], str | None]
) -> tuple[list[int], list[bool], list[int]]:
    """(the loop's tokens, which of them the policy wrote, the template's tokens of the whole conversation). Raises
    CannotAppend where verl's builder raises, and the template's own exception for its text of the whole."""
    ours, theirs, end = [QUESTION], [QUESTION], turn_end(builder)
    with _appending("cannot write a question"):
        stream = builder.build_initial_tokens(ours, tools=tools)
    by_policy = [False] * len(stream)
    for number, (query, result) in enumerate(SEARCHES):
        call, turn = _turn(builder, theirs, query, f"call{number:05}", tools, end and end[0])
        # The loop's messages have no ids where the parser gives none; the template's text of the whole may demand them.
        called = [*ours, {name: call[name] for name in ("role", "content", "tool_calls")}]
        returned, id = {"role": "tool", "content": result}, call_id(turn)
        theirs = [*theirs, call, returned | {"tool_call_id": call["tool_calls"][0]["id"]}]
        ours = [*called, returned if id is None else returned | {"tool_call_id": id}]
        tokens = builder.merge_assistant_tokens(stream, turn).token_ids
        with _appending("cannot write what a call returns after the policy's tokens"):
            merged = builder.merge_context_tokens(called, ours, tokens, tools=tools)
        mask, _ = builder.align_response_metadata(merged, [*by_policy, *([True] * len(turn))])
        stream, by_policy = merged.token_ids, [bool(own) for own in mask]
    return stream, by_policy, builder._render_tokens(theirs, add_generation_prompt=True, tools=tools)


@contextmanager
def _appending(what: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # a template may raise any exception
        raise CannotAppend(f"{what}: {reason_of(error)}") from error


def _call_id(config: DictConfig, tokenizer) -> Callable[[list[int]], str | None]:
    """The id that the run's parser gives to the call of a turn; most give none."""

    def call_id(turn: list[int]) -> str | None:
        try:
            parser = ToolParser.get_tool_parser(config.actor_rollout_ref.rollout.multi_turn.format, tokenizer)
            return asyncio.run(parser.extract_tool_calls(turn))[1][0].tool_call_id
        except Exception:  # the template check says which calls the parser does not read
            return None

    return call_id


def _turn(
    builder: ContinuousTokenBuilder, messages: list[dict], query: str, id: str, tools, end: int | None
) -> tuple[dict, list[int]]:
    """The message of a call, and the tokens of a policy that writes it as the template does, up to the turn's end. The
    policy thinks first, unless the header has closed the thought."""
    without, before = (
        builder._render_tokens(messages, add_generation_prompt=prompt, tools=tools)
        for prompt in (False, True)
    )
    header = before[len(without) :]
    function = {"name": "search", "arguments": {"query": query}}
    calls = [{"id": id, "type": "function", "function": function}]
    call = {"role": "assistant", "content": "", "tool_calls": calls}
    for message in (call | {"reasoning_content": THOUGHT}, call):
        written = builder._render_tokens([*messages, message], add_generation_prompt=False, tools=tools)
        ends = range(len(written), len(header), -1) if header else ()
        own = next((end for end in ends if written[end - len(header) : end] == header), None)
        if own is not None:
            break
    turn = written[common_start(before, written) if own is None else own :]
    if end is not None and end in turn:
        turn = turn[: len(turn) - turn[::-1].index(end)]
    return message, turn
