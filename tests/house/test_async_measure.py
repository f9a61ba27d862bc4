"""The comparison of the trainers (evidence/async): figures of a run, means over seeds, and which is better per minute."""

import asyncio
import importlib.util
import json
import sys
from pathlib import Path

import pytest

from kit.retriever_fakes import app_of, client_of
from verl_credit.records.run.files import METRICS, VALIDATION, append_json

FOLDER = Path(__file__).parents[2] / "evidence" / "async"


@pytest.fixture
def load(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))

    def module(name):
        monkeypatch.delitem(sys.modules, name, raising=False)
        spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
        found = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(found)
        return found

    return module


def figures(em, minutes, **changes):
    """Of a run that was evaluated every ten steps; ``minutes``: at which."""
    run = {
        **{"steps": 20, "step_s": 6.0, "generation_s": 2.0, "both_cores": 0.5, "cores_used": 1.5},
        **{"age": 0.0, "oldest": 0.0, "clipped": 0.02, "minutes_of_steps": minutes[-1]},
    }
    steps = [str(10 * place) for place in range(len(em))]
    return (
        run
        | changes
        | {"em": dict(zip(steps, em, strict=True)), "em_at_minute": dict(zip(steps, minutes, strict=True))}
    )


def test_held_out_em_per_minute_is_the_area_over_the_same_minutes(load):
    rate, run = load("comparison").em_per_minute, figures([0.2, 0.6, 1.0], [0.0, 1.0, 3.0])
    assert rate(run, 1.0) == pytest.approx(0.4)
    assert rate(run, 2.0) == pytest.approx(
        (0.4 + 0.7) / 2
    )  # .8 after two minutes, in the middle of the second part
    assert rate(run, 3.0) == pytest.approx((0.4 + 1.6) / 3)
    assert rate(figures([0.2, 0.6], [0.0, 9.0]), 9.0) == pytest.approx(0.4)  # "10" after "0", as numbers


def test_a_slower_run_that_learns_as_much_a_step_is_worse_a_minute(load):
    runs = {
        "credit-1": figures([0.2, 0.8], [0.0, 2.0]),
        "credit-2": figures([0.2, 0.6], [0.0, 2.0]),
        "credit_separate_async-1": figures([0.2, 0.8], [0.0, 4.0], age=1.0),
        "credit_separate_async-2": figures([0.2, 0.6], [0.0, 4.0], age=2.0),
    }
    said = load("comparison").tables(runs)
    assert said.splitlines()[-1] == (
        "Better held-out EM per minute: `credit` with 0.450; `credit_separate_async` 0.325, lower in 2 of 2 seeds."
    )
    assert "| seeds | 1, 2 | 1, 2 |" in said
    assert "mean of the first 2.0 minutes | 0.450 (0.400 to 0.500) | 0.325 (0.300 to 0.350) |" in said
    assert "| age of a turn in steps, mean | 0.00 (0.00 to 0.00) | 1.50 (1.00 to 2.00) |" in said


@pytest.mark.parametrize(
    "other, seeds, said",
    [
        ([0.2, 0.6], 1, "lower in 1 of 1 seeds, not told apart."),
        ([0.2, 0.8], 2, "lower in 0 of 2 seeds, not told apart."),
    ],
)
def test_one_seed_or_seeds_that_disagree_decide_nothing(load, other, seeds, said):
    runs = {
        f"{mode}-{seed}": figures(em, [0.0, 2.0])
        for mode, em in (("credit", [0.2, 0.8]), ("credit_colocate_async", other))
        for seed in range(seeds)
    }
    assert load("comparison").better(runs).endswith(said)


def test_a_trainer_alone_is_better_than_nothing(load):
    assert (
        load("comparison")
        .better({"credit-1": figures([0.2, 0.8], [0.0, 2.0])})
        .endswith("no other trainer was run.")
    )


def test_the_figures_of_a_run_are_read_from_its_files(load, tmp_path):
    measure, score = load("measure"), "val-core/lab-greedy/em/mean@1"
    for step in range(1, 11):
        seconds = 30.0 if step <= measure.WARM else 6.0
        row = {"perf/time_per_step": seconds, "timing_s/gen": 2.0, "actor/pg_clipfrac": 0.01 * step}
        append_json(
            tmp_path / METRICS,
            {"step": step, **row, "credit/staleness/mean": 1.0, "credit/staleness/oldest": 2.0},
        )
    for step, em in ((0, 0.25), (10, 0.75)):
        append_json(tmp_path / VALIDATION, {"step": step, score: em})
    cores = [
        [0.0, 4, [99, 99]],
        [1.0, 5, [99, 99]],
        [2.0, 7, [99, 1]],
        [3.0, 10, [99, 99]],
    ]  # two while it trained warm
    (tmp_path / measure.SAMPLES).write_text(json.dumps(cores))
    found = measure.read(tmp_path)
    assert found["step_s"] == 6.0 and found["generation_s"] == 2.0 and found["steps"] == 10
    assert found["minutes_of_steps"] == pytest.approx(3.0)
    assert found["em"] == {0: 0.25, 10: 0.75} and found["em_at_minute"] == pytest.approx({0: 0.0, 10: 3.0})
    assert found["both_cores"] == 0.5 and found["cores_used"] == pytest.approx((1.98 + 1.0) / 2)
    assert found["age"] == 1.0 and found["oldest"] == 2.0 and found["clipped"] == pytest.approx(0.08)
    load("comparison").tables({"credit-1": found})


def test_a_run_that_was_cut_off_is_put_aside_and_one_that_fails_stops_no_other(load, tmp_path, monkeypatch):
    measure, made = load("measure"), []

    def train(run_dir, mode, seed, overrides):
        made.append((mode, seed, overrides))
        run_dir.mkdir()
        (run_dir / measure.SAMPLES).touch()
        return 5 if mode == "credit" else 0

    monkeypatch.setattr(measure, "train", train)
    monkeypatch.setattr(measure.signal, "signal", lambda *_: None)
    done, cut = tmp_path / "credit-1", tmp_path / "credit_colocate_async-1"
    done.mkdir()
    (done / measure.SAMPLES).touch()
    cut.mkdir()
    (cut / "half").touch()
    modes = ["credit", "credit_colocate_async"]
    options = measure.argparse.Namespace(
        dir=tmp_path, delay=0.0, seeds=[1, 2], modes=modes, overrides=["a=b"]
    )
    (failed,) = measure.make_runs(options)
    assert made == [(mode, seed, ["a=b"]) for mode, seed in ((modes[1], 1), (modes[0], 2), (modes[1], 2))]
    assert f"{tmp_path / 'credit-2'}: exit code 5" in failed
    assert [path.name for path in tmp_path.glob("*cut-off*/*")] == ["half"]


def test_the_slow_search_waits_before_every_answer_and_not_before_saying_that_it_lives(load):
    waited = []

    async def pause(seconds):
        waited.append(seconds)

    async def ask():
        app, _ = app_of()
        async with (
            app.router.lifespan_context(app),
            client_of(load("slow_search").slowed(app, 0.5, pause)) as client,
        ):
            assert (await client.get("/livez")).status_code == 200 and waited == []
            return await client.post("/retrieve", json={"queries": ["a town"], "topk": 2})

    answer = asyncio.run(ask())
    assert answer.status_code == 200 and len(answer.json()["result"][0]) == 2 and waited == [0.5]
