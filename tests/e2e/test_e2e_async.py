"""verl's asynchronous trainers on the tiny lab: credit in every step, the age of every turn, a checkpoint and a resume."""

import pytest

from kit.train_run import train
from verl_credit.run.files import EVENTS, METRICS, read_json_lines
from verl_credit.run.tables import TURNS, read_table, table_path

pytestmark = pytest.mark.e2e

SETTINGS = [
    *("--config-name", "lab", "lab.size=tiny", "data.val_max_samples=8", "trainer.test_freq=-1"),
    *("trainer.val_before_train=false", "trainer.save_freq=2", "data.train_batch_size=8"),
]
UPDATES = {"credit_colocate_async": 1, "credit_separate_async": 2}
"""Mini-batches that are credited by themselves, of the two of a step."""


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    return tmp_path_factory.mktemp("async") / "tiny"


@pytest.mark.parametrize("mode", UPDATES)
def test_a_run_goes_on_from_its_checkpoint(mode, lab, tmp_path):
    run_dir = tmp_path / "run"
    settings = [
        *SETTINGS,
        f"lab.dir={lab}",
        f"run_dir={run_dir}",
        f"trainer.v1.trainer_mode={mode}",
    ]
    code, first = train(tmp_path / "first.log", *settings, "trainer.total_training_steps=2")
    assert code == 0, first
    code, second = train(tmp_path / "second.log", *settings, "trainer.total_training_steps=4")
    assert code == 0, second
    assert f"resume: from step 2, not exact: trainer.v1.trainer_mode={mode}: rollouts that" in second
    rows = read_json_lines(run_dir / METRICS)
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    for row in rows:
        assert row["credit/staleness/turns_unknown"] == 0 and row["credit/rollouts_failed"] == 0
        assert 0 <= row["credit/staleness/mean"] <= row["credit/staleness/oldest"] <= row["step"] - 1
        assert row["credit/gain/scored"] == 1 and row["actor/grad_norm"] > 0
        assert row["credit/rows_trained"] == 64 / UPDATES[mode]  # of an update
        columns = read_table(table_path(run_dir, TURNS, row["step"])).columns
        assert len(set(columns["row"])) == 64 / UPDATES[mode]
        # All of a step's updates compute log-probs with the weights of the last sync.
        assert row.get("credit/staleness/ratio_off_at_age_0", 0.0) < 1e-4
    # Prompts of two steps are under way from the beginning.
    assert rows[1]["credit/staleness/mean"] > 0
    said = [event["text"] for event in read_json_lines(run_dir / EVENTS) if event["kind"] == "trainer"]
    assert len(said) == 2 and all(
        "the ratio of a token is to the weights that wrote the token" in text for text in said
    )
