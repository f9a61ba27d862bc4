"""The probe's file: every key, what is refused, and the page that lists them."""

import json
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from verl_credit.config.gone import LAST
from verl_credit.config.keys.section import Part, declared
from verl_credit.errors import ConfigError
from verl_credit.study.probe.file import GONE, ProbeSettings

PAGE = Path(__file__).parents[3] / "docs" / "probe.md"


def read(**tree) -> ProbeSettings:
    return declared(ProbeSettings, tree, "probe.yaml")


def defaults_page(part: Part | None = None, indent: str = "") -> str:
    """Every key with its default, as YAML, each below its description."""
    part, lines = part or ProbeSettings(), []
    for name, field in type(part).model_fields.items():
        value = getattr(part, name)
        if isinstance(value, Part):
            lines += [f"{indent}{name}:", defaults_page(value, indent + "  ")]
        else:
            lines += [f"{indent}# {field.description}", f"{indent}{name}: {json.dumps(value)}"]
    return "\n".join(lines)


def test_the_page_lists_every_key_with_its_default():
    assert defaults_page() in PAGE.read_text(encoding="utf-8")
    assert read(**OmegaConf.to_container(OmegaConf.create(defaults_page()))) == ProbeSettings()


SECTIONS = ["generation", "batch_config", "update", "truth", "runtime"]
PLACES = [
    ({"generatio": {}}, "generatio", SECTIONS),
    ({"generation": {"sorce": "run"}}, "generation.sorce", ["source"]),
    ({"generation": {"source": "kept"}}, "generation.source", "expected run: the run's own engine"),
    ({"runtime": {"micro_batch": 0}}, "runtime.micro_batch", "expected a whole number of at least 1"),
    ({"truth": {"etas": [1.0]}}, "truth.etas", "expected at least two numbers above 0"),
    ({"truth": {"etas": [1.0, float("inf")]}}, "truth.etas.1", "expected at least two numbers above 0"),
    ({"update": {"lr": 0.0}}, "update.lr", "expected learning rate, a number above 0"),
]  # fmt: skip


@pytest.mark.parametrize(("tree", "key", "accepted"), PLACES)
def test_what_cannot_be_used_is_refused_by_its_key(tree, key, accepted):
    with pytest.raises(ConfigError) as error:
        read(**tree)
    assert str(error.value).startswith("probe.yaml: ") and error.value.key == key
    assert error.value.accepted[: len(accepted)] == accepted
    value = tree
    for part in key.split("."):
        value = value[int(part) if part.isdigit() else part]
    if part not in ("generatio", "sorce"):
        assert error.value.value == value


@pytest.mark.parametrize("key", [f"{section}.{name}" for section, keys in GONE.items() for name in keys])
def test_a_key_of_before_is_refused_with_the_commit_that_last_had_it(key):
    section, name = key.split(".")
    with pytest.raises(ConfigError, match=rf"^probe\.yaml: .*{key}=naive.*commit {LAST} last had it"):
        read(**{section: {name: "naive"}})
