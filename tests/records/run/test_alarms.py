"""Alarms of a run that collapses: each sees its own collapse, none a healthy run; page and remedies are right."""

import math
from pathlib import Path

import pytest

from kit.recipes import load_config
from verl_credit.names import ANSWER_WHEN_SOLVED, EXPLAINED_VARIANCE, INVALID_ACTIONS
from verl_credit.recipe.rules import validate
from verl_credit.records.run.alarms import ALARMS, Watch
from verl_credit.records.run.files import METRICS, VALIDATION, append_json

ROOT = Path(__file__).parents[3]
SETTINGS = {"half_lr": "0.00025", "more": "actor_rollout_ref.rollout.n=16", "tokens": "32"}
HELD_OUT = "val-core/qa-greedy/reward/mean@1"
HEALTHY = {
    "critic/score/mean": 0.6,
    "actor/entropy": 0.3,
    ANSWER_WHEN_SOLVED: 0.8,
    "credit/turns_per_row": 3.0,
    "credit/tool/searches_per_row": 2.0,
    "response_length/mean": 500.0,
    "credit/stop/answer": 0.9,
    "actor/grad_norm": 0.4,
    "credit/groups/groups": 16.0,
    "credit/groups/tied": 8.0,
    "credit/groups/all_failed": 3.0,
    HELD_OUT: 0.7,
    EXPLAINED_VARIANCE: 0.5,
    INVALID_ACTIONS: 0.3,
}
STUCK = {"credit/groups/all_failed": 5.0}
# alarm: what falls or grows after ten healthy steps; by a little less, which is none yet
COLLAPSES = {
    "held_out_falls": ({HELD_OUT: 0.5}, {HELD_OUT: 0.53}),
    "reward_falls": ({"critic/score/mean": 0.29}, {"critic/score/mean": 0.31}),
    "entropy_falls": ({"actor/entropy": 0.029} | STUCK, {"actor/entropy": 0.031} | STUCK),
    "entropy_explodes": ({"actor/entropy": 0.91}, {"actor/entropy": 0.89}),
    "right_answers_fall": ({ANSWER_WHEN_SOLVED: 0.59}, {ANSWER_WHEN_SOLVED: 0.61}),
    "turns_shrink": ({"credit/turns_per_row": 1.7}, {"credit/turns_per_row": 1.9}),
    "searches_stop": ({"credit/tool/searches_per_row": 0.1}, {"credit/tool/searches_per_row": 0.3}),
    "responses_grow": ({"response_length/mean": 1010.0}, {"response_length/mean": 990.0}),
    "answers_stop": ({"credit/stop/answer": 0.44}, {"credit/stop/answer": 0.46}),
    "gradients_grow": ({"actor/grad_norm": 2.1}, {"actor/grad_norm": 1.9}),
    "no_contrast": ({"credit/groups/tied": 15.0}, {"credit/groups/tied": 14.0}),
    "values_say_nothing": ({EXPLAINED_VARIANCE: 0.04}, {EXPLAINED_VARIANCE: 0.06}),
    "actions_invalid": ({INVALID_ACTIONS: 0.81}, {INVALID_ACTIONS: 0.79}),
    "gradient_not_finite": ({"actor/grad_norm": math.nan}, {"actor/grad_norm": 0.5}),
}


def alarms(rows, run_dir=Path("no run"), before=0, **credit):
    """The alarms of each step after ``before``."""
    watch = Watch(run_dir, before, SETTINGS, **credit)
    return [{name for name, _ in watch.see(before + 1 + i, row)} for i, row in enumerate(rows)]


@pytest.mark.parametrize("name", [alarm.name for alarm in ALARMS])
def test_an_alarm_sees_its_own_collapse_and_nothing_else_does(name):
    collapsed, shaken = COLLAPSES[name]
    rows = [HEALTHY] * 10 + [HEALTHY | collapsed] * 5
    assert alarms(rows)[-1] == {name}
    assert set().union(*alarms(rows)[:10]) == set()
    assert set().union(*alarms([HEALTHY] * 10 + [HEALTHY | shaken] * 20)) == set()


