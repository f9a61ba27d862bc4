"""Checks that need verl, before Ray starts: names, rollout correction, the run's tools, the chat template.

verl itself would refuse the same later, in a worker or at its first step.
"""

from __future__ import annotations

import asyncio
import json
import logging
from importlib import import_module

import torch
from omegaconf import DictConfig, OmegaConf

from verl_credit.config.fit import DEFAULT, turns_at_most
from verl_credit.errors import ConfigError, PreflightError
from verl_credit.host.registry import register_parts
from verl_credit.recipe.agent_loops import KEYS as TOOL_KEYS
from verl_credit.recipe.agent_loops import own_loops, tools_given
from verl_credit.recipe.rules.own import MODULES
from verl_credit.recipe.rules.trainer_mode import CORRECTION, CORRECTION_DEFAULTS

RESULT = "The river Nile ends in the sea."
QUERY = "mouth of the river Nile"
_FUNCTION = {"name": "search", "arguments": {"query": QUERY}}
CALL = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": _FUNCTION}]}
QUESTION = [{"role": "user", "content": "Where does the Nile end?"}]


def register_all() -> None:
    """Register everything of the plugin, in the process that launches a run and in the one that trains; idempotent.

    Actors and agent-loop workers register what they use (`verl_credit.host.registry`), and the trainer checks it there.
    Raises ImportError where verl or a dependency is missing.
    """
    register_parts()
    from verl_credit.host import measure as measuring  # noqa: F401
    from verl_credit.host.actor import loss  # noqa: F401  (decorators register)
    from verl_credit.host.rollout import search_agent  # noqa: F401
    from verl_credit.host.step import async_trainers, estimator  # noqa: F401


def check_names(config: DictConfig) -> None:
    """Check that verl's registries have the estimator, loss, agent loop and tool format, after the recipe's own modules are
    imported. Raises ConfigError. A rule of recipes checks the engine's name (`recipe.rules.engines`)."""
    from verl.experimental.agent_loop.agent_loop import _agent_loop_registry
    from verl.experimental.agent_loop.tool_parser import ToolParser
    from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY, POLICY_LOSS_REGISTRY, AdvantageEstimator

    modules = config.actor_rollout_ref.model.external_lib
    for module in [modules] if isinstance(modules, str) else modules or []:
        try:
            import_module(module)  # as verl does in every worker
        except Exception as error:  # a user's module may raise any exception
            refusal = f"it cannot be imported: {line_of(error)}"
            raise ConfigError(key=MODULES, value=module, accepted=refusal) from error
    estimators = {str(getattr(n, "value", n)) for n in (*ADV_ESTIMATOR_REGISTRY, *AdvantageEstimator)}
    # verl's own loops write no turn ids
    loops = {n for n, entry in _agent_loop_registry.items() if not entry["_target_"].startswith("verl.")}
    for key, accepted in {
        "algorithm.adv_estimator": estimators,
        "actor_rollout_ref.actor.policy_loss.loss_mode": POLICY_LOSS_REGISTRY,
        "actor_rollout_ref.rollout.multi_turn.format": ToolParser._registry,
        DEFAULT: loops | {*own_loops(config)},
    }.items():
        if (value := OmegaConf.select(config, key)) not in accepted:
            raise ConfigError(key=key, value=value, accepted=sorted(accepted), shown=repr(value))


