"""`verl-credit lineage ...`: what it prints, and how it ends."""

import json
import sys
from types import SimpleNamespace

import pytest

from kit.trials import trial
from verl_credit.cli import main
from verl_credit.records.lineage import LineageStore


@pytest.fixture
def store(tmp_path):
    store = LineageStore(tmp_path / "store", lower_is_better=False)
    for name, text in (("a", "x: 1\n"), ("b", "x: 2\n")):
        (tmp_path / f"{name}.yaml").write_text(text)
    facts = {"lower_is_better": False, "exit_code": 0}
    store.append(trial("a", "baseline", 0.25, snapshot_path=str(tmp_path / "a.yaml")), facts)
    store.append(
        trial(
            "b",
            "keep",
            0.5,
            delta_vs_best=0.25,
            parent_exp="a",
            hypothesis="two\nlines",
            snapshot_path=str(tmp_path / "b.yaml"),
        )
    )
    store.append(trial("c", "crash", parent_exp="gone"), facts)
    store.start("d", {"timestamp": "2026-11-22T09:00:00Z", "job_name": "runs/d"})
    return store


@pytest.fixture
def run(store, capsys):
    def call(*words):
        code = main(["lineage", *words, "--dir", str(store.root)])
        said = capsys.readouterr()
        return code, said.out, said.err

    return call


def test_show_names_every_trial_and_the_one_without_an_end(run):
    assert run("show") == (
        0,
        "exp_a  baseline  0.250000\n"
        "exp_b  keep  0.500000 (+0.250000)  two lines\n"
        "exp_c  crash  -\n"
        "exp_d  began 2026-11-22T09:00:00Z in runs/d, and has no end: it goes on, or it was killed\n",
        "",
    )
    found = json.loads(run("show", "--json")[1])
    assert [one["exp_id"] for one in found["trials"]] == ["a", "b", "c"]
    assert (
        found["trials"][0]["facts"]["exit_code"] == 0
        and list(found["unfinished"]) == ["d"]
        and found["damaged"] == []
    )


def test_damaged_lines_are_said_beside_the_answer(run, store):
    with store.path.open("a") as file:
        file.write("one cell\n")
    code, out, err = run("show")
    assert code == 0 and "one cell" not in out
    assert err == "not read: results.tsv line 6: 1 cells; expected 17: one cell\n"
    assert json.loads(run("show", "--json")[1])["damaged"][0]["line"] == 6


def test_the_direction_comes_from_the_companion_or_the_command_line(run, store):
    assert run("best")[1].startswith("exp_b  keep") and json.loads(run("best", "--json")[1])["exp_id"] == "b"
    assert run("best", "--lower-is-better")[1].startswith("exp_a")
    store.companion.unlink()
    code, out, err = run("best")
    assert code == 4 and not out
    assert (
        "results.jsonl does not say which core_metric is better: add --lower-is-better or --higher-is-better"
        in err
    )
    assert run("best", "--higher-is-better")[1].startswith("exp_b") and run("show")[0] == 0


def test_a_chain_and_a_diff(run, store):
    assert [line.split()[0] for line in run("chain")[1].splitlines()] == ["exp_a", "exp_b"]
    assert [one["exp_id"] for one in json.loads(run("chain", "b", "--json")[1])] == ["a", "b"]
    assert (
        run("chain", "c")[1].splitlines()[0] == "exp_gone  is not in the store, or is a descendant of its own"
    )
    code, out, _ = run("diff", "b")
    assert code == 1 and out.endswith("@@ -1 +1 @@\n-x: 1\n+x: 2\n")
    assert run("diff", "b", "b")[:2] == (0, "")


@pytest.mark.parametrize(
    "words, said",
    [
        (["chain", "bb"], "no trial 'bb' (did you mean b?)"),
        (["diff", "a"], "a has no parent; name the trial to compare it with"),
        (["diff", "c"], "no trial 'gone'"),
        (["diff", "b", "c"], "c has no snapshot_path"),
        (["render", "--out", "/proc/none/x.md"], "/proc/none/x.md cannot be written"),
    ],
)
def test_what_is_not_there_ends_with_4_and_one_line(run, words, said):
    code, out, err = run(*words)
    assert code == 4 and not out and said in err and err.count("\n") == 1


def test_a_folder_without_a_table_and_a_snapshot_that_is_gone(run, store, capsys):
    (store.root.parent / "a.yaml").unlink()
    assert "a.yaml is not there" in run("diff", "b")[2]
    assert main(["lineage", "show", "--dir", "nowhere"]) == 4
    assert "nowhere/results.tsv is not there" in capsys.readouterr().err


def test_render_writes_the_page_of_the_store(run, store, tmp_path):
    code, out, _ = run("render", "--for", "ana")
    text = (store.root / "KNOWLEDGE.md").read_text()
    assert code == 0 and out == f"{store.root / 'KNOWLEDGE.md'}\n"
    assert "You are specialist **ana**. Current best: **exp_b**" in text
    assert text.startswith("# Session start — 20")
    assert run("render", "--out", str(tmp_path / "own.md"))[0] == 0
    assert "## Recent Activity (last 3)" in (tmp_path / "own.md").read_text()


def test_export_hands_every_trial_to_verls_loggers(run, store, monkeypatch, tmp_path):
    monkeypatch.setenv("VERL_FILE_LOGGER_ROOT", str(tmp_path))
    from verl.utils import tracking

    seen = {}
    real = tracking.Tracking.__init__

    def watched(self, project, name, loggers, config):
        seen[name] = config
        real(self, project, name, loggers, config)

    monkeypatch.setattr(tracking.Tracking, "__init__", watched)
    code, out, _ = run("export", "--to", "file")
    assert code == 0 and out.endswith("3 trials sent to file, project lineage\n")
    written = {path.stem: json.loads(path.read_text()) for path in (tmp_path / "lineage").glob("*.jsonl")}
    assert written["exp_b"] == {"step": 0, "data": {"core_metric": 0.5, "delta_vs_best": 0.25}}
    assert set(written) == {"exp_a", "exp_b", "exp_c"}
    assert seen["exp_b"]["parent_exp"] == "a" and seen["exp_a"]["facts"]["exit_code"] == 0
    assert run("export", "c", "--to", "file")[1].endswith("1 trials sent to file, project lineage\n")
    code, _, err = run("export", "--to", "wandbb")
    assert code == 4 and "--to wandbb (did you mean wandb?): verl has wandb, mlflow" in err
    monkeypatch.setitem(sys.modules, "mlflow", None)
    assert "import of mlflow halted" in run("export", "--to", "mlflow")[2]
    broken = SimpleNamespace(
        set_tracking_uri=lambda uri: 1 / 0
    )  # a server that is down: verl goes on without
    monkeypatch.setitem(sys.modules, "mlflow", broken)
    monkeypatch.setattr(tracking, "MLFLOW_SLEEP_SECONDS", 0)
    assert "mlflow did not start" in run("export", "--to", "mlflow")[2]
