"""The lens on the page: which groups, what it says of them, the credit of turns and tokens, and text that cannot act."""

import json
import re

import numpy as np
import pytest

from kit.credit_tables import GAINS, ROWS, rollout, write_step
from kit.report_page import SCALES, Page, report
from verl_credit.records.report import lens as lens_module
from verl_credit.records.report import lens_group
from verl_credit.records.report.lens import GROUPS, NO_TABLES, lens
from verl_credit.records.report.lens_group import Group, StepTurns
from verl_credit.records.report.text import Scale
from verl_credit.records.run.table_files import ROLLOUTS, TURNS, read_table, table_path, tables_of

ATTACK = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\u202e\x00\ud800"
ALL_RIGHT = (
    "In this group every rollout is right, and 2 searches that gained information have negative credit."
)


def group_of(folder, number=3, group=0, scales=SCALES):
    c = read_table(table_path(folder, ROLLOUTS, number), ("group", "row")).columns
    rows = [row for row, one in zip(c["row"], c["group"], strict=True) if one == group]
    return Group(StepTurns.of(read_table(table_path(folder, TURNS, number))), rows, scales)


def group_about(found, question):
    return next(group for group in found.groups if group["question"] == question)


@pytest.mark.slow
def test_an_all_right_group_whose_good_searches_lose_is_told(run_dir):
    """p: gains .4, .1, .6 in turn 1: mean .3667, so .1 is below its siblings; .2 and .1 in turn 2: the latter is."""
    write_step(run_dir)
    group = group_about(lens(run_dir, 3, SCALES), "Who?")
    assert group["said"] == ALL_RIGHT
    assert [row["right"] for row in group["rollouts"]] == [True] * 3
    text = report(run_dir)
    assert "Credit is relative to the siblings" in Page(text).text and ALL_RIGHT in text


SAME = [rollout("call", "page", "done", prompt=prompt) for prompt in ("Who?", "Who?", "Where?", "Where?")]


def test_the_lens_opens_where_the_credit_differs_from_grpo_and_noise_is_not_counted(tmp_path):
    """Two gains that are 1e-6 apart: "Who?" is all right and has credit of .0013. "Where?" has GRPO's +-.707 (ddof 1)."""
    gains = [[0.395], [0.395 + 1e-6], [0.5], [0.1]]
    write_step(tmp_path, 3, rows=SAME, gains=gains, outcomes=[1.0, 1.0, 1.0, 0.0], groups=[*"aabb"])
    scales = {"advantage": Scale(1.0), "reward": Scale(0.1)}
    first, second = lens(tmp_path, 3, scales).groups
    assert (first["question"], second["question"]) == ("Where?", "Who?")
    credit = first["advantage"]
    assert first["grpo"] == [pytest.approx([half, half], abs=1e-5) for half in (0.5**0.5, -(0.5**0.5))]
    group = group_of(tmp_path, group=1, scales=scales)
    # The answers have +-1, the population's standard deviation: that factor alone is no contrast.
    assert first["factor"] == group.factor == pytest.approx(2**0.5, abs=1e-5)
    apart = np.array(credit) - first["factor"] * np.array(first["grpo"])
    assert group.contrast == pytest.approx((apart**2).mean() ** 0.5, abs=1e-5) and group.contrast > 0.1
    noise = group_of(tmp_path, group=0, scales=scales)
    assert 0 < noise.given_G_K1.abs().max() < 0.05 and noise.contrast == 0.0
    assert second["said"].endswith("; no search that gained information has negative credit.")
    assert (first["limit"], first["floor"]) == (2.0, 0.05)
    assert first["said"].endswith("1 search that gained information has negative credit.")
    gained = [[turn["gained"] for turn in row["turns"]] for row in first["rollouts"]]
    assert gained == [[True, False], [True, False]]
    no_gain = group_of(tmp_path, group=1, scales=scales | {"reward": Scale(3.0)})
    assert no_gain.punished == 0  # a gain of .1 is noise of gains as large as 3


def test_turns_and_tokens_have_the_credit_that_was_stored(tmp_path):
    advantages_B_T, step, turns, *_ = write_step(tmp_path, transform_mode="gtpo_sepa_hicra", reject=[1])
    page = group_about(lens(tmp_path, 3, SCALES), "Who?")
    for row, shown in enumerate(page["rollouts"]):
        stored = advantages_B_T[row][turns.turn_ids_B_T[row] >= 0].float()
        assert shown["credit"] == pytest.approx(stored.tolist(), abs=1e-6)
        n = int(turns.n_turns_B[row])
        for name in ("advantage", "clip"):
            table_B_K1 = getattr(step.credit, f"{name}_B_K1" if name == "advantage" else "clip_scale_B_K1")
            assert page[name][row] == pytest.approx(table_B_K1[row, :n].tolist(), abs=1e-6)
    assert page["mode"] == "turn-group-v1d"


