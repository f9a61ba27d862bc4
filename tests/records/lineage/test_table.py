"""The table: the public format, and every way in which a line of it can be damaged."""

import csv

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kit.trials import HEADER, line, trial
from verl_credit.records.lineage import COLUMNS, FailureLabel, LineageStore, Trial
from verl_credit.records.lineage.table import format_row, read_rows

GOOD = [line("a", "baseline", 0.25), line("b", "keep", 0.5)]


def test_the_columns_are_those_of_the_public_format():
    columns = "exp_id timestamp specialist parent_exp baseline_exp domain hypothesis expected_delta status core_metric "
    columns += "val_bpb delta_vs_best train_s total_s job_name snapshot_path notes"
    assert " ".join(HEADER.split()) == columns
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'notes'"):
        Trial(*range(16))


def test_ten_labels_and_one_that_says_nothing():
    assert len(FailureLabel) == 10
    assert [label for label in FailureLabel if not label.is_informational] == ["harness_abort"]
    assert [label for label in FailureLabel if label.is_kept] == ["keep", "baseline"]


def test_a_file_of_another_writer_opens_and_keeps_its_bytes(tmp_path):
    """Written by Python's csv, as the released store does: quoted tabs, quotes and line breaks, several lines a cell."""
    rows = [
        ["001", "t", "s", "", "", "d", 'a "quoted"\tword\nand\r\n\nmore', "+0.5", "baseline", "0.3321", "", "", "1.5", "2",
         "j", "p", "n\n"],
        ["002", *[""] * 7, "", "", "1.25", "-0.01", *[""] * 5],
    ]  # fmt: skip
    path = tmp_path / "results.tsv"
    with path.open("w", newline="") as file:
        csv.writer(file, delimiter="\t", lineterminator="\n").writerows([COLUMNS, *rows])
    before = path.read_bytes()
    store = LineageStore(tmp_path, lower_is_better=False)
    first, second = store.all_trials()
    assert first.hypothesis == rows[0][6] and first.notes == "n\n" and first.core_metric == 0.3321
    assert (first.train_s, first.total_s, first.val_bpb) == (1.5, 2.0, None)
    assert second.status is FailureLabel.DISCARD and (second.val_bpb, second.delta_vs_best) == (1.25, -0.01)
    assert store.damaged() == () and path.read_bytes() == before and len(list(tmp_path.iterdir())) == 1


TEXT = st.text(st.sampled_from("a\t\n\r\"'|\x0b\u2028\N{LATIN SMALL LETTER E WITH ACUTE}"), max_size=12)


@given(hypothesis=TEXT, notes=TEXT)
def test_any_text_survives_here_and_in_pythons_csv(hypothesis, notes):
    written = trial("a", "keep", 0.1, hypothesis=hypothesis, notes=notes)
    row = format_row(written)
    assert read_rows(HEADER.encode() + row) == ([written], [])
    (cells,) = csv.reader([row.decode()], delimiter="\t", strict=True)
    assert dict(zip(COLUMNS, cells, strict=True))["hypothesis"] == hypothesis and cells[-1] == notes


@pytest.mark.parametrize(
    "bad, what",
    [
        ("c\tonly\tfour\tcells", "4 cells; expected 17"),
        (line("c") + "\tone more", "18 cells; expected 17"),
        (line("c", "kept"), "status='kept'; accepted are keep, discard, crash"),
        (line("c", metric="0,5"), "core_metric='0,5'; expected a number or nothing"),
        (line("c", metric="nan"), "core_metric='nan'; expected a finite number or nothing"),
        (line("c", metric="-inf"), "core_metric='-inf'; expected a finite number"),
        (line("c", hypothesis='"open'), "a quote that is never closed"),
        (line("c", hypothesis='"shut" too early'), "expected after"),
        (HEADER.rstrip("\n"), "a second header"),
        (line("c", notes="null \0 byte"), "a null byte"),
        (line("c", notes="\udcff"), "bytes that are no UTF-8: b'\\xff'"),
        (line(" "), "exp_id is empty"),
    ],
)  # fmt: skip
def test_a_damaged_line_is_skipped_and_named(bad, what):
    for place in range(3):
        lines = [*GOOD[:place], bad, *GOOD[place:]]
        content = (HEADER + "\n".join(lines) + "\n").encode(errors="surrogateescape")
        rows, damaged = read_rows(content, "results.tsv")
        assert [row.exp_id for row in rows] == ["a", "b"]
        (named,) = damaged
        assert what in named.what and named.what.isprintable()
        assert (named.file, named.line) == ("results.tsv", place + 2)


def test_an_open_quote_costs_its_own_row_though_a_later_quote_would_close_it():
    later = line("b", "keep", 0.5, hypothesis='ends with a quote"')
    several = line("c", "keep", 0.6, hypothesis='"\nfirst and\nsecond"')
    for torn in (line("x", hypothesis='"open'), line("x", notes='"open'), 'x\t"'):
        content = (HEADER + "\n".join([torn, GOOD[0], later, torn, several]) + "\n").encode()
        rows, damaged = read_rows(content)
        assert [row.exp_id for row in rows] == ["a", "b", "c"]
        assert [one.line for one in damaged] == [2, 5]


def test_windows_line_ends_blank_lines_and_a_byte_order_mark_are_no_damage():
    content = "\ufeff" + HEADER + GOOD[0] + "\n\n" + GOOD[1]
    rows, damaged = read_rows(content.replace("\n", "\r\n").encode())
    assert [row.exp_id for row in rows] == ["a", "b"] and not damaged


def test_a_cut_anywhere_in_the_last_row_leaves_the_rows_before():
    content = (HEADER + GOOD[0] + "\n").encode()
    last = format_row(trial("b", "keep", 0.5, hypothesis="two\nlines", notes="n"))
    for cut in range(1, len(last) - 3):
        rows, damaged = read_rows(content + last[:cut])
        assert [row.exp_id for row in rows] == ["a"], cut
        assert damaged[0].line == 3
    assert [row.exp_id for row in read_rows(content + last[:-1])[0]] == ["a", "b"]


@pytest.mark.parametrize(
    "cell, what",
    [
        ("a\0b", "a null byte"),
        ("\udcff", "no Unicode"),
        ("x" * 131073, "field larger than field limit"),
        (f"pasted:\n{line('z', 'keep')}\n", "a quote that is never closed"),
    ],
)
def test_a_cell_that_would_not_be_read_back_is_refused(cell, what):
    with pytest.raises(ValueError, match=what):
        format_row(trial("a", notes=cell, hypothesis=cell))


def test_many_open_quotes_are_read_in_linear_time():
    content = (HEADER + "".join(f'{n}\t"open\n' for n in range(20000)) + GOOD[0] + "\n").encode()
    rows, damaged = read_rows(content)
    assert [row.exp_id for row in rows] == ["a"] and len(damaged) == 20000
