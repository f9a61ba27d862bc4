"""The probe's file: every key, what is refused, and the page that lists them."""

from pathlib import Path

import pytest
from omegaconf import OmegaConf

from verl_credit.errors import ConfigError
from verl_credit.recipe.declared import declared
from verl_credit.study.probe.settings import ProbeSettings, defaults_page

PAGE = Path(__file__).parents[3] / "docs" / "probe.md"


def read(**tree) -> ProbeSettings:
    return declared(ProbeSettings, tree, "probe.yaml")


def test_an_empty_file_is_the_defaults_and_says_what_is_in_use():
    assert read() == ProbeSettings()
    said = "X=rb_residual baseline=residual_mu (leave_one_out) estimand=per_token Y=adamw/credit"
    assert read().banner() == said


def test_the_page_lists_every_key_with_its_default():
    assert defaults_page() in PAGE.read_text(encoding="utf-8")
    assert read(**OmegaConf.to_container(OmegaConf.create(defaults_page()))) == ProbeSettings()


@pytest.mark.parametrize(
    ("tree", "estimand"),
    [
        ({}, "per_token"),
        ({"rb_normalize_by_length": True}, "per_sequence_mean"),
        ({"rb_normalize_by_length": False}, "per_sequence"),
        ({"rb_normalize_by_length": False, "estimand": "per_sequence"}, "per_sequence"),
    ],
)
def test_the_founding_plans_switch_names_an_estimand(tree, estimand):
    assert read(estimator=tree).estimator.estimand == estimand


def test_a_biased_estimate_says_so():
    settings = read(generation={"rb_requires_grad": False})
    assert settings.banner().endswith("WITHOUT the pathwise term: X is biased")


@pytest.mark.parametrize(
    ("tree", "said"),
    [
        ({"estimatr": {}}, "unknown key estimatr (did you mean estimator?)"),
        ({"estimator": {"baseline": {"mod": "none"}}}, "unknown key estimator.baseline.mod (did you mean mode?)"),
        ({"estimator": {"baseline": {"mode": "ema"}}}, "estimator.baseline.mode='ema': expected none"),
        ({"estimator": {"baseline": {"ema_decay": 1.0}}}, "estimator.baseline.ema_decay=1.0: expected weight"),
        ({"runtime": {"micro_batch": 0}}, "runtime.micro_batch=0: expected a whole number of at least 1"),
        ({"truth": {"etas": [1.0]}}, "truth.etas=[1.0]: expected at least two numbers"),
        ({"truth": {"etas": [1.0, float("inf")]}}, "truth.etas.1=inf"),
        ({"update": {"lr": 0.0}}, "update.lr=0.0: expected learning rate, a number above 0"),
        (
            {"estimator": {"estimand": "per_token", "rb_normalize_by_length": True}},
            "estimand=per_token with rb_normalize_by_length=true, which means per_sequence_mean: give one of the two",
        ),
        ({"estimator": {"baseline": {"ema_decay": 0.5}}}, "ema_decay=0.5 is not read by mode=residual_mu with fit=leave"),
        ({"estimator": {"baseline": {"mode": "none", "fit": "previous"}}}, "fit=previous is not read by mode=none"),
        ({"estimator": {"x_estimator_mode": "naive", "baseline": {"mode": "none"}}}, "not read by x_estimator_mode=naive"),
        (
            {"estimator": {"x_estimator_mode": "naive"}, "generation": {"rb_requires_grad": False}},
            "naive has no pathwise term",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_used_is_refused_by_its_key(tree, said):
    with pytest.raises(ConfigError) as error:
        read(**tree)
    assert str(error.value).startswith("probe.yaml: ")
    assert said in str(error.value)
