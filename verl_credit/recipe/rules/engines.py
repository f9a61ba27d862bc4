"""Refuses engines, attention, agent loops, tools, the user's files and reward managers with which a run would not work, or
not as its keys promise.

Checks without the data that turns, rows and answers fit the lengths of their places (`config/fit.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from os.path import isfile  # pathlib raises OSError for a name that no file system takes
from pathlib import Path

from omegaconf import DictConfig

from verl_credit.config import fit
from verl_credit.config.engines import ENGINE, ENGINES, engine_of
from verl_credit.config.fit import DEFAULT, ULYSSES
from verl_credit.config.resolved import select
from verl_credit.config.settings import CreditSettings
from verl_credit.errors import ConfigError
from verl_credit.names import AGENT_NAME, AGENTS, TURN_AGENT
from verl_credit.policy.families import ATTENTION, OURS, Keys
from verl_credit.recipe.agent_loops import (
    KEYS,
    LISTED,
    MULTI_TURN,
    loops_by_mask,
    may_call,
    own_loops,
    tools_given,
)
from verl_credit.recipe.recipe_files import verl_folder
from verl_credit.recipe.rules.own import own_modules
from verl_credit.turns.score.scorers import SCORERS

STRATEGY = "actor_rollout_ref.actor.strategy"
MANAGER = "reward.reward_manager"
HAND_ON = ("naive", "rate_limited", "remote")
"""The managers of verl 0.9.1 that hand the agent loop's record (``tool_extra_fields``) to the reward function."""
OVERLONG = "reward.reward_kwargs.overlong_buffer_cfg.enable"
RESPONSE = "data.max_response_length"
UPDATE = "actor_rollout_ref.actor.ppo_max_token_len_per_gpu"
SCORER = "algorithm.info_gain_scorer"
ROUTES = "actor_rollout_ref.rollout.enable_rollout_routing_replay"
FUSED = "actor_rollout_ref.model.use_fused_kernels"
ROLLOUT_MODE = "actor_rollout_ref.rollout.mode"


CODE = ("reward.custom_reward_function.path", f"{MANAGER}.module.path", "data.custom_cls.path")
VERLS_LOOPS = ("single_turn_agent", "tool_agent", "diffusion_single_turn_agent")


def validate_files(config: DictConfig, settings: CreditSettings) -> Iterator[ConfigError]:
    """Yields a refusal for every file of the user's that verl would not find."""
    for key in CODE:
        path = select(config, key)
        if path and not _module_there(str(path)):
            use = "there is no such file; give a Python file, or pkg://MODULE for a module to import"
            yield ConfigError(key=key, value=path, accepted=use)
    verl = verl_folder().parents[1]
    for key, path in tools_given(config).items():
        roots = (Path(), verl.parent, verl)  # as verl looks for it
        if not isinstance(path, str) or not any(isfile(root / path) for root in roots):
            use = "there is no such file, neither from here nor in verl's package"
            yield ConfigError(key=key, value=path, accepted=use)


def _module_there(path: str) -> bool:
    if path.startswith("pkg://"):
        try:
            return find_spec(path.removeprefix("pkg://").replace("/", ".")) is not None
        except (ImportError, ValueError):
            return False
        except Exception:  # the user's package raises when it is imported, which `train` reports
            return True
    return isfile(path.removeprefix("file://"))


def validate_loop(config: DictConfig, settings: CreditSettings) -> Iterator[ConfigError]:
    """Yields a refusal for an agent loop that nothing here or in the user's file has. A module may register others."""
    name, known = select(config, DEFAULT), (*AGENTS, *own_loops(config), *loops_by_mask(config))
    if name in VERLS_LOOPS and name not in known:
        ours = AGENT_NAME if name == "single_turn_agent" else TURN_AGENT
        use = f"verl's own loops do not write which token belongs to which turn; take {ours}, or {AGENT_NAME} for the search"
        yield ConfigError(key=DEFAULT, value=name, accepted=use)
    elif name not in known and not own_modules(config):
        own = f"or a loop of yours that {LISTED} lists (docs/agent-loops.md)"
        yield ConfigError(key=DEFAULT, value=name, accepted=[*known, own])


