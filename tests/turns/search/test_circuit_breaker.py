"""The breaker by a clock that only the test moves."""

import random

import pytest

from verl_credit.turns.rollout.search.faults import CircuitBreaker


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


def opened(clock, failures=3, pause_s=5.0):
    breaker = CircuitBreaker(failures=failures, pause_s=pause_s, clock=clock)
    for _ in range(failures):
        breaker.failed(breaker.enter())
    assert breaker.refuses
    return breaker


def test_a_cancelled_probe_makes_room_for_the_next(clock):
    breaker = opened(clock)
    clock.now += 5
    breaker.cancelled(breaker.enter())
    ticket = breaker.enter()
    assert ticket is not None and breaker.enter() is None
    breaker.succeeded(ticket)
    assert not breaker.refuses


def test_a_cancelled_request_counts_neither_way(clock):
    breaker = CircuitBreaker(failures=2, pause_s=5.0, clock=clock)
    breaker.failed(breaker.enter())
    breaker.cancelled(breaker.enter())
    assert not breaker.refuses
    breaker.failed(breaker.enter())
    assert breaker.refuses


def test_many_that_fail_together_count_once(clock):
    breaker = CircuitBreaker(failures=3, pause_s=5.0, clock=clock)
    for _ in range(2):
        for ticket in [breaker.enter() for _ in range(60)]:
            breaker.failed(ticket)
        assert not breaker.refuses
    breaker.failed(breaker.enter())
    assert breaker.refuses


def test_a_success_of_an_older_request_counts_while_it_is_closed(clock):
    breaker = CircuitBreaker(failures=2, pause_s=5.0, clock=clock)
    older = breaker.enter()
    breaker.failed(breaker.enter())
    breaker.succeeded(older)  # the server answers
    breaker.failed(breaker.enter())
    assert not breaker.refuses


def test_while_it_is_open_only_the_probe_decides(clock):
    breaker = CircuitBreaker(failures=3, pause_s=5.0, clock=clock)
    older = [breaker.enter() for _ in range(30)]
    for _ in range(3):
        breaker.failed(breaker.enter())
    breaker.succeeded(older[0])
    assert breaker.refuses
    clock.now += 5
    breaker.failed(older[1])  # must not begin the pause anew
    probe = breaker.enter()
    assert probe is not None
    breaker.failed(older[2])  # nor end the probe
    breaker.cancelled(older[3])
    breaker.succeeded(older[4])
    assert breaker.refuses and breaker.enter() is None
    breaker.succeeded(probe)
    assert not breaker.refuses


@pytest.mark.parametrize("seed", range(20))
def test_against_a_plain_model_of_one_request_at_a_time(clock, seed):
    """Random outcomes and waiting times; the model counts failures and remembers when it opened."""
    chance = random.Random(seed)
    breaker = CircuitBreaker(failures=3, pause_s=5.0, clock=clock)
    in_a_row, opened_at = 0, None
    for _ in range(300):
        clock.now += chance.choice([0.0, 1.0, 2.5, 5.0])
        ticket = breaker.enter()
        assert (ticket is None) == (opened_at is not None and clock.now - opened_at < 5.0)
        if ticket is None:
            continue
        if chance.random() < 0.4:
            breaker.succeeded(ticket)
            in_a_row, opened_at = 0, None
        else:
            breaker.failed(ticket)
            in_a_row += 1
            if opened_at is not None or in_a_row >= 3:
                opened_at = clock.now
