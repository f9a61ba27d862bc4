"""Turn signals that fail: which reasons are told, where, and never with a secret."""

import math
import traceback

import pytest

from kit.signal_step import rewards, step_of
from kit.turn_rows import Row
from verl_credit.errors import IntegrityError
from verl_credit.turns.rollout.book import RowRecord
from verl_credit.turns.step.signals.built_in import find_signal
from verl_credit.turns.step.signals.own import own_signal

NAN = math.nan


ASKED = Row(("ask", "page", "done"))


def leaky(group, *, login, url):
    raise ConnectionError(f"401 for {url}\nwith Bearer {login['api_key']} or {login['others'][0]}")


def test_a_secret_among_the_params_is_in_no_message_of_a_function():
    login = {"api_key": "hush", "others": ["loud  voice"], "passwords": ["loud  voice", "loud"]}
    params = {"login": login, "url": "https://me:whisper@judge/score"}
    with pytest.raises(IntegrityError) as raised:
        rewards({own_signal("mine.leaky", leaky, params): 1.0}, step_of(ASKED, ASKED))
    said = "'mine.leaky' raised for rows 0, 1: ConnectionError: 401 for https://***@judge/score with Bearer *** or ***"
    assert f"{said} (test_turn_signals_faults.py, line " in str(raised.value)
    shown = "".join(traceback.format_exception(raised.value, chain=True))
    assert not [secret for secret in ("Bearer hush", "loud", "whisper") if secret in shown]


def test_lost_information_gains_are_counted_and_stop_the_run_when_many():
    signals, rows = (
        {find_signal("info_gain", {}): 1.0},
        step_of(*[ASKED] * 4, gains=[[0.5], [NAN], [0.2], [None]]),
    )
    reward, has, metrics = rewards(signals, rows, 0.34, info_gain_on_error="drop")
    assert reward[:, 0].isnan().tolist() == [False, True, False, False]
    assert has[:, 0].tolist() == [True, True, True, False]
    name = "credit/signal/info_gain"
    assert [metrics[f"{name}/{of}"] for of in ("turns", "without", "lost")] == [3, 1, 1]
    assert metrics[f"{name}/mean"] == pytest.approx(0.35)
    with pytest.raises(IntegrityError, match="'info_gain' lost 1 of 3 rewards .*faults.max_lost_rewards"):
        rewards(signals, rows, 0.33, info_gain_on_error="drop")


def judged(value, reason=""):
    record = RowRecord(signals={"my.judge": [value]})
    record.signal_errors = {"my.judge": reason} if reason else {}
    return Row(("ask", "page", "done"), record=record)


async def judge(trajectory):
    raise AssertionError("the agent loop asks it")


def test_the_first_reason_for_tolerated_losses_is_noted_once_a_step_with_its_rows():
    signals, notes = {own_signal("my.judge", judge, {}): 1.0}, []
    batch = [judged(0.5), judged(NAN, "it is down"), judged(NAN), judged(NAN, "it is down"), judged(None)]
    rewards(signals, step_of(*batch), 0.75, notes.append)
    said = "turn signal 'my.judge' lost 3 of 4 rewards (it is down; rows 1, 3; 1 more for other reasons)"
    assert notes == [said]
    with pytest.raises(IntegrityError) as raised:
        rewards(signals, step_of(*batch), 0.7, notes.append)
    assert str(raised.value) == f"{said}; a share of 0.7 is tolerated (faults.max_lost_rewards)"
    rewards(signals, step_of(judged(0.5), judged(None)), 0.0, notes.append)
    assert notes == [said]
