"""The longest row and its short answers fit a micro-batch: what is known without the data."""

from __future__ import annotations

from verl_credit.config.resolved import Config, Tree, select
from verl_credit.config.row_room import MASKED_OBSERVATION, SHORT_ANSWER, least_log_prob_tokens
from verl_credit.config.settings import CreditSettings
from verl_credit.config.turn_limit import DEFAULT, turns_at_most
from verl_credit.errors import ConfigError
from verl_credit.names import AGENTS
from verl_credit.turns.scorers import SCORERS

ULYSSES = "ulysses_sequence_parallel_size"
LOG_PROB = "actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu"
UPDATE = "actor_rollout_ref.actor.ppo_max_token_len_per_gpu"
REFERENCE = "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu"


def sequence_parallel(role: Config) -> int:
    """Ranks that share a sequence in the actor or the reference: verl's engine reads the key of ``fsdp_config``, into which
    the older one is copied where it is above 1."""
    older, read = (select(role, key) or 1 for key in (ULYSSES, f"fsdp_config.{ULYSSES}"))
    return older if older > 1 else read


def validate_budgets(config: Tree, settings: CreditSettings) -> None:
    """What is known without the data: the longest row, and one short answer per context. Raises ConfigError."""
    actor, rollout, ref = (config.actor_rollout_ref[name] for name in ("actor", "rollout", "ref"))
    row = _row(config)
    if actor.use_dynamic_bsz != rollout.log_prob_use_dynamic_bsz:
        ours, other = (
            "actor_rollout_ref.actor.use_dynamic_bsz",
            "actor_rollout_ref.rollout.log_prob_use_dynamic_bsz",
        )
        raise ConfigError.of(config, ours, other, accepted="verl wants them equal")
    referred = actor.use_kl_loss or config.algorithm.use_kl_in_reward
    if referred and ref.log_prob_use_dynamic_bsz:
        _must_hold(REFERENCE, ref.log_prob_max_token_len_per_gpu, sequence_parallel(ref), row)
    if not actor.use_dynamic_bsz:
        return
    ranks = sequence_parallel(actor)
    _must_hold(UPDATE, actor.ppo_max_token_len_per_gpu, ranks, row)
    answers = _contexts(config, settings)
    said = f" and {answers} short answer{'s' * (answers > 1)} of {SHORT_ANSWER} tokens" if answers else ""
    if masked := masked_tokens(config, settings):
        said += f" and, for the turn signal infopo, {masked} tokens of masked observations and the responses behind them"
    needed = least_log_prob_tokens(row, answers) + masked
    _must_hold(LOG_PROB, rollout.log_prob_max_token_len_per_gpu, ranks, needed, said)


def tokens_per_micro_batch(config: Config) -> int | None:
    """Tokens that a micro-batch of old_log_probs holds; None where micro-batches are counted in rows."""
    rollout = config.actor_rollout_ref.rollout
    return rollout.log_prob_max_token_len_per_gpu if rollout.log_prob_use_dynamic_bsz else None


def _row(config: Config) -> int:
    return config.data.max_prompt_length + config.data.max_response_length


def _contexts(config: Config, settings: CreditSettings) -> int:
    """How many answers the longest row of a log-prob micro-batch carries."""
    scorer = SCORERS[settings.algorithm.info_gain_scorer]
    return scorer.answers_behind_row(config) if settings.scores_gain else 0


def masked_tokens(config: Config, settings: CreditSettings) -> int:
    """What infopo puts behind the longest row of a log-prob micro-batch: every response but the first once more, as long as
    the limits allow, and a masked observation before each. In rows of their own: a masked observation in place of none."""
    if not settings.masks_observations:
        return 0
    if not SCORERS[settings.algorithm.info_gain_scorer].rides:
        return MASKED_OBSERVATION
    turns, most = turns_at_most(config)[1], config.data.max_response_length
    if turns is None or select(config, DEFAULT) not in (None, *AGENTS):  # no budget of ours
        return most + MASKED_OBSERVATION * max((turns or 2) - 1, 1)
    return min(most, (turns - 1) * config.search.max_new_tokens) + (turns - 1) * MASKED_OBSERVATION


def _must_hold(key: str, budget: int | None, ranks: int, needed: int, said: str = "") -> None:
    if budget is None or budget * ranks < needed:
        accepted = f"{needed} tokens{f' over {ranks} ranks' if ranks > 1 else ''}"
        raise ConfigError(
            f"{key}={budget} cannot hold a row of data.max_prompt_length + data.max_response_length{said}: {accepted}",
            key=key,
            value=budget,
            accepted=accepted,
        )
