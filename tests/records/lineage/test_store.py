"""The store: what it finds among trials, what it adds, what it refuses to add, and every damage of a line."""

import csv
import multiprocessing

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kit.trials import HEADER, line, trial
from verl_credit.records.lineage import COLUMNS, FailureLabel, LineageStore, verdict
from verl_credit.records.lineage.trial import chain, keeps_of
from verl_credit.records.lineage.trials import read_rows

# The worked example of the public format: lower is not better, e2 is the lucky one that was discarded.
E = (
    trial("e0", "baseline", 0.3321),
    trial("e1", "keep", 0.3496, delta_vs_best=0.0175, parent_exp="e0"),
    trial("e2", "discard", 0.36, hypothesis="lucky discard\nnewline", parent_exp="e1"),
    trial("e3", "keep", None, parent_exp="e1"),
)
GOOD = [line("a", "baseline", 0.25), line("b", "keep", 0.5)]


def store_of(folder, *trials, lower_is_better=False):
    store = LineageStore(folder, lower_is_better=lower_is_better)
    for one in trials:
        store.append(lambda _, one=one: one)
    return store


def ids(trials):
    return [one.exp_id for one in trials]


def test_the_worked_example(tmp_path):
    store = store_of(tmp_path, *E)
    assert store.all_trials() == E and store.best() == E[1]
    assert ids(chain(E, "e2")) == ["e0", "e1", "e2"]
    assert store_of(tmp_path / "lower", *E, lower_is_better=True).best() == E[0]
    assert [ids(keeps_of(E, lower_is_better=lower)) for lower in (True, False)] == [["e1", "e3"]] * 2


def test_an_empty_store_and_one_without_a_kept_metric_have_no_best(tmp_path):
    store = LineageStore(tmp_path / "new", lower_is_better=True)
    assert store.best() is None and store.all_trials() == store.damaged() == ()
    assert not store.root.exists()  # reading makes nothing
    assert store_of(tmp_path, trial("a", "disqualified", 0.1), trial("b", "keep")).best() is None


def test_a_chain_ends_at_a_circle_and_at_a_missing_parent():
    parents = {"a": "c", "b": "a", "c": "b", "d": "gone"}
    trials = [trial(name, parent_exp=parent) for name, parent in parents.items()]
    assert ids(chain(trials, "c")) == ["a", "b", "c"] and ids(chain(trials, "d")) == ["d"]


def test_an_append_adds_bytes_and_changes_none(tmp_path):
    path = tmp_path / "results.tsv"
    damaged = HEADER + "damaged \udcff\n" + line("a", metric="nan") + "\n"
    for before in (HEADER + line("a") + "\n", damaged, ""):
        path.write_bytes(before.encode(errors="surrogateescape"))
        store_of(tmp_path, trial("b", metric=0.5))
        added = ("" if before else HEADER) + line("b", metric=0.5) + "\n"
        assert path.read_bytes() == (before + added).encode(errors="surrogateescape")


@pytest.mark.parametrize(
    "cut", [HEADER[:1], HEADER[:40], HEADER[:-1], HEADER + line("a")[:3], HEADER + 'a\t"b']
)
def test_an_append_after_a_cut_line_begins_a_line(tmp_path, cut):
    (tmp_path / "results.tsv").write_text(cut)
    store = store_of(tmp_path, trial("b", metric=0.5), trial("c", hypothesis="two\nlines"))
    assert ids(store.all_trials()) == ["b", "c"]
    text = store.path.read_text()
    assert text.startswith(cut) and text.startswith(HEADER) and text.count(HEADER) == 1
    assert len(store.damaged()) == (len(cut) > len(HEADER))


