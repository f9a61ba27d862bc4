"""The store: what it finds among trials, what it adds, and what it refuses to add."""

import fcntl
import json
import multiprocessing
import os
import resource
import threading

import pytest

from kit.trials import HEADER, line, trial
from verl_credit.records.lineage import LineageError, LineageStore, verdict

# The worked example of the public format: lower is not better, e2 is the lucky one that was discarded.
E = (
    trial("e0", "baseline", 0.3321),
    trial("e1", "keep", 0.3496, delta_vs_best=0.0175, parent_exp="e0"),
    trial("e2", "discard", 0.36, hypothesis="lucky discard\nnewline", parent_exp="e1"),
    trial("e3", "keep", None, parent_exp="e1"),
)


def store_of(folder, *trials, lower_is_better=False):
    store = LineageStore(folder, lower_is_better=lower_is_better)
    for one in trials:
        store.append(one)
    return store


def ids(trials):
    return [one.exp_id for one in trials]


def test_the_direction_has_no_default(tmp_path):
    with pytest.raises(TypeError, match="lower_is_better"):
        LineageStore(tmp_path)


def test_the_worked_example(tmp_path):
    store = store_of(tmp_path, *E)
    assert store.all_trials() == E and store.best() == E[1]
    assert ids(store.keeps()) == ["e1", "e3"]
    assert ids(store.chain_to("e2")) == ["e0", "e1", "e2"]
    assert ids(store.latest(2)) == ["e2", "e3"] and store.latest(0) == store.latest(-1) == ()
    assert store_of(tmp_path / "lower", *E, lower_is_better=True).best() == E[0]
    assert ids(store_of(tmp_path / "lower", lower_is_better=True).keeps()) == ["e1", "e3"]


def test_an_empty_store_and_one_without_a_kept_metric_have_no_best(tmp_path):
    store = LineageStore(tmp_path / "new", lower_is_better=True)
    assert store.best() is None and store.all_trials() == store.damaged() == () and not store.unfinished()
    assert not store.root.exists()  # reading makes nothing
    assert store_of(tmp_path, trial("a", "disqualified", 0.1), trial("b", "keep")).best() is None


def test_a_chain_ends_at_a_circle_and_at_a_missing_parent(tmp_path):
    store = store_of(
        tmp_path,
        trial("a", parent_exp="c"),
        trial("b", parent_exp="a"),
        trial("c", parent_exp="b"),
        trial("d", parent_exp="gone"),
    )
    assert ids(store.chain_to("c")) == ["a", "b", "c"] and ids(store.chain_to("d")) == ["d"]
    with pytest.raises(KeyError, match="gone"):
        store.chain_to("gone")


def test_an_append_adds_bytes_and_changes_none(tmp_path):
    path = tmp_path / "results.tsv"
    for before in (HEADER + line("a") + "\n", HEADER + "damaged\n" + line("a", metric="nan") + "\n", ""):
        path.write_text(before)
        store_of(tmp_path, trial("b", metric=0.5))
        added = ("" if before else HEADER) + line("b", metric=0.5) + "\n"
        assert path.read_text() == before + added


@pytest.mark.parametrize(
    "cut", [HEADER[:1], HEADER[:40], HEADER[:-1], HEADER + line("a")[:3], HEADER + 'a\t"b']
)
def test_an_append_after_a_cut_line_begins_a_line(tmp_path, cut):
    (tmp_path / "results.tsv").write_text(cut)
    (tmp_path / "results.jsonl").write_text('{"event": "star')
    store = store_of(tmp_path, trial("b", metric=0.5), trial("c", hypothesis="two\nlines"))
    assert ids(store.all_trials()) == ["b", "c"]
    text = (tmp_path / "results.tsv").read_text()
    assert text.startswith(cut) and text.startswith(HEADER) and text.count(HEADER) == 1
    named = [(one.file, one.line) for one in store.damaged()]
    assert named == [("results.tsv", 2)] * (len(cut) > len(HEADER)) + [("results.jsonl", 1)]
    assert store.facts("b") == {}


@pytest.mark.parametrize(
    "bad, said",
    [
        (trial("e1"), "exp_id='e1' is taken"),
        (trial("exp_9"), "ids are written bare: '9'"),
        (trial(""), "exp_id=''"),
        (trial(" a"), "without blanks"),
        (trial("a\tb"), "control characters"),
        (trial("n", metric=float("nan")), "core_metric=nan; expected a finite number"),
        (trial("n", delta_vs_best=float("inf")), "delta_vs_best=inf"),
        (trial("n", metric="much"), "core_metric='much'"),
        (trial("n", notes="\0"), "a null byte"),
    ],
)
def test_a_trial_that_is_refused_leaves_both_files_alone(tmp_path, bad, said):
    store = store_of(tmp_path, *E)
    before = store.path.read_bytes(), store.companion.read_bytes()
    with pytest.raises(ValueError, match=said):
        store.append(bad, {"n": 1})
    assert (store.path.read_bytes(), store.companion.read_bytes()) == before


