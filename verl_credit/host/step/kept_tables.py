"""The credit of a step, turn by turn: the turn table of all rows, and the choice of groups for a reader."""

from __future__ import annotations

from pathlib import Path

import torch

from verl_credit.credit.groups import z_score_per_turn
from verl_credit.host.step import store
from verl_credit.records.run.table_files import TURNS, write_table
from verl_credit.turns.step.assign import StepCredit


def keep_turns(run_dir: Path, batch, step: StepCredit, number: int) -> None:
    """Write the turn table of step ``number``."""
    uids, sessions = store.prompt_ids(batch), step.inputs.turns.sessions
    if sessions is not None:
        uids = [uids[row] for row in sessions.last_S.tolist()]
    write_table(run_dir, TURNS, number, turn_columns(step, uids), pipeline(step))


def pipeline(step: StepCredit) -> dict:
    """Returns the settings that made the credit."""
    settings, algorithm = step.settings, step.settings.algorithm
    return {
        "mode": algorithm.info_gain_norm_mode,
        "signals": dict(settings.turn_signals),
        "outcome_operator": algorithm.advantage_mode,
        "tied_groups": algorithm.tied_groups,
        "shared": {
            "gamma": algorithm.gamma,
            "lam": algorithm.lam,
            "alpha": algorithm.adv_rescale_alpha,
            "clip_beta": settings.clip_beta,
            "norm_by_std": algorithm.norm_adv_by_std_in_grpo,
            "gain_scale": step.inputs.gain_scale,
            "outcome_scale": step.inputs.outcome_scale,
        },
        "turn_params": dict(algorithm.turn_params),
        "algorithm": algorithm.algorithm_mode,
        "transform": algorithm.transform_mode,
        "uncertainty": algorithm.uncertainty_kind,
        "sepa_lambda": step.metrics.get("credit/sepa_lambda"),
        "gtpo_beta": algorithm.gtpo.beta,
        "hicra_alpha": algorithm.hicra.alpha,
        "entropy_mask_rho": algorithm.entropy_mask.rho,
    }


def turn_columns(step: StepCredit, uids: list[str]) -> dict[str, list]:
    """A line per turn of every row but padding; a row without a turn has one line without tokens.

    Where rollouts have several outputs, a row is a rollout.
    """
    columns: dict[str, list] = {}
    turns, tables = step.inputs.turns, step.tables
    n_tokens = tables.optional["turn_tokens_B_K1"].tolist()
    reward, has_reward = tables.reward_B_K.double().tolist(), tables.has_reward_B_K.tolist()
    known = (tables.has_reward_B_K & tables.reward_B_K.isfinite()).tolist()
    anchor_B_K1 = tables.optional.get("anchor_B_K1")
    anchor = None if anchor_B_K1 is None else anchor_B_K1.tolist()
    value_B_K1 = tables.optional.get("value_B_K1")
    values = None if value_B_K1 is None else value_B_K1.tolist()
    signals = {
        name: (value_B_K.double().tolist(), (has_B_K & value_B_K.isfinite()).tolist())
        for name, (value_B_K, has_B_K) in step.signals.items()
    }
    z_B_K = _z(step)
    z = None if z_B_K is None else z_B_K.tolist()
    rewarded = step.rewarded_B_K.tolist()
    advantage, clip = step.credit.advantage_B_K1.tolist(), step.credit.clip_scale_B_K1.tolist()
    outcome, outcome_advantage = tables.outcome_B.double().tolist(), step.credit.outcome_advantage_B.tolist()
    for row, padding in enumerate(turns.is_padding):
        last = max(int(turns.n_turns_B[row]) - 1, 0)
        for turn in range(0 if padding else last + 1):
            tool = turn < last
            line = {
                "uid": uids[row],
                "group": int(tables.group_B[row]),
                "row": row,
                "turn": turn,
                "answer": not tool,
                "tokens": n_tokens[row][turn],
                "has_reward": tool and has_reward[row][turn],
                "reward": reward[row][turn] if tool and known[row][turn] else None,
                "signals": [
                    (name, value[row][turn])
                    for name, (value, has) in signals.items()
                    if tool and has[row][turn]
                ],
                "z": z[row][turn] if tool and z is not None and rewarded[row][turn] else None,
                "anchor": None if anchor is None else anchor[row][turn],
                "value": None if values is None else values[row][turn],
                "advantage": advantage[row][turn],
                "clip_scale": clip[row][turn],
                "valid": bool(turns.row_valid_B[row]),
                "outcome": outcome[row],
                "outcome_advantage": outcome_advantage[row],
            }
            for name, value in line.items():
                columns.setdefault(name, []).append(value)
    return columns


def sampled_rows(step: StepCredit, count: int) -> list[int]:
    """All valid rows of ``count`` groups: those with the longest rows, of equal ones the first."""
    turns, group_B = step.inputs.turns, step.tables.group_B
    longest_first = sorted(turns.valid_rows, key=lambda row: -int(turns.n_turns_B[row]))
    groups = list(dict.fromkeys(int(group_B[row]) for row in longest_first))[:count]
    return [row for row in turns.valid_rows if int(group_B[row]) in groups]


def _z(step: StepCredit) -> torch.Tensor | None:
    """z of every reward among the same turn of its prompt's other rows, where the turn mode compares rewards so."""
    algorithm = step.settings.algorithm
    mode = algorithm.turn_mode
    if not step.inputs.rewarding or not mode.scales_clip or algorithm.replaces_turns:
        return None
    options = {**mode.options, **step.settings.turn_options}
    norm = {
        name: options[name] for name in ("norm_by_std", "ddof", "variance_floor", "eps") if name in options
    }
    return z_score_per_turn(step.tables.reward_B_K, step.rewarded_B_K, step.tables.group_B, **norm)
