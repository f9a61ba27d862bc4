"""Small batches for tests, written down turn by turn, in the form in which the credit step reads them."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from kit.byte_world import make_tokenizer
from kit.settings import settings
from verl_credit.credit import turn_table
from verl_credit.host.step.estimator import bring_turns, info_gain_advantage
from verl_credit.turns.rollout.book import RowRecord, TurnBatch
from verl_credit.turns.step.assign import CreditRun, StepCredit, StepInputs
from verl_credit.turns.step.signals.built_in import InfoGainSignal
from verl_credit.turns.step.token_stage import TokenStage
from verl_credit.turns.step.turn_values import TurnValues


@dataclass(frozen=True)
class Row:
    """One trajectory: policy turn, observation, policy turn, ... as text."""

    parts: tuple[str, ...]
    prompt: str = "Who?"
    golds: tuple[str, ...] = ("Paris", "paris, france")
    scores: dict = field(default_factory=dict)
    columns: dict = field(default_factory=dict)
    record: RowRecord = field(default_factory=RowRecord)
    is_padding: bool = False
    turn_rewards: tuple[float | None, ...] | None = None
    """Per tool turn; None: no turn has one."""


def lost_row(code: str, **changes) -> Row:
    """A row lost to a fault of the search server: no token of it is the policy's."""
    return Row((), record=RowRecord(stop_reason="tool_fault", tool_fault=code), **changes)


def padding_row(of: Row) -> Row:
    """What verl appends: a stub sequence that carries everything else of the row it was made from."""
    return Row((), "", of.golds, of.scores, of.columns, of.record, is_padding=True)


def turn_batch(rows: list[Row], tokenizer) -> TurnBatch:
    prompts, responses, turn_ids = [], [], []
    for row in rows:
        prompts.append(tokenizer(row.prompt or "<|im_end|>", add_special_tokens=False)["input_ids"])
        ids, turns = [], []
        for place, text in enumerate(row.parts or ("<|im_end|>",)):
            piece = tokenizer(text, add_special_tokens=False)["input_ids"]
            ids += piece
            turns += [place // 2 if row.parts and place % 2 == 0 else -1] * len(piece)
        responses.append(ids)
        turn_ids.append(turns)
    width = max(len(ids) for ids in turn_ids)
    turn_ids_B_T = torch.tensor([ids + [-1] * (width - len(ids)) for ids in turn_ids])
    mask_B_T = (turn_ids_B_T >= 0).long()
    n_turns_B = turn_table(turn_ids_B_T, mask_B_T).n_turns_B
    none = [[None] * max(n - 1, 0) for n in n_turns_B.tolist()]
    return TurnBatch(
        prompt_ids=prompts,
        response_ids=responses,
        turn_ids_B_T=turn_ids_B_T,
        response_mask_B_T=mask_B_T,
        records=[row.record.as_dict() for row in rows],
        scores=[row.scores for row in rows],
        ground_truths=[{"target": list(row.golds)} for row in rows],
        extra_infos=[{"question": row.prompt} for row in rows],
        columns=[row.columns for row in rows],
        is_padding=[row.is_padding for row in rows],
        row_valid_B=torch.tensor([not row.is_padding and not row.record.tool_fault for row in rows]),
        n_turns_B=n_turns_B,
        turn_rewards=[
            none[place] if row.turn_rewards is None else list(row.turn_rewards)
            for place, row in enumerate(rows)
        ],
    )


def step_inputs(
    turns: TurnBatch, gains: list[list[float | None]], tokenizer=None, *, signals=None, scored=True, **changes
) -> StepInputs:
    """The batch before the estimator. ``gains``: one per tool turn, None where a turn has none. They are the turn rewards
    unless ``signals`` says otherwise; any share of them may be lost. With a tokenizer there is a token level."""
    width = max(int(turns.n_turns_B.max()) - 1, 0)
    wide = [row + [None] * (width - len(row)) for row in gains]
    chosen = settings(**changes)
    run = CreditRun(
        chosen,
        tokenizer or make_tokenizer(),
        {InfoGainSignal("info_gain"): 1.0} if signals is None else signals,
        None if tokenizer is None else TokenStage(chosen.algorithm, tokenizer),
        tolerated_share=1.0,
        values=TurnValues.of(chosen),
    )
    return StepInputs(
        run,
        turns,
        torch.tensor([[gain or 0.0 for gain in row] for row in wide]).view(len(wide), width),
        torch.tensor([[gain is not None for gain in row] for row in wide]).view(len(wide), width).bool(),
        scored=scored,
    )


def estimate(
    inputs: StepInputs,
    turns: TurnBatch,
    outcomes: list[float],
    groups: list,
    mask_B_T: torch.Tensor | None = None,
) -> StepCredit:
    """By the registered estimator, with the outcome as the reward of the last token.

    ``mask_B_T``: what rejection has left of the response mask."""
    rewards_B_T = torch.zeros(turns.turn_ids_B_T.shape)
    rewards_B_T[:, -1] = torch.tensor(outcomes)
    with bring_turns(inputs) as found:
        mask_B_T = turns.response_mask_B_T if mask_B_T is None else mask_B_T
        info_gain_advantage(rewards_B_T, mask_B_T, index=groups)
    return found.credit


def credited(turns: TurnBatch, gains, outcomes: list[float], groups: list, **changes) -> StepCredit:
    """The batch after the estimator."""
    return estimate(step_inputs(turns, gains, **changes), turns, outcomes, groups)