@pytest.mark.parametrize(
    "bad, named",
    [
        (trial("e1"), "exp_id='e1'"),
        (trial("exp_9"), "'9'"),
        (trial(""), "exp_id=''"),
        (trial(" a"), "exp_id=' a'"),
        (trial("a\tb"), "exp_id="),
        (trial("n", metric=float("nan")), "core_metric='nan'"),
        (trial("n", delta_vs_best=float("inf")), "delta_vs_best='inf'"),
        (trial("n", metric="much"), "core_metric='much'"),
        (trial("n", notes="\0"), "null byte"),
        (trial("n", notes="\udcff"), ""),
        (trial("n", notes="x" * 131073), "field limit"),
        (trial("n", notes=f"pasted:\n{line('z')}\n"), "exp_id='n'"),
    ],
)
def test_a_trial_that_is_refused_leaves_the_table_alone(tmp_path, bad, named):
    store = store_of(tmp_path, *E)
    before = store.path.read_bytes()
    with pytest.raises(ValueError) as error:
        store.append(lambda _: bad)
    assert named in str(error.value) and store.path.read_bytes() == before


def test_a_table_of_something_else_is_not_written_to(tmp_path):
    (tmp_path / "results.tsv").write_text("name\tscore\na\t1\n")
    store = LineageStore(tmp_path, lower_is_better=False)
    with pytest.raises(ValueError, match=r"'name\\tscore'"):
        store.append(lambda _: trial("a"))
    assert store.path.read_text() == "name\tscore\na\t1\n" and len(store.damaged()) == 2


def test_the_verdict_is_made_under_the_lock_and_by_the_threshold(tmp_path):
    store = LineageStore(tmp_path, lower_is_better=False)

    def end(name, metric):
        def row(rows):
            found = verdict(metric, rows, threshold=0.005, lower_is_better=False)
            return trial(name, found.status, metric, delta_vs_best=found.delta_vs_best)

        return store.append(row)

    ends = [end("a", None), end("b", 0.30), end("c", 0.305), end("d", 0.306), end("e", 0.31), end("f", 0.5)]
    assert [one.status for one in ends] == ["discard", "baseline", "discard", "keep", "discard", "keep"]
    deltas = [one.delta_vs_best and round(one.delta_vs_best, 6) for one in ends]
    assert deltas == [None, None, 0.005, 0.006, 0.004, 0.194]
    before = [trial("b", "baseline", 1.1)]
    lower = verdict(1.0, before, threshold=0.05, lower_is_better=True)
    assert (lower.status, round(lower.delta_vs_best, 6)) == ("keep", -0.1)
    assert verdict(1.2, before, threshold=0, lower_is_better=True).status == "discard"


def _write(folder, writer, go):
    go.wait()
    for number in range(3):
        store_of(folder, trial(f"{writer}-{number}", metric=0.5, hypothesis="two\nlines"))


@pytest.mark.slow
def test_three_first_writers_lose_no_row_and_write_one_header(tmp_path):
    context = multiprocessing.get_context("fork")
    go = context.Event()
    processes = [context.Process(target=_write, args=(tmp_path, n, go)) for n in range(3)]
    for process in processes:
        process.start()
    go.set()
    for process in processes:
        process.join(120)
    store = LineageStore(tmp_path, lower_is_better=False)
    assert sorted(ids(store.all_trials())) == [f"{n}-{number}" for n in range(3) for number in range(3)]
    assert store.damaged() == () and store.path.read_text().count(HEADER) == 1


def test_a_file_of_another_writer_opens(tmp_path):
    """Written by Python's csv, as the released store does: quoted tabs, quotes and line breaks, several lines a cell."""
    rows = [
        ["001", "t", "s", "", "", "d", 'a "quoted"\tword\nand\r\n\nmore', "+0.5", "baseline", "0.3321", "", "", "1.5", "2",
         "j", "p", "n\n"],
        ["002", *[""] * 7, "", "", "1.25", "-0.01", *[""] * 5],
    ]  # fmt: skip
    with (tmp_path / "results.tsv").open("w", newline="") as file:
        csv.writer(file, delimiter="\t", lineterminator="\n").writerows([COLUMNS, *rows])
    store = LineageStore(tmp_path, lower_is_better=False)
    first, second = store.all_trials()
    assert first.hypothesis == rows[0][6] and first.notes == "n\n" and first.core_metric == 0.3321
    assert (first.train_s, first.total_s, first.val_bpb) == (1.5, 2.0, None)
    assert second.status is FailureLabel.DISCARD and (second.val_bpb, second.delta_vs_best) == (1.25, -0.01)
    assert store.damaged() == ()


