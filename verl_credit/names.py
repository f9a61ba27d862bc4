"""The names of our data in verl's batches, and of our agent loops, trainers and modes, for writer and reader alike."""

import re

TURN_IDS = "turn_ids"
"""The index of each response token's turn, -1 for a token that the policy did not write."""

TURN_REWARDS = "turn_rewards"
"""Key in verl's per-row ``extra_fields``: what the calls of each turn earned; None: no reward is known."""

CLIP_SCALE = "clip_scale"
"""The factor on the clip range of each response token's turn."""

BRANCHES = "credit_branches"
"""The answers that are appended to each row in the old_log_probs forward (`turns/branches.py`)."""

BRANCH_LOG_PROBS = "credit_branch_log_probs"
"""The log-probs of these answers' tokens in that forward."""

SCORE_BRANCHES = "credit_score_branches"
"""Flag on a batch: use its branches."""

HIDDEN_SPANS, HIDDEN_STATES = "credit_hidden_spans", "credit_hidden_states"
"""The spans of each row whose hidden states are read in that forward, and the states (`host/engine/hidden_engine.py`)."""

READ_HIDDEN = "credit_read_hidden"
"""Flag on a batch: read its spans' hidden states."""

ROW_RECORD = "credit"
"""Key in verl's per-row ``extra_fields``: the agent loop's record of the row (`turns/book.py`)."""

AGENT_NAME = "search_agent"
TURN_AGENT = "turn_agent"
AGENTS = (AGENT_NAME, TURN_AGENT)
"""Our agent loops: with the search tool, and without it."""
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
ROLLOUT_NAME, SGLANG = "hf", "sglang"
MCP_TOOL = "verl_credit.host.rollout.mcp_tool.MCPTool"
"""``class_name`` of an MCP tool in the tool file."""
VLLM_EXTENSION = "verl_credit.host.vllm_rollout.worker_extension.WorkerExtension"
"""The class that extends vLLM's worker."""

PROBE_SCORE, PROBE_PATH = "entropy_probe_score", "entropy_probe_path"
"""The weights of the entropy probe on each response token's log-prob and entropy."""

PROBE_GROUP = "entropy_probe_group"
"""The group of prompts of each row in the entropy probe's standard error."""

