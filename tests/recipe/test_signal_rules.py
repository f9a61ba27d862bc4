"""`algorithm.turn_signal`, `.turn_signals` and what belongs to them."""

import re
from pathlib import Path

import pytest

from kit.recipes import check
from verl_credit.commands.explain import explanation
from verl_credit.config.settings import CreditSettings
from verl_credit.errors import ConfigError

SIGNAL, SEVERAL, MODE = (
    f"algorithm.{name}" for name in ("turn_signal", "turn_signals", "info_gain_norm_mode")
)
HERE = __name__


def lengths(group, *, scale=1.0):
    return [[scale * len(turn.text) for turn in one.tool_turns] for one in group.trajectories]


async def judge(trajectory, *, url):
    raise AssertionError("a judge is not called before the start")


def fails(group):
    return 1 / 0


def signals(*overrides):
    return CreditSettings.from_config(check(*overrides)).turn_signals


def refused(*overrides) -> ConfigError:
    with pytest.raises(ConfigError) as found:
        check(*overrides)
    return found.value


def test_information_gain_is_the_signal_unless_another_is_named():
    assert signals() == {"info_gain": 1.0}
    assert signals(f"{MODE}=none") == {}
    assert signals("algorithm.adv_estimator=grpo", f"{MODE}=none") == {}
    assert signals(f"{SIGNAL}=column:steps") == {"column:steps": 1.0}
    both = signals(f"{SEVERAL}={{info_gain:1,{HERE}.lengths:0.5}}", "+algorithm.turn_signal_params.scale=2")
    assert both == {"info_gain": 1.0, f"{HERE}.lengths": 0.5}


def test_without_information_gain_nothing_is_scored():
    assert not CreditSettings.from_config(check(f"{SIGNAL}=column:steps")).scores_gain


def test_a_judge_is_bound_but_not_called():
    check(f"{SIGNAL}={HERE}.judge", "+algorithm.turn_signal_params.url=http://localhost:1")


@pytest.mark.parametrize(
    "overrides, key, message",
    [
        ([f"{SIGNAL}=info_gian"], SIGNAL, "did you mean info_gain"),
        ([f"{SIGNAL}=column:"], SIGNAL, "column:NAME"),
        ([f"{SIGNAL}=tool_reward"], SIGNAL, "the search gives no reward"),
        ([f"{SIGNAL}=tool_reward", f"{MODE}=none"], SIGNAL, "reads no turn rewards"),
        ([f"{SIGNAL}=none"], SIGNAL, "has none to compare"),
        ([f"{SIGNAL}=info_gain", f"{SEVERAL}={{info_gain:1}}"], SIGNAL, "set one of the two"),
        ([f"{SEVERAL}={{info_gain:0}}"], SEVERAL, "weights that are not all 0"),
        ([f"{SIGNAL}={HERE}.absent"], SIGNAL, "has no 'absent'"),
        ([f"{SIGNAL}={HERE}.fails"], SIGNAL, "ZeroDivisionError"),
        ([f"{SIGNAL}={HERE}.judge"], SIGNAL, "missing a required argument: 'url'"),
        (
            [f"{SIGNAL}={HERE}.lengths", "+algorithm.turn_signal_params.skale=2"],
            SIGNAL,
            "unexpected keyword",
        ),
        ([f"{SIGNAL}=os.abort"], SIGNAL, "Python's own"),
    ],
)
def test_what_cannot_be_meant_is_refused(overrides, key, message):
    error = refused(*overrides)
    assert error.key == key and message in str(error)


def test_a_secret_among_the_params_is_never_shown():
    params = "+algorithm.turn_signal_params"
    config = check(f"{SIGNAL}={HERE}.asks", f"{params}.api_key=hush", f"{params}.url=http://me:hush@judge")
    assert "hush" not in explanation("lab", config).partition("not the defaults")[0]
    assert "hush" not in str(refused(f"{SIGNAL}={HERE}.judge", f"{params}.api_key=hush"))


async def asks(trajectory, *, api_key, url):
    raise AssertionError("a judge is not called before the start")


def test_explain_names_every_signal_and_their_sum():
    config = check(f"{SEVERAL}={{info_gain:1,{HERE}.lengths:0.5}}")
    shown = explanation("lab", config)
    assert f"turn signal: {HERE}.lengths" in shown and "a call of your function per question" in shown
    assert f"1 info_gain + 0.5 {HERE}.lengths, each z-scored over its question's turns" in shown


def test_the_signals_of_the_page_run(tmp_path, monkeypatch):
    """docs/turn-signals.md: the function is called with the page's option, the judge is bound to its address."""
    page = (Path(__file__).parents[2] / "docs" / "turn-signals.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert len(blocks) == 2
    (tmp_path / "page_signals.py").write_text("\n".join(blocks))
    monkeypatch.syspath_prepend(tmp_path)
    check(f"{SIGNAL}=page_signals.short_queries", "+algorithm.turn_signal_params.scale=50")
    check(f"{SIGNAL}=page_signals.judge", "+algorithm.turn_signal_params.url=http://localhost:1")
