"""Checks that need verl, before Ray starts, of what verl would refuse in a worker or at its first step."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec

import torch
from omegaconf import DictConfig, OmegaConf

from verl_credit.config.fit import DEFAULT, turns_at_most
from verl_credit.config.keys import AUTO
from verl_credit.errors import ConfigError, ConfigErrors, PreflightError
from verl_credit.host.registry import register_parts
from verl_credit.names import LOOP_MANAGER, MCP_TOOL, MEASURE_MODE
from verl_credit.recipe.agent_loops import KEYS as TOOL_KEYS
from verl_credit.recipe.agent_loops import loops_by_mask, own_loops, tools_given
from verl_credit.recipe.rules.own import MODULES
from verl_credit.recipe.rules.trainer_mode import CORRECTION, CORRECTION_DEFAULTS

MCP = f"take ours with class_name: {MCP_TOOL} and type: native (docs/agent-loops.md#mcp)"
NO_SUFFIX = "suffix diff failed"  # verl's text


def register_all(trainer_mode: str | None = None) -> None:
    """Register everything of the plugin, in the process that launches a run and in the one that trains; idempotent. Actors
    and agent-loop workers register what they use (`verl_credit.host.registry`), and the trainer checks it there."""
    register_parts()
    if trainer_mode == MEASURE_MODE:
        from verl_credit.host import measuring_run as measuring  # noqa: F401
    from verl_credit.host.actor import policy_loss  # noqa: F401  (decorators register)
    from verl_credit.host.rollout import env_agent, search_agent  # noqa: F401
    from verl_credit.host.step import async_trainers, estimator  # noqa: F401


def check_names(config: DictConfig) -> None:
    """Check that verl's registries have the estimator, loss, agent loop and tool format, after the recipe's own modules are
    imported. Raises ConfigError."""
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
    wrong = []
    for key, accepted in {
        "algorithm.adv_estimator": estimators,
        "actor_rollout_ref.actor.policy_loss.loss_mode": POLICY_LOSS_REGISTRY,
        "actor_rollout_ref.rollout.multi_turn.format": {AUTO, *ToolParser._registry},
        DEFAULT: loops | {*own_loops(config), *loops_by_mask(config)},
    }.items():
        if (value := OmegaConf.select(config, key)) not in accepted:
            wrong.append(ConfigError(key=key, value=value, accepted=sorted(accepted), shown=repr(value)))
    if wrong:
        raise ConfigErrors(wrong)
    _check_manager(config)


def _check_manager(config: DictConfig) -> None:
    """Refuses a manager of agent loops that verl could not create, or could not hand prompts to."""
    if (path := OmegaConf.select(config, LOOP_MANAGER)) is None:
        return  # verl's own
    use = "expected my_module.MyManager, a class with create and generate_sequences, as verl's AgentLoopManagerTQ, or null"
    module, _, name = str(path).rpartition(".")
    try:
        manager = getattr(import_module(module), name)
    except Exception as error:  # a user's module may raise any exception
        raise ConfigError(key=LOOP_MANAGER, value=path, accepted=f"{use}: {line_of(error)}") from error
    if lacks := [
        one for one in ("create", "generate_sequences") if not callable(getattr(manager, one, None))
    ]:
        raise ConfigError(key=LOOP_MANAGER, value=path, accepted=f"{use}; it has no {' and no '.join(lacks)}")


def check_trace(config: DictConfig) -> None:
    """Refuse with ConfigError a trace whose package is not installed."""
    key = "actor_rollout_ref.rollout.trace.backend"
    backend = OmegaConf.select(config, key)
    if backend and find_spec(backend) is None:
        use = f"the package {backend} is not installed: pip install {backend}, or {key}=null"
        raise ConfigError(key=key, value=backend, accepted=use)


def check_correction(config: DictConfig) -> None:
    """Refuse with ConfigError the rollout correction that verl would refuse at its first step, in verl's words."""
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_rejection_mask

    given = config.algorithm.get("rollout_correction") or {}
    log_probs = "actor_rollout_ref.rollout.calculate_log_probs"
    if given.get("bypass_mode", False) and not OmegaConf.select(config, log_probs):
        use = f"{CORRECTION}.bypass_mode=true trains on the rollout engine's log-probs: set {log_probs}=true"
        raise ConfigError.of(config, log_probs, accepted=use)
    settings = {name: given.get(name, v) for name, v in CORRECTION_DEFAULTS.items() if name != "loss_type"}
    zero_1_1 = torch.zeros(1, 1)
    row = {"old_log_prob": zero_1_1, "rollout_log_prob": zero_1_1, "response_mask": zero_1_1 + 1}
    for off, kind in (("rollout_rs", "rollout_is"), ("rollout_is", "rollout_rs")):
        if settings[kind] is None:
            continue
        try:
            weights, kept_1_1, _ = compute_rollout_correction_and_rejection_mask(
                **row, **settings | {off: None}
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
            inside = f"bounds with 1 inside (0.5_5.0, each with a point): a token of unchanged probability would {effect}"
            key = f"{CORRECTION}.{kind}"
            raise ConfigError.of(config, f"{key}_threshold", key, accepted=inside)


def check_other_tools(config: DictConfig) -> list[str]:
    """Load the recipe's tools as verl's workers will; returns a line that names them. Raises PreflightError."""
    from verl_credit.turns.rollout.search.wire import SCHEMA

    tools, settings = _loaded(config)
    if not settings:
        return []
    names = [tool.name for tool in tools]
    if not names:
        raise PreflightError(f"{settings}: holds no tool")
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise PreflightError(f"{settings}: several tools are called {', '.join(twice)}; rename them")
    search = SCHEMA["function"]["name"]
    if search in names and config.search.max_searches:
        raise PreflightError(f"{settings}: a tool is called {search!r}, as the search tool is; rename it")
    what = "tools beside the search" if config.search.max_searches else "tools"
    key, turns = turns_at_most(config)
    most = f"at most {key}={turns}" if turns else "as many as fit the row"
    return [f"{what}: {', '.join(names)}; their calls are turns ({most})"]


def tool_schemas(config: DictConfig) -> list[dict]:
    """The schemas that the agent loop hands to the chat template. Raises PreflightError as `check_other_tools` does."""
    tools, _ = _loaded(config)
    return [tool.tool_schema.model_dump(exclude_unset=True, exclude_none=True) for tool in tools]


def _loaded(config: DictConfig) -> tuple[list, str]:
    """Returns the recipe's tools and the settings that name their files; "" where there are none."""
    from verl.experimental.agent_loop.utils import resolve_config_path
    from verl.tools.tool_registry import load_all_tools

    multi_turn = config.actor_rollout_ref.rollout.multi_turn
    settings = ", ".join(f"{key}={path}" for key, path in tools_given(config).items())
    if not settings:
        return [], ""
    try:
        paths = {key: multi_turn.get(key) and resolve_config_path(multi_turn[key]) for key in TOOL_KEYS}
        return load_all_tools(**paths), settings
    except Exception as error:  # a user's module may raise any exception
        mcp = f"; verl 0.9.1 has no MCP tools: {MCP}" if "ToolType" in str(error) else ""
        raise PreflightError(f"{settings}: verl cannot load it ({line_of(error)[:300]}){mcp}") from error


def line_of(error: BaseException) -> str:
    """The error's class and message on one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def reason_of(error: BaseException) -> str:
    """The first error in one line: verl's builder tries a template that raised again with another message."""
    while error.__context__ is not None:
        error = error.__context__
    line = line_of(error)[:300]
    anew = ": it writes the dialogue before a result anew, and verl only appends"
    return f"{line}{anew if NO_SUFFIX in line else ''}"