MOVED = {
    "verl_credit.attention": "verl_credit.policy.attention",
    "verl_credit.bench": "verl_credit.study.bench",
    "verl_credit.campaign": "verl_credit.study.campaign",
    "verl_credit.credit.laws.broken": "verl_credit.credit.laws.laws",
    "verl_credit.credit.laws.own": "verl_credit.credit.laws.subjects",
    "verl_credit.credit.laws.properties": "verl_credit.credit.laws.effects",
    "verl_credit.credit.laws.rewards": "verl_credit.credit.laws.effects",
    "verl_credit.credit.laws.steady": "verl_credit.credit.laws.laws",
    "verl_credit.credit.laws.tokens": "verl_credit.credit.laws.effects",
    "verl_credit.credit.loss.aggregate": "verl_credit.credit.loss",
    "verl_credit.credit.loss.policy_loss": "verl_credit.credit.loss",
    "verl_credit.credit.outcome.grpo": "verl_credit.credit.outcome",
    "verl_credit.credit.outcome.half_negative": "verl_credit.credit.outcome",
    "verl_credit.credit.outcome.low_baseline": "verl_credit.credit.outcome",
    "verl_credit.credit.outcome.maxrl": "verl_credit.credit.outcome",
    "verl_credit.credit.outcome.outcome": "verl_credit.credit.groups",
    "verl_credit.credit.outcome.outcome.grpo": "verl_credit.credit.outcome.grpo",
    "verl_credit.credit.outcome.reinforce_pp": "verl_credit.credit.outcome",
    "verl_credit.credit.outcome.rloo": "verl_credit.credit.outcome",
    "verl_credit.credit.plugins.algorithm": "verl_credit.credit.plugins.run",
    "verl_credit.credit.token.entropy_mask": "verl_credit.credit.token.gtpo",
    "verl_credit.credit.token.grpo_s": "verl_credit.credit.token.gtpo_canonical",
    "verl_credit.credit.token.hicra": "verl_credit.credit.token.gtpo",
    "verl_credit.credit.token.sepa": "verl_credit.credit.token.gtpo",
    "verl_credit.credit.turn.modes.hgpo": "verl_credit.credit.turn.modes.gigpo",
    "verl_credit.credit.turn.modes.leave_one_out": "verl_credit.credit.turn.modes.turn_group",
    "verl_credit.credit.turn.modes.separate": "verl_credit.credit.turn.modes.joint",
    "verl_credit.credit.turn.modes.turn_gae": "verl_credit.credit.turn.modes.progress",
    "verl_credit.credit.turn.modes.turn_group_unbiased": "verl_credit.credit.turn.modes.turn_group",
    "verl_credit.credit.turn.modes.turn_group_v1d": "verl_credit.credit.turn.modes.turn_group",
    "verl_credit.data": "verl_credit.worlds.data",
    "verl_credit.doctor": "verl_credit.recipe.doctor",
    "verl_credit.fidelity": "verl_credit.study.fidelity",
    "verl_credit.generation": "verl_credit.policy.generation",
    "verl_credit.host.agent_manager": "verl_credit.host.rollout.agent_manager",
    "verl_credit.host.cpu.vllm_extension.CPUWorkerExtension": VLLM_EXTENSION,
    "verl_credit.host.loss": "verl_credit.host.actor.loss",
    "verl_credit.host.reward": "verl_credit.turns.reward.qa",
    "verl_credit.lab": "verl_credit.worlds.lab",
    "verl_credit.lineage": "verl_credit.records.lineage",
    "verl_credit.plan": "verl_credit.recipe.plan",
    "verl_credit.probe": "verl_credit.study.probe",
    "verl_credit.real": "verl_credit.worlds.real",
    "verl_credit.records.lineage.edit": "verl_credit.records.lineage.trial",
    "verl_credit.records.lineage.locked": "verl_credit.records.lineage.store",
    "verl_credit.records.lineage.rule": "verl_credit.records.lineage.trial",
    "verl_credit.report": "verl_credit.records.report",
    "verl_credit.reward": "verl_credit.turns.reward",
    "verl_credit.reward.boxed": "verl_credit.turns.reward.qa",
    "verl_credit.run": "verl_credit.records.run",
    "verl_credit.search": "verl_credit.turns.search",
    "verl_credit.search.circuit_breaker": "verl_credit.turns.search.faults",
    "verl_credit.search.pages": "verl_credit.turns.search.protocol",
    "verl_credit.turns.reward.boxed": "verl_credit.turns.reward.qa",
    "verl_credit.turns.search.circuit_breaker": "verl_credit.turns.search.faults",
    "verl_credit.twin": "verl_credit.study.twin",
}
"""Packages and modules that have moved: recipes, plug-ins and saved configurations may still name the old place."""

_OLD_PLACE = re.compile(
    rf"\b({'|'.join(re.escape(name) for name in sorted(MOVED, key=len, reverse=True))})(?![\w-])"
)


def place_now(text: str) -> str:
    """``text`` with every name of `MOVED` in it replaced by the new one."""
    return _OLD_PLACE.sub(lambda found: MOVED[found[1]], text)


def bare_id(exp_id: str) -> str:
    """The id, if a row may have it. Raises ValueError for one with ``exp_``, blanks at its ends or control characters."""
    if not exp_id or exp_id != exp_id.strip() or not exp_id.isprintable():
        use = "expected a name without blanks at its ends or control characters"
        raise ValueError(f"exp_id={exp_id!r}; {use}")
    if exp_id.startswith("exp_"):
        raise ValueError(f"exp_id={exp_id!r}; ids are written bare: {exp_id.removeprefix('exp_')!r}")
    return exp_id
