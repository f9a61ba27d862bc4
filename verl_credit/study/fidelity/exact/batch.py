"""Trajectories as the batch that operators read. One token a turn: a mode's advantage_B_T is its turns'."""

from __future__ import annotations

import torch

from verl_credit.credit.laws.world import World
from verl_credit.study.fidelity.exact.trajectories import Trajectories
from verl_credit.study.fidelity.exact.values import turn_values


def as_world(trajectories: Trajectories, logits_D: torch.Tensor) -> World:
    """N rows, a prompt each; K = the question's turns - 1.

    State scores are the potentials after each search (the answer is not scored), values are exact V of the outcome, and an
    anchor is the place: visits at different turns are the same state.
    """
    t, rows = trajectories, len(trajectories.outcome_N)
    turn_N_K1, columns_K1 = t.turn_N_K1, torch.arange(t.turn_N_K1.shape[1])
    searched_N_K = columns_K1[:-1] < t.n_turns_N[:, None] - 1
    place_S = torch.tensor([list(t.choices.question.places).index(name) for name, _ in t.choices.states])
    after_N_K = torch.where(searched_N_K, t.potential_N_K1[:, 1:], torch.nan)
    return World(
        outcome_B=t.outcome_N,
        group_B=torch.arange(rows),
        valid_B=torch.ones(rows, dtype=torch.bool),
        gain_B_K=t.gain_N_K,
        has_gain_B_K=searched_N_K,
        turn_ids_B_T=torch.where(turn_N_K1, columns_K1, -1),
        mask_B_T=turn_N_K1,
        log_prob_B_T=t.turn_log_prob_N_K1(logits_D),
        entropy_B_T=torch.where(turn_N_K1, t.choices.entropy_S(logits_D)[t.state_N_K1], 0.0),
        planning_B_T=torch.zeros_like(turn_N_K1),
        anchor_B_K1=torch.where(turn_N_K1, place_S[t.state_N_K1], -1),
        value_B_K1=turn_values(t, logits_D),
        bootstrap_B=torch.zeros(rows, dtype=torch.float64),
        state_score_B_K1=torch.nn.functional.pad(after_N_K, (0, 1), value=torch.nan),
        initial_score_B=t.potential_N_K1[:, 0],
        turn_tokens_B_K1=turn_N_K1.long(),
        result_turn_B=torch.where(t.n_turns_N > 1, 0, -1),
    )


def in_groups(world: World, group_M_G: torch.Tensor) -> World:
    """The groups' rows one after the other, each group a prompt of its own."""
    groups, size = group_M_G.shape
    prompt_B = torch.arange(groups).repeat_interleave(size)
    return world.rows(group_M_G.flatten()).but(group_B=prompt_B)
