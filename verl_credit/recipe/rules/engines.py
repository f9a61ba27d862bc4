"""Refuses engines, attention, tools and reward managers with which a run would not work, or not as its keys promise.

Checks without the data that turns, rows and answers fit the lengths of their places (`config/fit.py`).
"""

from __future__ import annotations

from collections.abc import Iterator

from omegaconf import DictConfig

from verl_credit.config import fit
from verl_credit.config.engines import ENGINE, ENGINES, engine_of
from verl_credit.config.fit import DEFAULT, ULYSSES
from verl_credit.config.resolved import Config, Tree, select
from verl_credit.config.settings import CreditSettings
from verl_credit.errors import ConfigError
from verl_credit.names import AGENT_NAME, AGENTS, TURN_AGENT
from verl_credit.policy.families import ATTENTION, OURS, Keys
from verl_credit.recipe.agent_loops import (
    KEYS,
    MULTI_TURN,
    may_call,
    own_loops,
    tools_given,
)
from verl_credit.recipe.rules.refusals import refusals_of
from verl_credit.turns.score.scorers import SCORERS

STRATEGIES = ("fsdp", "fsdp2")
MANAGER = "reward.reward_manager"
HAND_ON = ("naive", "rate_limited", "remote")
"""The managers of verl 0.9.1 that hand the agent loop's record (``tool_extra_fields``) to the reward function."""
OVERLONG = "reward.reward_kwargs.overlong_buffer_cfg.enable"
RESPONSE = "data.max_response_length"
UPDATE = "actor_rollout_ref.actor.ppo_max_token_len_per_gpu"


def validate_actor(config: Tree, settings: CreditSettings) -> Iterator[ConfigError]:
    """Yields a refusal for every fault."""
    attention = select(config, ATTENTION)
    model, actor = config.actor_rollout_ref.model, config.actor_rollout_ref.actor
    if actor.strategy not in STRATEGIES:
        use = "built for and tested with verl's FSDP engine, whichever algorithm.info_gain_scorer; use fsdp2 or fsdp"
        yield ConfigError.of(config, "actor_rollout_ref.actor.strategy", accepted=use)
    if attention in OURS:
        for role in ("actor", "ref"):
            for name in (f"{role}.{ULYSSES}", f"{role}.fsdp_config.{ULYSSES}"):
                if (select(config.actor_rollout_ref, name) or 1) > 1:
                    use = "attention over several ranks is not built; set it to 1, or "
                    use += str(Keys("flash_attention_2", True, "rows"))
                    yield ConfigError.of(config, f"actor_rollout_ref.{name}", ATTENTION, accepted=use)
        if model.get("use_fused_kernels", False):
            use = "verl's fused head does not hand the rows' places on to the model; set it to false"
            yield ConfigError.of(config, "actor_rollout_ref.model.use_fused_kernels", ATTENTION, accepted=use)
    if settings.scores_gain:
        SCORERS[settings.algorithm.info_gain_scorer].needs(config)


def validate_rollout(config: Tree, settings: CreditSettings) -> Iterator[ConfigError]:
    """Yields a refusal for every fault."""
    engine = engine_of(config)
    if config.actor_rollout_ref.rollout.enable_rollout_routing_replay:
        use = "verl's FSDP engine replays no routes of experts, so that it would do nothing; set it to false"
        yield ConfigError.of(config, "actor_rollout_ref.rollout.enable_rollout_routing_replay", accepted=use)
    if engine.name not in ENGINES:
        yield ConfigError.of(config, ENGINE, accepted=ENGINES)
    elif (device := config.trainer.device) not in engine.devices:
        there = [other.name for other in ENGINES.values() if device in other.devices]
        yield ConfigError.of(config, ENGINE, "trainer.device", accepted=there)
    yield from refusals_of(_own_loops, config)
    served = settings.scores_gain and SCORERS[settings.algorithm.info_gain_scorer].in_rollout
    if served and engine.no_scores:
        use = f"{engine.no_scores}; set algorithm.info_gain_scorer=branch or rows"
        yield ConfigError.of(config, "algorithm.info_gain_scorer", ENGINE, accepted=use)
    if served and select(config, DEFAULT) not in AGENTS:
        use = f"the scores are asked for by {' and '.join(AGENTS)}; with an agent loop of your own take branch or rows"
        yield ConfigError.of(config, "algorithm.info_gain_scorer", DEFAULT, accepted=use)
    yield from _other_tools(config)
    yield from _reward_manager(config)


def _own_loops(config: Tree) -> None:
    own_loops(config)


def _other_tools(config: Tree) -> Iterator[ConfigError]:
    """Yields a refusal where the agent loop would offer no tool of the recipe's, or the recipe has no tool to offer."""
    given = tools_given(config)
    if given and not may_call(config):
        key = next(iter(given))
        use = f"there is one turn and no call, so that its tools would never be used; set {DEFAULT}={TURN_AGENT}, which "
        use += f"calls them without a search, or {key}=null"
        yield ConfigError.of(config, key, "search.max_searches", accepted=use)
    if not given and select(config, DEFAULT) == TURN_AGENT:
        files = " and ".join(f"{MULTI_TURN}.{key}" for key in KEYS)
        use = f"it calls the tools that {files} name, and both are null; give one, or use {AGENT_NAME}"
        yield ConfigError.of(config, DEFAULT, accepted=use)


