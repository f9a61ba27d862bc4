"""Checks without the data that turns, rows and answers fit the lengths of their places (`config/fit.py`)."""

from __future__ import annotations

from verl_credit.config.fit import (
    DEFAULT,
    LOG_PROB,
    MODEL_LEN,
    SHORT_ANSWER,
    engine_tokens,
    least_log_prob_tokens,
    longest_row,
    masked_tokens,
    sequence_parallel,
    turns_at_most,
)
from verl_credit.config.resolved import Tree, select
from verl_credit.config.settings import CreditSettings
from verl_credit.errors import ConfigError
from verl_credit.names import AGENTS
from verl_credit.turns.scorers import SCORERS

RESPONSE = "data.max_response_length"
UPDATE = "actor_rollout_ref.actor.ppo_max_token_len_per_gpu"
REFERENCE = "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu"


def validate_turns_fit(config: Tree, settings: CreditSettings) -> None:
    """Raises ConfigError where all turns at full length exceed a response; a user's loop has its own budgets."""
    limit, turns = turns_at_most(config)
    budget, tokens = config.data.max_response_length, config.search.max_new_tokens
    if select(config, DEFAULT) in AGENTS and turns is not None and turns * tokens > budget:
        message = f"{RESPONSE}={budget} cannot hold {limit}={turns} turns of search.max_new_tokens={tokens}, what tools "
        message += "return not counted"
        raise ConfigError(message, key=RESPONSE, value=budget, accepted=f"at least {turns * tokens}")


def validate_rows_fit(config: Tree, settings: CreditSettings) -> None:
    """Raises ConfigError where the longest row, with a short answer per context, exceeds the engine or a micro-batch."""
    actor, rollout, ref = (config.actor_rollout_ref[name] for name in ("actor", "rollout", "ref"))
    row, scorer = longest_row(config), SCORERS[settings.algorithm.info_gain_scorer]
    # At a shorter length the engine would cut a response, or refuse a prompt in the middle of a trajectory.
    length, served = rollout.max_model_len, settings.scores_gain and scorer.in_rollout
    if length is not None and length < (needed := engine_tokens(row, served, SHORT_ANSWER)):
        also = ", and an answer after it (algorithm.info_gain_scorer=server)" if served else ""
        use = f"{needed} or more, or auto"
        message = f"{MODEL_LEN}={length} cannot hold a row of data.max_prompt_length + {RESPONSE} = {row} tokens{also}: "
        raise ConfigError(f"{message}set it to {use}", key=MODEL_LEN, value=length, accepted=use)
    if actor.use_dynamic_bsz != rollout.log_prob_use_dynamic_bsz:
        other = "actor_rollout_ref.rollout.log_prob_use_dynamic_bsz"
        use = "verl wants them equal"
        raise ConfigError.of(config, "actor_rollout_ref.actor.use_dynamic_bsz", other, accepted=use)
    referred = actor.use_kl_loss or config.algorithm.use_kl_in_reward
    if referred and ref.log_prob_use_dynamic_bsz:
        _must_hold(REFERENCE, ref.log_prob_max_token_len_per_gpu, sequence_parallel(ref), row)
    if not actor.use_dynamic_bsz:
        return
    ranks = sequence_parallel(actor)
    _must_hold(UPDATE, actor.ppo_max_token_len_per_gpu, ranks, row)
    answers = scorer.answers_behind_row(config) if settings.scores_gain else 0
    also = f" and {answers} short answer{'s' * (answers > 1)} of {SHORT_ANSWER} tokens" if answers else ""
    if masked := masked_tokens(config, settings, scorer):
        also += f" and, for the turn signal infopo, {masked} tokens of masked observations and the responses after them"
    needed = least_log_prob_tokens(row, answers) + masked
    _must_hold(LOG_PROB, rollout.log_prob_max_token_len_per_gpu, ranks, needed, also)


def _must_hold(key: str, budget: int | None, ranks: int, needed: int, also: str = "") -> None:
    if budget is None or budget * ranks < needed:
        accepted = f"{needed} tokens{f' over {ranks} ranks' if ranks > 1 else ''}"
        message = f"{key}={budget} cannot hold a row of data.max_prompt_length + {RESPONSE}{also}: {accepted}"
        raise ConfigError(message, key=key, value=budget, accepted=accepted)
