"""Checks that a row and the answers scored with it fit into a micro-batch of log-probs and into the engine.

    a micro-batch:  row + contexts x answer                               <=  tokens x ranks that share a sequence
    the engine:     row (+ 1 for SGLang)       <=  actor_rollout_ref.rollout.max_model_len

The length limits give the longest row. With max_model_len=null the engine takes all positions of the model, and refuses
longer requests itself. Recipe rules and `doctor` check this before the start, scorers for every request.
"""

from __future__ import annotations

from typing import ClassVar, NamedTuple, Protocol

from omegaconf import DictConfig

from verl_credit.config.engines import engine_named
from verl_credit.config.resolved import select
from verl_credit.config.settings import CreditSettings
from verl_credit.names import AGENT_NAME, ENV_AGENT

MODEL_LEN = "actor_rollout_ref.rollout.max_model_len"
LOG_PROB = "actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu"
REFERENCE = "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu"
ULYSSES = "ulysses_sequence_parallel_size"
MOST = "actor_rollout_ref.rollout.multi_turn.max_assistant_turns"
DEFAULT = "actor_rollout_ref.rollout.agent.default_agent_loop"

SHORT_ANSWER = 8  # tokens of the answer tag and a short answer, which follow every context


class Scorer(Protocol):
    """The attributes of a scorer that decide whether rows fit. `turns/score` imports this file, so this is a protocol."""

    frozen: ClassVar[bool]

    def answers_behind_row(self, config: DictConfig) -> int: ...


def longest_row(config: DictConfig) -> int:
    return config.data.max_prompt_length + config.data.max_response_length


def turns_at_most(config: DictConfig) -> tuple[str, int | None]:
    """Returns (key that limits the turns of a row, their number); None where the row's length or a user's loop ends it."""
    if select(config, DEFAULT) in (None, AGENT_NAME):
        return "search.max_searches+1", config.search.max_searches + 1
    if select(config, DEFAULT) == ENV_AGENT and config.environment.window is not None:
        return "environment.window", 1
    if select(config, DEFAULT) == ENV_AGENT:
        return "environment.max_steps", config.environment.max_steps
    return MOST, select(config, MOST) or None


def reference_in_actor(config: DictConfig) -> bool:
    """verl's condition: with LoRA the reference is the actor without its adapter, and no other model is loaded."""
    model = config.actor_rollout_ref.model
    rank = select(model, "lora.rank") or select(model, "lora_rank") or 0
    return rank > 0 or select(model, "lora_adapter_path") is not None


def in_references_batches(config: DictConfig, settings: CreditSettings, scorer: Scorer) -> bool:
    """Answers are scored in micro-batches of the reference, not of the actor."""
    return settings.scores_gain and scorer.frozen and not reference_in_actor(config)


def sequence_parallel(role: DictConfig) -> int:
    """The ranks that share a sequence in the actor or the reference. verl's engine reads the key of ``fsdp_config``, into
    which verl copies an older key above 1."""
    older, read = (select(role, key) or 1 for key in (ULYSSES, f"fsdp_config.{ULYSSES}"))
    return older if older > 1 else read


def tokens_per_micro_batch(config: DictConfig) -> int | None:
    """The tokens that a micro-batch of old_log_probs holds; None where micro-batches are counted in rows."""
    rollout = config.actor_rollout_ref.rollout
    return rollout.log_prob_max_token_len_per_gpu if rollout.log_prob_use_dynamic_bsz else None


def engine_tokens(row: int, engine: str) -> int:
    """The tokens of the longest sequence of an engine (``rollout.name``): ``rollout.max_model_len=auto``."""
    return row + engine_named(engine).unused


class Place(NamedTuple):
    """The micro-batch in which answers are scored, with its limit of tokens."""

    key: str
    budget: int
    left: int
    """The tokens left beside the longest row."""
    contexts: int
    """The number of contexts whose answers share these tokens."""


def place_of_answers(config: DictConfig, settings: CreditSettings, scorer: Scorer) -> Place | None:
    """The place in which this run scores answers; None where no answer has to fit beside a row."""
    roles, row = config.actor_rollout_ref, longest_row(config)
    key, role, counted = LOG_PROB, roles.actor, roles.actor.use_dynamic_bsz
    contexts = scorer.answers_behind_row(config) if settings.scores_gain else 0
    if in_references_batches(config, settings, scorer):
        key, role, contexts, counted = REFERENCE, roles.ref, 1, roles.ref.log_prob_use_dynamic_bsz
    if not contexts or not counted:
        return None
    budget = select(config, key)
    return Place(key, budget, budget * sequence_parallel(role) - row, contexts)
