"""All values of a configuration by their full names, and which keys have none."""

import pytest
from omegaconf import OmegaConf

from kit.recipes import load_config
from verl_credit.config.keys import Algorithm, read_section
from verl_credit.config.resolved import data, flat_values, leaves, value_at
from verl_credit.config.settings import CreditSettings
from verl_credit.errors import ConfigError
from verl_credit.recipe.rules import validate

WRITTEN = {
    "a": {"b": "???", "c": "${nothing}", "d": "${a.b}", "e": "${f}", "empty": {}},
    "f": {"g": 1, "h": "${nothing}"},
    "list": [1, {"x": "${f.g}"}],
}


def test_a_value_is_resolved_and_a_key_without_one_is_listed():
    assert flat_values(OmegaConf.create(WRITTEN)) == {
        **{f"a.{name}": "???" for name in "bcd"},
        "a.e.g": 1,
        "a.e.h": "???",
        "a.empty": {},
        "f.g": 1,
        "f.h": "???",
        "list": [1, {"x": 1}],
    }


def test_the_leaves_of_plain_data_have_full_names():
    assert dict(leaves({"a": [{"b": 1}, 2], "c": {"d": None}})) == {"a.0.b": 1, "a.1": 2, "c.d": None}


def test_a_tree_has_the_values_that_the_configuration_has():
    config = OmegaConf.create(WRITTEN | {"a": {"b": "???", "e": "${f}"}, "f": {"g": 1}})
    for key in ("a.b", "a.e", "a.e.g", "f.g.none", "nothing", "nothing.g"):
        assert value_at(data(config), key) == data(value_at(config, key)), key
    recipe = load_config("lab")
    assert CreditSettings.from_config(data(recipe)) == CreditSettings.from_config(recipe)


@pytest.mark.parametrize("form", [lambda config: config, data], ids=["configuration", "tree"])
def test_a_declared_key_without_a_value_is_missing(form):
    config = load_config("lab", ["algorithm.info_gain_prefix=???"])
    with pytest.raises(ConfigError) as caught:
        read_section(Algorithm, form(config))
    assert caught.value.key == "algorithm.info_gain_prefix"


def test_a_check_of_a_recipe_resolves_the_whole_of_it_once(monkeypatch):
    config, whole = load_config("lab"), []
    to_container = OmegaConf.to_container

    def counted(one, *, resolve):
        whole.extend([resolve] if one is config else [])
        return to_container(one, resolve=resolve)

    monkeypatch.setattr(OmegaConf, "to_container", counted)
    validate(config)
    assert whole == [False, True]