@pytest.mark.slow
def test_groups_are_the_telling_ones_and_bounded(tmp_path, monkeypatch):
    for number in range(1, 5):
        write_step(tmp_path, number)
    found = lens(tmp_path, 4, SCALES)
    assert {one["question"] for one in found.groups} == {"Where?"}
    assert [one["step"] for one in found.groups] == [4, 3, 2, 1]
    assert len(found.groups) == GROUPS and lens(tmp_path, 2, SCALES).groups[0]["step"] == 2
    monkeypatch.setattr(lens_module, "TOKENS_IN_ALL", 10)
    assert len(lens(tmp_path, 4, SCALES).groups) == 1
    for module in (lens_module, lens_group):
        monkeypatch.setattr(module, "ROLLOUTS", 2)
        monkeypatch.setattr(module, "TOKENS_A_ROLLOUT", 5)
    (page,) = lens(tmp_path, 4, SCALES).groups
    assert page["notes"] == ["1 of 3 rollouts are not shown."]
    assert [len(row["text"]) for row in page["rollouts"]] == [5, 5] and page["rollouts"][0]["more"] > 0
    assert all(len(row["credit"]) == 5 for row in page["rollouts"])


@pytest.mark.slow
def test_no_tables_half_tables_and_tables_of_others_leave_a_page(run_dir):
    assert NO_TABLES in Page(report(run_dir)).text and "<script" not in report(run_dir)
    for number in (1, 2, 3):
        write_step(run_dir, number)
    turns, tokens = tables_of(run_dir, TURNS), tables_of(run_dir, ROLLOUTS)
    turns[1].unlink()
    tokens[2].write_bytes(tokens[2].read_bytes()[:500])
    before = tokens[2].read_bytes()
    found = lens(run_dir, 3, SCALES)
    assert {one["step"] for one in found.groups} == {3}
    assert "no turns of step 1" in found.problems[0] and f"{tokens[2]} cannot be read" in found.problems[1]
    text = Page(report(run_dir)).text
    assert all(problem in text for problem in found.problems) and tokens[2].read_bytes() == before


@pytest.mark.slow
def test_a_table_with_flipped_bytes_costs_no_page(run_dir):
    random = np.random.default_rng(0)
    write_step(run_dir, 3)
    whole = {kind: table_path(run_dir, kind, 3).read_bytes() for kind in (TURNS, ROLLOUTS)}
    for _ in range(12):
        for kind, content in whole.items():
            damaged = bytearray(content)
            for place in random.integers(len(damaged), size=random.integers(0, 4)):
                damaged[place] ^= 1 << int(random.integers(8))
            table_path(run_dir, kind, 3).write_bytes(damaged)
        assert "First and last values" in report(run_dir)


def test_a_table_of_a_step_that_is_not_finished_waits(run_dir):
    write_step(run_dir, 4)
    assert lens(run_dir, 3, SCALES).groups == [] and lens(run_dir, 4, SCALES).groups


def test_nothing_in_a_table_acts_on_the_page(run_dir):
    text = ATTACK.replace("\ud800", "")
    rows = [rollout("call <b>", text, "done", prompt=text), *ROWS[1:]]
    write_step(run_dir, rows=rows, gains=[[0.4], *GAINS[1:]])
    text = report(run_dir)
    page = Page(text)
    assert text.count("<script") == 2 and text.count("</script>") == 2  # the data and the lens's own
    (data,) = re.findall(r'<script type="application/json" id="lens-data">(.*?)</script>', text, re.S)
    assert not set("<>&\u202e\x00") & set(data)
    group = next(one for one in json.loads(data)["groups"] if "script" in one["question"])
    assert "<script>alert(1)" in group["rollouts"][0]["turns"][0]["seen"] and "[U+202E]" in group["question"]
    assert not [name for _, name, _ in page.attributes if name.startswith("on")]
    (policy,) = [value for _, name, value in page.attributes if name == "content" and "default-src" in value]
    assert policy.startswith("default-src 'none'; img-src data:;") and "script-src 'sha256-" in policy
    assert "'unsafe-inline'" not in policy.partition("script-src")[2]
