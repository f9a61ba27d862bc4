"""Campaign files and folders with anything in them: they are read, or refused in one line that names file and key."""

from __future__ import annotations

import copy
import json
import random
from pathlib import Path

from kit.damage import damaged_bytes, damaged_value, written
from kit.fuzz import ACCEPTED, REFUSED, checker_of, command, contents, cuts, one_plain_line, told, try_all
from kit.report_page import write_lines
from verl_credit.errors import ConfigError, ExitCode
from verl_credit.study.campaign.design import planned
from verl_credit.study.campaign.file import parse, read_campaign
from verl_credit.study.campaign.record import RECORD, VERSION

METRIC = "val-aux/lab-sampled/em/mean@1"
GOOD = {
    "name": "mine",
    "hypothesis": "joint is faster",
    "expected_delta": "+1 pp",
    "engine": "train",
    "recipe": "lab",
    "config_dir": "own",
    "overrides": ["lab.size=tiny"],
    "conditions": {"grpo": ["a=none"], "joint": ["a=joint"], "both": ["a=joint", "b=1"], "last": []},
    "baseline": "grpo",
    "seeds": [1, 2],
    "worlds": [0, 3],
    "budget": {"runs": 4, "hours": 2.5},
    "stop": {"max_failures": 2},
    "metric": {"name": METRIC, "window": [0, 30], "higher_is_better": True},
    "comparisons": [["joint", "grpo"], ["both", "grpo"]],
    "factors": {
        "f": {"low": ["grpo", "joint"], "high": ["both", "last"]},
        "g": {"low": ["grpo", "both"], "high": ["joint", "last"]},
    },
}
# fmt: off
ODD = (
    None, True, 0, 1, -1, 2**31, 10**400, 0.5, float("nan"), float("inf"), "", " ", "text", "a/b", "..", "é" * 100,
    "\x1b[31m",
    "a\nb", "\u202e", "${nothing}", "${oc.env:HOME}", "???", "seed=3", "run_dir=x", "grpo", "all", "=", "null", [],
    [None], [[]], [1, 1], ["a"], [["grpo", "grpo"]], {}, {"a": 1}, {1: 2}, {"": []}, {None: 1}, {"a": {"b": ["grpo"]}},
)
# fmt: on
EVENTS = [
    {"time": 1.0, "kind": "start", "text": "start"},
    {"time": 3601.0, "kind": "end", "reason": "done", "text": "done, 30 of 30 steps done"},
]


def make(seed: int) -> tuple[list[str], dict, str]:
    """(what was done, the tree, what is damaged beside it: its text, or a file of the campaign's folder)"""
    draw, tree = random.Random(seed), copy.deepcopy(GOOD)
    done = []
    for _ in range(draw.choice((0, 1, 1, 2))):
        kind, key = draw.random(), draw.choice(list(tree))
        if kind < 0.7:
            done.append(damaged_value(tree, draw, ODD))
        elif kind < 0.85 and len(tree) > 1:
            done.append(f"without {key}")
            del tree[key]
        else:
            place = draw.choice([tree, *(one for one in tree.values() if isinstance(one, dict))])
            name = draw.choice((key[:-1], key.upper(), "", "a.b", "é", "a\nb", "x" * 200, "token"))
            place[name] = draw.choice(ODD)
            done.append(f"new key {name!r:.40}")
    return done, tree, draw.choice(("", "", "text", "folder", "folder"))


def law_of_file(file: Path) -> str:
    before = contents(file.parent)
    code, out, err = command("campaign", "status", str(file), f"--dir={file.parent / 'nowhere'}")
    assert code == ExitCode.PREFLIGHT and not err
    one_plain_line(out)
    try:
        campaign, path = read_campaign(str(file))
    except ConfigError as error:
        assert str(error).isprintable() and str(file) in str(error), f"names no file: {error!s:.600}"
        verdict = REFUSED
    else:
        assert path == file and planned(campaign) and campaign.pairs()
        verdict = ACCEPTED
    assert contents(file.parent) == before
    return verdict


def named(error: ConfigError, tree: dict) -> bool:
    """A refused key is one of the file, or one that it lacks."""
    return not error.key or error.key.startswith((*map(str, tree), *GOOD))


def law_of_tree(tree: dict) -> str:
    try:
        parse(tree, "mine.yaml")
    except ConfigError as error:
        said = str(error)
        assert said.isprintable() and said.startswith("mine.yaml: ") and named(error, tree), f"{said!r:.600}"
        return REFUSED
    return ACCEPTED


def law_of_folder(folder: Path) -> str:
    before = contents(folder)
    code, out, err = command("campaign", "status", str(folder / "mine.yaml"), f"--dir={folder}")
    assert not err and contents(folder) == before
    assert all(line.isprintable() for line in out.split("\n")), f"not printable: {out!r:.600}"
    if code == ExitCode.PREFLIGHT:
        one_plain_line(out)
        assert str(folder) in out, f"names no file: {out!r:.600}"
        return REFUSED
    assert code == ExitCode.DONE and out.splitlines()[0].split() == ["run", "state", "hours", "steps", "area"]
    return ACCEPTED


def write_folder(folder: Path, tree: dict, draw: random.Random) -> list[str]:
    """A campaign's folder with two runs, and damage to one of its files; returns what was done."""
    (folder / RECORD).write_text(json.dumps({"version": VERSION, "campaign": tree, "added": []}))
    for seed in (1, 2):
        run = folder / f"grpo/seed-{seed}-world-0"
        run.mkdir(parents=True)
        write_lines(run / "events.jsonl", EVENTS)
        write_lines(run / "validation.jsonl", [{"step": step, METRIC: step / 60} for step in (0, 15, 30)])
    file = draw.choice(sorted(path for path in folder.rglob("*.json*") if path.is_file()))
    if draw.random() < 0.6:
        lines = file.read_text().splitlines()
        number = draw.randrange(len(lines))
        row = json.loads(lines[number])
        done = f"{file.name} line {number + 1}{damaged_value(row, draw, ODD)}"
        lines[number] = json.dumps(row)
        file.write_text("\n".join(lines) + "\n")
        return [done]
    done, content = damaged_bytes(file.read_bytes(), draw)
    file.write_bytes(content)
    return [f"{file.name}: {done}"]


@checker_of
def checker(folder: Path, seed: int) -> str:
    (done, tree, damaged), draw = make(seed), random.Random(-seed - 1)
    file = folder / "mine.yaml"
    text = written(tree, draw)
    file.write_bytes(damaged_bytes(text, draw)[1] if damaged == "text" else text)
    if damaged == "folder":
        done += write_folder(folder, tree, draw)
    with told((done, tree, damaged)):
        if damaged == "folder":
            return law_of_folder(folder)
        law_of_tree(tree)
        return law_of_file(file)


@cuts(20, failed=(2003,))
def test_a_campaign_is_read_or_refused_in_one_line(seeds, tmp_path):
    with checker(tmp_path) as check:
        try_all(check, seeds)
