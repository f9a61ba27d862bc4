"""`verl-credit lineage ...`: what it prints, and how it ends."""

import pytest

from kit.trials import trial
from verl_credit.cli import main
from verl_credit.records.lineage import LineageStore


@pytest.fixture
def store(tmp_path):
    store = LineageStore(tmp_path / "store", lower_is_better=False)
    for row in (
        trial("a", "baseline", 0.25),
        trial("b", "keep", 0.5, delta_vs_best=0.25, parent_exp="a", hypothesis="two\nlines"),
        trial("c", "crash", parent_exp="gone"),
    ):
        store.append(lambda _, row=row: row)
    return store


@pytest.fixture
def run(store, capsys):
    def call(*words):
        code = main(["lineage", *words, "--dir", str(store.root)])
        return code, *capsys.readouterr()

    return call


def test_render_writes_the_page_of_the_store(run, store, tmp_path):
    with store.path.open("a") as file:
        file.write("one cell\n")
    code, out, err = run("render", "--for", "ana")
    assert err.startswith("not read: ") and "one cell" in err
    text = (store.root / "KNOWLEDGE.md").read_text()
    assert code == 0 and out == f"{store.root / 'KNOWLEDGE.md'}\n"
    assert "You are specialist **ana**. Current best: **exp_b**" in text
    assert text.startswith("# Session start — 20")
    assert run("render", "--out", str(tmp_path / "own.md"))[0] == 0
    assert "## Recent Activity (last 3)" in (tmp_path / "own.md").read_text()


def test_what_is_not_there_ends_with_4_and_one_line(run, capsys):
    code, out, err = run("render", "--out", "/proc/none/x.md")
    assert code == 4 and not out and "/proc/none" in err and err.count("\n") == 1
    assert main(["lineage", "render", "--dir", "nowhere"]) == 4
    assert "nowhere/results.tsv" in capsys.readouterr().err