def test_an_id_inside_a_cell_is_not_taken_and_a_quoted_one_is(tmp_path):
    store = store_of(tmp_path, trial("a", hypothesis="x\nb\ty"), trial("b"))
    assert ids(store.all_trials()) == ["a", "b"]
    with store.path.open("a") as file:
        file.write('"c"' + line("") + "\n")
    with pytest.raises(ValueError, match="'c' is taken"):
        store.append(trial("c"))


def test_a_table_of_something_else_is_not_written_to(tmp_path):
    (tmp_path / "results.tsv").write_text("name\tscore\na\t1\n")
    store = LineageStore(tmp_path, lower_is_better=False)
    with pytest.raises(
        ValueError, match=r"begins with 'name\\tscore', not with the header of a table of trials"
    ):
        store.append(trial("a"))
    assert (tmp_path / "results.tsv").read_text() == "name\tscore\na\t1\n"
    assert [one.line for one in store.damaged()] == [1, 2]


def test_facts_of_a_trial_stand_in_the_companion(tmp_path):
    store = LineageStore(tmp_path, lower_is_better=False)
    store.start("a", {"seed": 1, "nan": float("nan")})
    assert store.all_trials() == () and store.unfinished()["a"]["seed"] == 1
    store.append(trial("a", metric=0.5), {"exit_code": 0, "seeds": (1, 2)})
    assert store.facts("a") == {"seed": 1, "nan": None, "exit_code": 0, "seeds": [1, 2]}
    events = [json.loads(text) for text in store.companion.read_text().splitlines()]
    assert [(one["event"], one["exp_id"]) for one in events] == [("started", "a"), ("ended", "a")]
    with pytest.raises(ValueError, match="hold exp_id, which the store writes"):
        store.append(trial("b"), {"exp_id": "c"})
    with pytest.raises(ValueError, match="not JSON serializable"):
        store.append(trial("b"), {"folder": tmp_path})


def test_a_trial_that_was_killed_is_unfinished_until_it_has_a_row(tmp_path):
    store = LineageStore(tmp_path, lower_is_better=False)
    store.start("a", {"run": 1})
    store.start("a", {"run": 2})  # goes on after the kill: the same trial
    assert list(store.unfinished()) == ["a"] and store.unfinished()["a"]["run"] == 2
    store.append(trial("a", "crash"))
    assert not store.unfinished()
    with pytest.raises(ValueError, match="'a' has ended"):
        store.start("a")
    seen = []
    assert store.start(lambda rows, open_: seen.append((ids(rows), dict(open_))) or "b") == "b"
    assert seen == [(["a"], {})]


def test_damaged_lines_of_the_companion_are_named(tmp_path):
    store = store_of(tmp_path, trial("a"))
    with store.companion.open("ab") as file:
        file.write(b'[1]\n{"event": 1, "exp_id": "a"}\n\xff\n' + b"[" * 100000 + b"\n")
    store.append(trial("b"), {"n": 1})
    assert [(one.line, one.what) for one in store.damaged()] == [
        (2, "no object with exp_id and event"), (3, "no object with exp_id and event"), (4, "not JSON"), (5, "not JSON"),
    ]  # fmt: skip
    assert store.facts("b") == {"n": 1}


@pytest.mark.parametrize("full", ["results.tsv", "results.jsonl"])
def test_a_full_disk_is_one_error_and_no_part_of_a_row(tmp_path, full):
    """By a limit on the size of files, which ends a write in its middle as a full disk does."""
    store = store_of(tmp_path, *E)
    before = store.path.read_bytes(), store.companion.read_bytes()
    row, facts = ("x" * 5000, "") if full == "results.tsv" else ("", "x" * 5000)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, limits[1]))
    try:
        with pytest.raises(LineageError, match=f"{full} cannot be written: File too large$"):
            store.append(trial("n", notes=row), {"facts": facts})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (store.path.read_bytes(), store.companion.read_bytes()) == before
    store.append(trial("n"))


def test_a_folder_that_cannot_be_written_or_read_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    store = LineageStore(tmp_path / "file", lower_is_better=False)
    for work in (lambda: store.append(trial("a")), lambda: store.start("a"), store.all_trials):
        with pytest.raises(LineageError, match="file/results.tsv cannot be|file cannot be"):
            work()


