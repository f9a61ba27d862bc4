"""What a step leaves behind of its credit: turn tables of all rows, token tables of the groups that the report shows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from verl_credit.config.keys import Algorithm
from verl_credit.credit.token.token_transforms import TRANSFORMS, token_weights
from verl_credit.credit.token.uncertainty import canonical_kind, uncertainty
from verl_credit.host.step import store
from verl_credit.records.run.tables import TOKENS, TURNS, drop_old, write_table
from verl_credit.turns.assign import StepCredit
from verl_credit.turns.batch import TurnBatch
from verl_credit.turns.reward.qa import gold_answers
from verl_credit.turns.signals import turn_texts
from verl_credit.turns.token_stage import TokenInputs, pieces_of, planning_detector

OBSERVATION_CHARACTERS = 4000
_UNFINISHED = "\ufffd"  # a character that a token boundary divides
_LONGEST_CHARACTER = 4  # bytes, and so tokens


def keep_tables(
    run_dir: Path, batch, step: StepCredit, number: int, *, groups: int, steps: int, entropy: bool
) -> None:
    """Write the tables of step ``number``; ``batch`` has its advantages by now.

    ``groups``: how many prompts' rollouts the token table has (`sample_trajectories`). ``steps``: how many steps' token
    tables are kept (`keep_token_tables`). ``entropy``: verl computed entropies in this step.
    """
    about = pipeline(step)
    write_table(run_dir, TURNS, number, turn_columns(step, store.prompt_ids(batch)), about)
    rows = sampled_rows(step, groups) if steps else []
    if rows:
        part = batch.select_keys([batch.keys[row] for row in rows])
        read = store.read(part, "advantages", "response_mask")
        advantage_b_T, trained_b_T = (
            read[name].to_padded_tensor(padding=0) for name in ("advantages", "response_mask")
        )
        tokens = store.token_inputs(part, number, step.tables.valid_B[rows], entropy=entropy)
        columns = token_columns(step, rows, tokens, trained_b_T.bool(), advantage_b_T)
        write_table(run_dir, TOKENS, number, columns, about)
    drop_old(run_dir, TOKENS, number, steps)


def pipeline(step: StepCredit) -> dict:
    """What a report must know to make the same credit again."""
    settings, algorithm = step.settings, step.settings.algorithm
    return {
        "mode": algorithm.info_gain_norm_mode,
        "signals": dict(settings.turn_signals),
        "outcome_operator": algorithm.advantage_mode,
        "tied_groups": algorithm.tied_groups,
        "shared": {
            "gamma": algorithm.gamma,
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
    """A line per turn of every row but padding; a row without a turn has one line without tokens."""
    columns: dict[str, list] = {}
    turns, tables = step.inputs.turns, step.tables
    n_tokens = tables.optional["turn_tokens_B_K1"].tolist()
    reward, has_reward = tables.reward_B_K.double().tolist(), tables.has_reward_B_K.tolist()
    known = (tables.has_reward_B_K & tables.reward_B_K.isfinite()).tolist()
    anchor_B_K1 = tables.optional.get("anchor_B_K1")
    anchor = None if anchor_B_K1 is None else anchor_B_K1.tolist()
    signals = {
        name: (value_B_K.double().tolist(), (has_B_K & value_B_K.isfinite()).tolist())
        for name, (value_B_K, has_B_K) in step.signals.items()
    }
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
                "anchor": None if anchor is None else anchor[row][turn],
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
    """All valid rows of the groups that `sample_trajectories` begins with: by their longest row, then by its place.

    A reader must see a group whose rollouts are all right and that gives a turn with a reward above 0 a negative advantage:
    where none of these is one, the first that is takes the last place.
    """
    turns, group_B = step.inputs.turns, step.tables.group_B
    longest: dict[int, tuple[int, int]] = {}
    for row in turns.row_valid_B.nonzero().flatten().tolist():
        group, rank = int(group_B[row]), (-int(turns.n_turns_B[row]), row)
        longest[group] = min(longest.get(group, rank), rank)
    ordered = sorted(longest, key=longest.__getitem__)
    chosen = ordered[:count]
    telling = [group for group in ordered if _tells(step, group)]
    if chosen and telling and not set(chosen) & set(telling):
        chosen[-1] = telling[0]
    return [
        row for row in range(len(turns.records)) if turns.row_valid_B[row] and int(group_B[row]) in chosen
    ]


def _tells(step: StepCredit, group: int) -> bool:
    tables = step.tables
    rows_B = tables.valid_B & (tables.group_B == group)
    against_B_K = step.rewarded_B_K & (tables.reward_B_K > 0) & (step.credit.advantage_B_K < 0)
    return bool((tables.outcome_B[rows_B] > 0.5).all()) and bool(against_B_K[rows_B].any())


def token_columns(
    step: StepCredit,
    rows: list[int],
    inputs: TokenInputs,
    trained_b_T: torch.Tensor,
    advantage_b_T: torch.Tensor,
) -> dict[str, list]:
    """A line per row; the tensors have the rows ``rows`` alone. Lists are over the tokens that the policy wrote."""
    turns, tokenizer = step.inputs.turns, step.inputs.run.tokenizer
    width = inputs.log_prob_B_T.shape[1]
    turn_ids_b_T = turns.turn_ids_B_T[rows, :width]
    written_b_T = turn_ids_b_T >= 0
    trained_b_T = trained_b_T & written_b_T
    planning_b_T = _planning(step, inputs.token_ids_B_T, written_b_T)
    uncertainty_b_T, pooled_b_T, weight_b_T = _weights(step, rows, inputs, planning_b_T, trained_b_T)
    values = {
        "turn": turn_ids_b_T,
        "trained": trained_b_T,
        "planning": planning_b_T,
        "log_prob": inputs.log_prob_B_T,
        "entropy": inputs.entropy_B_T,
        "uncertainty": uncertainty_b_T,
        "pooled_uncertainty": pooled_b_T,
        "weight": weight_b_T,
        "advantage": advantage_b_T,
    }
    columns = {
        name: [None] * len(rows) if value is None else _lists(value, written_b_T)
        for name, value in values.items()
    }
    texts = [_texts(turns, row, tokenizer.decode) for row in rows]
    return columns | {
        "group": step.tables.group_B[rows].tolist(),
        "row": rows,
        "question": [
            str(turns.extra_infos[row].get("question", ""))[:OBSERVATION_CHARACTERS] for row in rows
        ],
        "golds": [
            [str(gold)[:OBSERVATION_CHARACTERS] for gold in gold_answers(turns.ground_truths[row])]
            for row in rows
        ],
        "stop_reason": [str(turns.records[row]["stop_reason"]) for row in rows],
        "observations": [[text[:OBSERVATION_CHARACTERS] for text in row] for row in texts],
        "observation_characters": [[len(text) for text in row] for row in texts],
        "text": [
            token_texts(inputs.token_ids_B_T[place][written_b_T[place]].tolist(), tokenizer)
            for place in range(len(rows))
        ],
    }


def token_texts(ids: list[int], tokenizer) -> list[str]:
    """A piece of text per token. Tokens that divide a character: the first has it whole, the others are empty."""
    pieces, place = pieces_of(tokenizer)(ids), 0
    while place < len(pieces):
        if _UNFINISHED in pieces[place]:
            for end in range(place + 2, min(place + _LONGEST_CHARACTER, len(ids)) + 1):
                (whole,) = tokenizer.batch_decode([ids[place:end]], clean_up_tokenization_spaces=False)
                if _UNFINISHED not in whole:
                    pieces[place:end] = [whole, *[""] * (end - place - 1)]
                    break
        place += 1
    return pieces


def _texts(turns: TurnBatch, row: int, decode: Callable) -> list[str]:
    """What was shown to the policy after each turn."""
    ids, turn_ids = turns.response_ids[row], turns.turn_ids_B_T[row].tolist()
    return [seen for _, seen in turn_texts(ids, turn_ids, int(turns.n_turns_B[row]), decode)]


def _planning(step: StepCredit, ids_b_T, written_b_T) -> torch.Tensor | None:
    """By the run's own detector; where no transform asks for one, by the phrases that cost nothing."""
    run = step.inputs.run
    detect = None if run.stage is None else run.stage.detect
    if detect is None and step.settings.algorithm.planning.detector == "grams":
        detect = planning_detector(run.settings.algorithm, run.tokenizer)
    return None if detect is None else detect(ids_b_T, written_b_T)


