"""Sampled groups as a step of training reads them: rows, the tables of turn modes, the run's credit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain

import torch

from verl_credit.config.settings import CreditSettings
from verl_credit.credit.outcome import OUTCOME_OPERATORS
from verl_credit.credit.turn.turn_credit import BatchTables
from verl_credit.credit.turn.turns import turn_table
from verl_credit.credit.turn.value_providers import KEY, PROVIDERS
from verl_credit.errors import ConfigError, IntegrityError
from verl_credit.names import ADV_ESTIMATOR
from verl_credit.study.fidelity.credits import Credit
from verl_credit.study.fidelity.turn_tables import TurnTables
from verl_credit.turns.rollout.book import RowRecord, TurnBatch
from verl_credit.turns.score.gains import gains_of, plan_gains, score_answers
from verl_credit.turns.score.scorers import SCORERS
from verl_credit.turns.step.anchor_table import anchor_table
from verl_credit.turns.step.assign import CreditRun, assign, step_inputs
from verl_credit.turns.step.signals.built_in import signals_of
from verl_credit.turns.step.signals.own import TrajectorySignal
from verl_credit.turns.step.signals.signal import Signal, StepRows
from verl_credit.worlds.rollouts.rollout import Groups, Trajectory


def turn_batch(trajectories: Sequence[Trajectory], data: Sequence[Mapping]) -> TurnBatch:
    """``data[question]``: the data set's row, which turn signals of the user's may read. Turn ids are -1 on the tool's
    answers."""
    prompts, responses, turn_ids = [], [], []
    for trajectory in trajectories:
        first, last = trajectory.steps[0].state, trajectory.steps[-1]
        start = first.prompt_length
        response = [*last.state.ids[start:], *last.turn_ids]
        ids = [-1] * len(response)
        for number, step in enumerate(trajectory.steps):
            at = len(step.state.ids) - start
            ids[at : at + len(step.turn_ids)] = [number] * len(step.turn_ids)
        prompts.append(list(first.ids[:start]))
        responses.append(response)
        turn_ids.append(torch.tensor(ids))
    of_data = [data[trajectory.steps[0].state.question] for trajectory in trajectories]
    turn_ids_B_T = torch.nn.utils.rnn.pad_sequence(turn_ids, batch_first=True, padding_value=-1)
    n_turns = [len(trajectory.steps) for trajectory in trajectories]
    return TurnBatch(
        prompt_ids=prompts,
        response_ids=responses,
        turn_ids_B_T=turn_ids_B_T,
        response_mask_B_T=(turn_ids_B_T >= 0).long(),
        records=[_record(trajectory) for trajectory in trajectories],
        scores=[{"em": trajectory.reward} for trajectory in trajectories],
        ground_truths=[row["reward_model"]["ground_truth"] for row in of_data],
        extra_infos=[row.get("extra_info") or {} for row in of_data],
        columns=[dict(row) for row in of_data],
        is_padding=[False] * len(prompts),
        row_valid_B=torch.ones(len(prompts), dtype=torch.bool),
        n_turns_B=torch.tensor(n_turns),
        turn_rewards=[[None] * (n - 1) for n in n_turns],
    )


def _record(trajectory: Trajectory) -> dict:
    """Anchors by pages and signals of the user's read the searches."""
    searches = [
        {"turn": turn, "query": call.query, "pages": list(pages)}
        for turn, step in enumerate(trajectory.steps)
        for call, pages in zip(step.calls, step.pages, strict=True)
        if call.refused is None
    ]
    return RowRecord(searches=searches, n_searches=len(searches)).as_dict()


def rows_settings(settings: CreditSettings, **changes) -> CreditSettings:
    """The settings, with ``changes``, for a step that measures gains by rows: by the policy's ordinary forward."""
    by_rows = {"info_gain_scorer": "rows", "info_gain_every": 1, "info_gain_warmup_steps": 0}
    return replace(settings, algorithm=settings.algorithm.model_copy(update=by_rows | changes))


def outcomes_of(groups: Groups) -> tuple[torch.Tensor, torch.Tensor]:
    """(outcome_B, group_B), rows in the order of the groups."""
    outcome_B = torch.tensor([t.reward for t in chain(*groups)], dtype=torch.float64)
    return outcome_B, torch.tensor([prompt for prompt, group in enumerate(groups) for _ in group])


