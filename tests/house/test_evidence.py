"""evidence/: archives with their numbers, the scripts that stay, and pages that say what these scripts print."""

import importlib.util
import json
import re
import runpy
import shutil
import sys
from pathlib import Path

import pytest

from verl_credit.campaign.design import planned
from verl_credit.campaign.file import read_campaign
from verl_credit.campaign.report import write_campaign_report

ROOT = Path(__file__).parents[2]
EVIDENCE = ROOT / "evidence"


def module(path):
    """A script, without what it does from the command line."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str((EVIDENCE / path).parent))
        spec = importlib.util.spec_from_file_location(Path(path).stem, EVIDENCE / path)
        found = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(found)
    return found


def start(path, *arguments):
    """As from the command line."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [path, *map(str, arguments)])
        patch.syspath_prepend(str((EVIDENCE / path).parent))
        runpy.run_path(str(EVIDENCE / path), run_name="__main__")


archive = module("archive.py")


@pytest.fixture(scope="module")
def raw(tmp_path_factory):
    """All archives, as `make evidence-raw` unpacks them."""
    folder = tmp_path_factory.mktemp("raw")
    for topic in archive.topics():
        archive.unpack(EVIDENCE / topic, folder / topic)
    return folder


def rows(text):
    return [line for line in text.splitlines() if line.startswith("|")]


def table(page, head):
    """The rows of the table that begins with ``head``."""
    found = (EVIDENCE / page).read_text()
    return rows(found[found.index(head) :].partition("\n\n")[0])


# Archives.


