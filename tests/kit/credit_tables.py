"""Runs with credit tables for tests: small batches through the estimator, and their tables in a folder."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import torch

from kit.byte_world import make_tokenizer
from kit.turn_rows import Row, estimate, padding_row, step_inputs, turn_batch
from verl_credit.host.step.tables import pipeline, sampled_rows, token_columns, turn_columns
from verl_credit.records.run.tables import TOKENS, TURNS, write_table
from verl_credit.turns.book import RowRecord
from verl_credit.turns.token_stage import TokenInputs

PLANS, CALLS = "let me check the town", "call it"


def rollout(*texts: str, prompt: str = "Who?", stop: str = "answer") -> Row:
    return Row(texts, prompt, record=RowRecord(stop))


# p: all right, and the first searches gained. q: mixed. r: all wrong, no gain.
ROWS = [
    rollout(PLANS, "page", CALLS, "other page", "done"),
    rollout(CALLS, "page", "what if we stop"),
    rollout(PLANS, "page", CALLS, "page", "done"),
    padding_row(rollout("x")),
    rollout(CALLS, "page", "the key is here", prompt="Where?"),
    rollout(CALLS, "a longer page", CALLS, "page", "no", prompt="Where?"),
    rollout("done at once", prompt="Where?"),
    rollout(CALLS, "page", "no", prompt="When?"),
    rollout(CALLS, "page", "nothing", prompt="When?"),
]
GROUPS = ["p", "p", "p", "pad", "q", "q", "q", "r", "r"]
GAINS = [[0.4, 0.2], [0.1], [0.6, 0.1], [], [0.3], [-0.1, 0.05], [], [0.0], [-0.2]]
OUTCOMES = [1.0, 1.0, 1.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0]
SEPA = {"steps": 100, "delay_steps": 0, "correct_rate_gate": 0.0}  # lambda = step / 100


@cache
def tokenizer():
    return make_tokenizer()


def credited_step(rows=ROWS, gains=GAINS, outcomes=OUTCOMES, groups=GROUPS, step=50, reject=None, **changes):
    """(advantages_B_T, step, turns, inputs, trained_B_T). ``reject``: rows whose first token is rejected."""
    turns = turn_batch(rows, tokenizer())
    given = replace(
        step_inputs(turns, gains, tokenizer(), sepa=SEPA, **changes), tokens=token_inputs(turns, step)
    )
    trained_B_T = turns.response_mask_B_T.bool().clone()
    for row in reject or ():
        trained_B_T[row, 0] = False
    found = estimate(given, turns, outcomes, groups, trained_B_T.long())
    return found.advantage_B_T, found, turns, given.tokens, trained_B_T


def token_inputs(turns, step) -> TokenInputs:
    shape, random = turns.turn_ids_B_T.shape, torch.Generator().manual_seed(0)
    ids_B_T = torch.tensor([ids + [0] * (shape[1] - len(ids)) for ids in turns.response_ids])
    log_prob_B_T, entropy_B_T = -3 * torch.rand(shape, generator=random), torch.rand(shape, generator=random)
    mask_B_T = turns.response_mask_B_T.bool()
    return TokenInputs(step, mask_B_T, ids_B_T, log_prob_B_T, entropy_B_T, turns.row_valid_B)


def write_step(folder, number=3, sample=3, **changes):
    """Tables of one step in ``folder``; returns what was credited."""
    advantages_B_T, step, _, inputs, trained_B_T = found = credited_step(**changes)
    write_table(folder, TURNS, number, turn_columns(step, changes.get("groups", GROUPS)), pipeline(step))
    rows = sampled_rows(step, sample)
    part = TokenInputs(
        inputs.step,
        inputs.mask_B_T[rows],
        inputs.token_ids_B_T[rows],
        inputs.log_prob_B_T[rows],
        inputs.entropy_B_T[rows],
        inputs.row_valid_B[rows],
    )
    columns = token_columns(step, rows, part, trained_B_T[rows], advantages_B_T[rows])
    write_table(folder, TOKENS, number, columns, pipeline(step))
    return found