TEXT = st.text(st.sampled_from("a\t\n\r\"'|\x0b\u2028\N{LATIN SMALL LETTER E WITH ACUTE}"), max_size=12)


@pytest.mark.slow
@given(hypothesis=TEXT, notes=TEXT)
def test_any_text_survives_here_and_in_pythons_csv(hypothesis, notes):
    written = trial("a", "keep", 0.1, hypothesis=hypothesis, notes=notes)
    assert read_rows(f"{HEADER}{written.row()}\n".encode()) == ([written], [])
    (cells,) = csv.reader([written.row()], delimiter="\t", strict=True)
    assert dict(zip(COLUMNS, cells, strict=True))["hypothesis"] == hypothesis and cells[-1] == notes


@pytest.mark.parametrize(
    "bad, what",
    [
        ("c\tonly\tfour\tcells", "4 cells; expected 17"),
        (line("c") + "\tone more", "18 cells; expected 17"),
        (line("c", "kept"), "status='kept'"),
        (line("c", metric="0,5"), "core_metric='0,5'"),
        (line("c", metric="nan"), "core_metric='nan'"),
        (line("c", metric="-inf"), "core_metric='-inf'"),
        (line("c", hypothesis='"open'), "a quote"),
        (line("c", hypothesis='"shut" too early'), "expected after"),
        (HEADER.rstrip("\n"), "status='status'"),
        (line("c", notes="null \0 byte"), "a null byte"),
        (line("c", notes="\udcff"), "no UTF-8"),
        (line(" "), "exp_id"),
    ],
)  # fmt: skip
def test_a_damaged_line_is_skipped_and_named(bad, what):
    for place in range(3):
        lines = [*GOOD[:place], bad, *GOOD[place:]]
        rows, damaged = read_rows((HEADER + "\n".join(lines) + "\n").encode(errors="surrogateescape"))
        (named,) = damaged
        assert ids(rows) == ["a", "b"] and named.startswith(f"line {place + 2}: ")
        assert what in named and named.isprintable()


def test_an_open_quote_costs_its_own_row_though_a_later_quote_would_close_it():
    later = line("b", "keep", 0.5, hypothesis='ends with a quote"')
    several = line("c", "keep", 0.6, hypothesis='"\nfirst and\nsecond"')
    for torn in (line("x", hypothesis='"open'), line("x", notes='"open'), 'x\t"'):
        content = (HEADER + "\n".join([torn, GOOD[0], later, torn, several]) + "\n").encode()
        rows, damaged = read_rows(content)
        assert ids(rows) == ["a", "b", "c"] and len(damaged) == 2
        assert [one.partition(":")[0] for one in damaged] == ["line 2", "line 5"]


def test_windows_line_ends_blank_lines_and_a_byte_order_mark_are_no_damage():
    content = "\ufeff" + HEADER + GOOD[0] + "\n\n" + GOOD[1]
    rows, damaged = read_rows(content.replace("\n", "\r\n").encode())
    assert ids(rows) == ["a", "b"] and not damaged


def test_a_cut_anywhere_in_the_last_row_leaves_the_rows_before():
    content = (HEADER + GOOD[0] + "\n").encode()
    last = trial("b", "keep", 0.5, hypothesis="two\nlines", notes="n").row().encode()
    for cut in range(1, len(last) - 2):
        rows, damaged = read_rows(content + last[:cut])
        assert ids(rows) == ["a"] and damaged, cut
    assert ids(read_rows(content + last)[0]) == ["a", "b"]


@pytest.mark.parametrize("text", ['=HYPERLINK("x")', "+1+cmd|x", "-2+3", "@SUM(A1)", "'=1", " =1", "\t=1"])
def test_no_cell_is_a_formula_where_a_spreadsheet_opens_the_table(text, tmp_path):
    store = store_of(tmp_path, one := trial("a", hypothesis=text, notes=text, expected_delta="+0.01"))
    assert store.all_trials() == (one,)
    (cells,) = list(csv.reader(store.path.read_text().splitlines()[1:], delimiter="\t"))
    assert cells.count(f"'{text}") == 2 and "+0.01" in cells
