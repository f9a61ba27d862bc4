"""Runs with credit tables for tests: small batches through the estimator, and their tables in a folder."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import torch

from kit.byte_world import make_tokenizer
from kit.turn_rows import Row, estimate, padding_row, step_inputs, turn_batch
from verl_credit.host.step.kept_tables import pipeline, sampled_rows, turn_columns
from verl_credit.host.step.watch import credit_columns, rollout_columns, text_columns
from verl_credit.names import CLIP_SCALE
from verl_credit.records.run.table_files import ROLLOUTS, TURNS, write_table
from verl_credit.turns.rollout.book import RowRecord
from verl_credit.turns.step.token_stage import TokenInputs

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


def rows_of(inputs: TokenInputs, rows: list[int], trained_B_T) -> TokenInputs:
    names = ("token_ids_B_T", "log_prob_B_T", "entropy_B_T", "row_valid_B")
    values = {name: getattr(inputs, name)[rows] for name in names}
    return TokenInputs(step=inputs.step, mask_B_T=trained_B_T[rows], **values)


def write_step(folder, number=3, sample=3, **changes):
    """Tables of one step in ``folder``; returns what was credited."""
    found = credited_step(**changes)
    _, step, _, inputs, trained_B_T = found
    write_tables(folder, step, number, changes.get("groups", GROUPS), sample, inputs, trained_B_T)
    return found


def write_tables(folder, step, number, groups, sample, inputs=None, trained_B_T=None):
    """``sample``: how many groups, None: all. ``inputs``, ``trained_B_T``: those of `credited_step`."""
    turns = step.inputs.turns
    inputs = token_inputs(turns, number) if inputs is None else inputs
    trained_B_T = turns.response_mask_B_T.bool() if trained_B_T is None else trained_B_T
    write_table(folder, TURNS, number, turn_columns(step, groups), pipeline(step))
    rows = sampled_rows(step, len(groups) if sample is None else sample)
    if not rows:
        return
    fields = {
        "advantages": step.advantage_B_T,
        "response_mask": trained_B_T,
        "old_log_probs": inputs.log_prob_B_T,
        "entropy": inputs.entropy_B_T,
        CLIP_SCALE: step.clip_scale_B_T,
        "rm_scores": torch.zeros(step.advantage_B_T.shape),
    }
    data = {
        name: torch.nested.as_nested_tensor(
            [value[row, : len(turns.response_ids[row])] for row in rows], layout=torch.jagged
        )
        for name, value in fields.items()
    }
    columns = rollout_columns(turns, rows, data | {"uid": [groups[row] for row in rows]})
    columns |= text_columns(turns, rows, tokenizer())
    credit = credit_columns(step, rows, rows_of(inputs, rows, trained_B_T))
    columns |= {name: [None] * len(rows) if one is None else one for name, one in credit.items()}
    write_table(folder, ROLLOUTS, number, columns, pipeline(step))
