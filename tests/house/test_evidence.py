"""evidence/: archives with their numbers, the scripts that stay, and pages that say what these scripts print."""

import importlib.util
import json
import re
import runpy
import shutil
import sys
from pathlib import Path

import pytest
import yaml

from verl_credit.recipe.compose import load_config
from verl_credit.records.run.files import METRICS, VALIDATION, append_json, read_json_lines
from verl_credit.study.campaign.design import planned
from verl_credit.study.campaign.file import read_campaign
from verl_credit.study.campaign.report import write_campaign_report
from verl_credit.study.twin import Twin

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


# Pages.


PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *EVIDENCE.rglob("*.md")]


@pytest.mark.parametrize("page", sorted(PAGES), ids=lambda page: str(page.relative_to(ROOT)))
def test_a_script_that_a_page_names_is_there_or_the_page_names_its_commit(page):
    text = page.read_text()
    gone = [
        name
        for name in re.findall(r"(?<!build/)\bevidence/[\w/]+\.(?:py|sh)\b", text)
        if not (ROOT / name).exists()
    ]
    assert gone == [] or "commit 1ed6804" in " ".join(text.split())


# Campaigns.


@pytest.mark.slow
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


@pytest.mark.slow
def test_the_tables_of_exact_bias_are_those_of_the_archive(raw, tmp_path, capsys):
    shutil.copyfile(raw / "fidelity/exact_bias.json", tmp_path / "exact_bias.json")
    start("fidelity/exact_bias.py", "--again", "--folder", tmp_path)
    printed = rows(capsys.readouterr().out)
    for head in ("| mode | group | cosine", "| group size | 2", "| stop probability | 0.1"):
        _, _, *body = table("fidelity/README.md", head)
        assert len(body) > 15 and set(body) <= set(printed), head
    assert (tmp_path / "exact_bias.png").stat().st_size > 10_000


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
def test_kept_policies_are_asked_all_held_out_questions(tiny_lab, tmp_path):
    """A checkpoint that is the lab's own policy answers as the twin says of it."""
    run, own = tmp_path / "grpo" / "seed-1", tmp_path / "own"
    policy = run / "checkpoints/global_step_5/actor/huggingface"
    shutil.copytree(tiny_lab.policy, policy)
    (run / "config.yaml").write_text(yaml.safe_dump({"lab": {"dir": str(tiny_lab.root)}}))
    row = module("fidelity/held_out.py").held_out(run, 5)
    own.mkdir()
    settings = [f"lab.dir={tiny_lab.root}", f"run_dir={own}", "data.val_max_samples=-1", "seed=99"]
    Twin(load_config("lab", settings), own, lambda text: None).evaluate(0)
    (expected,) = read_json_lines(own / VALIDATION)
    assert row | {"step": 0} == expected


# The lab.

GOLD = {"gold_ids": ["a", "b"]}


def searched(step, *turns, **changes):
    """A trajectory; of each turn (information gain, the pages that its search brought)."""
    said = [{"text": "<think>let me check</think>", "reward": gain} for gain, _ in turns]
    searches = [{"turn": turn, "pages": pages} for turn, (_, pages) in enumerate(turns)]
    return {"step": step, "turns": said, "searches": searches} | GOLD | changes


def test_gains_are_told_apart_by_what_a_search_brought_first():
    rows = [
        searched(1, (0.5, ["b", "x"]), (0.1, ["b"]), (0.25, ["a"])),
        searched(5, (0.75, ["b"]), (None, ["a"])),
        searched(6, (9.0, ["b"])),
        searched(1, (9.0, ["b"]), gold_ids=[]),
    ]
    found = module("lab/run.py").gain_by_kind(rows, last_step=5)
    assert found["steps"] == "1-5" and found["answer"] == {"turns": 2, "mean": 0.625, "standard_error": 0.125}
    assert found["useless"] == {"turns": 1, "mean": 0.1, "standard_error": 0.0}
    assert found["intermediate"] == {"turns": 1, "mean": 0.25, "standard_error": 0.0}


