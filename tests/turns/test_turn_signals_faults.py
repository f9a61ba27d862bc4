"""Turn signals that fail: which reasons are told, where, and never with a secret."""

import math
import traceback

import pytest
import torch

from kit.byte_world import make_tokenizer
from kit.settings import settings
from kit.turn_rows import Row, turn_batch
from verl_credit.errors import IntegrityError
from verl_credit.turns.signals import StepRows, find_signal, own_signal, step_rewards

NAN = math.nan


def step_of(*rows, gains=None):
    """One question's rows. ``gains``: per row and tool turn; None where a turn has none."""
    tokenizer = make_tokenizer()
    turns = turn_batch(list(rows), tokenizer)
    width = max(int(turns.n_turns_B.max()) - 1, 0)
    table = [[None] * width for _ in rows] if gains is None else gains
    has = torch.tensor([[gain is not None for gain in row] for row in table])
    gain = torch.tensor([[gain or 0.0 for gain in row] for row in table], dtype=torch.float64)
    same = torch.zeros(len(rows), dtype=torch.int64)
    return StepRows(turns, tokenizer.decode, torch.zeros(len(rows)), same, gain, has)


def rewards(signals, rows, tolerated_share=0.0, **changes):
    chosen = settings(turn_signals={signal.name: weight for signal, weight in signals.items()}, **changes)
    return step_rewards(signals, chosen, rows, scored=True, tolerated_share=tolerated_share)


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


def test_a_step_whose_gains_are_all_lost_is_no_step_of_plain_grpo():
    rows = step_of(ASKED, ASKED, gains=[[NAN], [NAN]])
    with pytest.raises(IntegrityError, match="'info_gain' lost 2 of 2 rewards"):
        rewards({find_signal("info_gain", {}): 1.0}, rows, 0.9, info_gain_on_error="drop")
