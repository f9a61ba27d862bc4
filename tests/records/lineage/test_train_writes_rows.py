"""`verl-credit train` writes its own row: every way to end, a kill, a second start, a store that cannot be written."""

import pytest
from omegaconf import OmegaConf

from kit.lab_run import launches, run
from kit.machine import MACHINE
from kit.trials import trial
from verl_credit.cli.train import start as train_module
from verl_credit.cli.train.trial_row import TrialRow, held_out_metric
from verl_credit.errors import ExitCode, IntegrityError, PreflightError, Terminated, TooLargeError
from verl_credit.records.lineage import LineageStore
from verl_credit.records.report.run_data import read_run
from verl_credit.records.run import events
from verl_credit.records.run.files import EVENTS, METRICS, VALIDATION, append_json, read_json_lines

FIVE = "trainer.total_training_steps=5"


def found(share):
    return {"val-aux/lab-greedy/em/mean@1": share, "val-aux/lab-greedy/questions": 64}


@pytest.fixture
def ends_with(monkeypatch):
    """Without the checks before the start, which have tests of their own."""
    monkeypatch.setattr(train_module, "gather", lambda **_: MACHINE)
    monkeypatch.setattr(train_module, "_make_ready", lambda *_: None)
    return launches(monkeypatch)


@pytest.fixture
def store(tmp_path):
    return LineageStore(tmp_path / "lineage", lower_is_better=False)


@pytest.fixture
def start(capsys, tmp_path):
    """Start a run in that folder beside the store; returns (exit code, lines)."""
    return lambda name, *overrides: run(capsys, tmp_path / name, FIVE, *overrides)


@pytest.mark.slow
def test_finished_trials_are_baseline_kept_or_discarded(ends_with, start, store, tmp_path):
    for name, share, hypothesis in (("a", 0.25, "as it is"), ("b", 0.5, "more"), ("c", 0.5, "more | again")):
        ends_with(steps=5, found=found(share))
        code, lines = start(name, f"lineage.hypothesis='{hypothesis}'", "lineage.expected_delta=0.02")
        assert code == 0
    a, b, c = store.all_trials()
    assert [(t.exp_id, t.status, t.core_metric, t.delta_vs_best) for t in (a, b, c)] == [
        ("a", "baseline", 0.25, None), ("b", "keep", 0.5, 0.25), ("c", "discard", 0.5, 0.0),
    ]  # fmt: skip
    assert (a.parent_exp, b.parent_exp, c.parent_exp, c.baseline_exp) == ("", "a", "b", "a")
    assert (c.hypothesis, c.expected_delta, c.domain) == ("more | again", "+0.02", "lab")
    assert c.job_name == str(tmp_path / "c") and c.snapshot_path == str(tmp_path / "c" / "config.yaml")
    assert c.notes == "alpha=0.3 gamma=1, 5 of 5 steps; gain +0 over exp_b, not above 0.005"
    assert c.total_s > 0 and c.specialist == "turn-group-v1d"
    rule = "kept when held-out exact match gains by more than 0.005 over exp_b (0.5)"
    assert any(f"trial exp_c in {store.path}: {rule}" in line for line in lines)
    assert any(f"trial exp_c: discard, exact match, greedy 0.5; {store.path}" in line for line in lines)
    assert "exp_id: c\n" in (tmp_path / "c" / "config.yaml").read_text()  # what verl's loggers are given
    assert read_json_lines(tmp_path / "c" / EVENTS)[-1]["trial"].startswith("trial exp_c: discard")


@pytest.mark.slow
@pytest.mark.parametrize(
    "ending, status, why",
    [
        ({"error": IntegrityError("no gain arrives")}, "disqualified", "no gain arrives"),
        ({"error": PreflightError("Ray does not start")}, "preflight_crash", "Ray does not start"),
        ({"error": TooLargeError("room: 90 GiB")}, "size_blocked", "room: 90 GiB"),
        ({"error": KeyboardInterrupt()}, "harness_abort", "the next run goes on"),
        ({"error": Terminated()}, "train_budget_overrun", "the next run goes on"),
        ({"note": (events.MAX_HOURS, "step 2 is the last")}, "train_budget_overrun", "step 2 is the last"),
        ({}, "discard", "no held-out metric"),
    ],
)
def test_every_other_end_has_its_label(ends_with, start, store, ending, status, why):
    ends_with(**ending)
    start("a")
    (trial,) = store.all_trials()
    assert trial.status == status and why in trial.notes and "2 of 5 steps" in trial.notes


