"""The credit that the run itself gives: its turn signals, outcome operator, mode and options, by the trainer's functions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from verl_credit.config.settings import CreditSettings
from verl_credit.errors import ConfigError, IntegrityError
from verl_credit.study.fidelity.credit import Credit, nested
from verl_credit.study.fidelity.tables import outcomes_of, rows_settings
from verl_credit.turns.assign import CreditRun, assign, step_inputs
from verl_credit.turns.batch import TurnBatch
from verl_credit.turns.gains import plan_gains
from verl_credit.turns.signals import Signal, TrajectorySignal, signals_of
from verl_credit.turns.token_stage import TokenStage
from verl_credit.worlds.rollouts.rollout import Trajectory


def run_credit(
    batch: TurnBatch,
    groups: Sequence[Sequence[Trajectory]],
    settings: CreditSettings,
    forward,
    tokenizer,
    *,
    step: int,
    planned_steps: int,
) -> Credit:
    """As step ``step`` of ``planned_steps`` would give it to these rollouts, in a step that measures gains.

    Of turns: a token transform that only spreads a turn's advantage is left out. Outcomes are the trajectories'.
    """
    name = f"this run: {settings.algorithm.info_gain_norm_mode}"
    settings = rows_settings(settings)
    try:
        signals = signals_of(settings)
        if reason := _not_here(settings, signals):
            return Credit(name, None, reason, "run")
        algorithm = settings.algorithm.model_copy(update={"transform_mode": "none"})
        settings = replace(settings, algorithm=algorithm)
        run = CreditRun(settings, tokenizer, signals, TokenStage(algorithm, tokenizer))
        plan = plan_gains(batch, settings, tokenizer)
        inputs = step_inputs(run, plan, forward, {}, step=step, planned_steps=planned_steps)
        found = assign(inputs, *outcomes_of(groups), batch.response_mask_B_T.bool())
    except (ConfigError, IntegrityError, ValueError) as error:
        return Credit(name, None, str(error), "run")
    if signals and not found.rewarded_B_K.any():
        return Credit(name, None, f"no turn has a reward ({', '.join(settings.turn_signals)})", "run")
    n_tool_turns_B = torch.tensor([len(t.steps) - 1 for group in groups for t in group])
    sizes = [len(group) for group in groups]
    return Credit(name, nested(found.credit.advantage_B_K1, n_tool_turns_B, sizes), kind="run")


def _not_here(settings: CreditSettings, signals: dict[Signal, float]) -> str | None:
    algorithm = settings.algorithm
    if not settings.turn_estimator:
        return f"algorithm.adv_estimator={algorithm.adv_estimator} is one of verl's own"
    if algorithm.algorithm_mode is not None:
        return f"algorithm.algorithm_mode={algorithm.algorithm_mode} gives credit to tokens, not to turns"
    if algorithm.canonical_transform:
        return f"algorithm.transform_mode={algorithm.transform_mode} gives credit to tokens, not to turns"
    if settings.masks_observations:
        return "the turn signal infopo is scored in training alone"
    for signal in signals:
        if isinstance(signal, TrajectorySignal):
            return f"the turn signal {signal.name} is a coroutine, which agent loops alone call"
    return None