def check_correction(config: DictConfig) -> None:
    """Refuse with ConfigError the rollout correction that verl would refuse at its first step, in verl's words."""
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_rejection_mask

    given = config.algorithm.get("rollout_correction") or {}
    if given.get("bypass_mode", False) and not config.actor_rollout_ref.rollout.calculate_log_probs:
        log_probs = "actor_rollout_ref.rollout.calculate_log_probs"
        use = f"{CORRECTION}.bypass_mode=true trains on the rollout engine's log-probs: set {log_probs}=true"
        raise ConfigError.of(config, log_probs, accepted=use)
    settings = {
        name: given.get(name, value) for name, value in CORRECTION_DEFAULTS.items() if name != "loss_type"
    }
    one_1_1 = torch.zeros(1, 1)
    for off, kind in (("rollout_rs", "rollout_is"), ("rollout_is", "rollout_rs")):
        if settings[kind] is None:
            continue
        try:
            weights, kept_1_1, _ = compute_rollout_correction_and_rejection_mask(
                old_log_prob=one_1_1,
                rollout_log_prob=one_1_1,
                response_mask=one_1_1 + 1,
                **settings | {off: None},
            )
        except (ValueError, TypeError) as error:
            raise ConfigError(f"verl refuses {CORRECTION}: {error}") from error
        except ArithmeticError:  # verl divides by the weights' sum, or by a bound
            weight = 0.0
        else:
            scale = 1.0 if weights is None else weights.batch["rollout_is_weights"].item()
            weight = kept_1_1.item() * scale
        if weight != 1:
            effect = "be rejected" if kind == "rollout_rs" else f"weigh {weight:.3g}, and not 1"
            inside = (
                f"a token of unchanged probability would {effect}: 1 must lie within the bounds. Two bounds are written "
                "0.5_5.0, each with a point: 0.5_5 is read as the number 0.55"
            )
            raise ConfigError.of(
                config, f"{CORRECTION}.{kind}_threshold", f"{CORRECTION}.{kind}", accepted=inside
            )


def check_other_tools(config: DictConfig) -> list[str]:
    """Load the recipe's tools as verl's workers will; returns a line that names them. Raises PreflightError.

    A call of such a tool is a turn like any other, and its gain is measured. verl turns what the tool raises into an
    observation. Nothing says whether that was the policy's mistake (a wrong argument) or the tool's, so it is counted.
    """
    from verl_credit.turns.search.protocol import SCHEMA

    tools, settings = _loaded(config)
    if not settings:
        return []
    names = [tool.name for tool in tools]
    if not names:
        raise PreflightError(f"{settings}: holds no tool")
    search = SCHEMA["function"]["name"]
    if search in names and config.search.max_searches:
        raise PreflightError(
            f"{settings}: a tool is called {search!r}, as the search tool is, which would take its place; rename it"
        )
    what = "tools beside the search" if config.search.max_searches else "tools"
    key, turns = turns_at_most(config)
    most = f"at most {key}={turns}" if turns else "as many as fit the row"
    return [
        f"{what}: {', '.join(names)}; their calls are turns ({most}), the policy reads their errors "
        "(credit/tool/other_errors)"
    ]


def tool_schemas(config: DictConfig) -> list[dict]:
    """The schemas that the agent loop hands to the chat template. Raises PreflightError as `check_other_tools` does."""
    tools, _ = _loaded(config)
    return [tool.tool_schema.model_dump(exclude_unset=True, exclude_none=True) for tool in tools]


def _loaded(config: DictConfig) -> tuple[list, str]:
    """Returns the recipe's tools and the settings that name their files; "" where there are none."""
    from verl.tools.tool_registry import load_all_tools
    from verl.utils.import_utils import resolve_config_path

    multi_turn = config.actor_rollout_ref.rollout.multi_turn
    settings = ", ".join(f"{key}={path}" for key, path in tools_given(config).items())
    if not settings:
        return [], ""
    try:
        paths = {key: multi_turn.get(key) and resolve_config_path(multi_turn[key]) for key in TOOL_KEYS}
        return load_all_tools(**paths), settings
    except Exception as error:  # a user's module may raise any exception
        mcp = "; verl 0.9.1 has no MCP tools: type: native" if "ToolType" in str(error) else ""
        raise PreflightError(f"{settings}: verl cannot load it ({line_of(error)[:300]}){mcp}") from error


