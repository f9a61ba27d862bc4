"""All values of a configuration by their full names, and which keys have none."""

from omegaconf import OmegaConf

from verl_credit.config.resolved import flat_values, leaves

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
