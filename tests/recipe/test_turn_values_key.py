"""`algorithm.turn_values` before a start: what is accepted, and what a function may not read."""

import pytest

from kit.recipes import check, refused
from verl_credit.cli.recipe.stages import explanation
from verl_credit.config.settings import CreditSettings
from verl_credit.credit.turn.value_providers import PROVIDERS, Need, Provider
from verl_credit.recipe.plan.plan import make_plan
from verl_credit.recipe.unread import unused
from verl_credit.study.fidelity.turn_rows import _not_here

KEY, MODE = "algorithm.turn_values", "algorithm.info_gain_norm_mode"
GAE, HERE = f"{MODE}=turn_gae", __name__


def observed_words(trajectory):
    """Words on the pages before each turn, and the turn's number."""
    words, states = 0, []
    for number, turn in enumerate(trajectory.turns):
        states.append([words, number])
        words += len(turn.observation.split())
    return states


def outcome(trajectory):
    return [trajectory.outcome] * len(trajectory.turns)


def score(trajectory):
    return [trajectory.scores.get("em", 0.5)] * len(trajectory.turns)


def answered(trajectory):
    return [float(trajectory.golds[0] in trajectory.turns[-1].text)] * len(trajectory.turns)


def own_response(trajectory):
    return [len(turn.text) for turn in trajectory.turns]


def number_of_turns(trajectory):
    return [len(trajectory.turns)] * len(trajectory.turns)


def one_number(trajectory):
    return 0.5


def text(trajectory):
    return ["page"] * len(trajectory.turns)


@pytest.mark.parametrize("name", ["group", "features", "column:belief", f"{HERE}.observed_words"])
def test_providers(name):
    settings = CreditSettings.from_config(check(GAE, f"{KEY}={name}"))
    assert settings.algorithm.turn_values == name and settings.turn_signals == {}


def test_a_signal_beside_values_and_the_modes_options():
    more = ("algorithm.lam=0.5", "+algorithm.turn_params.scale=rms", "+algorithm.turn_params.negative=0.5")
    config = check(GAE, f"{KEY}=features", "algorithm.turn_signal=info_gain", *more)
    settings = CreditSettings.from_config(config)
    assert (
        settings.turn_options == {"gamma": 1.0, "lam": 0.5, "scale": "rms", "negative": 0.5}
        and settings.scores_gain
    )


@pytest.mark.slow
def test_lam_has_a_key_and_says_where_nothing_reads_it():
    error = refused(GAE, f"{KEY}=group", "+algorithm.turn_params.lam=0.5")
    assert error.key == "algorithm.turn_params.lam" and "algorithm.lam" in error.accepted
    config = check(f"{MODE}=turn-group-v1d", "algorithm.lam=0.5")
    assert "algorithm.lam=0.5" in unused(config, CreditSettings.from_config(config))


@pytest.mark.parametrize("mode", ["none", "turn-group-v1d", "gigpo"])
def test_values_that_nothing_reads_are_refused(mode):
    error = refused(f"{MODE}={mode}", f"{KEY}=features")
    assert (error.key, error.value) == (KEY, "features") and f"{MODE}={mode}" in str(error)
    assert "set it to null, or algorithm.info_gain_norm_mode=turn_gae" in error.accepted


@pytest.mark.slow
def test_another_name_is_refused_with_all_names_and_the_nearest():
    error = refused(GAE, f"{KEY}=feature")
    assert (error.key, error.value) == (KEY, "feature") and "did you mean features?" in str(error)
    assert error.accepted[:5] == ["group", "features", "state", "critic", "column:NAME"]
    assert refused(GAE, f"{KEY}=column:").value == "column:"


AFTER = "a value may read what stands before its turn's response alone"


@pytest.mark.parametrize(
    ("name", "why"),
    [
        *((name, AFTER) for name in ("outcome", "score", "answered", "own_response", "number_of_turns")),
        ("one_number", "returned float; expected a list with an entry for each of 2 turns"),
        ("text", "turn 0 has ['page']; expected as many finite numbers for each turn"),
        ("absent", "has no 'absent'"),
    ],
)
def test_a_function_that_reads_what_comes_after_the_state_or_has_another_form_is_refused(name, why):
    error = refused(GAE, f"{KEY}={HERE}.{name}")
    assert (error.key, error.value) == (KEY, f"{HERE}.{name}") and why in str(error)


@pytest.mark.parametrize("given", ["replay=-1", "ridge=0", "folds=1"])
def test_ranges(given):
    name, _, value = given.partition("=")
    error = refused(GAE, f"{KEY}=group", f"{KEY}_{name}={value}")
    assert (error.key, error.value) == (f"{KEY}_{name}", float(value))


@pytest.mark.slow
def test_a_provider_is_one_entry(monkeypatch):
    """Keys, refusals, `explain`, `plan` and `fidelity` go through the table of providers."""
    need = Need("data.shuffle", True, "the order has to change")
    mine = Provider(
        "mine", "V by nobody", value=lambda seen: seen.turn_B_K1.double(), needs=(need,), uncounted="a fee",
        training_alone="nobody is there",
    )  # fmt: skip
    monkeypatch.setitem(PROVIDERS, "mine", mine)
    config = check(GAE, f"{KEY}=mine", f"{KEY}_replay=2")
    settings = CreditSettings.from_config(config)
    assert f"{KEY}_replay=2" in unused(config, settings) and "ridge" not in settings.banner()
    assert "values: mine\n" in (text := explanation("lab", config)) and "V by nobody" in text
    assert "a fee" in make_plan(config).notes
    assert _not_here(settings, {}) == f"{KEY}=mine: nobody is there"
    error = refused(GAE, f"{KEY}=mine", "data.shuffle=false")
    assert (error.key, error.value) == ("data.shuffle", False) and error.accepted == need.why
    assert "mine" in refused(GAE, f"{KEY}=min").accepted
