"""Sampled groups through the trainer's own functions: the tables that turn modes read, and the credit of the run."""

from __future__ import annotations

from dataclasses import replace

import torch

from verl_credit.config.settings import CreditSettings
from verl_credit.credit.outcome import OUTCOME_OPERATORS
from verl_credit.credit.turn.turns import turn_table
from verl_credit.errors import ConfigError, IntegrityError
from verl_credit.names import ADV_ESTIMATOR
from verl_credit.records.report.again import TurnTables
from verl_credit.study.fidelity.mode_credit import Credit, nested
from verl_credit.turns.assign import CreditRun, anchor_table, assign, step_inputs
from verl_credit.turns.book import TurnBatch
from verl_credit.turns.gains import gains_of, plan_gains, score_answers
from verl_credit.turns.signals.known import signals_of
from verl_credit.turns.signals.own import TrajectorySignal
from verl_credit.turns.signals.signal import Signal, StepRows
from verl_credit.turns.token_stage import TokenStage
from verl_credit.worlds.rollouts.rollout import Groups


def rows_settings(settings: CreditSettings) -> CreditSettings:
    """The settings for a step that measures gains by rows, that is by the policy's ordinary forward."""
    changes = {"info_gain_scorer": "rows", "info_gain_every": 1, "info_gain_warmup_steps": 0}
    return replace(settings, algorithm=settings.algorithm.model_copy(update=changes))


def gain_settings(settings: CreditSettings) -> CreditSettings:
    """The settings with gains measured whatever the mode reads."""
    settings = rows_settings(settings)
    mode = settings.algorithm.info_gain_norm_mode
    changes = {
        "adv_estimator": ADV_ESTIMATOR,
        "info_gain_norm_mode": mode if settings.scores_gain else "turn-group-v1d",
        "turn_signal": "info_gain",
        "turn_signals": None,
        "algorithm_mode": None,
    }
    return replace(settings, algorithm=settings.algorithm.model_copy(update=changes))


def outcomes_of(groups: Groups) -> tuple[torch.Tensor, torch.Tensor]:
    """(outcome_B, group_B), rows in the order of the groups."""
    outcome_B = torch.tensor([t.reward for group in groups for t in group], dtype=torch.float64)
    return outcome_B, torch.tensor([prompt for prompt, group in enumerate(groups) for _ in group])


def tables_of(
    batch: TurnBatch, groups: Groups, settings: CreditSettings, forward, tokenizer
) -> tuple[TurnTables, torch.Tensor]:
    """(outcomes, gains, states before turns and lengths, as turn modes read them; gold_B_K1).

    gold_B_K1 is the gold answer's probability before every turn; NaN where it was not scored. Gains of ``prob_diff`` are its
    differences.
    """
    plan = plan_gains(batch, gain_settings(settings), tokenizer)
    score_B_K1, asked_B_K1 = score_answers(plan, forward)
    gain_B_K, has_gain_B_K = gains_of(plan, score_B_K1, asked_B_K1, {})
    outcome_B, group_B = outcomes_of(groups)
    rows = StepRows(batch, tokenizer.decode, outcome_B, group_B, gain_B_K, has_gain_B_K)
    table = turn_table(batch.turn_ids_B_T, batch.turn_ids_B_T >= 0)
    a = settings.algorithm
    shape = len(outcome_B), gain_B_K.shape[1] + 1
    tables = TurnTables(
        pipeline={
            "mode": a.info_gain_norm_mode,
            "signals": {"info_gain": 1.0},
            # Only `run_credit` reads a user's operator.
            "outcome_operator": a.advantage_mode if a.advantage_mode in OUTCOME_OPERATORS else "grpo",
            "tied_groups": a.tied_groups,
            "shared": {
                "gamma": a.gamma,
                "alpha": a.adv_rescale_alpha,
                "clip_beta": settings.clip_beta,
                "norm_by_std": a.norm_adv_by_std_in_grpo,
                "gain_scale": 1.0,
                "outcome_scale": 1.0,
            },
            "turn_params": dict(a.turn_params),
        },
        rows=list(range(len(outcome_B))),
        uids=[str(group) for group in group_B.tolist()],
        outcome_B=outcome_B,
        reward_B_K=gain_B_K.double(),
        has_reward_B_K=has_gain_B_K,
        group_B=group_B,
        valid_B=batch.row_valid_B,
        n_tool_turns_B=table.n_tool_turns_B,
        tokens_B_K1=table.n_tokens_B_K1,
        anchor_B_K1=anchor_table(settings, rows),
        advantage_B_K1=torch.zeros(shape),  # no run gave credit
        clip_scale_B_K1=torch.ones(shape),
    )
    return tables, score_B_K1.exp().masked_fill(~asked_B_K1, torch.nan)


def run_credit(
    batch: TurnBatch,
    groups: Groups,
    settings: CreditSettings,
    forward,
    tokenizer,
    *,
    step: int,
    planned_steps: int,
) -> Credit:
    """The credit that step ``step`` of ``planned_steps`` would give to these rollouts, if it measures gains.

    A token transform that only spreads a turn's advantage is left out. Outcomes are the trajectories'.
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
        step_credit = assign(inputs, *outcomes_of(groups), batch.response_mask_B_T.bool())
    except (ConfigError, IntegrityError, ValueError) as error:
        return Credit(name, None, str(error), "run")
    if signals and not step_credit.rewarded_B_K.any():
        return Credit(name, None, f"no turn has a reward ({', '.join(settings.turn_signals)})", "run")
    n_tool_turns_B = torch.tensor([len(t.steps) - 1 for group in groups for t in group])
    sizes = [len(group) for group in groups]
    return Credit(name, nested(step_credit.credit.advantage_B_K1, n_tool_turns_B, sizes), kind="run")


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