@pytest.mark.parametrize(
    ("learns", "with_it"),
    [
        ({"credit/turns_per_row": 1.2}, {"critic/score/mean": 0.7}),
        ({"response_length/mean": 1200.0}, {"critic/score/mean": 0.8}),
        ({"actor/entropy": 0.01}, {"credit/groups/all_failed": 1.0}),
    ],
)
def test_what_changes_because_the_policy_learns_is_no_alarm(learns, with_it):
    assert set().union(*alarms([HEALTHY] * 10 + [HEALTHY | learns | with_it] * 20)) == set()
    assert alarms([HEALTHY] * 10 + [HEALTHY | learns | STUCK] * 20)[-1]


AT_ONCE = ("actions_invalid", "gradient_not_finite")


def test_one_bad_step_is_no_collapse_but_two_alarms_come_at_once():
    lasting = [row for name, (row, _) in COLLAPSES.items() if name not in AT_ONCE]
    collapses = {key: value for row in lasting for key, value in row.items()}
    once = HEALTHY | collapses | {"actor/grad_norm": 1.0, HELD_OUT: 0.6, "actor/entropy": 0.9}
    assert set().union(*alarms([HEALTHY] * 10 + [once] + [HEALTHY] * 10)) == set()
    for name in AT_ONCE:
        assert alarms([HEALTHY, HEALTHY | COLLAPSES[name][0], HEALTHY]) == [set(), {name}, set()]


def test_a_reward_of_zero_that_stays_there_is_not_rising():
    """Without this no alarm of a run that never solved anything could fire."""
    nothing = HEALTHY | {"critic/score/mean": 0.0, HELD_OUT: 0.0}
    assert alarms([nothing] * 10 + [nothing | {"credit/turns_per_row": 1.0}] * 5)[-1] == {"turns_shrink"}


def test_metrics_that_a_run_does_not_have_are_no_alarm():
    assert alarms([{}] * 20) == [set()] * 20
    sometimes = [
        {ANSWER_WHEN_SOLVED: 0.9 if step < 25 else 0.1} if step % 5 == 0 else {} for step in range(60)
    ]
    assert [bool(seen) for seen in alarms(sometimes)] == [False] * 45 + [True] * 15  # ten measured steps


def test_a_start_that_goes_on_compares_its_own_steps_with_the_beginning_of_the_run(tmp_path):
    """A remedy gets a window of steps before the same alarm can come again."""
    for step in range(1, 21):
        append_json(
            tmp_path / METRICS, {"step": step} | HEALTHY | ({"actor/entropy": 2.0} if step > 10 else {})
        )
    append_json(tmp_path / VALIDATION, {"step": 0, HELD_OUT: 0.9})
    still = alarms([HEALTHY | {"actor/entropy": 2.0}] * 6, tmp_path, before=20)
    assert [bool(seen) for seen in still] == [False] * 4 + [True] * 2
    assert alarms([HEALTHY] * 10, tmp_path, before=20) == [set()] * 10


def test_tied_groups_are_no_alarm_for_a_credit_that_compares_no_rollouts():
    rows = [HEALTHY] * 10 + [HEALTHY | COLLAPSES["no_contrast"][0]] * 5
    assert {"no_contrast"} in alarms(rows) and not any(alarms(rows, grouped=False))


def _placeholders(remedy):
    remedy = remedy.replace("RUN/checkpoints/global_step_N", "/run/checkpoints/global_step_3")
    return remedy.replace("OTHER_QUESTIONS", "other.parquet").format(**SETTINGS).split()


@pytest.mark.slow
def test_every_remedy_is_accepted_by_the_rules():
    """Every override of the table, those of one alarm together, in as few compositions as their values allow."""
    together: list[dict[str, str]] = []
    recipe = {"actions_invalid": "doorkey"}
    for alarm in [one for one in ALARMS if one.name not in recipe]:
        own = dict(override.split("=", 1) for override in _placeholders(alarm.remedy))
        for known in together:
            if all(known.get(key, value) == value for key, value in own.items()):
                known.update(own)
                break
        else:
            together.append(own)
    for known in together:
        config = load_config("lab", [f"{key}={value}" for key, value in known.items()])
        validate(config)
    for alarm in [one for one in ALARMS if one.name in recipe]:
        validate(load_config(recipe[alarm.name], _placeholders(alarm.remedy)))
