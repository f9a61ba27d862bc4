"""campaign.html, its pictures and its table: with all runs, with some, with none, and with hostile text."""

import json
import re

import pytest

from kit.report_page import Page
from verl_credit.cli import main
from verl_credit.study.campaign import report
from verl_credit.study.campaign.file import parse
from verl_credit.study.campaign.record import keep_record
from verl_credit.study.campaign.report import write_campaign_report
from verl_credit.study.campaign.results import results

METRIC = "val-aux/lab-sampled/em/mean@1"
TREE = {
    "name": "mine",
    "hypothesis": "joint is faster",
    "recipe": "lab",
    "conditions": {"grpo": ["a=1"], "joint": ["a=2"], "worse": ["a=3"]},
    "baseline": "grpo",
    "seeds": [1, 2, 3, 4, 5, 6, 7],
    "metric": {"name": METRIC, "window": [0, 30]},
}
BETTER = {"grpo": 0.0, "joint": 0.2, "worse": -0.001}


def finished(folder, name, seed, shift=None, reason="done", steps=(0, 15, 30)):
    run = folder / name / f"seed-{seed}"
    run.mkdir(parents=True, exist_ok=True)
    rows = [{"time": 1000.0, "kind": "start"}]
    rows += (
        [{"time": 4600.0, "kind": "end", "reason": reason, "text": f"{reason}, 30 of 30 steps done"}]
        if reason
        else []
    )
    (run / "events.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    wobble = (3 * (seed + ord(name[-1])) % 7 - 3) / 100 * (name != "grpo")
    values = [
        0.3 + 0.01 * step + (BETTER[name] if shift is None else shift) + wobble + seed / 100 for step in steps
    ]
    lines = [json.dumps({"step": s, METRIC: v}) + "\n" for s, v in zip(steps, values, strict=True)]
    (run / "validation.jsonl").write_text("".join(lines))
    return run


@pytest.fixture
def campaign(tmp_path):
    """Declared; ``campaign(**changes)`` declares another one."""

    def declare(**changes):
        keep_record(tmp_path, parse({**TREE, **changes}, "f.yaml"), {}, 0)
        return tmp_path

    return declare


@pytest.fixture
def pictures():
    """Asked for by the tests whose pictures differ in kind; the others do without, to be quick."""


@pytest.fixture(autouse=True)
def _draw_only_where_asked(request, monkeypatch):
    if "pictures" not in request.fixturenames:
        monkeypatch.setattr(report, "panel_data_uri", lambda panel: "data:,")
        monkeypatch.setattr(report, "differences_picture", lambda _: "data:,")


def whole(folder):
    for name in TREE["conditions"]:
        for seed in TREE["seeds"]:
            finished(folder, name, seed)


def page(folder):
    found = Page(write_campaign_report(folder).read_text())
    assert "script" not in found.tags
    found.text = re.sub(r"\s+", " ", found.text)
    found.links = [value for _, name, value in found.attributes if name in ("src", "href")]
    assert all(link.startswith("data:") or (folder / link).is_file() for link in found.links)
    return found


@pytest.mark.slow
def test_a_whole_campaign_ends_in_a_conclusion(campaign, pictures):
    folder = campaign()
    whole(folder)
    (folder / "joint/seed-1/report.html").write_text("the run's own")
    found = page(folder)
    assert "21 of 21 runs are done. 21 h 0 min of runs." in found.text
    assert "joint against grpo: joint is better (p = 0.031 after Holm over 2, 7 pairs)." in found.text
    assert (
        "worse against grpo: not resolved (p = " in found.text and "pairs would give 80 % power" in found.text
    )
    assert [link for link in found.links if not link.startswith("data:")] == ["joint/seed-1/report.html"]
    judged = {one.comparison.a: one.comparison for one in results(folder).judged}
    assert judged["joint"].difference.mean == pytest.approx(0.2)


@pytest.mark.slow
def test_some_runs(campaign):
    folder = campaign(budget={"hours": 30.0})
    finished(folder, "grpo", 1)
    finished(folder, "joint", 1)
    finished(folder, "grpo", 2, reason=None)
    finished(folder, "joint", 2, reason="failed")
    found = page(folder)
    assert "2 of 21 runs are done; 17 not started, 1 unfinished, 1 failed." in found.text
    assert "of 30 h." in found.text
    assert "joint against grpo: not resolved yet: 5 of 7 pairs are missing." in found.text
    assert "Failed or damaged: joint/seed-2. Their pairs are left out" in found.text
    assert "an interval needs at least 3 values" in found.text


def test_a_run_without_the_number_is_named(campaign):
    folder = campaign(seeds=[1, 2, 3])
    finished(folder, "grpo", 1, steps=(0, 15))
    finished(folder, "joint", 1)
    file = finished(folder, "joint", 2) / "validation.jsonl"
    file.write_text(file.read_text().replace("sampled", "greedy"))
    (finished(folder, "joint", 3) / "events.jsonl").write_text("[1]\n")
    found = page(folder)
    assert "values from step 0 to 15 do not cover the window 0 to 30" in found.text
    assert f"validation.jsonl has no {METRIC} (did you mean val-aux/lab-greedy/em/mean@1?)" in found.text
    assert "events.jsonl line 1 is not a JSON object" in found.text
    assert "3 pairs (seed, world) cannot resolve 2 comparisons at 5 %: at least 7 are needed" in found.text


@pytest.mark.slow
def test_a_factorial(campaign):
    conditions = {name: [f"a={name}"] for name in ("C1", "C2", "C3", "C4")}
    factors = {
        "outcome": {"g": ["C1", "C2"], "m": ["C3", "C4"]},
        "token": {"n": ["C1", "C3"], "s": ["C2", "C4"]},
    }
    folder = campaign(conditions=conditions, baseline="C1", factors=factors)
    assert "No table: 0 (seed, world) have runs of all conditions" in page(folder).text
    BETTER.update({"C1": 0.0, "C2": 0.001, "C3": 0.2, "C4": 0.2})
    for name in conditions:
        for seed in TREE["seeds"]:
            finished(folder, name, seed)
    effects = {name: cells for name, *cells in page(folder).rows}
    assert effects["outcome"][0] == "1" and effects["outcome"][-2:] == ["< 0.001", "< 0.001"]
    assert "outcome x token" in effects


@pytest.mark.slow
def test_text_is_escaped(campaign):
    folder = campaign(hypothesis="<script>alert(1)</script> \x1b[31m & more")
    whole(folder)
    end = {"kind": "end", "reason": "failed", "text": "<b>x\x00"}
    (folder / "grpo/seed-1/events.jsonl").write_text('{"kind": "start"}\n' + json.dumps(end) + "\n")
    found = page(folder)  # its parser refuses scripts
    assert "<script>alert(1)</script> ␛[31m & more" in found.text and "<b>x␀" in found.text
    assert "default-src 'none'; img-src data:" in (folder / "campaign.html").read_text()


@pytest.mark.slow
def test_the_same_runs_give_the_same_page(campaign, pictures):
    folder = campaign()
    whole(folder)
    first = {
        path.name: path.read_bytes() for path in (write_campaign_report(folder).parent).glob("campaign*")
    }
    write_campaign_report(folder)
    assert first == {path.name: path.read_bytes() for path in folder.glob("campaign*")}


@pytest.mark.slow
def test_the_commands(campaign, capsys):
    folder = campaign(seeds=[1, 2])
    finished(folder, "grpo", 1)
    finished(folder, "joint", 1, reason="failed")
    assert main(["campaign", "status", str(folder)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"grpo/seed-1 +done +1.00 +30 +0.460  done, 30 of 30 steps done", lines[1])
    assert re.fullmatch(r"joint/seed-1 +failed +1.00 +30 +-  failed, 30 of 30 steps done", lines[2])
    assert lines[-2:] == [
        "engine train: 1 of 6 runs done, 2.00 hours",
        "note: 2 pairs (seed, world) cannot resolve 2 comparisons at 5 %: at least 7 are needed",
    ]
    assert main(["campaign", "report", "turn_modes_lab", "--dir", str(folder)]) == 0
    assert capsys.readouterr().out == f"report: {folder}/campaign.html\n"
    (folder / "campaign.html").unlink()
    assert main(["report", str(folder)]) == 0 and (folder / "campaign.html").exists()


@pytest.mark.parametrize("command", ["status", "report"])
def test_what_is_no_campaign_is_refused(command, tmp_path, capsys):
    assert main(["campaign", command, "turn_modes_lab", "--dir", str(tmp_path)]) == 4
    assert "campaign.json does not exist: `verl-credit campaign run FILE --dir" in capsys.readouterr().out
    assert main(["campaign", command, "nothing"]) == 4
    assert "nothing is no file and no shipped campaign" in capsys.readouterr().out
    for content, said in {
        "{": "campaign.json is damaged",
        '{"version": 1, "campaign": {}, "added": 5}': "campaign.json is damaged",
        '{"version": 9, "campaign": {}, "added": []}': "version=9; this verl_credit reads version 1",
    }.items():
        (tmp_path / "campaign.json").write_text(content)
        assert main(["campaign", command, str(tmp_path)]) == 4
        assert said in capsys.readouterr().out
