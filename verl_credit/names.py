"""The names of our data in verl's batches, metrics, agent loops, trainers and modes, for writer and reader alike."""

TURN_IDS = "turn_ids"
"""The index of each response token's turn, -1 for a token that the policy did not write."""

TURN_REWARDS = "turn_rewards"
"""Key in verl's per-row ``extra_fields``: what the calls of each turn earned; None: no reward is known."""

CLIP_SCALE = "clip_scale"
"""The factor on the clip range of each response token's turn."""

BRANCHES = "credit_branches"
"""The answers that are appended to each row in the old_log_probs forward (`turns/score/branches.py`)."""

BRANCH_LOG_PROBS = "credit_branch_log_probs"
"""The log-probs of these answers' tokens in that forward."""

SCORE_BRANCHES = "credit_score_branches"
"""Flag on a batch: use its branches."""

ROW_RECORD = "credit"
"""Key in verl's per-row ``extra_fields``: the agent loop's record of the row (`turns/rollout/book.py`)."""

LINK = "link"
"""Key in verl's per-row ``extra_fields``: an output's chain and the chain's parent, where there are sub-agents."""

SCORES = "reward_extra_info"
"""Key in verl's per-row ``extra_fields``: the values of the reward function beside the score."""

TOOL_FAULT = "verl_credit_fault"
"""Key among the metrics of a call: the `SearchFault` of a tool whose server failed. verl hands metrics on as they are."""

AGENT_NAME = "search_agent"
TURN_AGENT = "turn_agent"
LOOP_MANAGER = "actor_rollout_ref.rollout.agent.agent_loop_manager_class"
OUR_MANAGER = "verl_credit.host.rollout.agent_manager.CreditAgentLoopManager"
ENV_AGENT = "env_agent"
AGENTS = (AGENT_NAME, TURN_AGENT, ENV_AGENT)
"""Our agent loops: with the search tool, without it, and in an environment."""
ENVIRONMENTS = ("gymnasium", "minigrid", "textworld", "textarena", "openenv")
"""The adapters of environments (`worlds/environments/`)."""
ADV_ESTIMATOR = "info_gain"
LOSS_MODE = "turn_ppo"
TRAINER_MODE = "credit"
COLOCATE_MODE = "credit_colocate_async"
SEPARATE_MODE = "credit_separate_async"
ASYNC_MODES = (COLOCATE_MODE, SEPARATE_MODE)
TRAINING_MODES = (TRAINER_MODE, *ASYNC_MODES)
"""Our trainers: one makes every step on rollouts of its own weights, and the rollouts of two run on into later steps."""
MEASURE_MODE = "credit_fidelity"
TRAINER_MODES = (*TRAINING_MODES, MEASURE_MODE)
"""The trainers, and the one that `verl-credit fidelity` starts, which makes no step."""
ROLLOUT_NAME = "hf"
OUR_REWARD = "pkg://verl_credit.turns.rollout.reward.qa"
"""``reward.custom_reward_function.path`` of a run whose reward is ours."""
MCP_TOOL = "verl_credit.host.rollout.mcp_tool.MCPTool"
"""``class_name`` of an MCP tool in the tool file."""
VLLM_EXTENSION = "verl_credit.host.vllm_rollout.worker_extension.WorkerExtension"
"""The class that extends vLLM's worker."""

PROBE_SCORE, PROBE_PATH = "entropy_probe_score", "entropy_probe_path"
"""The weights of the entropy probe on each response token's log-prob and entropy."""

PROBE_GROUP = "entropy_probe_group"
"""The group of prompts of each row in the entropy probe's standard error."""


ANSWER_WHEN_SOLVED = "credit/gain/answer_when_solved"
EXPLAINED_VARIANCE = "credit/values/explained_variance"
INVALID_ACTIONS = "credit/env/invalid"
ROWS_LEFT_OUT = "credit/rows_left_out"
TURNS_CUT = "credit/turns_cut"
"""Metrics of a step that alarms, notes and the report read."""


def bare_id(exp_id: str) -> str:
    """The id, if a row may have it. Raises ValueError for one with ``exp_``, blanks at its ends or control characters."""
    if not exp_id or exp_id != exp_id.strip() or not exp_id.isprintable():
        use = "expected a name without blanks at its ends or control characters"
        raise ValueError(f"exp_id={exp_id!r}; {use}")
    if exp_id.startswith("exp_"):
        raise ValueError(f"exp_id={exp_id!r}; ids are written bare: {exp_id.removeprefix('exp_')!r}")
    return exp_id


TAKE_OVER = "VERL_CREDIT_RUN"
"""The variable in which `verl-credit run` tells our plugin what to do with the launches of its command."""
