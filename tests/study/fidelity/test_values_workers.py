"""Values by other processes: the same as by one, and an end of every process."""

import multiprocessing
import os
import signal
from functools import partial
from types import SimpleNamespace

import pytest

from kit.choice_world import world
from verl_credit.errors import PreflightError
from verl_credit.study.fidelity.true_values import states_of, values_of
from verl_credit.study.fidelity.workers import Workers, workers_of
from verl_credit.worlds.rollouts.rollout import Start, roll
from verl_credit.worlds.rollouts.sampler import digest

pytestmark = pytest.mark.slow  # processes import the project

QUESTIONS = 10


def subject(questions):
    sampler, protocol, _ = world(questions)
    return SimpleNamespace(roll=partial(roll, sampler, protocol))


def killed():
    os.kill(os.getpid(), signal.SIGKILL)


def states():
    sampler, protocol, states = world(QUESTIONS)
    return states_of(roll(sampler, protocol, [Start(state, 4, 0, "rollout") for state in states]))


def values(**options):
    sampler, protocol, _ = world(QUESTIONS)
    return values_of(states(), partial(roll, sampler, protocol), continuations=16, seed=3, **options)


def test_values_do_not_depend_on_the_number_of_processes(tmp_path):
    alone, said = values(path=tmp_path / "1.jsonl"), []
    assert 0 < sum(value.successes for value in alone.values()) < 16 * len(alone)
    for processes in (2, 3):
        path = tmp_path / f"{processes}.jsonl"
        with Workers(partial(subject, QUESTIONS), processes) as workers:
            options = {"elsewhere": workers.values, "say": lambda *counts: said.append(counts)}
            assert values(path=path, **options) == alone
        assert sorted(path.read_text().splitlines()) == sorted(
            (tmp_path / "1.jsonl").read_text().splitlines()
        )
    assert said == 2 * [(4, 10), (8, 10), (10, 10)]
    assert not multiprocessing.active_children()


def test_processes_are_begun_where_they_are_worth_it(monkeypatch):
    monkeypatch.setattr("verl_credit.study.fidelity.workers.cores", lambda: 4)
    made = []
    monkeypatch.setattr(
        "verl_credit.study.fidelity.workers.Workers", lambda load, processes: made.append(processes)
    )
    for prompts, parallel in [(31, None), (32, None), (64, 3), (9, 16), (5, 2), (4, 2), (64, 1)]:
        workers_of(None, prompts, parallel)
    assert made == [4, 3, 3, 2]


def test_once_it_is_enough_no_more_parts_are_handed_out():
    with Workers(partial(subject, QUESTIONS), 3) as workers:
        found = values(elsewhere=workers.values, enough=lambda: True)
    assert {state.question for state in states() if digest(state.ids) in found} == {0, 1, 2, 3}


def test_a_process_that_died_is_said_in_one_line():
    with (
        Workers(killed, 2) as workers,
        pytest.raises(PreflightError, match="one of 2 processes died.*--parallel"),
    ):
        values(elsewhere=workers.values)