def validate_actor(config: DictConfig, settings: CreditSettings) -> Iterator[ConfigError]:
    """Yields a refusal for every fault."""
    if select(config, STRATEGY) not in ("fsdp", "fsdp2"):
        use = f"built for and tested with verl's FSDP engine, whichever {SCORER}; use fsdp2 or fsdp"
        yield ConfigError.of(config, STRATEGY, accepted=use)
    if select(config, ATTENTION) in OURS:
        roles = ("actor", "actor.fsdp_config", "ref", "ref.fsdp_config")
        for key in (f"actor_rollout_ref.{role}.{ULYSSES}" for role in roles):
            if (select(config, key) or 1) > 1:
                use = "attention over several ranks is not built; set it to 1, or "
                use += str(Keys("flash_attention_2", True, "rows"))
                yield ConfigError.of(config, key, ATTENTION, accepted=use)
        if select(config, FUSED):
            use = "verl's fused head does not hand the rows' places on to the model; set it to false"
            yield ConfigError.of(config, FUSED, ATTENTION, accepted=use)
    if settings.scores_gain:
        SCORERS[settings.algorithm.info_gain_scorer].needs(config)


def validate_rollout(config: DictConfig, settings: CreditSettings) -> Iterator[ConfigError]:
    """Yields a refusal for every fault."""
    engine, device = engine_of(config), config.trainer.device
    if select(config, ROLLOUT_MODE) != "async":
        yield ConfigError.of(config, ROLLOUT_MODE, accepted=["async"])
    if select(config, ROUTES):
        use = "verl's FSDP engine replays no routes of experts, so that it would do nothing; set it to false"
        yield ConfigError.of(config, ROUTES, accepted=use)
    if engine.name not in ENGINES:
        yield ConfigError.of(config, ENGINE, accepted=ENGINES)
    elif device not in engine.devices:
        its, there = engine.devices[0], [other.name for other in ENGINES.values() if device in other.devices]
        use = f"{engine.name} generates on {its} alone; set the engine to {' or '.join(there)}, or trainer.device={its}"
        use += ", with hardware=laptop for a CPU's other keys" * (its == "cpu")
        yield ConfigError.of(config, ENGINE, "trainer.device", accepted=use)
    yield from _other_tools(config)
    yield from _reward_manager(config)


def _other_tools(config: DictConfig) -> Iterator[ConfigError]:
    """Yields a refusal where the agent loop would offer no tool of the recipe's, or the recipe has no tool to offer."""
    given = tools_given(config)
    if given and not may_call(config):
        key = next(iter(given))
        use = f"there is one turn and no call; set {DEFAULT}={TURN_AGENT}, which calls tools without a search, or {key}=null"
        yield ConfigError.of(config, key, "search.max_searches", accepted=use)
    if not given and select(config, DEFAULT) == TURN_AGENT:
        files = " and ".join(f"{MULTI_TURN}.{key}" for key in KEYS)
        use = f"it calls the tools that {files} name, and both are null; give one, or use {AGENT_NAME}"
        yield ConfigError.of(config, DEFAULT, accepted=use)


def _reward_manager(config: DictConfig) -> Iterator[ConfigError]:
    """Checks that verl's manager passes on what the reward function reads, and leaves outcomes as MaxRL needs them."""
    manager = config.reward.reward_manager
    if manager.source != "register":
        return  # the outcomes of a user's manager are checked in every step (`checks`)
    if may_call(config) and manager.name not in HAND_ON:
        use = "the reward function would not get the agent loop's record, and an answer in what a tool returns would count "
        use += f"as the policy's; use one of {', '.join(HAND_ON)}"
        calls = "search.max_searches" if config.search.max_searches else DEFAULT
        yield ConfigError.of(config, f"{MANAGER}.name", calls, accepted=use)
    if manager.name == "dapo" and config.algorithm.advantage_mode == "maxrl" and select(config, OVERLONG):
        use = "maxrl divides by the mean outcome, and the penalty makes outcomes of long rows negative; set it to false"
        yield ConfigError.of(config, OVERLONG, f"{MANAGER}.name", "algorithm.advantage_mode", accepted=use)


