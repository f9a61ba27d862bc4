"""The environment is played before a start: what it gives is said, and what would end the run later is refused."""

import random
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

from kit.environments import CORRIDOR, FAULTY, Corridor
from kit.in_process import Here
from kit.recipes import check
from verl_credit.config.keys import Environment
from verl_credit.errors import PreflightError
from verl_credit.recipe.doctor import environments
from verl_credit.recipe.doctor.context import Context
from verl_credit.recipe.doctor.status import Status

HERE = __name__


class Unseeded(Corridor):
    """It draws from a generator that no seed reaches."""

    draws = random.Random()

    def step(self, action):
        self.at = self.draws.randrange(self.length)
        return self._seen()


class Silent(Corridor):
    def _seen(self, **more):
        step = super()._seen(**more)
        return type(step)(step.observation, terminated=step.terminated)


@pytest.fixture(autouse=True)
def here(monkeypatch):
    monkeypatch.setattr(environments, "Pool", Here)


def checked(tmp_path, path, *overrides, **task):
    row = {"prompt": [{"role": "user", "content": "Walk."}], "data_source": "x", "agent_name": "env_agent",
           "reward_model": {"ground_truth": ""}, "extra_info": {"environment": {"seed": 1} | task}}  # fmt: skip
    parquet.write_table(pa.Table.from_pylist([row] * 16), tmp_path / "rows.parquet")
    files = [f"data.{name}_files={tmp_path}/rows.parquet" for name in ("train", "val")]
    given = [
        f"environment.path={path}",
        "~environment.kwargs",
        "+environment.kwargs.length=9",
        "environment.max_steps=21",
    ]
    model = "actor_rollout_ref.model.path=x"
    return environments.check_reset(Context(None, check(*files, model, *given, *overrides, recipe="doorkey")))


@pytest.mark.slow
def test_what_an_environment_gives_is_said(tmp_path):
    result = checked(tmp_path, CORRIDOR)
    assert result.status is Status.PASS
    assert result.found == f"environment {CORRIDOR}: 2 actions, rewards, names of states, progress, success"
    assert checked(tmp_path, CORRIDOR, "+environment.kwargs.says=false").found.endswith(
        "progress; no success"
    )
    found = checked(tmp_path, f"{HERE}.Silent", observation="room 1 of 9").found
    assert found == f"environment {HERE}.Silent: no list of actions: resets alone were compared"


@pytest.mark.slow
def test_random_numbers_that_no_seed_reaches_are_found(tmp_path):
    with pytest.raises(PreflightError, match=r"Unseeded, seed 1: step \d+ was (observation|state)="):
        checked(tmp_path, f"{HERE}.Unseeded")


@pytest.mark.parametrize(
    "path, overrides, task, named",
    [
        (FAULTY, [], {"options": {"fault": "raises"}}, "no such door"),
        ("no_module.Class", [], {}, "no_module"),
        ("textworld", [], {}, "pip install textworld"),
        (CORRIDOR, [], {"observation": "room 2 of 9"}, "prepare env"),
        (CORRIDOR, ["environment.kwargs.length=2", "+environment.kwargs.says=false"], {}, "environment.success_at"),
        (CORRIDOR, ["+environment.kwargs.width=1"], {}, "width"),
    ],
)  # fmt: skip
def test_what_would_end_the_run_is_refused(tmp_path, path, overrides, task, named):
    more = ["~environment.kwargs.length", "+environment.kwargs.game=x"] if path == "textworld" else []
    with pytest.raises(PreflightError, match="environment.path=") as caught:
        checked(tmp_path, path, *more, *overrides, **task)
    assert named in str(caught.value)


def test_the_first_row_with_a_task_is_played_in_two_processes(monkeypatch):
    made, settings = [], SimpleNamespace(environment=Environment(path=CORRIDOR, max_steps=3))
    monkeypatch.setattr(environments, "Pool", lambda *args, **more: made.append(more) or Here(*args, **more))
    rows = [SimpleNamespace(task=None), SimpleNamespace(task={"seed": 1})]
    found = [
        environments.check_reset(SimpleNamespace(settings=settings, rows=lambda _, n=n: rows[:n]))
        for n in (1, 2)
    ]
    assert [one.status for one in found] == [Status.SKIP, Status.PASS] and [
        one["processes"] for one in made
    ] == [2]


def test_a_run_without_an_environment_has_nothing_to_try():
    config = check("search.max_searches=1", "search.url=http://x", recipe="lab")
    assert environments.check_reset(Context(None, config)).status is Status.SKIP