def _reward_manager(config: Tree) -> Iterator[ConfigError]:
    """Checks that verl's manager passes on what the reward function reads, and leaves outcomes as MaxRL needs them."""
    if not isinstance(config.reward, DictConfig):
        raise ConfigError.of(config, "reward", accepted="a section with keys")
    manager = config.reward.reward_manager
    if manager.source != "register":
        return  # the outcomes of a user's manager are checked in every step (`checks`)
    if may_call(config) and manager.name not in HAND_ON:
        use = "it does not hand the agent loop's record to the reward function, so that an answer in what a tool returns "
        use += f"would count as the policy's; use one of {', '.join(HAND_ON)}"
        calls = "search.max_searches" if config.search.max_searches else DEFAULT
        yield ConfigError.of(config, f"{MANAGER}.name", calls, accepted=use)
    if manager.name == "dapo" and config.algorithm.advantage_mode == "maxrl" and select(config, OVERLONG):
        use = "maxrl divides by the mean outcome, and the penalty makes outcomes of long rows negative; set it to false"
        yield ConfigError.of(config, OVERLONG, f"{MANAGER}.name", "algorithm.advantage_mode", accepted=use)


def overlong_unread(config: Config) -> list[str]:
    """Returns the overlong penalty's keys where the manager does not read them."""
    manager = config.reward.reward_manager
    if not select(config, OVERLONG) or manager.source != "register" or manager.name == "dapo":
        return []
    return [f"{OVERLONG}=true: {MANAGER}.name={manager.name} knows no penalty for long rows"]


def validate_turns_fit(config: Tree, settings: CreditSettings) -> None:
    """Raises ConfigError where all turns at full length exceed a response; a user's loop has its own budgets."""
    limit, turns = fit.turns_at_most(config)
    budget, tokens = config.data.max_response_length, config.search.max_new_tokens
    if select(config, DEFAULT) in AGENTS and turns is not None and turns * tokens > budget:
        message = f"{RESPONSE}={budget} cannot hold {limit}={turns} turns of search.max_new_tokens={tokens}, what tools "
        message += "return not counted"
        raise ConfigError(message, key=RESPONSE, value=budget, accepted=f"at least {turns * tokens}")


def validate_rows_fit(config: Tree, settings: CreditSettings) -> Iterator[ConfigError]:
    """Yields a refusal where the longest row, with a short answer per context, exceeds the engine or a micro-batch."""
    actor, rollout, ref = (config.actor_rollout_ref[name] for name in ("actor", "rollout", "ref"))
    row, scorer = fit.longest_row(config), SCORERS[settings.algorithm.info_gain_scorer]
    # At a shorter length the engine would cut a response, or refuse a prompt in the middle of a trajectory.
    length, served = rollout.max_model_len, settings.scores_gain and scorer.in_rollout
    needed = fit.engine_tokens(row, served, fit.SHORT_ANSWER, engine=rollout.name)
    if length is not None and length < needed:
        also = ", and an answer after it (algorithm.info_gain_scorer=server)" if served else ""
        if unused := engine_of(config).unused:
            also += f", and {unused} that verl's server of {rollout.name} leaves free"
        use = f"{needed} or more, or auto"
        message = f"{fit.MODEL_LEN}={length} cannot hold a row of data.max_prompt_length + {RESPONSE} = {row} tokens{also}: "
        yield ConfigError(f"{message}set it to {use}", key=fit.MODEL_LEN, value=length, accepted=use)
    if actor.use_dynamic_bsz != rollout.log_prob_use_dynamic_bsz:
        other = "actor_rollout_ref.rollout.log_prob_use_dynamic_bsz"
        use = "verl wants them equal"
        yield ConfigError.of(config, "actor_rollout_ref.actor.use_dynamic_bsz", other, accepted=use)
    if actor.use_dynamic_bsz:
        ranks = fit.sequence_parallel(actor)
        yield from _must_hold(UPDATE, actor.ppo_max_token_len_per_gpu, ranks, row)
        answers = scorer.answers_behind_row(config) if settings.scores_gain else 0
        also = (
            f" and {answers} short answer{'s' * (answers > 1)} of {fit.SHORT_ANSWER} tokens"
            if answers
            else ""
        )
        needed = fit.least_log_prob_tokens(row, answers)
        yield from _must_hold(fit.LOG_PROB, rollout.log_prob_max_token_len_per_gpu, ranks, needed, also)
    # The last, because in the recipes its budget is the update's.
    if (actor.use_kl_loss or config.algorithm.use_kl_in_reward) and ref.log_prob_use_dynamic_bsz:
        answer = fit.SHORT_ANSWER * fit.in_references_batches(config, settings, scorer)
        also = f" and a short answer of {answer} tokens" if answer else ""
        limits = ref.log_prob_max_token_len_per_gpu, fit.sequence_parallel(ref)
        yield from _must_hold(fit.REFERENCE, *limits, row + answer, also)


def _must_hold(
    key: str, budget: int | None, ranks: int, needed: int, also: str = ""
) -> Iterator[ConfigError]:
    if budget is None or budget * ranks < needed:
        accepted = f"{needed} tokens{f' over {ranks} ranks' if ranks > 1 else ''}"
        message = f"{key}={budget} cannot hold a row of data.max_prompt_length + {RESPONSE}{also}: {accepted}"
        yield ConfigError(message, key=key, value=budget, accepted=accepted)