def test_the_verdict_is_made_under_the_lock_and_by_the_threshold(tmp_path):
    store = LineageStore(tmp_path, lower_is_better=False)

    def end(name, metric):
        def row(rows):
            found = verdict(metric, rows, threshold=0.005, lower_is_better=False)
            return trial(name, found.status, metric, delta_vs_best=found.delta_vs_best)

        return store.append(row)

    ends = [end("a", None), end("b", 0.30), end("c", 0.305), end("d", 0.306), end("e", 0.31), end("f", 0.5)]
    assert [one.status for one in ends] == ["discard", "baseline", "discard", "keep", "discard", "keep"]
    assert [one.delta_vs_best and round(one.delta_vs_best, 6) for one in ends] == [
        None,
        None,
        0.005,
        0.006,
        0.004,
        0.194,
    ]
    lower = verdict(1.0, [trial("b", "baseline", 1.1)], threshold=0.05, lower_is_better=True)
    assert (lower.status, round(lower.delta_vs_best, 6)) == ("keep", -0.1)
    assert lower.why == "gain +0.1 over exp_b, above 0.05"
    assert verdict(1.2, [trial("b", "baseline", 1.1)], threshold=0, lower_is_better=True).status == "discard"


def test_what_another_writer_adds_before_the_lock_is_ours_is_seen(tmp_path, monkeypatch):
    """The header, the ids that are taken and the best are those of the moment when the lock is held."""
    store = LineageStore(tmp_path, lower_is_better=False)
    flock = fcntl.flock

    def waits(file, how):
        monkeypatch.setattr(fcntl, "flock", flock)
        store.path.write_text(HEADER + line("other", "baseline", 0.5) + "\n")
        flock(file, how)

    monkeypatch.setattr(fcntl, "flock", waits)
    seen = []
    store.append(lambda rows: seen.append(ids(rows)) or trial("mine"))
    assert seen == [["other"]] and store.path.read_text().count(HEADER) == 1
    monkeypatch.setattr(fcntl, "flock", waits)
    with pytest.raises(ValueError, match="'other' is taken"):
        LineageStore(tmp_path, lower_is_better=False).append(trial("other"))


def test_a_writer_that_holds_the_lock_is_waited_for(tmp_path):
    store = store_of(tmp_path, trial("a"))
    with store.path.open() as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        waiting = threading.Thread(target=store.append, args=(trial("b"),), daemon=True)
        waiting.start()
        waiting.join(0.1)
        assert waiting.is_alive() and line("b") not in store.path.read_text()
    waiting.join(10)
    assert ids(store.all_trials()) == ["a", "b"]


def _write(folder, writer, rows, go):
    go.wait()
    store = LineageStore(folder, lower_is_better=False)
    for number in range(rows):
        store.append(trial(f"{writer}-{number}", metric=0.5, hypothesis="two\nlines"), {"writer": writer})


def together(folder, writers, rows):
    context = multiprocessing.get_context("fork")
    go = context.Event()
    processes = [context.Process(target=_write, args=(folder, n, rows, go)) for n in range(writers)]
    for process in processes:
        process.start()
    go.set()
    for process in processes:
        process.join(120)
    assert [process.exitcode for process in processes] == [0] * writers
    store = LineageStore(folder, lower_is_better=False)
    expected = {f"{writer}-{number}" for writer in range(writers) for number in range(rows)}
    assert len(store.all_trials()) == len(expected) and set(ids(store.all_trials())) == expected
    assert store.damaged() == () and store.path.read_text().count(HEADER) == 1
    assert len(store.companion.read_text().splitlines()) == len(expected)
    for writer in range(writers):  # each one's rows in its own order
        mine = [one for one in ids(store.all_trials()) if one.startswith(f"{writer}-")]
        assert mine == [f"{writer}-{number}" for number in range(rows)]


def test_two_first_writers_write_one_header(tmp_path):
    together(tmp_path, 3, 3)


@pytest.mark.slow
def test_8_processes_write_100_rows_each(tmp_path):
    together(tmp_path, 8, 100)


def test_a_row_is_on_the_disk_when_append_returns(tmp_path, monkeypatch):
    synced = []
    fsync = os.fsync
    monkeypatch.setattr(
        os, "fsync", lambda file: synced.append(os.readlink(f"/proc/self/fd/{file}")) or fsync(file)
    )
    store_of(tmp_path, E[0])
    assert [os.path.basename(path) for path in synced] == ["results.tsv", "results.jsonl"]
