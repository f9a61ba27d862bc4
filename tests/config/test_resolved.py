"""The resolved tree has the values that OmegaConf gives, and what has no value is named."""

import pickle

import pytest
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from kit.recipes import OWN, load_config
from verl_credit.config.resolved import data, resolved, select
from verl_credit.errors import ConfigError
from verl_credit.recipe.files import shipped_recipes


def without_missing(value):
    if isinstance(value, dict):
        return {name: without_missing(one) for name, one in value.items() if one != "???"}
    return [without_missing(one) for one in value] if isinstance(value, list) else value


@pytest.mark.parametrize("name", shipped_recipes())
def test_a_recipe_has_the_values_that_omegaconf_gives_it(name):
    config = load_config(name, [] if name.startswith(("lab", "real")) else OWN)
    assert resolved(config) == without_missing(OmegaConf.to_container(config, resolve=True))


WRITTEN = {
    "a": {"b": 1, "c": "text", "none": None, "list": [1, "${a.b}", {"x": "${a.c}"}], "gone": "???"},
    "one": "${a.b}",
    "chain": "${one}",
    "section": "${a}",
    "below": "${section.c}",
    "selected": "${oc.select:a.none,7}",
    "default": "${oc.select:a.gone,7}",
    "absent": "${oc.select:z,'${a.c}'}",
    "two": "${oc.select:a.c,${oc.select:a.b,null}}",
    "inside": "${a.c}/${a.b}",
    "pair": "${oc.select:a.b,0}/${oc.select:a.c,0}",
    "item": "${a.list.0}",
    "escaped": "\\${a.b}",
    "sub": {"relative": "${.own}", "own": "${oc.select:.other,5}", "other": 6},
}


def test_every_kind_of_interpolation_has_the_value_that_omegaconf_gives_it():
    config = OmegaConf.create(WRITTEN)
    assert resolved(config) == without_missing(OmegaConf.to_container(config, resolve=True))


@pytest.mark.parametrize(
    "wrong",
    [
        {"a": "${nothing}"},
        {"a": "${b}", "b": "???"},
        {"a": "${b}", "b": "${a}"},
        {"a": {"b": "${a}"}},
        {"a": "${no_resolver:1}"},
    ],
)
def test_what_has_no_value_raises_the_error_of_omegaconf(wrong):
    config = OmegaConf.create(wrong)
    with pytest.raises(OmegaConfBaseException) as theirs:
        OmegaConf.to_container(config, resolve=True)
    with pytest.raises(type(theirs.value)) as ours:
        resolved(config)
    assert ours.value.full_key == theirs.value.full_key


def test_with_missing_values_kept_every_key_is_there():
    written = {
        "a": {"b": "???", "c": "${nothing}", "d": "${a.b}", "e": "${f}"},
        "f": {"g": 1, "h": "${nothing}"},
    }
    below = {"g": 1, "h": "???"}
    kept = resolved(OmegaConf.create(written), keep_missing=True)
    assert kept == {"a": {"b": "???", "c": "???", "d": "???", "e": below}, "f": below}


def test_a_missing_value_is_absent_and_read_by_its_full_name_it_is_refused():
    tree = resolved(OmegaConf.create({"a": {"b": "???", "c": {"d": 1}}}))
    assert select(tree, "a.b") is None and select(tree, "a.b", 3) == 3 and "b" not in tree.a
    assert tree.a.c.d == select(tree, "a.c.d") == 1
    for read in (lambda: tree.a.b, lambda: tree["a"]["b"], lambda: tree.a.c.e):
        with pytest.raises(ConfigError) as caught:
            read()
        assert caught.value.key in ("a.b", "a.c.e")


def test_a_section_is_data_that_other_processes_can_read():
    tree = resolved(OmegaConf.create({"a": {"b": [{"c": 1}]}}))
    assert pickle.loads(pickle.dumps(tree)) == tree
    plain = data(tree)
    assert type(plain["a"]) is dict and type(plain["a"]["b"][0]) is dict
