"""All values of a configuration by their full names, and which keys have none."""

from omegaconf import OmegaConf

from kit.recipes import load_config
from verl_credit.config.resolved import data, flat_values, leaves, select
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


def test_a_section_is_data_of_plain_types():
    plain = data(OmegaConf.create({"a": {"b": [{"c": 1}]}}))
    assert type(plain["a"]) is dict and type(plain["a"]["b"][0]) is dict and data("text") == "text"


def test_a_checked_configuration_says_what_it_has_and_what_it_lacks():
    config = load_config("lab")
    validate(config)
    assert hasattr(config.trainer, "device") and not hasattr(config.trainer, "devise")
    assert select(config, "trainer.devise") is None and select(config, "trainer.devise", default=3) == 3
