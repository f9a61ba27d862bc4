"""The credit of a run that names none (`algorithm.info_gain_norm_mode=auto`), and why the run has it.

Credit follows values of the state where there are several turns (evidence/credits, evidence/horizon). Which values
depends on what can be observed. A key that the run names stays.
"""

from __future__ import annotations

from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl_credit.config.fit import DEFAULT
from verl_credit.config.keys import AUTO
from verl_credit.config.resolved import select
from verl_credit.credit.token.gtpo_canonical import CANONICAL
from verl_credit.names import ADV_ESTIMATOR, AGENT_NAME, ENV_AGENT
from verl_credit.recipe.agent_loops import may_call
from verl_credit.recipe.step_size import EACH

MODE, VALUES, LAM, PARAMS = (
    f"algorithm.{name}" for name in ("info_gain_norm_mode", "turn_values", "lam", "turn_params")
)
NAMED_LAM = 1.0
"""``lam=auto`` of a mode that is named."""
GOLDS = "verl_credit.turns.rollout.reward.qa"
"""The reward function whose rows have short gold answers."""
OF_VALUES: dict[str, tuple[float, str]] = {
    "features": (0.8, "several turns, and short gold answers that searches may show"),
    "state": (0.9, "several turns, and rollouts of a question that may come to equal states"),
    "group": (0.9, "several turns, and nothing that is known of a state but its turn"),
}
"""The lam beside the values, and why they are taken."""


def decide_credit(config: DictConfig) -> None:
    """Replaces ``auto`` of the mode and of lam, chooses values and their options, and fills ``credit_reason`` in."""
    if select(config, MODE) == AUTO:
        chosen, why = _chosen(config)
        for key, value in chosen.items():
            OmegaConf.update(config, key, value, force_add=True)
        shown = ", ".join(f"{key.removeprefix('algorithm.')}={value}" for key, value in chosen.items())
        config.credit_reason = f"{shown}: {why}"
    if select(config, LAM) == AUTO:
        OmegaConf.update(config, LAM, NAMED_LAM)  # verl reads the key, too


def _chosen(config: DictConfig) -> tuple[dict[str, Any], str]:
    """Returns the keys and values of the credit, and the reason."""
    if why := _without_values(config):
        return {MODE: "none"}, why
    signals = select(config, "algorithm.turn_signals"), select(config, "algorithm.turn_signal")
    if signals[0] is not None or signals[1] not in (AUTO, "none"):
        return {MODE: "turn-group-v1d"}, "a turn signal is named, whose rewards this mode compares"
    values = select(config, VALUES) or _values(config)
    lam, why = OF_VALUES.get(values, (0.8, f"several turns, and {VALUES} is named"))
    chosen: dict[str, Any] = {MODE: "turn_gae", VALUES: values}
    if select(config, LAM) == AUTO:
        chosen[LAM] = lam
    if not select(config, PARAMS):
        chosen[PARAMS] = {"scale": "rms", "negative": 0.5}
        if not _known_unit(config):  # the floor has the unit of outcomes
            chosen[PARAMS]["rms_floor"] = 0.0
    return chosen, why


def _without_values(config: DictConfig) -> str:
    """Why the run can have no values of states; empty where it can."""
    algorithm = config.algorithm
    if algorithm.get("adv_estimator") != ADV_ESTIMATOR:
        return "verl's estimator gives the credit"
    if algorithm.get("algorithm_mode") is not None:
        return "algorithm.algorithm_mode replaces the pipeline"
    if not may_call(config):
        return "without a tool there is one turn"
    if algorithm.get("advantage_mode") != "grpo" or algorithm.get("transform_mode") in CANONICAL:
        return "an outcome operator is named, and values of states take none"
    return ""


def _known_unit(config: DictConfig) -> bool:
    """Outcomes are 0 or 1; those of a reward function of the user's, and returns, may have any unit."""
    of_return = select(config, DEFAULT) == ENV_AGENT and config.environment.outcome != "success"
    return _has_golds(config) and not of_return


def _has_golds(config: DictConfig) -> bool:
    return str(select(config, "reward.custom_reward_function.path")).endswith(GOLDS)


def _values(config: DictConfig) -> str:
    if select(config, DEFAULT) == AGENT_NAME and _has_golds(config):
        return "features"
    return "state" if (select(config, EACH) or 0) > 1 else "group"
