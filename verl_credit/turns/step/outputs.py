"""Rollouts of several outputs that a step refuses: what has no meaning for them would be silently wrong."""

from __future__ import annotations

from collections.abc import Iterator

from omegaconf import DictConfig

from verl_credit.config.resolved import select
from verl_credit.config.settings import CreditSettings
from verl_credit.credit.arguments import check_name
from verl_credit.credit.operator import ONE, RESETS, SUB_AGENTS
from verl_credit.credit.outcome import OUTCOME_OPERATORS
from verl_credit.credit.plugins.load import load, plugin_path
from verl_credit.credit.token.gtpo_canonical import CANONICAL
from verl_credit.errors import IntegrityError
from verl_credit.turns.rollout.book import TurnBatch
from verl_credit.turns.rollout.sessions import session_of, sessions_of
from verl_credit.turns.step.signals.built_in import signals_of

TAKES = {ONE: "rollouts of one output", RESETS: "context resets", SUB_AGENTS: "sub-agents"}
BUILT_IN = OUTCOME_OPERATORS | CANONICAL
VERLS = "grpo"
"""verl's own estimator that knows sessions; every other one of verl's counts each output as a rollout."""
ACTOR, CORRECTION = "actor_rollout_ref.actor", "algorithm.rollout_correction"
MINI_BATCH, CRITICS = f"{ACTOR}.ppo_mini_batch_size", "critic.ppo_mini_batch_size"
PER_OUTPUT = (  # (key, values that read an output by itself, what would be right)
    (f"{ACTOR}.loss_agg_mode", ("seq-mean-token-mean",), "token-mean, or seq-mean-token-sum: no mean over an output"),
    (f"{ACTOR}.policy_loss.ratio_level", ("sequence",), "token or turn: a sequence is one output"),
    (f"{ACTOR}.policy_loss.loss_mode", ("gspo", "geo_mean"), "a loss whose ratio is a token's or a turn's"),
    (f"{ACTOR}.shuffle", (True,), "false: the outputs of a rollout stay in one update"),
    (f"{CORRECTION}.rollout_is", ("sequence",), "token: a sequence is one output"),
    ("algorithm.use_kl_in_reward", (True,), "false: the penalty would be that of the last output alone"),
)  # fmt: skip


def check_outputs(turns: TurnBatch, settings: CreditSettings, config: DictConfig) -> None:
    """Raises IntegrityError for a rollout with several outputs, where the run would count them as rollouts."""
    several = next((rows for rows in sessions_of(turns.keys) if len(rows) > 1), None)
    if several is None or settings.algorithm.adv_estimator == VERLS:
        return
    parents = [parent for _, parent in turns.links if parent]
    for key, value, accepted in _unfit(settings, config, SUB_AGENTS if parents else RESETS):
        raise IntegrityError(
            f"row {several[1]}: its agent loop returned {len(several)} outputs of one rollout "
            f"({session_of(turns.keys[several[0]])}), and {key}={value} has no meaning for them; expected {accepted}"
        )
    rows = zip(turns.keys, turns.links, strict=False)
    spawned = {(session_of(key), link) for key, link in rows if link[1]}
    twice = len({(session, parent) for session, (_, parent) in spawned}) < len(spawned)
    for name in ("lam", "gamma") if twice else ():
        if (value := settings.turn_options.get(name, 1)) != 1:
            raise IntegrityError(
                f"algorithm.{name}={value}: sub-agents of one turn run side by side, and their credit would follow their "
                "order in the list; expected 1"
            )


def resets_refused(settings: CreditSettings, config: DictConfig) -> list[tuple[str, object, str]]:
    """(key, value, what is accepted) of what a run refuses whose rollouts are sure to have several outputs of one chain."""
    return [] if settings.algorithm.adv_estimator == VERLS else [*_unfit(settings, config, RESETS)]


def _unfit(settings: CreditSettings, config: DictConfig, kind: str) -> Iterator[tuple[str, object, str]]:
    """(key, value, what is accepted) of every setting without a meaning for this kind of outputs."""
    a = settings.algorithm
    if not settings.turn_estimator:
        yield "algorithm.adv_estimator", a.adv_estimator, f"info_gain or {VERLS}"
        return
    declared = {"algorithm.info_gain_norm_mode": (a.turn_mode.name, a.turn_mode.outputs)}
    for key in ("advantage_mode", "transform_mode", "algorithm_mode", "uncertainty_kind"):
        name, key = getattr(a, key) or "", f"algorithm.{key}"
        path = "" if name in BUILT_IN else plugin_path(name)
        operator = load(path, key) if path else BUILT_IN.get(name)
        declared[key] = name, getattr(operator, "outputs", SUB_AGENTS)
    if a.turn_values == "state":
        declared["algorithm.turn_values"] = a.turn_values, RESETS
    for signal in signals_of(settings):
        declared[f"turn signal {signal.name}"] = "on", signal.outputs
    for key, (value, outputs) in declared.items():
        check_name(f"{key}={value}: outputs", outputs, TAKES)
        if list(TAKES).index(outputs) < list(TAKES).index(kind):
            yield key, value, f"one for {TAKES[kind]}; this one takes {TAKES[outputs]} alone"
    for key, values, accepted in PER_OUTPUT:
        if (value := select(config, key)) in values:
            yield key, value, accepted
    if any(
        name.startswith("seq_") for name in str(select(config, f"{CORRECTION}.rollout_rs") or "").split(",")
    ):
        yield f"{CORRECTION}.rollout_rs", select(config, f"{CORRECTION}.rollout_rs"), "a criterion of tokens"
    mini, critics = select(config, MINI_BATCH), select(config, CRITICS)
    if select(config, "critic.enable") and critics != mini:
        yield CRITICS, critics, f"{MINI_BATCH}={mini}: both update with the same mini-batches"
    if every := select(config, "probe.every"):
        yield "probe.every", every, "0: its baselines take outputs for rollouts"