def tables_of(
    batch: TurnBatch, groups: Groups, settings: CreditSettings, forward, tokenizer
) -> tuple[TurnTables, torch.Tensor]:
    """(outcomes, gains, states before turns and lengths, as turn modes read them; gold_B_K1).

    gold_B_K1 is the gold answer's probability before every turn; NaN where it was not scored. Gains of ``prob_diff`` are its
    differences.
    """
    a = settings.algorithm
    mode = a.info_gain_norm_mode if settings.scores_gain else "turn-group-v1d"
    changes = {
        "turn_signal": "info_gain",
        "turn_signals": None,
        "algorithm_mode": None,
    }  # whatever the mode reads
    measured = rows_settings(settings, adv_estimator=ADV_ESTIMATOR, info_gain_norm_mode=mode, **changes)
    plan = plan_gains(batch, measured, tokenizer)
    score_B_K1, asked_B_K1 = score_answers(plan, forward)
    gain_B_K, has_gain_B_K, _, gold_B_K1 = gains_of(plan, score_B_K1, asked_B_K1, {})
    outcome_B, group_B = outcomes_of(groups)
    rows = StepRows(batch, tokenizer.decode, outcome_B, group_B, gain_B_K, has_gain_B_K)
    table = turn_table(batch.turn_ids_B_T, batch.turn_ids_B_T >= 0)
    known = group_B, batch.row_valid_B, table.n_tool_turns_B
    optional = {"turn_tokens_B_K1": table.n_tokens_B_K1, "anchor_B_K1": anchor_table(settings, rows)}
    tables = TurnTables(
        pipeline={
            "mode": a.info_gain_norm_mode,
            # Only `run_credit` reads a user's operator.
            "outcome_operator": a.advantage_mode if a.advantage_mode in OUTCOME_OPERATORS else "grpo",
            "tied_groups": a.tied_groups,
            "shared": {
                "gamma": a.gamma,
                "lam": a.lam,
                "alpha": a.adv_rescale_alpha,
                "clip_beta": settings.clip_beta,
                "norm_by_std": a.norm_adv_by_std_in_grpo,
            },
            "turn_params": dict(a.turn_params),
        },
        batch=BatchTables(outcome_B, gain_B_K.double(), has_gain_B_K, *known, optional),
    )
    return tables, gold_B_K1


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
    try:
        signals = signals_of(settings)
        if reason := _not_here(settings, signals):
            return Credit(name, None, reason, "run")
        settings = rows_settings(settings, transform_mode="none")
        run = CreditRun.of(settings, tokenizer)
        plan = plan_gains(batch, settings, tokenizer)
        inputs = step_inputs(run, plan, forward, {}, step=step, planned_steps=planned_steps)
        step_credit = assign(inputs, *outcomes_of(groups), batch.response_mask_B_T.bool())
    except (ConfigError, IntegrityError, ValueError) as error:
        return Credit(name, None, str(error), "run")
    if signals and not step_credit.rewarded_B_K.any():
        return Credit(name, None, f"no turn has a reward ({', '.join(settings.turn_signals)})", "run")
    tables = TurnTables({}, step_credit.tables)
    return Credit(name, tables.per_turn(step_credit.credit.advantage_B_K1), kind="run")


def _not_here(settings: CreditSettings, signals: dict[Signal, float]) -> str | None:
    algorithm = settings.algorithm
    if not settings.turn_estimator:
        return f"algorithm.adv_estimator={algorithm.adv_estimator} is one of verl's own"
    if algorithm.algorithm_mode is not None:
        return f"algorithm.algorithm_mode={algorithm.algorithm_mode} gives credit to tokens, not to turns"
    if algorithm.canonical_transform:
        return f"algorithm.transform_mode={algorithm.transform_mode} gives credit to tokens, not to turns"
    if settings.scores_gain and SCORERS[algorithm.info_gain_scorer].frozen:
        return (
            f"algorithm.info_gain_scorer={algorithm.info_gain_scorer}: the reference scores in training alone"
        )
    provider = PROVIDERS.get(algorithm.turn_values)
    if provider is not None and provider.training_alone:
        return f"{KEY}={provider.name}: {provider.training_alone}"
    coroutines = (signal.name for signal in signals if isinstance(signal, TrajectorySignal))
    if name := next(coroutines, None):
        return f"the turn signal {name} is a coroutine, which agent loops alone call"
    return None
