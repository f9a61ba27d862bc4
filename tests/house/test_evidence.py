"""evidence/: published numbers are those of the archives and of the scripts, and a script that a page names can be found."""

import json
import re
import runpy
import shutil
import sys
from pathlib import Path

import pytest

from verl_credit.study.campaign.file import read_campaign

ROOT = Path(__file__).parents[2]
EVIDENCE = ROOT / "evidence"
archive = runpy.run_path(str(EVIDENCE / "archive.py"))


@pytest.fixture(scope="module")
def raw(tmp_path_factory):
    """All archives, as `make evidence-raw` unpacks them; `unpack` refuses one that is not the one of its numbers."""
    folder = tmp_path_factory.mktemp("raw")
    for topic in archive["topics"]():
        archive["unpack"](EVIDENCE / topic, folder / topic)
    return folder


@pytest.fixture
def started(monkeypatch, capsys):
    """Starts a script as from the command line; the rows of the tables that it prints."""
    before = set(sys.modules)

    def go(path, *arguments):
        monkeypatch.setattr(sys, "argv", [path, *map(str, arguments)])
        monkeypatch.syspath_prepend(str((EVIDENCE / path).parent))
        runpy.run_path(str(EVIDENCE / path), run_name="__main__")
        return [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]

    yield go
    for name in set(sys.modules) - before:
        if str(EVIDENCE) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def test_an_archive_is_the_same_again_and_another_one_is_refused(tmp_path):
    topic, folder = tmp_path / "topic", tmp_path / "folder"
    for name in ("b.json", "a/c.jsonl"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
    topic.mkdir()
    (topic / "numbers.json").write_text('{"table": {"row": [1, 0.5]}}')
    archive["pack"](folder, topic)
    first, numbers = (topic / "raw.tar.xz").read_bytes(), json.loads((topic / "numbers.json").read_text())
    assert (
        archive["packed"](shutil.copytree(folder, tmp_path / "later", copy_function=shutil.copyfile)) == first
    )
    assert numbers["table"] == {"row": [1, 0.5]}
    archive["unpack"](topic, tmp_path / "again")
    assert (tmp_path / "again/a/c.jsonl").read_text() == "a/c.jsonl"
    (topic / "raw.tar.xz").write_bytes(first + b" ")
    with pytest.raises(ValueError, match=numbers["raw"]):
        archive["unpack"](topic, tmp_path / "third")


def test_a_script_that_a_page_names_is_there_or_the_page_names_its_commit():
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *EVIDENCE.rglob("*.md")]
    assert len(pages) > 30
    lost = {}
    for page in pages:
        text = page.read_text()
        named = re.findall(r"(?<!build/)\bevidence/[\w/]+\.(?:py|sh)\b", text)
        gone = [name for name in named if not (ROOT / name).exists()]
        if gone and not re.search(r"commit\s(1ed6804|23dae403)", text):
            lost[str(page.relative_to(ROOT))] = gone
    assert lost == {}


@pytest.mark.slow
def test_numbers_stay_small(raw):
    """A reader of the repository gets them all; raw results are packed."""
    assert {path.name for path in raw.iterdir()} > {"campaigns", "fidelity"}
    assert max(path.stat().st_size for path in EVIDENCE.rglob("numbers*.json")) <= 20_000


def test_campaigns_that_were_declared_can_be_run():
    for path in EVIDENCE.rglob("*.yaml"):
        if "conditions:" in path.read_text():
            campaign, _ = read_campaign(str(path))
            assert campaign.cannot_resolve() == "" or path.stem == "choice", path


@pytest.mark.parametrize(
    "command, page",
    [
        (("reliability/kills.py", "--table"), "reliability/README.md"),
        (("reliability/long_run.py", "--table"), "reliability/README.md"),
        (("reliability/load.py",), "reliability/load.md"),
        (("reliability/inputs.py",), "reliability/inputs.md"),
        (("horizon/chain.py", EVIDENCE / "horizon/numbers_chain.json", "--again"), "horizon/README.md"),
        (("horizon/curves.py", EVIDENCE / "horizon/lab_curves.jsonl"), "horizon/README.md"),
        pytest.param(
            ("fidelity/exact_bias.py", "--again", "--folder", "RAW/fidelity"),
            "fidelity/README.md",
            marks=pytest.mark.slow,
        ),
    ],
    ids=lambda given: given if isinstance(given, str) else given[0],
)
def test_a_script_prints_what_is_published(raw, started, monkeypatch, command, page):
    """A page may call a row otherwise, write .5 for 0.5, and leave a few rows out."""
    monkeypatch.setenv("RELIABILITY", str(raw / "reliability"))
    printed = {_numbers(line) for line in started(*(str(part).replace("RAW", str(raw)) for part in command))}
    lines = (EVIDENCE / page).read_text().splitlines()
    published = {_numbers(line) for line in lines if line.startswith("|")}
    found = {row for row in printed if len(row) > 1}
    assert len(found) > 3 and len(found - published) <= 0.2 * len(found)


def _numbers(line):
    """The numbers after the row's name."""
    cells = line.replace(",", "").partition("|")[2].partition("|")[2]
    return tuple(float(number) for number in re.findall(r"[\d.]*\d", cells))


@pytest.mark.slow
@pytest.mark.nightly
def test_the_bench_compares_two_servers_and_checks_every_answer(tmp_path, started):
    small = (
        "--rows 200 --requests 8 --rounds 1 --batch-repeats 1 --reliability 40 --overload 0 --encoder tiny"
    )
    file = tmp_path / "bench.json"
    rows = started("retriever/bench.py", "--work", tmp_path, *small.split(), "--threads", 1, "--json", file)
    found = json.loads(file.read_text())
    assert found["sizes"][0]["same_documents"] == 1 and found["reliability"]["wrong_200"] == 0
    assert any("| 200 | ours / plain |" in line for line in rows)
