"""The rollouts of a step as its update reads them (`keep_rollouts`), for the entropy probe."""

from __future__ import annotations

from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from verl_credit.host.step import store
from verl_credit.names import CLIP_SCALE
from verl_credit.records.run.tables import ROLLOUTS, drop_old, write_table
from verl_credit.turns.assign import group_numbers
from verl_credit.turns.batch import TurnBatch

SAMPLING = ("temperature", "top_p", "top_k")
OBJECTIVE = (
    *(
        "loss_agg_mode",
        "loss_scale_factor",
        "clip_ratio",
        "clip_ratio_low",
        "clip_ratio_high",
        "clip_ratio_c",
    ),
    *("entropy_coeff", "use_kl_loss", "kl_loss_coef", "kl_loss_type"),
    *("ppo_mini_batch_size", "ppo_epochs", "shuffle"),
)
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
REWARDS = ("token_level_rewards", "rm_scores")  # with the KL penalty in them, or without


def keep_rollouts(run_dir: Path, batch, turns: TurnBatch, number: int, config: DictConfig) -> None:
    """Write the rollouts that update ``number`` is made with; ``batch`` has all fields by now."""
    rows = turns.row_valid_B.nonzero().flatten().tolist() if config.keep_rollouts else []
    if rows:
        data = store.read(
            batch.select_keys([batch.keys[row] for row in rows]), "uid", *PER_TOKEN.values(), *REWARDS
        )
        about = update(config, turns, number)
        write_table(run_dir, ROLLOUTS, number, rollout_columns(turns, rows, data), about)
    drop_old(run_dir, ROLLOUTS, number, config.keep_rollouts)


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


def update(config: DictConfig, turns: TurnBatch, step: int) -> dict:
    """What a reader needs, beside the rows, to sample as the policy did and to take the gradient of the update.

    ``policy_step``: the rollouts were written by the parameters after this step, those of checkpoint ``global_step_N``.
    ``rows`` and ``loss_tokens`` count the whole batch, padding and lost rows included: verl divides by them. Tokens that
    rollout correction rejected are among ``loss_tokens``, too.
    """
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    policy_loss = OmegaConf.to_container(actor.policy_loss, resolve=True)
    rows = len(turns.is_padding)
    return {
        "policy_step": step - 1,
        "sampling": {name: rollout[name] for name in SAMPLING},
        "objective": {
            **{name: actor[name] for name in OBJECTIVE},
            **{name: value for name, value in policy_loss.items() if not name.startswith("_")},
            "grad_clip": actor.optim.clip_grad,
        },
        "rows": rows,
        "loss_tokens": int(turns.response_mask_B_T.sum()),
        "updates": rows // (actor.ppo_mini_batch_size * rollout.n) * actor.ppo_epochs,
    }