def test_an_archive_holds_its_files_alone_and_is_the_same_again(tmp_path):
    topic, folder = tmp_path / "topic", tmp_path / "folder"
    for name in ("b.json", "a/c.jsonl"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
    topic.mkdir()
    (topic / "numbers.json").write_text('{"raw": "", "table": {"row": [1, 0.5]}}')
    archive.pack(folder, topic)
    first = (topic / "raw.tar.xz").read_bytes()
    assert archive.packed(shutil.copytree(folder, tmp_path / "later", copy_function=shutil.copyfile)) == first
    numbers = json.loads((topic / "numbers.json").read_text())
    assert numbers["table"] == {"row": [1, 0.5]} and re.fullmatch("sha256 [0-9a-f]{64}", numbers["raw"])
    archive.unpack(topic, tmp_path / "again")
    assert {path.name: path.read_text() for path in (tmp_path / "again").rglob("*.json*")} == {
        "b.json": "b.json",
        "c.jsonl": "a/c.jsonl",
    }
    (topic / "raw.tar.xz").write_bytes(first + b" ")
    with pytest.raises(ValueError, match=numbers["raw"]):
        archive.unpack(topic, tmp_path / "third")


def test_every_archive_is_the_one_of_its_numbers_and_numbers_stay_small(raw):
    assert {path.name for path in raw.iterdir()} == set(archive.topics()) > {"campaigns", "fidelity"}
    numbers = [*EVIDENCE.rglob("numbers*.json")]
    assert len(numbers) > len(archive.topics()) and max(path.stat().st_size for path in numbers) <= 20_000


# Campaigns.


def test_a_campaigns_page_is_made_from_the_archive(raw, tmp_path):
    folder = shutil.copytree(raw / "campaigns/turn_modes_lab", tmp_path / "turn_modes_lab")
    page = write_campaign_report(folder).read_text()
    assert "18 of 48 runs are done" in page
    numbers = json.loads((EVIDENCE / "campaigns/numbers.json").read_text())
    areas = numbers["turn_modes_lab: area, its interval, runs"]
    for name, (mean, low, high, _) in areas.items():
        assert f"{name}" in page and f"{100 * mean:.1f}" in page and f"{100 * low:.1f}" in page, name
        assert f"{100 * high:.1f}" in page, name


def test_what_is_kept_of_a_campaign_is_all_that_was_kept(raw, tmp_path):
    start("campaigns/keep.py", raw / "campaigns/real_math_cpu", tmp_path / "kept")
    files = {
        path.relative_to(tmp_path / "kept"): path.read_bytes()
        for path in (tmp_path / "kept").rglob("*.json*")
    }
    source = raw / "campaigns/real_math_cpu"
    assert files == {path.relative_to(source): path.read_bytes() for path in source.rglob("*.json*")}


def test_held_out_answers_of_a_campaign(raw, capsys):
    start("campaigns/held_out.py", raw / "campaigns/sepa_factorial_twin")
    printed = capsys.readouterr().out
    assert "| C5 - C1 | +9.1 ± 3.6 (14 of 16) | +3.6 ± 2.6 (11 of 16) |" in printed
    assert "| C8 - C5 | -2.8 ± 3.0 (5 of 16) | -4.9 ± 2.3 (1 of 16) |" in printed


def test_the_campaign_that_was_written_down_and_not_run_can_be_run():
    campaign, _ = read_campaign(str(EVIDENCE / "campaigns/maxrl_held_out.yaml"))
    assert len(planned(campaign)) == campaign.budget.runs == 54


# Tables that a script prints.


def test_the_tables_of_exact_bias_are_those_of_the_archive(raw, tmp_path, capsys):
    shutil.copyfile(raw / "fidelity/exact_bias.json", tmp_path / "exact_bias.json")
    start("fidelity/exact_bias.py", "--again", "--folder", tmp_path)
    printed = rows(capsys.readouterr().out)
    for head in ("| mode | group | cosine", "| group size | 2", "| stop probability | 0.1"):
        _, _, *body = table("fidelity/README.md", head)
        assert len(body) > 15 and set(body) <= set(printed), head
    assert (tmp_path / "exact_bias.png").stat().st_size > 10_000


def test_exact_bias_at_a_tiny_size_has_the_numbers_of_the_published_run(raw, tmp_path, capsys):
    start("fidelity/exact_bias.py", "--tiny", "--folder", tmp_path)
    capsys.readouterr()
    found, whole = (
        json.loads((folder / "exact_bias.json").read_text()) for folder in (tmp_path, raw / "fidelity")
    )
    keyed = {tuple(row[:4]): row[4:] for row in whole["rows"]}
    assert found["columns"] == whole["columns"] and len(found["rows"]) > 80
    for row in found["rows"]:
        for here, there in zip(row[4:], keyed[tuple(row[:4])], strict=True):
            assert here == (
                pytest.approx(there, rel=1e-5, abs=1e-9) if isinstance(there, float) else there
            ), row[:4]


def test_the_tables_of_the_lab_are_those_of_the_archive(raw, capsys):
    start("lab/summarize.py", raw / "lab/results")
    assert capsys.readouterr().out == (EVIDENCE / "lab/tables.md").read_text()


def test_the_tables_of_the_lakes_are_those_of_the_archive(raw, capsys):
    start("fidelity/lakes/run.py", raw / "fidelity/lakes", "--again")
    printed = capsys.readouterr().out
    assert "| none, grpo | 0.39 ± 0.02 | 0.10 ± 0.02 | 0.41 ± 0.02 | 0.10 ± 0.01 | 0.38 ± 0.04 |" in printed
    assert "| gigpo, by cell | +0.010 (-0.002 to +0.022) | +0.003 (-0.005 to +0.010) |" in printed


@pytest.fixture
def reliability(raw, monkeypatch, capsys):
    """Starts a script of reliability/ beside the published results; the rows that it prints."""
    names = [path.stem for path in (EVIDENCE / "reliability").glob("*.py")]
    for name in names:
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setenv("RELIABILITY", str(raw / "reliability"))

    def started(name, *options):
        start(f"reliability/{name}", *options)
        return rows(capsys.readouterr().out)

    yield started
    for name in names:
        sys.modules.pop(name, None)


def numbers_of(line):
    """Those behind the row's name."""
    return re.findall(r"[\d.]*\d", line.replace(",", "").partition("|")[2].partition("|")[2])


@pytest.mark.parametrize(
    "command, page",
    [
        (("kills.py", "--table"), "README.md"),
        (("long_run.py", "--table"), "README.md"),
        (("load.py",), "load.md"),
        (("inputs.py",), "inputs.md"),
    ],
)
def test_the_scripts_of_reliability_print_what_is_published(reliability, command, page):
    published = [numbers_of(line) for line in rows((EVIDENCE / "reliability" / page).read_text())]
    printed = [numbers_of(line) for line in reliability(*command)]
    assert len(printed) > 8 and [numbers for numbers in printed if numbers not in published] == []


MUTANTS = {
    0: ["76 | 24 | 0 | 95 | 2", "61 | 14 | 25 | 95 | 1"],
    21: ["83 | 17 | 0 | 89 | 0", "74 | 17 | 9 | 90 | 0"],
}


@pytest.mark.parametrize("seed", MUTANTS)
def test_mutants_are_counted_as_published(reliability, seed):
    """The numbers of places, which stand before, are those of today's code."""
    found = reliability("mutants.py", "table", *(["--seed", str(seed)] if seed else []))
    assert [line.partition(" | 100 | ")[2].strip(" |") for line in found[2:4]] == MUTANTS[seed]


# Fidelity and learning.


def test_own_cosine_and_learning_are_compared_as_published(raw, tmp_path, monkeypatch, capsys):
    """From the areas and the fidelity of the published runs: rank correlations, differences and their p-values."""
    learning = module("fidelity/learning.py")
    known = json.loads((raw / "fidelity/learning.json").read_text())
    for number, name in enumerate(known["policies"]):
        run, _, step = name.rpartition("-step-")
        credits = {
            learning.NAMES.get(condition, condition): of for condition, of in known["measured"].items()
        }
        policy = {
            "policy": run,
            "step": int(step),
            "gradients": {
                c: {"own_difference": {"value": of["own cosine"][number]}} for c, of in credits.items()
            },
            "credits": {c: {"pearson": {"value": of["pearson"][number]}} for c, of in credits.items()},
        }
        (tmp_path / name).mkdir()
        (tmp_path / name / "fidelity.json").write_text(json.dumps({"policies": [policy]}))

    def pairs(areas):
        return {
            c: {tuple(map(int, re.findall(r"\d+", key))): value for key, value in of.items()}
            for c, of in areas.items()
        }

    areas = pairs(known["areas"])
    ends = {
        mode: {
            c: {tuple(pair): each for pair, each in zip(of["pairs"], of["each"], strict=True)}
            for c, of in rows.items()
        }
        for mode, rows in known["held_out"].items()
    }
    monkeypatch.setattr(learning, "areas_of", lambda runs: areas)
    monkeypatch.setattr(learning, "held_out_of", lambda runs: ends)
    monkeypatch.setattr(learning, "RESAMPLES", 20)
    measured = [str(tmp_path / name) for name in known["policies"]]
    monkeypatch.setattr(sys, "argv", ["learning.py", "RUNS", *measured, "--folder", str(tmp_path / "out")])
    learning.main()
    found = json.loads((tmp_path / "out/learning.json").read_text())
    for name, of in known["correlations"].items():
        assert {
            key: found["correlations"][name][key] for key in ("credits", "pairs", "spearman", "p")
        } == pytest.approx({key: of[key] for key in ("credits", "pairs", "spearman", "p")})
    assert found["parts"] == pytest.approx(known["parts"])
    for name, of in known["learned"].items():
        assert found["learned"][name]["mean"] == pytest.approx(of["mean"], abs=1e-12)
        assert found["learned"][name].get("p") == pytest.approx(of.get("p"))
    assert (tmp_path / "out/learning.png").stat().st_size > 10_000
    assert (
        "low_baseline           n 15  area 0.611  minus GRPO's +0.027 ± 0.012  p 0.0003"
        in capsys.readouterr().out
    )
