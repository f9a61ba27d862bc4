"""A campaign runs to its end, whatever happens to a run or to itself; a stand-in writes the files of a run."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from verl_credit.errors import ConfigError, PreflightError
from verl_credit.records.run.lock import run_lock
from verl_credit.study.campaign import runner
from verl_credit.study.campaign.record import read_record
from verl_credit.study.campaign.state import State, states

pytestmark = pytest.mark.slow  # each composes a campaign's conditions several times
FIRST, SECOND = ["grpo/seed-1", "joint/seed-1"], ["grpo/seed-2", "joint/seed-2"]


def state_by_folder(stand):
    return {one.run.folder: one.state for one in states(read_record(stand.folder).campaign, stand.folder)}


def test_every_run_once_block_by_block(stand, capsys):
    assert stand.run() == 0
    assert stand.started == [*FIRST, *SECOND]
    said = capsys.readouterr().out
    assert "2 pairs (seed, world) cannot resolve 1 comparison at 5 %: at least 6 are needed" in said
    assert "grpo/seed-1: exit code 0, done, 30 of 30 steps done" in said and "4 of 4 done" in said
    assert stand.run() == 0 and stand.started == []
    found = states(read_record(stand.folder).campaign, stand.folder)
    assert [one.value for one in found] == pytest.approx([0.4] * 4)  # (0.3 x 15 + 0.5 x 15) / 30
    assert all(0 < one.hours < 0.01 for one in found)


def test_a_run_that_fails_ends_nothing_else_and_is_tried_again(stand, capsys):
    stand.does(**{"grpo/seed-1": "fails", "joint/seed-1": "killed"})
    assert stand.run() == 1
    assert stand.started == [*FIRST, *SECOND]
    assert state_by_folder(stand) == {
        "grpo/seed-1": State.FAILED,
        "joint/seed-1": State.UNFINISHED,
        **dict.fromkeys(SECOND, State.DONE),
    }
    assert "exit code -9, killed" in capsys.readouterr().out
    stand.does()
    assert stand.run() == 0 and stand.started == FIRST


def test_the_stop_rule_and_the_budget(stand, capsys):
    stand.does(**dict.fromkeys([*FIRST, *SECOND], "fails"))
    assert stand.run(stop={"max_failures": 2}) == 1 and stand.started == FIRST
    assert "no further run starts: stop.max_failures=2: 2 failed" in capsys.readouterr().out
    stand.does()
    assert stand.run(budget={"runs": 3}) == 0 and stand.started == [*FIRST, "grpo/seed-2"]
    assert "no further run starts: budget.runs=3 is spent" in capsys.readouterr().out
    assert stand.run(budget={"hours": 1e-9}) == 0 and stand.started == []
    assert "budget.hours=1e-09 is spent" in capsys.readouterr().out
    assert stand.run(budget={}) == 0 and stand.started == ["joint/seed-2"]


def test_a_second_runner_is_refused(stand):
    stand.folder.mkdir()
    with (
        run_lock(stand.folder),
        pytest.raises(PreflightError, match=f"--dir={stand.folder}: process {os.getpid()}"),
    ):
        stand.run()
    assert stand.started == []


def test_a_folder_that_holds_something_else_is_left_alone(stand):
    stand.folder.mkdir()
    (stand.folder / "thesis.tex").write_text("mine")
    with pytest.raises(ConfigError) as error:
        stand.run()
    assert (error.value.key, error.value.value) == ("--dir", stand.folder)
    assert error.value.accepted == "it holds thesis.tex, and no campaign; give a new folder"


def test_a_damaged_run_is_left_alone_and_named(stand, capsys):
    assert stand.run() == 0 and stand.started
    events = stand.folder / "grpo/seed-1/events.jsonl"
    events.write_text("not json\n")
    assert stand.run() == 1 and stand.started == []
    assert "grpo/seed-1: left alone: damaged" in capsys.readouterr().out
    assert events.read_text() == "not json\n"


def test_what_a_later_start_found_does_not_undo_a_run(stand):
    assert stand.run() == 0 and stand.started
    with (stand.folder / "grpo/seed-1/events.jsonl").open("a") as file:
        for row in ({"kind": "start"}, {"kind": "end", "reason": "refused", "text": "the disk is full"}):
            file.write(json.dumps(row) + "\n")
    assert stand.run() == 0 and stand.started == []


def test_a_run_that_goes_on_elsewhere_is_left_alone(stand, capsys):
    folder = stand.folder / "grpo/seed-1"
    assert stand.run(seeds=[2]) == 0 and stand.started == SECOND
    folder.mkdir(parents=True)
    (folder / "events.jsonl").write_text(json.dumps({"time": time.time(), "kind": "start"}) + "\n")
    with run_lock(folder):
        assert stand.run(seeds=[1, 2]) == 1 and stand.started == ["joint/seed-1"]
    assert "grpo/seed-1: left alone: running" in capsys.readouterr().out
    (folder / "run.lock").write_text(json.dumps({"pid": 2**22 + 1, "host": "here"}))  # of a killed one
    assert stand.run() == 0 and stand.started == ["grpo/seed-1"]


def test_seeds_and_conditions_can_be_added_and_that_is_recorded(stand, capsys):
    assert stand.run() == 0 and stand.started
    more = stand.tree["conditions"] | {"separate": ["algorithm.info_gain_norm_mode=separate"]}
    assert stand.run(seeds=[0, 1, 2], conditions=more) == 0
    assert stand.started == [
        "grpo/seed-0",
        "joint/seed-0",
        "separate/seed-0",
        "separate/seed-1",
        "separate/seed-2",
    ]
    (added,) = read_record(stand.folder).added
    assert (
        added["what"] == "condition separate; seed 0; comparison separate against grpo"
        and added["ended"] == 4
    )
    assert "added: seed 0" in capsys.readouterr().out


def test_runs_side_by_side(stand, monkeypatch):
    """The first ends when the second has ended: one after the other they would wait for ever."""
    built = []
    monkeypatch.setattr(runner, "run_child", lambda command: built.append(command) or 0)
    stand.does(**{"grpo/seed-1": f"waits for {stand.folder}/joint/seed-1/validation.jsonl"})
    assert stand.run(parallel=2) == 0 and len(stand.started) == 4
    # Before them, so that they do not build it side by side.
    assert [command[2] for command in built] == ["verl_credit.recipe.world"]
    assert (stand.folder / "joint/seed-1/output.log").read_text() == "ends joint/seed-1\n"
    assert stand.run(parallel=2) == 0 and len(built) == 1


def test_gpu_runs_are_not_put_side_by_side(stand):
    given = ["data.train_files=x", "data.val_files=x"]
    stand.tree["metric"]["window"] = [0, 100]
    with pytest.raises(ConfigError) as error:
        stand.run(
            parallel=2,
            recipe="math_sepa",
            overrides=given,
            conditions={"a": [], "b": ["credit=maxrl"]},
            baseline="a",
        )
    use = "runs of condition a would share trainer.device=cuda, and each would take all of it; use 1"
    assert (error.value.key, error.value.value, error.value.accepted) == ("--parallel", 2, use)
    with pytest.raises(ConfigError) as error:
        stand.run(parallel=0)
    use = "expected a whole number of at least 1"
    assert (error.value.key, error.value.value, error.value.accepted) == ("--parallel", 0, use)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_told_to_stop_it_waits_for_the_run_and_starts_no_other(stand, capsys, number):
    stand.does(**{"grpo/seed-1": f"waits for {stand.root}/go"})
    events = stand.folder / "grpo/seed-1/events.jsonl"

    def tell():
        while not events.exists() or "start" not in events.read_text():
            time.sleep(0.01)
        os.kill(os.getpid(), number)
        if number == signal.SIGINT:  # Ctrl-C reaches a run by itself; here the run is let go
            (stand.root / "go").touch()

    teller = threading.Thread(target=tell)
    teller.start()
    assert stand.run() == 130
    teller.join()
    assert stand.started == ["grpo/seed-1"]
    said = capsys.readouterr().out
    assert "interrupted; the same command goes on" in said and "run 2 of 4" not in said
    stand.does()
    assert stand.run() == 0
    rest = [FIRST[1], *SECOND]
    assert stand.started == (rest if number == signal.SIGINT else [FIRST[0], *rest])


KILLED = """
import sys
sys.path[:0] = [{tests!r}]
from pathlib import Path
from study.campaign.conftest import Stand
from verl_credit.study.campaign import runner
stand = Stand(Path({root!r}))
stand.does(**{{"grpo/seed-2": "waits for {root}/never"}})
runner.run_command = stand.run_command
stand.run()
"""


@pytest.mark.slow
def test_after_kill_9_nothing_is_repeated(stand):
    tests = str(Path(__file__).parents[2])
    code = KILLED.format(tests=tests, root=str(stand.root))
    process = subprocess.Popen(
        [sys.executable, "-c", code], start_new_session=True, stdout=subprocess.DEVNULL
    )
    events = stand.folder / "grpo/seed-2/events.jsonl"
    while not events.exists():
        assert process.poll() is None
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert stand.started == [*FIRST, "grpo/seed-2"]
    stand.does()
    assert stand.run() == 0 and stand.started == SECOND
    assert len((stand.folder / "grpo/seed-1/events.jsonl").read_text().splitlines()) == 2
