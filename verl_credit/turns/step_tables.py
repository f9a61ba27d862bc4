"""The tables that a turn mode reads of a step: its turn rewards, and what else it asks for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch

from verl_credit.config.settings import FORWARD_SIGNALS, CreditSettings
from verl_credit.turns.anchors import anchor_table, observations
from verl_credit.turns.batch import TurnBatch
from verl_credit.turns.gains import score_gains, score_infopo
from verl_credit.turns.scorers import Forward, GainPlan
from verl_credit.turns.signals import Signal, StepRows, step_rewards
from verl_credit.turns.step_credit import StepTables, TurnStep
from verl_credit.turns.token_stage import TokenStage


def turn_step(
    plan: GainPlan,
    forward: Forward,
    settings: CreditSettings,
    tokenizer,
    metrics: dict,
    *,
    signals: Mapping[Signal, float],
    step: int,
    planned_steps: int,
    stage: TokenStage | None,
    tolerated_share: float,
    note: Callable[[str], None],
) -> TurnStep:
    """What `advantages_of` reads, once the forward of the step is over. ``metrics`` gets those of the gains.

    ``tolerated_share``: of turn rewards that may be lost (``faults.max_lost_rewards``); ``note`` is told of lost ones.
    """
    gain_B_K, mask_B_K = score_gains(plan, forward, metrics)
    infopo_B, named = score_infopo(plan, forward), set(settings.turn_signals)
    gain_scale, outcome_scale = settings.curriculum_at(step, planned_steps)
    found = TurnStep(
        settings,
        plan.turns.turn_ids_B_T,
        gain_B_K,
        mask_B_K,
        plan.turns.row_valid_B,
        scored=plan.scored or not named or not named <= FORWARD_SIGNALS,
        gain_scale=gain_scale,
        outcome_scale=outcome_scale,
        stage=stage,
    )
    found.tables = partial(
        _tables,
        found,
        plan.turns,
        tokenizer,
        (gain_B_K, mask_B_K, infopo_B),
        plan.scored,
        signals,
        tolerated_share,
        note,
    )
    return found


def _tables(
    step: TurnStep,
    turns: TurnBatch,
    tokenizer,
    scores: tuple,
    scored: bool,
    signals: Mapping[Signal, float],
    tolerated_share: float,
    note: Callable[[str], None],
    outcome_B: torch.Tensor,
    group_B: torch.Tensor,
) -> StepTables:
    """Called by the estimator, which alone has outcomes and groups."""
    rows, settings = StepRows(turns, tokenizer.decode, outcome_B, group_B, *scores), step.settings
    reward_B_K, mask_B_K, metrics = step_rewards(
        signals,
        settings,
        rows,
        scored=scored,
        tolerated_share=tolerated_share,
        parts=step.signals,
        note=note,
    )
    algorithm, optional = settings.algorithm, {}
    if algorithm.algorithm_mode is not None:
        step.anchor_B_K1 = anchor_table(settings, rows)
        step.observations_B = observations(rows)
    elif "anchor_B_K1" in algorithm.turn_mode.tables:
        optional["anchor_B_K1"] = anchor_table(settings, rows)
    return reward_B_K, mask_B_K, optional, metrics