def check_template(config: DictConfig, meter) -> str:
    """Check that the chat template writes the tools and their results; returns what it writes, "" without a tool.

    verl's own builder writes the tool responses here, as in the agent loop, therefore what it cannot write is refused, too.
    ``meter`` is the `PromptMeter` of the run's tokenizer. Raises PreflightError that names the model and what is left out.
    """
    tools, call = "the search tool", "a search"
    if not config.search.max_searches:
        tools, call = "the recipe's tools", "a tool"
        meter.tools = tool_schemas(config)
    if not meter.tools:
        return ""
    model, own = config.actor_rollout_ref.model, "actor_rollout_ref.model.custom_chat_template"
    given = own if model.get("custom_chat_template") else model.path
    named = f"actor_rollout_ref.model.path={model.path}: the chat template ({given})"
    try:
        writes_tools = meter.text(QUESTION) != meter.text(QUESTION, with_tools=False)
    except Exception as error:  # a template may raise any exception
        raise PreflightError(f"{named} cannot write a question: {line_of(error)[:300]}") from error
    if config.search.require_schema and not writes_tools:
        raise PreflightError(
            f"{named} writes the same text with and without {tools}, so that the policy sees no tool; take a "
            f"model whose template writes tools, give one with {own}, or, where the policy or its prompts know how to call, "
            "set search.require_schema=false"
        )
    try:
        observation = _observation(config, meter)
    except Exception as error:
        raise PreflightError(
            f"{named} cannot write what {call} returns (a message of the role tool after a call): {line_of(error)[:300]}"
        ) from error
    if RESULT not in observation:
        raise PreflightError(
            f"{named} leaves out what {call} returns (a message of the role tool after a call), which it wrote as "
            f"{observation[:200]!r}; take a model whose template shows tool responses, or give one with {own}"
        )
    if lost := _unread_call(config, meter):
        raise PreflightError(f"{named} {lost}")
    return f"{tools} and what {call} returns"


def _unread_call(config: DictConfig, meter) -> str:
    """What is wrong with the template's form of a call for the run's parser; "" where the parser reads it.

    A template that writes no call at all is not judged: the policy learned the form elsewhere.
    """
    from verl.experimental.agent_loop.tool_parser import ToolParser

    wanted = config.actor_rollout_ref.rollout.multi_turn.format
    try:
        text = meter.text([*QUESTION, CALL, {"role": "tool", "content": RESULT}])
    except Exception as error:
        return f"cannot write a dialogue with a call and what it returns: {line_of(error)[:300]}"
    if QUERY not in text or wanted not in ToolParser._registry:  # `check_names` refuses an unknown one
        return ""
    ids = meter.tokenizer.encode(text, add_special_tokens=False)
    reading = [
        name
        for name in ToolParser._registry
        if _reads(ToolParser.get_tool_parser, name, meter.tokenizer, ids)
    ]
    if wanted in reading:
        return ""
    place = text.rindex(QUERY)
    known = f"set it to {' or '.join(reading)}" if reading else "no parser that verl has reads it"
    return (
        f"writes a call as {text[max(place - 60, 0) : place + len(QUERY) + 30]!r}, which "
        f"actor_rollout_ref.rollout.multi_turn.format={wanted} does not read, so that every call would be lost: {known}"
    )


def _reads(parser, name: str, tokenizer, ids: list[int]) -> bool:
    """Does the parser find the call?"""
    logging.disable(logging.CRITICAL)  # parsers log what they cannot read
    try:
        _, calls = asyncio.run(parser(name, tokenizer).extract_tool_calls(ids))
        return any((call.name, json.loads(call.arguments)) == ("search", {"query": QUERY}) for call in calls)
    except Exception:  # a parser for other tokenizers, or the user's
        return False
    finally:
        logging.disable(logging.NOTSET)


def _observation(config: DictConfig, meter) -> str:
    """The text that the agent loop would append after a call."""
    from verl.utils.tokenizer.continuous_token_wiring import create_continuous_token_builder

    before = [*QUESTION, CALL]
    builder = create_continuous_token_builder(
        meter.tokenizer, hf_model_type=meter.model_type, chat_template_kwargs=meter.kwargs
    )
    after = [*before, {"role": "tool", "content": RESULT}]
    ids = builder.tokenize_context_incremental_messages(before, after, tools=meter.tools)
    return meter.tokenizer.decode(ids)


def line_of(error: BaseException) -> str:
    """The error's class and message on one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
