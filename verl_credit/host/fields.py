"""Names under which our data travels through verl: one place, so that writer and reader cannot differ."""

TURN_IDS = "turn_ids"
"""Per response token: index of the turn the policy wrote it in, -1 for tokens that are not the policy's."""

CLIP_SCALE = "clip_scale"
"""Per response token: factor on the clip range of the token's turn."""

ROW_RECORD = "credit"
"""Key in verl's per-row ``extra_fields``: what the agent loop says about the row (see ``turn_book``)."""

AGENT_NAME = "search_agent"
ADV_ESTIMATOR = "info_gain"
LOSS_MODE = "turn_ppo"
TRAINER_MODE = "credit"
ROLLOUT_NAME = "hf"
