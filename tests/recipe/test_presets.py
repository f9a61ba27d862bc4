"""What the presets set: all of it valid and read, and conditions of the factorial that differ in their factors only."""

from importlib.resources import files

import pytest
from omegaconf import OmegaConf

from kit.idle import unused
from kit.recipes import check
from verl_credit.config.settings import CreditSettings
from verl_credit.recipe.recipe_files import RECIPES

FACTORIAL = {  # the eight conditions C1 to C8, in order: two outcome operators, four token levels
    "grpo_nostd": ("grpo", "none"),
    "grpo_gtpo": ("grpo", "gtpo"),
    "grpo_gtpo_hicra": ("grpo", "gtpo_hicra"),
    "grpo_gtpo_sepa": ("grpo", "gtpo_sepa"),
    "maxrl": ("maxrl", "none"),
    "maxrl_gtpo": ("maxrl", "gtpo"),
    "maxrl_gtpo_hicra": ("maxrl", "gtpo_hicra"),
    "maxrl_gtpo_sepa": ("maxrl", "gtpo_sepa"),
}
PRESETS = sorted(path.name.removesuffix(".yaml") for path in (files(RECIPES) / "credit").iterdir())


def flat(node, prefix=""):
    if not isinstance(node, dict):
        return {prefix: node}
    return {k: v for name, value in node.items() for k, v in flat(value, f"{prefix}.{name}").items()}


def preset(name):
    config = check(f"credit={name}")
    return config, CreditSettings.from_config(config), flat(OmegaConf.to_container(config, resolve=True))


@pytest.mark.slow
@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_is_valid_and_all_of_it_is_read(name):
    config, settings, _ = preset(name)
    assert unused(config) == [] and settings.preset == name and settings.preset_overrides == ()
    assert settings.banner().startswith(f"verl_credit: preset={name} | ")


@pytest.mark.slow
@pytest.mark.parametrize("name, promised", FACTORIAL.items())
def test_conditions_of_the_factorial_differ_in_their_two_factors_only(name, promised):
    """Beside those the preset's name, and for MaxRL the std switch that it does not read (test_token_estimator)."""
    _, settings, keys = preset(name)
    _, _, first = preset("grpo_nostd")
    assert (settings.algorithm.advantage_mode, settings.algorithm.transform_mode) == promised
    assert settings.turn_estimator and not settings.scores_gain and settings.ratio_level == "token"
    free = {".credit_preset", ".algorithm.advantage_mode", ".algorithm.transform_mode"}
    free |= {".algorithm.norm_adv_by_std_in_grpo"} if promised[0] == "maxrl" else set()
    assert {key for key in keys.keys() | first.keys() if keys.get(key) != first.get(key)} <= free
