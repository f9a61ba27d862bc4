"""The chat template tells the policy of its tools and shows it what they returned, or the run ends before Ray.

Tool responses are written by the builder of verl that the agent loop will use, so that what it cannot write is refused too.
"""

from __future__ import annotations

from omegaconf import DictConfig

from verl_credit.errors import PreflightError
from verl_credit.host.process.other_tools import tool_schemas

RESULT = "The river Nile ends in the sea."
QUESTION = [{"role": "user", "content": "Where does the Nile end?"}]


def check_template(config: DictConfig, meter) -> str:
    """What the template writes; "" without a tool. Raises PreflightError that names the model and what is left out.

    ``meter``: the `PromptMeter` of the run's tokenizer.
    """
    tools, call = "the search tool", "a search"
    if not config.search.max_searches:
        tools, call = "the recipe's tools", "a tool"
        meter.tools = tool_schemas(config)
    if not meter.tools:
        return ""
    model = config.actor_rollout_ref.model
    given = (
        "actor_rollout_ref.model.custom_chat_template" if model.get("custom_chat_template") else model.path
    )
    named = f"actor_rollout_ref.model.path={model.path}: the chat template ({given})"
    try:
        told = meter.text(QUESTION) != meter.text(QUESTION, with_tools=False)
    except Exception as error:  # templates raise what they like
        raise PreflightError(f"{named} cannot write a question: {_first_line(error)}") from error
    if config.search.require_schema and not told:
        raise PreflightError(
            f"{named} writes the same text with and without {tools}, so that the policy is told of no tool; take a "
            "model whose template writes tools, give one with actor_rollout_ref.model.custom_chat_template, or, where the "
            "policy or its prompts know how to call, set search.require_schema=false"
        )
    try:
        shown = _observation(config, meter)
    except Exception as error:
        raise PreflightError(
            f"{named} cannot write what {call} returns (a message of the role tool behind a call): {_first_line(error)}"
        ) from error
    if RESULT not in shown:
        raise PreflightError(
            f"{named} leaves out what {call} returns (a message of the role tool behind a call), which it wrote as "
            f"{shown[:200]!r}; take a model whose template shows tool responses, or give one with "
            "actor_rollout_ref.model.custom_chat_template"
        )
    return f"{tools} and what {call} returns"


def _observation(config: DictConfig, meter) -> str:
    """What the agent loop would put behind a call, as text."""
    from verl.utils.tokenizer.continuous_token_wiring import create_continuous_token_builder

    call = {"type": "function", "function": {"name": "search", "arguments": {"query": "Nile"}}}
    before = [*QUESTION, {"role": "assistant", "content": "", "tool_calls": [call]}]
    builder = create_continuous_token_builder(
        meter.tokenizer,
        hf_model_type=meter.model_type,
        chat_template_kwargs=meter.kwargs,
    )
    after = [*before, {"role": "tool", "content": RESULT}]
    ids = builder.tokenize_context_incremental_messages(before, after, tools=meter.tools)
    return meter.tokenizer.decode(ids)


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]
