"""Checks before Ray starts that the model's chat template writes tools, calls and results as the agent loop reads them."""

from __future__ import annotations

from omegaconf import DictConfig, OmegaConf

from verl_credit.config.keys import AUTO
from verl_credit.errors import PreflightError
from verl_credit.host.process.call_format import QUESTION, RESULTS, CallForm, settle
from verl_credit.host.process.verl_checks import reason_of, tool_schemas
from verl_credit.recipe.agent_loops import AT_ONCE, FORMAT
from verl_credit.turns.rollout.tool_calls import PARALLEL_CALLS


def check_template(config: DictConfig, meter) -> str:
    """Check that the chat template writes the tools and, through verl's builder, their results, and that the run's parser
    reads its calls. Decides ``auto`` of the format and of the calls at once. Returns what the template writes, "" without a
    tool. ``meter``: the run's `PromptMeter`. Raises PreflightError that names the model and what is left out.
    """
    tools, call = "the search tool", "a search"
    if not config.search.max_searches:
        tools, call = "the recipe's tools", "a tool"
        meter.tools = tool_schemas(config)
    if not meter.tools:
        settle(config)
        return ""
    model, own = config.actor_rollout_ref.model, "actor_rollout_ref.model.custom_chat_template"
    given = own if model.get("custom_chat_template") else model.path
    named = f"actor_rollout_ref.model.path={model.path}: the chat template ({given})"
    if why := _no_schema(config, meter, tools, own):
        raise PreflightError(f"{named} {why}")
    form, wanted = CallForm(meter), OmegaConf.select(config, FORMAT)
    name = form.chosen if wanted == AUTO else wanted
    lost = _unread_call(form, wanted, name)
    if lost and form.text:
        raise PreflightError(f"{named} {lost}")
    from verl_credit.host.process.stream_check import loop_builder

    try:
        builder = loop_builder(config, meter)
        observation = _observation(form, builder, 1, name)
    except Exception as error:  # a template may raise any exception
        unwritten = f"what {call} returns (a message of the role tool after a call): {reason_of(error)}"
        raise PreflightError(f"{named} cannot write {unwritten}") from error
    if RESULTS[0] not in observation:
        wrote = f"leaves out what {call} returns, and writes {observation[:200]!r}"
        raise PreflightError(f"{named} {wrote}; give a template that shows tool responses with {own}")
    if lost:
        raise PreflightError(f"{named} {lost}")
    why, at_once = _why_one_call(form, builder, name), OmegaConf.select(config, AT_ONCE)
    one_call = "takes one call a message"
    if why and at_once not in (1, AUTO):
        raise PreflightError(f"{named} {one_call} ({why}), and {AT_ONCE}={at_once}; set it to 1 or {AUTO}")
    decided = settle(config, name, at_once=1 if why else PARALLEL_CALLS)
    more = f"; it {one_call}, and further calls of a turn are counted as bad calls" if why else ""
    shown = f"{tools} and " if config.search.require_schema else ""  # otherwise it need not write them
    return f"{shown}what {call} returns" + (f"; {AUTO}: {decided}" if decided else "") + more


def _no_schema(config: DictConfig, meter, tools: str, own: str) -> str:
    """Why the policy would not see the tools; "" where it does."""
    try:
        written = meter.text(QUESTION)
    except Exception as error:  # a template may raise any exception
        return f"cannot write a question: {reason_of(error)}"
    try:
        without = meter.text(QUESTION, with_tools=False)
    except Exception as error:  # it reads the tools; the agent loop always gives it some
        given = config.data.get("tool_config_path") or config.data.get("function_tool_path")
        if not config.data.get("filter_overlong_prompts") or given:
            return ""
        use = "set data.filter_overlong_prompts=false, which would leave out every prompt"
        return f"cannot write a question without tools ({reason_of(error)}); {use}"
    if written != without or not config.search.require_schema:
        return ""
    use = f"give a template that writes tools with {own}, or set search.require_schema=false"
    return f"writes the same text with and without {tools}, so that the policy sees no tool; {use}"


def _unread_call(form: CallForm, wanted: str, name: str | None) -> str:
    """What is wrong with the template's form of a call for the run's parser; "" where the parser reads it."""
    from verl.experimental.agent_loop.tool_parser import ToolParser

    if form.error:
        return f"cannot write a dialogue with a call and what it returns: {form.error}"
    if name is None and not form.text:
        formats = ", ".join(ToolParser._registry)
        return f"leaves the call out of a dialogue; set {FORMAT}={AUTO} to the policy's format: {formats}"
    # `check_names` refuses an unknown name
    if name is not None and (name not in ToolParser._registry or form.reads(name)):
        return ""
    if not form.readers:
        return f"writes a call as {form.excerpt()}, which no parser reads ({FORMAT}={wanted}); give it a parser of your own"
    readers = " or ".join(form.readers)
    return f"writes a call as {form.excerpt()}, which {FORMAT}={wanted} does not read; set it to {AUTO} or {readers}"


def _why_one_call(form: CallForm, builder, name: str) -> str:
    """Why a message may not hold two calls; "" where it may."""
    try:
        written = _observation(form, builder, 2, name)
    except Exception as error:  # a template may raise any exception
        return reason_of(error)
    return "" if all(result in written for result in RESULTS) else "it leaves out the second result"


def _observation(form: CallForm, builder, n: int, name: str | None) -> str:
    """The text that the agent loop would append after ``n`` calls."""
    before, after = form.messages(n, name)
    ids = builder.tokenize_context_incremental_messages(before, after, tools=form.meter.tools)
    return form.meter.tokenizer.decode(ids)
