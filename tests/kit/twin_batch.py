"""A stored step of a run, as the twin of the trainer reads it."""

from __future__ import annotations

import torch

from verl_credit.study.twin_step import Objective
from verl_credit.turns.rollout.book import TurnBatch


def turns_of(rollouts, facts, tokenizer, data) -> TurnBatch:
    """``data``: the rows of the training file, in which a rollout's prompt is found again."""
    truths = {
        tuple(
            tokenizer.apply_chat_template(row["prompt"], tokenize=True, add_generation_prompt=True)[
                "input_ids"
            ]
        ): row
        for row in data
    }
    found = [truths[tuple(ids.tolist())] for ids in rollouts.prompt_ids]
    rows, turn_ids_B_T = len(rollouts), facts.turn_ids_B_T
    n_turns_B = turn_ids_B_T.max(dim=1).values + 1
    return TurnBatch(
        prompt_ids=[ids.tolist() for ids in rollouts.prompt_ids],
        response_ids=[ids.tolist() for ids in rollouts.response_ids],
        turn_ids_B_T=turn_ids_B_T,
        response_mask_B_T=(turn_ids_B_T >= 0).long(),
        records=[{} for _ in range(rows)],
        scores=[{} for _ in range(rows)],
        ground_truths=[row["reward_model"]["ground_truth"] for row in found],
        extra_infos=[{} for _ in range(rows)],
        columns=[{} for _ in range(rows)],
        is_padding=[False] * rows,
        row_valid_B=torch.ones(rows, dtype=torch.bool),
        n_turns_B=n_turns_B,
        turn_rewards=[[None] * (int(n) - 1) for n in n_turns_B],
    )


def objective_of(facts) -> Objective:
    read = facts.objective
    keys = (
        "clip_ratio_low",
        "clip_ratio_high",
        "clip_ratio_c",
        "ratio_level",
        "dynamic_clip",
        "loss_agg_mode",
    )
    more = ("grad_clip", "loss_scale_factor", "entropy_coeff")
    rows = facts.rows * read["ppo_epochs"] // facts.updates
    return Objective(
        **{key: read[key] for key in (*keys, *more)}, mini_batch_rows=rows, epochs=read["ppo_epochs"]
    )


def adamw_of(model, state) -> torch.optim.AdamW:
    """The optimiser of a checkpoint, over the parameters of ``model``."""
    named = dict(model.named_parameters())
    one = next(iter(state.parameters.values()))
    optimizer = torch.optim.AdamW(
        named.values(), lr=state.lr, betas=one.betas, eps=one.eps, weight_decay=one.weight_decay
    )
    for name, parameter in named.items():
        saved = state.parameters[name]
        optimizer.state[parameter] = {
            "step": torch.tensor(float(saved.step)),
            "exp_avg": saved.exp_avg.clone(),
            "exp_avg_sq": saved.exp_avg_sq.clone(),
        }
    return optimizer
