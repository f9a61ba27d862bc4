"""`report A B`: the curves of two runs over each other, and the settings that differ."""

import pytest

from kit.report_page import Page, evaluation, training, write_lines, write_run
from verl_credit.cli import main
from verl_credit.errors import ExitCode
from verl_credit.records.report import page as module
from verl_credit.records.report.write import write_two


@pytest.fixture
def two(tmp_path, monkeypatch):
    """B has other settings, one more step, and sampled evaluation alone; the panels are seen as the words of ``alt``."""
    a, b = tmp_path / "a", tmp_path / "b <i>"
    for folder in (a, b):
        folder.mkdir()
        write_run(folder)
    text = (b / "config.yaml").read_text()
    (b / "config.yaml").write_text(text.replace("seed: 7", "seed: 8").replace("v1d", "unbiased"))
    write_lines(b / "metrics.jsonl", [training(step) for step in (1, 2, 3, 4)])
    row = evaluation(4, 0.5, 0.25)
    write_lines(b / "validation.jsonl", [{key: value for key, value in row.items() if "greedy" not in key}])
    monkeypatch.setattr(module, "panel_data_uri", lambda panel: "data:,")
    return a, b


def test_settings_and_curves(two, capsys):
    a, b = two
    before = {path: path.read_bytes() for path in (*a.rglob("*.*"), *b.rglob("*.*"))}
    assert main(["report", str(a), str(b)]) == ExitCode.DONE
    path = a / "compared_with_b__i_.html"
    assert capsys.readouterr().out.strip() == str(path)
    page = Page(path.read_text())
    assert ["seed", "7", "8"] in page.rows
    assert ["algorithm.info_gain_norm_mode", "turn-group-v1d", "turn-group-unbiased"] in page.rows
    assert not any("run_dir" in row for row in page.rows)  # a path changes no number
    alts = {alt.split(" over training steps")[0]: alt for alt in page.values("img", "alt")}
    of_b = "B: 25.0 % at step 1, 100.0 % at step 4"
    assert f"A: 25.0 % at step 1, 75.0 % at step 3; {of_b}" in alts["Exact match in training"]
    assert "A: 37.5 % at step 0" in alts["Held-out exact match, greedy, lab"]
    assert "B:" not in alts["Held-out exact match, greedy, lab"]
    assert "B: 25.0 % at step 4" in alts["Held-out exact match, sampled, lab"]
    assert "Entropy of the policy" not in alts  # neither recorded it
    assert {path: path.read_bytes() for path in before} == before  # nothing of either run is changed
    assert "script" not in page.tags and "b <i>" in page.text
    path = write_two(a, a, {})  # which has no other settings
    assert "None, but for paths and logging." in path.read_text()


@pytest.mark.parametrize("lacking", [0, 1])
def test_two_need_to_be_runs(two, capsys, lacking):
    (two[lacking] / "metrics.jsonl").unlink()
    assert main(["report", *map(str, two)]) == ExitCode.PREFLIGHT
    assert "metrics.jsonl does not exist" in capsys.readouterr().out
    assert not list(two[0].glob("compared*"))
