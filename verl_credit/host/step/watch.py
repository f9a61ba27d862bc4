"""The rollouts of a step as its update reads them, with texts and credit (`keep_rollouts`)."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from omegaconf import DictConfig, OmegaConf

from verl_credit.config.keys import Algorithm
from verl_credit.credit.token.token_transforms import TRANSFORMS, token_weights
from verl_credit.credit.token.uncertainty import canonical_kind, uncertainty
from verl_credit.host.step import store
from verl_credit.host.step.kept_tables import pipeline, sampled_rows
from verl_credit.names import CLIP_SCALE
from verl_credit.records.run.files import plain
from verl_credit.records.run.rollouts import keep_samples, write_samples
from verl_credit.records.run.table_files import ROLLOUTS, SAMPLES, table_path, tables_of, write_table
from verl_credit.turns.rollout.book import TurnBatch
from verl_credit.turns.rollout.reward.env_record import golds_of
from verl_credit.turns.step.assign import StepCredit, group_numbers
from verl_credit.turns.step.signals.signal import turn_texts
from verl_credit.turns.step.step import StepHost, token_inputs
from verl_credit.turns.step.token_stage import TokenInputs, pieces_of, planning_detector

_UNFINISHED = "\ufffd"  # a character that a token boundary divides
OBJECTIVE = (
    "loss_agg_mode", "loss_scale_factor", "clip_ratio", "clip_ratio_low", "clip_ratio_high", "clip_ratio_c",
    "entropy_coeff", "use_kl_loss", "kl_loss_coef", "kl_loss_type", "ppo_mini_batch_size", "ppo_epochs", "shuffle",
)  # fmt: skip
# Column: the field of the batch. A field that the step has not made is a null column.
PER_TOKEN = {
    "trained": "response_mask",
    "advantage": "advantages",
    "old_log_prob": "old_log_probs",
    "entropy": "entropy",
    "clip_scale": CLIP_SCALE,
    "ref_log_prob": "ref_log_prob",
    "rollout_is_weight": "rollout_is_weights",
}
CREDIT = ("planning", "uncertainty", "pooled_uncertainty", "weight")
CONTEXT = "[another context] "
"""Stands before what the policy reads next where a context was begun anew, or a sub-agent begins or ends."""
REWARDS = ("token_level_rewards", "rm_scores")  # the KL penalty is in the first alone


@dataclass(frozen=True)
class Credited:
    """The rows that are kept, and what the token level read and made of them; None where nothing computes it."""

    rows: list[int]
    columns: dict[str, list | None]
    pipeline: dict
    rollouts: TurnBatch | None = None
    """The joined rows of a step whose rollouts have several outputs: their texts alone are kept."""


def credited_rows(host: StepHost, step: StepCredit, keep: DictConfig) -> Credited:
    """Called while the rows have the log-probs that the credit was made with: an asynchronous trainer replaces them before
    the update."""
    turns = step.inputs.turns
    rows = turns.valid_rows if keep.groups is None else sampled_rows(step, keep.groups)
    if not keep.steps or not rows:
        return Credited([], {}, {})
    if turns.sessions is not None:
        kept = "keep_rollouts keeps the texts of one rollout of a group, and no tokens: some have several outputs"
        host.note("keep_rollouts", kept)
        return Credited(rows, {"group": step.tables.group_B[rows].tolist()}, pipeline(step), turns)
    tokens = token_inputs(host, step.tables.valid_B[rows], rows=rows)
    return Credited(rows, credit_columns(step, rows, tokens), pipeline(step))


def keep_rollouts(
    run_dir: Path,
    batch,
    turns: TurnBatch,
    credited: Credited | None,
    number: int,
    config: DictConfig,
    tokenizer,
) -> None:
    """Write the rollouts that update ``number`` is made with; ``batch`` has all fields by now.

    ``credited``: None where verl's own estimator made the advantages; it knows no groups to choose among.
    """
    steps, whole = config.keep_rollouts.steps, config.keep_rollouts.groups is None
    # The same step may have written it before a resume.
    table_path(run_dir, SAMPLES, number).unlink(missing_ok=True)
    if credited is None:
        credited = Credited(turns.valid_rows if steps and whole else [], dict.fromkeys(CREDIT), {})
    if (joined := credited.rollouts) is not None:
        texts = text_columns(joined, credited.rows, tokenizer) | {"row": credited.rows} | credited.columns
        write_samples(run_dir, number, texts, credited.pipeline)
    elif rows := credited.rows:
        part = batch.select_keys([batch.keys[row] for row in rows])
        data = store.read(part, "uid", *PER_TOKEN.values(), *REWARDS)
        columns = rollout_columns(turns, rows, data) | text_columns(turns, rows, tokenizer)
        columns |= {
            name: [None] * len(rows) if one is None else one for name, one in credited.columns.items()
        }
        about = update(config, turns, number) if whole else None
        write_table(run_dir, ROLLOUTS, number, columns, credited.pipeline, about)
    for old in tables_of(run_dir, ROLLOUTS):
        if old <= number - steps:
            keep_samples(run_dir, old)


def rollout_columns(turns: TurnBatch, rows: list[int], data) -> dict[str, list]:
    """A line per row; ``data`` has the rows ``rows`` alone, its fields nested over the tokens of each response."""
    uids = [str(uid) for uid in data["uid"]]
    responses = [turns.response_ids[row] for row in rows]
    turn = [turns.turn_ids_B_T[row, : len(ids)] for row, ids in zip(rows, responses, strict=True)]
    rewards = next(data[name] for name in REWARDS if name in data)
    columns = {
        column: [values.tolist() for values in data[name].unbind()] if name in data else [None] * len(rows)
        for column, name in PER_TOKEN.items()
    }
    return columns | {
        "uid": uids,
        "group": group_numbers(uids).tolist(),
        "row": rows,
        "prompt_ids": [turns.prompt_ids[row] for row in rows],
        "response_ids": responses,
        "written": [(ids >= 0).tolist() for ids in turn],
        "trained": [[bool(one) for one in row] for row in columns["trained"]],
        "turn": [ids.tolist() for ids in turn],
        "outcome": [float(values.double().sum()) for values in rewards.unbind()],
    }


def text_columns(turns: TurnBatch, rows: list[int], tokenizer) -> dict[str, list]:
    texts, pieces = texts_of_turns(turns, rows, tokenizer.decode), []
    for row in rows:
        ids, turn_ids = turns.response_ids[row], turns.turn_ids_B_T[row].tolist()
        written = [one for one, turn in zip(ids, turn_ids, strict=False) if turn >= 0]
        piece = iter(token_texts(written, tokenizer))
        pieces.append([next(piece) if turn >= 0 else "" for turn in turn_ids[: len(ids)]])
    infos, records = [turns.extra_infos[row] for row in rows], [turns.records[row] for row in rows]
    return {
        "question": [str(info.get("question", "")) for info in infos],
        "golds": [list(map(str, golds_of(turns.records[row], turns.ground_truths[row]))) for row in rows],
        "gold_ids": [json.dumps(plain(info.get("gold_ids"))) for info in infos],
        "searches": [json.dumps(plain(record["searches"])) for record in records],
        "stop_reason": [str(record["stop_reason"]) for record in records],
        "texts": [[written for written, _ in row] for row in texts],
        "observations": [[seen for _, seen in row] for row in texts],
        "pieces": pieces,
    }


def texts_of_turns(
    turns: TurnBatch, rows: Sequence[int], decode: Callable[[list[int]], str]
) -> list[list[tuple[str, str]]]:
    """`turn_texts` of each row, with a mark before what is read where the next turn is of another output."""
    texts, begins = [], _contexts(turns)
    for row in rows:
        turn_ids, n_turns = turns.turn_ids_B_T[row].tolist(), int(turns.n_turns_B[row])
        of_turns = enumerate(turn_texts(turns.response_ids[row], turn_ids, n_turns, decode))
        texts.append([(own, CONTEXT * ((row, turn) in begins) + seen) for turn, (own, seen) in of_turns])
    return texts


def _contexts(turns: TurnBatch) -> set[tuple[int, int]]:
    """(row, turn) of joined rows where the next turn is of another output."""
    if (sessions := turns.sessions) is None:
        return set()
    output_B_1 = torch.arange(len(sessions.session_B))[:, None]
    output_S_K1 = sessions.join_turns(output_B_1.expand_as(sessions.turn_B_K1), -1)
    next_S_K = output_S_K1[:, 1:]
    return set(map(tuple, ((next_S_K >= 0) & (next_S_K != output_S_K1[:, :-1])).nonzero().tolist()))


def credit_columns(step: StepCredit, rows: list[int], inputs: TokenInputs) -> dict[str, list | None]:
    """Returns inputs and results of the token level, a line per row; ``inputs`` has the rows ``rows`` alone."""
    turns = step.inputs.turns
    width = inputs.log_prob_B_T.shape[1]
    turn_ids_b_T = turns.turn_ids_B_T[rows, :width]
    written_b_T = turn_ids_b_T >= 0
    trained_b_T = inputs.mask_B_T & written_b_T
    # A run without a transform that reads the mask has no detector; the phrases are cheap, so they are used there.
    run, algorithm = step.inputs.run, step.settings.algorithm
    detect = None if run.stage is None else run.stage.detect
    if detect is None and algorithm.planning.detector == "grams":
        detect = planning_detector(algorithm, run.tokenizer)
    planning_b_T = None if detect is None else detect(inputs.token_ids_B_T, written_b_T)
    values = planning_b_T, *_weights(step, rows, inputs, planning_b_T, trained_b_T)
    lengths = [len(turns.response_ids[row]) for row in rows]

    def cut(value_b_T) -> list | None:
        if value_b_T is None:
            return None
        return [row[:length].tolist() for row, length in zip(value_b_T, lengths, strict=True)]

    return dict(zip(CREDIT, map(cut, values), strict=True)) | {"group": step.tables.group_B[rows].tolist()}


def token_texts(ids: list[int], tokenizer) -> list[str]:
    """A piece of text per token. Tokens that divide a character: the first has it whole, the others are empty."""
    pieces, place = pieces_of(tokenizer)(ids), 0
    while place < len(pieces):
        if _UNFINISHED in pieces[place]:
            for end in range(place + 2, min(place + 4, len(ids)) + 1):  # at most 4 bytes, and so tokens
                (whole,) = tokenizer.batch_decode([ids[place:end]], clean_up_tokenization_spaces=False)
                if _UNFINISHED not in whole:
                    pieces[place:end] = [whole, *[""] * (end - place - 1)]
                    break
        place += 1
    return pieces


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


def update(config: DictConfig, turns: TurnBatch, step: int) -> dict:
    """Returns what a reader needs, beside the rows, to sample as the policy did and to take the gradient of the update.

    ``policy_step``: the rollouts were written by the parameters after this step, those of checkpoint ``global_step_N``.
    ``rows`` and ``loss_tokens`` count the whole batch with padding and masked rows: verl divides by them. Tokens that
    rollout correction rejected are among ``loss_tokens``, too.
    """
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    policy_loss = OmegaConf.to_container(actor.policy_loss, resolve=True)
    rows = len(turns.is_padding)
    return {
        "policy_step": step - 1,
        "sampling": {name: rollout[name] for name in ("temperature", "top_p", "top_k")},
        "objective": {
            **{name: actor[name] for name in OBJECTIVE},
            **{name: value for name, value in policy_loss.items() if not name.startswith("_")},
            "grad_clip": actor.optim.clip_grad,
        },
        "rows": rows,
        "loss_tokens": int(turns.response_mask_B_T.sum()),
        "updates": rows // (actor.ppo_mini_batch_size * rollout.n) * actor.ppo_epochs,
    }