def _weights(step: StepCredit, rows: list[int], inputs: TokenInputs, planning_b_T, trained_b_T):
    """(uncertainty, the same after pooling, weight), None where an operator of the user's makes them."""
    algorithm: Algorithm = step.settings.algorithm
    kind = canonical_kind(algorithm.uncertainty_kind)
    if kind is None or (kind == "shannon_entropy" and inputs.entropy_B_T is None):
        return None, None, None
    uncertainty_b_T = uncertainty(kind, inputs.log_prob_B_T, trained_b_T, entropy_B_T=inputs.entropy_B_T)
    transform = TRANSFORMS.get(algorithm.transform_mode)
    if transform is None or algorithm.replaces_turns:
        return uncertainty_b_T, None, None
    weight_b_T, pooled_b_T = token_weights(
        transform,
        uncertainty_b_T,
        trained_b_T,
        planning_B_T=planning_b_T,
        group_B=step.tables.group_B[rows] if transform.masked else None,
        sepa_lambda=step.metrics.get("credit/sepa_lambda") or 0.0,
        gtpo_beta=algorithm.gtpo.beta,
        entropy_mask_rho=algorithm.entropy_mask.rho,
    )
    return uncertainty_b_T, pooled_b_T, weight_b_T


def _lists(values_b_T: torch.Tensor, written_b_T: torch.Tensor) -> list[list]:
    return [values[written].tolist() for values, written in zip(values_b_T, written_b_T, strict=True)]