@pytest.mark.slow
def test_an_evaluation_that_took_too_long_is_an_overrun_of_its_own(ends_with, start, store):
    ends_with(ends_with.failed("EvaluationOverrun"), note=(events.EVALUATION_OVERRUN, "takes longer"))
    assert start("a")[0] == ExitCode.FAILED
    (trial,) = store.all_trials()
    assert trial.status == "eval_budget_overrun" and "takes longer" in trial.notes


@pytest.mark.slow
def test_a_failure_of_a_worker_is_a_crash_and_keeps_what_it_reached(ends_with, start, store):
    ends_with(ends_with.failed("a worker died at http://me:secret@host\n" + "x" * 200_000), found=found(0.5))
    assert start("a", "lineage.expected_delta=0")[0] == ExitCode.FAILED
    (trial,) = store.all_trials()
    assert trial.expected_delta == "+0" and len(trial.notes) < 1200
    assert (trial.status, trial.core_metric) == ("crash", 0.5) and store.best() is None
    assert "a worker died at http://***@host" in trial.notes


@pytest.mark.slow
def test_a_killed_trial_goes_on_and_one_that_ended_has_a_successor(ends_with, start, store, tmp_path):
    ends_with(SystemExit(9))  # as if killed: nothing after it is written
    with pytest.MonkeyPatch.context() as killed:
        killed.setattr(TrialRow, "end", lambda *_: "")
        with pytest.raises(SystemExit):
            train_module.start("lab", [f"run_dir={tmp_path / 'a'}", FIVE])
    assert not store.all_trials()
    ends_with(KeyboardInterrupt(), steps=3)
    start("a")
    ends_with(steps=5, found=found(0.5))
    start("a")
    rows = [(t.exp_id, t.parent_exp, t.status) for t in store.all_trials()]
    assert rows == [("a", "", "harness_abort"), ("a.2", "a", "baseline")]
    assert "3 of 5 steps" in store.all_trials()[0].notes and "2 of 5 steps" in store.all_trials()[1].notes


@pytest.mark.slow
def test_an_id_that_is_taken_gets_a_number_also_meanwhile(ends_with, start, store, tmp_path):
    store.append(lambda _: trial("b", job_name="elsewhere"))
    ends_with(steps=5, found=found(0.5))
    start("exp_b")
    start("c", "lineage.exp_id=b", "lineage.parent=zero")
    assert [(t.exp_id, t.parent_exp) for t in store.all_trials()[1:]] == [("b.2", ""), ("b.3", "zero")]
    with pytest.MonkeyPatch.context() as meanwhile:
        begin = TrialRow.begin

        def beaten(row):
            line = begin(row)
            store.append(lambda _: trial("d", job_name="elsewhere"))
            return line

        meanwhile.setattr(TrialRow, "begin", beaten)
        start("d")
    assert [t.exp_id for t in store.all_trials()[3:]] == ["d", "d.2"]


@pytest.mark.slow
def test_a_start_with_nothing_left_adds_the_row_of_a_killed_start_alone(start, store, monkeypatch, tmp_path):
    monkeypatch.setattr(train_module, "nothing_left", lambda config: "nothing left")
    monkeypatch.setattr("verl_credit.records.report.write.write_report", lambda run_dir: run_dir)
    append_json(tmp_path / "a" / METRICS, {"step": 5})
    append_json(tmp_path / "a" / VALIDATION, {"step": 5, **found(0.5)})
    for _ in range(2):
        assert start("a")[0] == ExitCode.NOTHING_LEFT
    assert [(t.exp_id, t.status) for t in store.all_trials()] == [("a", "baseline")]


