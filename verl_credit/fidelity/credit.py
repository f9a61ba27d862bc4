"""What the project's own code makes of sampled groups: information gain of every tool turn, and the credit of turn modes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from verl_credit.config.settings import CreditSettings
from verl_credit.credit import MODES
from verl_credit.credit.plugins import find_turn_mode
from verl_credit.credit.turn.mode import TurnMode
from verl_credit.credit.turn.tables import NAMED_OPERATORS
from verl_credit.credit.turn.turns import turn_table
from verl_credit.errors import PreflightError, did_you_mean
from verl_credit.fidelity.rollout import Trajectory
from verl_credit.names import ADV_ESTIMATOR
from verl_credit.report.again import NotOffered, TurnTables, credit_of_turns
from verl_credit.turns.anchors import anchor_table
from verl_credit.turns.batch import TurnBatch
from verl_credit.turns.gains import plan_gains, score_gains
from verl_credit.turns.signals import StepRows

ALPHAS = (0.3, 1.0)
OUTCOMES = ("rloo", "maxrl")
"""Beside the one that the configuration names, for the mode `none`."""
Advantages = list[list[list[float]]]
"""``[prompt][trajectory][turn]``, the ending turn last."""


@dataclass(frozen=True)
class Credit:
    """An advantage per turn by one way of making it; or the reason why there is none."""

    name: str
    advantages: Advantages | None
    reason: str = ""
    kind: str = "mode"
    """``run``: as the run gives it; ``mode``; ``control``."""
    held_out: bool = False
    """It is made from the first half of the continuations, and compared with A* by the second half."""


def find_modes(names: Sequence[str] | None) -> list[TurnMode]:
    """Every registered mode, or those with these names; one of the user's has the name my_module:my_mode.

    Raises PreflightError for a name that is neither.
    """
    found = []
    for name in MODES if names is None else names:
        if name not in MODES and not {".", ":"} & set(name):
            raise PreflightError(
                f"--modes {name}{did_you_mean(name, MODES)}: accepted are {', '.join(MODES)}, or my_module:my_mode"
            )
        try:
            found.append(find_turn_mode(name, "--modes"))
        except ValueError as error:
            raise PreflightError(str(error)) from error
    return found


def rows_settings(settings: CreditSettings) -> CreditSettings:
    """The same in a step that measures gains, and by rows: by the policy's ordinary forward."""
    changes = {"info_gain_scorer": "rows", "info_gain_every": 1, "info_gain_warmup_steps": 0}
    return replace(settings, algorithm=settings.algorithm.model_copy(update=changes))


def gain_settings(settings: CreditSettings) -> CreditSettings:
    """The same, with gains measured whatever the mode reads."""
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


def outcomes_of(groups: Sequence[Sequence[Trajectory]]) -> tuple[torch.Tensor, torch.Tensor]:
    """(outcome_B, group_B), rows in the order of the groups."""
    outcome_B = torch.tensor([t.reward for group in groups for t in group], dtype=torch.float64)
    return outcome_B, torch.tensor([prompt for prompt, group in enumerate(groups) for _ in group])


def tables_of(
    batch: TurnBatch, groups: Sequence[Sequence[Trajectory]], settings: CreditSettings, forward, tokenizer
) -> TurnTables:
    """What turn modes read of the groups: outcomes, gains, states before turns, lengths."""
    scoring = gain_settings(settings)
    gain_B_K, has_gain_B_K = score_gains(plan_gains(batch, scoring, tokenizer), forward, {})
    outcome_B, group_B = outcomes_of(groups)
    rows = StepRows(batch, tokenizer.decode, outcome_B, group_B, gain_B_K, has_gain_B_K)
    table = turn_table(batch.turn_ids_B_T, batch.turn_ids_B_T >= 0)
    a = settings.algorithm
    shape = len(outcome_B), gain_B_K.shape[1] + 1
    return TurnTables(
        pipeline={
            "mode": a.info_gain_norm_mode,
            "signals": {"info_gain": 1.0},
            # One of the user's is in the credit of the run alone (`run_credit`).
            "outcome_operator": a.advantage_mode if a.advantage_mode in NAMED_OPERATORS else "grpo",
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
        advantage_B_K1=torch.zeros(shape),  # no run gave any
        clip_scale_B_K1=torch.ones(shape),
    )


def mode_credits(tables: TurnTables, sizes: Sequence[int], modes: Sequence[TurnMode]) -> list[Credit]:
    """Every mode with information gain as its turn reward, beside each other; ``sizes``: trajectories per prompt."""
    found = []
    for mode, changes in variants(tables.pipeline, modes):
        label = ", ".join([mode.name, *(f"{key} {value}" for key, value in changes.items())])
        label = label.replace("outcome_operator ", "")
        try:
            credit = credit_of_turns(tables, mode, **changes)
        except NotOffered as error:
            found.append(Credit(label, None, str(error)))
        else:
            found.append(Credit(label, nested(credit.advantage_B_K1, tables.n_tool_turns_B, sizes)))
    return found


def variants(pipeline: Mapping, modes: Sequence[TurnMode]) -> list[tuple[TurnMode, dict]]:
    """Modes with what is changed of their options."""
    found: list[tuple[TurnMode, dict]] = []
    for mode in modes:
        if mode.name == "none":
            others = [{"outcome_operator": o} for o in OUTCOMES if o != pipeline["outcome_operator"]]
            found += [(mode, {}), *((mode, other) for other in others)]
        elif "alpha" in mode.options:
            found += [(mode, {"alpha": alpha}) for alpha in ALPHAS]
        else:
            found.append((mode, {}))
    return found


def nested(advantage_B_K1: torch.Tensor, n_tool_turns_B: torch.Tensor, sizes: Sequence[int]) -> Advantages:
    """Rows of a step as prompts' trajectories, without the columns behind a row's ending turn."""
    rows = iter(
        [row[: n + 1] for row, n in zip(advantage_B_K1.tolist(), n_tool_turns_B.tolist(), strict=True)]
    )
    return [[next(rows) for _ in range(size)] for size in sizes]