@pytest.mark.slow
def test_the_lab_and_a_run_on_it_are_measured(tiny_lab, tmp_path, monkeypatch, capsys):
    """The training is a stand-in that writes a run's files; `summarize.py` reads what comes out."""
    labs, run = module("lab/labs.py"), module("lab/run.py")
    commands = []

    def train(command, check):
        commands.append(command)
        folder = tmp_path / "runs" / "main-5"
        rest = {"actor/pg_clipfrac": 0.01, "actor/ppo_kl": 0.0, "actor/entropy": 1.0, "timing_s/step": 2.0}
        for step in range(1, 31):
            append_json(folder / METRICS, {"step": step, "credit/outcome/em": 0.5} | rest)
        for step, em in ((0, 0.25), (30, 0.75)):
            scores = {"em": em, "format_ok": 1.0}
            row = {
                f"val-aux/lab-{how}/{name}/mean@1": v
                for how in ("greedy", "sampled")
                for name, v in scores.items()
            }
            append_json(folder / VALIDATION, {"step": step} | row)

    for script in (labs, run):
        monkeypatch.setattr(script, "build_lab", lambda *given, **more: tiny_lab)
    monkeypatch.setattr(run.subprocess, "run", train)
    kept = [searched(step, (0.5 + step / 8, ["b"]), (0.1, ["x"])) for step in range(1, 31)]
    monkeypatch.setattr(run, "read_samples", lambda folder: (kept, []))
    out = ["--seeds", "5", "--out"]
    monkeypatch.setattr(sys, "argv", ["labs.py", *out, str(tmp_path / "results/labs.json")])
    labs.main()
    (lab,) = json.loads((tmp_path / "results/labs.json").read_text())
    assert (
        lab["world_seed"] == 5 and 0 <= lab["test_recall_by_question"]["3"] <= 1 and 0 <= lab["dev_em"] <= 1
    )
    own = ["--runs", str(tmp_path / "runs"), "--conditions", "main"]
    monkeypatch.setattr(sys, "argv", ["run.py", *out, str(tmp_path / "results"), *own])
    run.main()
    assert commands[0][3:7] == ["train", "--config-name", "lab", "lab.world_seed=5"]
    capsys.readouterr()
    start("lab/summarize.py", tmp_path / "results")
    printed = capsys.readouterr().out
    assert (
        "| main | 5 | 0, 30 | 0.250 → 0.750 | 0.250 → 0.750 | 0.250 → 0.750 | 0.250 → 0.750 | 2.0 |"
        in printed
    )
    assert "| 5 | +0.8750 ± 0.0884 (n=5) | none | +0.1000 ± 0.0000 (n=5) | 8.8 standard errors |" in printed


# The retriever's bench, and what asks about dependencies.


@pytest.mark.slow
@pytest.mark.nightly
def test_the_bench_compares_two_servers_and_checks_every_answer(tmp_path, capsys):
    small = "--rows 200 --requests 8 --rounds 1 --batch-repeats 1 --reliability 40 --overload 0 --encoder tiny --threads 1"
    start(
        "retriever/bench.py", "--work", tmp_path / "work", *small.split(), "--json", tmp_path / "bench.json"
    )
    found = json.loads((tmp_path / "bench.json").read_text())
    (size,) = found["sizes"]
    assert size["same_documents"] == 1 and size["alone_same_documents"] and size["alone_against_batch"] < 1e-5
    assert found["reliability"]["statuses"] == {"200": 40} and found["reliability"]["wrong_200"] == 0
    assert "| 200 | ours / plain |" in capsys.readouterr().out


@pytest.mark.parametrize(
    "dependencies, code, line",
    [
        ([{"name": "a", "version": "1"}], 0, "1 of 1 dependencies looked up"),
        ([{"name": "a", "skip_reason": "no network"}], 2, "NOT RUN for 1, first: no network"),
        (
            [{"name": "a", "version": "1", "vulns": [{"id": "X-1", "fix_versions": ["2"]}]}],
            1,
            "a 1: X-1, fixed in 2",
        ),
        (None, 2, "NOT RUN for constraints-cpu.txt: pip-audit reported nothing: it printed nothing"),
    ],
)
def test_a_dependency_that_was_not_looked_up_is_no_good_news(
    tmp_path, monkeypatch, capsys, dependencies, code, line
):
    program = tmp_path / "pip-audit"
    (tmp_path / "answer").write_text(
        "" if dependencies is None else json.dumps({"dependencies": dependencies})
    )
    program.write_text(f"#!/bin/sh\ncat '{tmp_path / 'answer'}'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PIP_AUDIT", str(program))
    with pytest.raises(SystemExit) as ended:
        start("reliability/supply.py")
    assert ended.value.code == code and line in capsys.readouterr().out