@pytest.mark.slow
def test_a_store_that_cannot_be_written_is_said_and_ends_nothing(ends_with, start, tmp_path):
    ends_with(steps=5, found=found(0.5))
    (tmp_path / "lineage").write_text("a file")
    code, lines = start("a")
    said = [line for line in lines if "trial: nothing is written down" in line]
    assert code == 0 and len(said) == 2 and all("lineage" in line for line in said)
    notes = [row for row in read_json_lines(tmp_path / "a" / EVENTS) if row["kind"] == "lineage"]
    assert len(notes) == 1 and (tmp_path / "lineage").read_text() == "a file"


@pytest.mark.parametrize(
    "override, said",
    [
        ("lineage.exp_id=exp_4", "ids are written bare: '4'"),
        ("lineage.metric=critic/score/mean", "a name in validation.jsonl, which begins with val-"),
        ("lineage.hypothesis='a\0b'", "without null bytes"),
        (f"lineage.expected_delta={'x' * 20001}", "a text of at most 20,000 characters"),
        ("lineage.threshold=-1", "a number of at least 0"),
        ("lineage.parnt=4", "lineage.parent"),
    ],
)
def test_keys_that_cannot_be_used_are_refused(start, store, override, said):
    code, (line,) = start("a", override)
    assert code == ExitCode.PREFLIGHT and said in line and not store.root.exists()


def config(metric=None, train="train.parquet", val="val.parquet"):
    return OmegaConf.create({"data": {"train_files": train, "val_files": val}, "lineage": {"metric": metric}})


def evaluation(step, **shares):
    """``source_mode=(exact match, questions)``"""
    row = {"step": step, "val-core/reward": 0.7}
    for name, (share, questions) in shares.items():
        name = f"val-aux/{name.replace('_', '-')}"
        row |= {f"{name}/em/mean@1": share, f"{name}/questions": questions}
    return row


@pytest.fixture
def metric_of(tmp_path):
    def found(*rows, **keys):
        append_json(tmp_path / METRICS, {"step": 1})
        for row in rows:
            append_json(tmp_path / VALIDATION, row)
        return held_out_metric(config(**keys), read_run(tmp_path))

    return found


def test_the_held_out_reward_is_the_metric_where_no_source_has_exact_match(metric_of):
    greedy, sampled = (
        {f"val-core/game-{mode}/reward/mean@1": value} for mode, value in (("greedy", -2.5), ("sampled", 9.0))
    )
    row = (
        {"step": 2, "val-aux/game-greedy/questions": 8, "val-aux/game-sampled/questions": 8}
        | greedy
        | sampled
    )
    assert metric_of(row)[:3] == ("reward, greedy", -2.5, "game")
    other = evaluation(2, nq_greedy=(0.5, 30))
    assert metric_of(row | other)[:3] == ("exact match, greedy", 0.5, "nq")


def test_exact_match_is_greedy_and_over_all_questions(metric_of):
    last = evaluation(2, nq_greedy=(0.5, 30), hotpotqa_greedy=(0.2, 10), nq_sampled=(0.9, 30))
    metric = metric_of(evaluation(0, nq_greedy=(0.9, 30)), last)
    assert (metric.name, metric.domain) == ("exact match, greedy", "hotpotqa, nq")
    assert metric.value == pytest.approx((0.5 * 30 + 0.2 * 10) / 40)


def test_sampled_counts_where_nothing_is_greedy_and_the_last_evaluation_where_there_are_several(metric_of):
    metric = metric_of(evaluation(1, lab_sampled=(0.5, 4)), evaluation(3, lab_sampled=(0.25, 4)))
    assert (metric.name, metric.value) == ("exact match, sampled", 0.25)


def test_a_metric_of_your_own(metric_of):
    own = metric_of(evaluation(0), evaluation(2), metric="val-core/reward")
    assert own[:2] == ("val-core/reward", 0.7)
    missing = metric_of(metric="val-core/f1")
    assert missing.value is None and "val-core/f1" in missing.why


def test_neither_an_evaluation_before_the_first_step_nor_the_training_pool_is_the_metric(metric_of, tmp_path):
    before = metric_of(evaluation(0, lab_greedy=(0.9, 30)))
    assert before.value is None and "lineage.metric" in before.why
    pool = metric_of(evaluation(2, nq_greedy=(0.9, 30)), train=["a", f"{tmp_path}/./b"], val=f"{tmp_path}/b")
    assert pool.value is None and f"{tmp_path}/b" in pool.why
