"""Rollouts of the agent loop of an environment on a scripted policy."""

from kit.environments import CORRIDOR
from kit.trajectories import record, run
from verl_credit.turns.rollout.reward.qa import compute_score

END = "<|im_end|>"
ALONE = (
    "search.max_searches=0",
    "search.url=null",
    "algorithm.info_gain_norm_mode=none",
    "actor_rollout_ref.rollout.agent.default_agent_loop=env_agent",
    "environment.max_steps=6",
    "search.max_new_tokens=40",
)


def play(tokenizer, script, *overrides, task=None, path=CORRIDOR, **given):
    """``text~`` in the script is a turn that does not end itself."""
    extra_info = {"environment": {"seed": 0} if task is None else task}
    script = [text.removesuffix("~") if text.endswith("~") else text + END for text in script]
    more = (f"environment.path={path}", *overrides)
    return run(tokenizer, script, *ALONE, *more, agent="env_agent", extra_info=extra_info, **given)


def scored(output):
    return compute_score("corridor", "", None, {"credit": record(output)})
