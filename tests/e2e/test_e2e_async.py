"""verl's asynchronous trainers on the tiny lab: credit in every step, the age of every turn, a kill and a resume."""

from dataclasses import replace

import pytest

from kit.faults import SAVED, STEP, STEPS, KillPoint, run_killed, run_straight, wrong_ages
from verl_credit.records.run.files import EVENTS, METRICS, read_json_lines
from verl_credit.records.run.table_files import TURNS, read_table, table_path

pytestmark = pytest.mark.e2e

UPDATES = {"credit_colocate_async": 1, "credit_separate_async": 2}
"""Mini-batches that are credited by themselves, of the two of a step."""
WAITING = KillPoint("waiting", f"{STEP}.on_sample_begin", who="self")


def settings(mode):
    return "data.train_batch_size=8", f"trainer.v1.trainer_mode={mode}"


def said_by_the_trainer(run_dir, mode, steps):
    """Every update has credit, every turn an age. Returns what the run said of its trainer and of a resume."""
    assert wrong_ages(run_dir) == []
    rows = read_json_lines(run_dir / METRICS)
    assert [row["step"] for row in rows] == list(range(1, steps + 1))
    for row in rows:
        assert row["credit/rollouts_failed"] == 0
        assert row["credit/rows_trained"] == 64 / UPDATES[mode]  # the rows of an update
        columns = read_table(table_path(run_dir, TURNS, row["step"])).columns
        assert len(set(columns["row"])) == 64 / UPDATES[mode]
    assert all(row["credit/gain/scored"] == 1 and row["actor/grad_norm"] > 0 for row in rows[1:])
    # Prompts of two steps are under way from the beginning.
    assert rows[1]["credit/staleness/mean"] > 0
    events = read_json_lines(run_dir / EVENTS)
    said = [event["text"] for event in events if event["kind"] in ("trainer", "resume")]
    starts = sum(event["kind"] == "start" for event in events)
    assert (
        sum("the ratio of a token is to the weights that wrote the token" in text for text in said) == starts
    )
    return said


def test_with_servers_of_its_own_every_update_has_credit_and_every_turn_an_age(tiny_lab, tmp_path):
    mode = "credit_separate_async"
    short = ("total_training_steps=2", "save_freq=-1", "test_freq=-1", "val_before_train=false")
    run_dir = run_straight(tmp_path, tiny_lab.root, *settings(mode), *(f"trainer.{one}" for one in short))
    assert len(said_by_the_trainer(run_dir, mode, steps=2)) == 1


@pytest.mark.nightly
@pytest.mark.parametrize("mode", UPDATES)
def test_a_killed_run_goes_on_from_its_checkpoint(mode, tiny_lab, tmp_path):
    """The trainer dies as it waits for rollouts after the checkpoint. More points: evidence/async/README.md."""
    point = replace(WAITING, call=SAVED * UPDATES[mode] + 1)
    outcome = run_killed(tmp_path / mode, tiny_lab.root, point, None, *settings(mode))
    assert outcome.lost == [] and outcome.first != 0 == outcome.second, outcome
    assert outcome.resumed_from == SAVED, outcome
    said = said_by_the_trainer(tmp_path / mode / "run", mode, STEPS)
    assert len(said) == 3
    assert f"from step 2, not exact: trainer.v1.trainer_mode={mode}: rollouts that" in "".join(said)
