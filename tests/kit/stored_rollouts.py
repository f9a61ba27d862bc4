"""A small file of rollouts, as `keep_rollouts` leaves it."""

from verl_credit.records.run.table_files import ROLLOUTS, ROLLOUTS_SCHEMA, write_table

UPDATE = {
    "policy_step": 11,
    "sampling": {"temperature": 0.7, "top_p": 0.9, "top_k": -1},
    "objective": {"loss_mode": "turn_ppo", "loss_agg_mode": "token-mean", "grad_clip": 1.0},
    "rows": 4,
    "loss_tokens": 9,
    "updates": 1,
}
COLUMNS = {
    "uid": ["a", "a", "b"],
    "group": [0, 0, 1],
    "row": [0, 1, 3],
    "prompt_ids": [[5, 6], [5, 6], [7]],
    "response_ids": [[1, 2, 3], [4], [8, 9]],
    "written": [[True, False, True], [True], [True, True]],
    "trained": [[False, False, True], [True], [True, True]],
    "turn": [[0, -1, 1], [0], [0, 0]],
    "outcome": [1.0, 0.0, 0.5],
    "advantage": [[0.0, 0.0, 0.5], [-0.5], [0.25, 0.25]],
    "old_log_prob": [[-1.0, 0.0, -2.0], [-0.5], [-3.0, -4.0]],
    "entropy": [None, None, None],
    "clip_scale": [[1.0, 1.0, 1.25], [1.0], [1.0, 0.75]],
    "ref_log_prob": [None, None, None],
    "rollout_is_weight": [[1.0, 1.0, 2.0], [1.0], [0.5, 1.0]],
}


def stored(folder, update=UPDATE, **changes):
    columns = COLUMNS | changes
    empty = dict.fromkeys(ROLLOUTS_SCHEMA.names, [None] * len(columns["row"]))
    return write_table(folder, ROLLOUTS, 12, empty | columns, {}, update)
