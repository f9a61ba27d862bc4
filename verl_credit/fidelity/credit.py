"""What the project's own code makes of sampled groups: information gain of every tool turn, and the credit of every mode."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from transformers import PreTrainedModel

from verl_credit.config.settings import CreditSettings
from verl_credit.credit import MODES
from verl_credit.credit.turn.turns import turn_table
from verl_credit.fidelity.rollout import Trajectory
from verl_credit.names import ADV_ESTIMATOR
from verl_credit.report.again import NotOffered, TurnTables, credit_of_turns
from verl_credit.turns.anchors import anchor_table
from verl_credit.turns.batch import TurnBatch
from verl_credit.turns.gains import plan_gains, score_gains
from verl_credit.turns.scorers import ScoreRow
from verl_credit.turns.signals import StepRows

ALPHAS = (0.3, 1.0)
OUTCOMES = ("rloo", "maxrl")
"""Beside the one that the configuration names, for the mode `none`."""
PENALTY = 0.1
"""Per turn, of the control: a credit can be good only because it asks for fewer turns."""


class PolicyForward:
    """`turns.scorers.Forward` for the scorer ``rows``: ordinary rows through the policy, in this process."""

    budget = None

    def __init__(self, model: PreTrainedModel, pad_token_id: int, rows_at_once: int = 32):
        self._model, self._pad, self._at_once = model, pad_token_id, rows_at_once

    @torch.inference_mode()
    def score_rows(self, rows: Sequence[ScoreRow]) -> torch.Tensor:
        """Mean log-prob of the gold tokens, float64 [N], at temperature 1; equal rows are computed once."""
        distinct = sorted(dict.fromkeys(rows), key=lambda row: len(row.context_ids))
        value: dict[ScoreRow, torch.Tensor] = {}
        for begin in range(0, len(distinct), self._at_once):
            part = distinct[begin : begin + self._at_once]
            full = [[*row.context_ids, *row.answer.token_ids] for row in part]
            width, kept = max(map(len, full)), max(len(row.answer.token_ids) for row in part) + 1
            ids_R_P = torch.tensor([[self._pad] * (width - len(ids)) + ids for ids in full])
            visible_R_P = torch.tensor([[0] * (width - len(ids)) + [1] * len(ids) for ids in full])
            logits = self._model(
                input_ids=ids_R_P,
                attention_mask=visible_R_P,
                position_ids=(visible_R_P.cumsum(dim=1) - 1).clamp(min=0),
                use_cache=False,
                logits_to_keep=kept,
            ).logits
            log_prob_R_n = logits[:, :-1].double().log_softmax(dim=-1)
            log_prob_R_n = log_prob_R_n.gather(2, ids_R_P[:, 1 - kept :, None])[:, :, 0]
            for row, log_prob in zip(part, log_prob_R_n, strict=True):
                n = len(row.answer.token_ids)
                of_answer = log_prob[kept - 1 - n :]
                value[row] = of_answer[row.answer.gold_start : row.answer.gold_end].mean()
        return torch.stack([value[row] for row in rows])


@dataclass(frozen=True)
class Credit:
    """Of one mode: an advantage per turn, ``[prompt][trajectory][turn]``; or the reason why there is none."""

    name: str
    advantages: list[list[list[float]]] | None
    reason: str = ""


def gain_settings(settings: CreditSettings) -> CreditSettings:
    """The same, with gains measured by rows whatever the mode reads."""
    mode = settings.algorithm.info_gain_norm_mode
    changes = {
        "adv_estimator": ADV_ESTIMATOR,
        "info_gain_norm_mode": mode if settings.scores_gain else "turn-group-v1d",
        "turn_signal": "info_gain",
        "turn_signals": None,
        "algorithm_mode": None,
        "info_gain_scorer": "rows",
        "info_gain_every": 1,
        "info_gain_warmup_steps": 0,
    }
    return replace(settings, algorithm=settings.algorithm.model_copy(update=changes))


def tables_of(
    batch: TurnBatch, groups: Sequence[Sequence[Trajectory]], settings: CreditSettings, forward, tokenizer
) -> TurnTables:
    """What turn modes read of the groups: outcomes, gains, states before turns, lengths."""
    scoring = gain_settings(settings)
    gain_B_K, has_gain_B_K = score_gains(plan_gains(batch, scoring, tokenizer), forward, {})
    outcome_B = torch.tensor([t.reward for group in groups for t in group], dtype=torch.float64)
    group_B = torch.tensor([prompt for prompt, group in enumerate(groups) for _ in group])
    rows = StepRows(batch, tokenizer.decode, outcome_B, group_B, gain_B_K, has_gain_B_K)
    table = turn_table(batch.turn_ids_B_T, batch.turn_ids_B_T >= 0)
    a = settings.algorithm
    shape = len(outcome_B), gain_B_K.shape[1] + 1
    return TurnTables(
        pipeline={
            "mode": a.info_gain_norm_mode,
            "signals": {"info_gain": 1.0},
            "outcome_operator": a.advantage_mode,
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


def credits_of(tables: TurnTables, sizes: Sequence[int]) -> list[Credit]:
    """Every registered mode, beside each other; ``sizes``: trajectories per prompt."""
    found = []
    for name, changes in variants(tables.pipeline):
        label = ", ".join([name, *(f"{key} {value}" for key, value in changes.items())])
        label = label.replace("outcome_operator ", "")
        try:
            found.append(Credit(label, _nested(credit_of_turns(tables, name, **changes), tables, sizes)))
        except NotOffered as error:
            found.append(Credit(label, None, str(error)))
    penalised = replace(tables, outcome_B=tables.outcome_B - PENALTY * (tables.n_tool_turns_B + 1))
    control = credit_of_turns(penalised, "none", outcome_operator="grpo")
    return [*found, Credit(f"none, {PENALTY:g} less per turn", _nested(control, tables, sizes))]


def variants(pipeline: Mapping) -> list[tuple[str, dict]]:
    """Modes with what is changed of their options."""
    found: list[tuple[str, dict]] = []
    for name, mode in MODES.items():
        if name == "none":
            others = [{"outcome_operator": o} for o in OUTCOMES if o != pipeline["outcome_operator"]]
            found += [(name, {}), *((name, other) for other in others)]
        elif "alpha" in mode.options:
            found += [(name, {"alpha": alpha}) for alpha in ALPHAS]
        else:
            found.append((name, {}))
    return found


def _nested(credit, tables: TurnTables, sizes: Sequence[int]) -> list[list[list[float]]]:
    rows = [
        row[: n + 1]
        for row, n in zip(credit.advantage_B_K1.tolist(), tables.n_tool_turns_B.tolist(), strict=True)
    ]
    found, begin = [], 0
    for size in sizes:
        found.append(rows[begin : begin + size])
        begin += size
    return found