def overlong_unread(config: DictConfig) -> list[str]:
    """Returns the overlong penalty's keys where the manager does not read them."""
    manager = config.reward.reward_manager
    if not select(config, OVERLONG) or manager.source != "register" or manager.name == "dapo":
        return []
    return [f"{OVERLONG}=true: {MANAGER}.name={manager.name} knows no penalty for long rows"]


def validate_turns_fit(config: DictConfig, settings: CreditSettings) -> Iterator[ConfigError]:
    """Yields a refusal of a turn that exceeds a response. As in verl, a limited number of turns may each be as long as what
    is left of the row."""
    budget, tokens = config.data.max_response_length, config.search.max_new_tokens
    if select(config, DEFAULT) in AGENTS and tokens > budget:
        message = f"{RESPONSE}={budget} cannot hold a turn of search.max_new_tokens={tokens}"
        yield ConfigError(message, key=RESPONSE, value=budget, accepted=f"at least {tokens}")


def validate_rows_fit(config: DictConfig, settings: CreditSettings) -> Iterator[ConfigError]:
    """Yields a refusal where the longest row, with a short answer per context, exceeds the engine or a micro-batch."""
    actor, rollout, ref = (config.actor_rollout_ref[name] for name in ("actor", "rollout", "ref"))
    row, scorer = fit.longest_row(config), SCORERS[settings.algorithm.info_gain_scorer]
    # At a shorter length the engine would cut a response, or refuse a prompt in the middle of a trajectory.
    length, needed = rollout.max_model_len, fit.engine_tokens(row, rollout.name)
    if length is not None and length < needed:
        unused = needed - row
        also = f", and {unused} that verl's server of {rollout.name} leaves free" if unused else ""
        use = f"{needed} or more, or auto"
        message = f"{fit.MODEL_LEN}={length} cannot hold a row of data.max_prompt_length + {RESPONSE} = {row} tokens{also}: "
        yield ConfigError(f"{message}set it to {use}", key=fit.MODEL_LEN, value=length, accepted=use)
    if actor.use_dynamic_bsz != rollout.log_prob_use_dynamic_bsz:
        both = (
            "actor_rollout_ref.actor.use_dynamic_bsz",
            "actor_rollout_ref.rollout.log_prob_use_dynamic_bsz",
        )
        yield ConfigError.of(config, *both, accepted="verl wants them equal")
    if actor.use_dynamic_bsz:
        answers = scorer.answers_behind_row(config) if settings.scores_gain else 0
        also = f" and {answers} short answer(s) of {fit.SHORT_ANSWER} tokens" if answers else ""
        ranks = fit.sequence_parallel(actor)
        yield from _must_hold(config, UPDATE, ranks, row)
        yield from _must_hold(config, fit.LOG_PROB, ranks, row + answers * fit.SHORT_ANSWER, also)
    # The last, because in the recipes its budget is the update's.
    if (actor.use_kl_loss or config.algorithm.use_kl_in_reward) and ref.log_prob_use_dynamic_bsz:
        answer = fit.SHORT_ANSWER * fit.in_references_batches(config, settings, scorer)
        also = f" and a short answer of {answer} tokens" if answer else ""
        yield from _must_hold(config, fit.REFERENCE, fit.sequence_parallel(ref), row + answer, also)


def _must_hold(
    config: DictConfig, key: str, ranks: int, needed: int, also: str = ""
) -> Iterator[ConfigError]:
    budget = select(config, key)
    if budget is None or budget * ranks < needed:
        accepted = f"{needed} tokens{f' over {ranks} ranks' if ranks > 1 else ''}"
        message = f"{key}={budget} cannot hold a row of data.max_prompt_length + {RESPONSE}{also}: {accepted}"
        yield ConfigError(message, key=key, value=budget, accepted=accepted)
