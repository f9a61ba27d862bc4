"""max_hours: the step that is made last, by a clock of our own."""

import pytest

from kit.recipes import load_config
from verl_credit.config.settings import CreditSettings
from verl_credit.errors import ConfigError
from verl_credit.recipe.rules import validate
from verl_credit.records.run.state import TimeLimit


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def steps_made(hours, step_s, **last_s):
    """Steps until one was the last, and the seconds they took; saving and evaluating at the last one only."""
    clock = Clock()
    limit, steps, last = TimeLimit(hours, clock), 0, False
    while True:
        clock.now += step_s
        steps += 1
        if last:
            return steps, clock.now - 100.0 + sum(last_s.values())
        last = limit.next_is_last({"step": step_s} | (last_s if steps == 1 else {}))


def test_a_run_ends_within_its_limit_and_uses_it():
    steps, seconds = steps_made(1.0, 100.0, save_checkpoint=50.0, testing=150.0)
    assert seconds <= 3600 < seconds + 2 * 100.0
    assert steps == 34  # 34 * 100 + 200 = 3600


def test_what_was_not_seen_is_taken_to_last_a_step():
    steps, _ = steps_made(1.0, 100.0)
    assert steps == 34  # two steps are kept free for saving and evaluating


@pytest.mark.parametrize(
    ("text", "value"),
    [("0", 0), ("-1", -1), (".inf", ".inf"), ("inf", float("inf")), ("soon", "soon"), ("true", True)],
)
def test_a_limit_that_is_no_positive_number_is_refused(text, value):
    with pytest.raises(ConfigError) as error:
        validate(load_config("lab", [f"max_hours={text}"]))
    assert (error.value.key, error.value.value) == ("max_hours", value)
    assert error.value.accepted == "expected a number of at least 0.001 or null"


def test_a_limit_without_checkpoints_is_refused():
    with pytest.raises(ConfigError, match="with trainer.save_freq=-1") as error:
        validate(load_config("lab", ["max_hours=2", "trainer.save_freq=-1"]))
    assert (error.value.key, error.value.value) == ("max_hours", 2)
    assert error.value.accepted == "the last step would be lost; set trainer.save_freq"


def test_an_early_end_does_not_move_the_curriculum(tmp_path):
    from verl_credit.host.step.recorded import Recorder
    from verl_credit.host.step.v1_host import V1Host

    config = load_config(
        "lab", [f"run_dir={tmp_path}", "algorithm.info_gain_curriculum.gain=[1,0]", "max_hours=1"]
    )
    host, recorder = V1Host(config, None, None), Recorder(config)
    recorder._limit = TimeLimit(1e-9, Clock())
    host.enter(None, {}, step=2, last_step=101, workers=None)
    recorder.finished(host, {}, {"step": 100.0, "gen": 50.0}, last=False)
    assert host.last_step == 3  # what verl stops at
    host.enter(None, {}, step=3, last_step=3, workers=None)
    settings = CreditSettings.from_config(config)
    assert settings.curriculum_at(3, host.planned_steps)[0] == pytest.approx(0.98)
