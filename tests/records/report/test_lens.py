"""The lens on the page: which groups, what it says of them, the credit behind every switch, and text that cannot act."""

import base64
import json
import re

import numpy as np
import pytest
import torch

from kit.credit_tables import GAINS, ROWS, rollout, write_step
from kit.report_page import SCALES, Page, report
from verl_credit.records.report import lens as lens_module
from verl_credit.records.report import lens_settings
from verl_credit.records.report.again import (
    credit_of_tokens,
    credit_of_turns,
    on_tokens,
    token_tables,
    turn_tables,
)
from verl_credit.records.report.lens import GROUPS, NO_TABLES, lens
from verl_credit.records.report.lens_settings import Group, check, settings_of
from verl_credit.records.report.text import Scale
from verl_credit.records.run.rollouts import read_tokens
from verl_credit.records.run.tables import ROLLOUTS, TURNS, read_table, table_path, tables_of, write_table

ATTACK = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\u202e\x00\ud800"
ALL_RIGHT = (
    "In this group every rollout is right, and 2 searches that gained information have negative credit."
)


def group_of(folder, number=3, group=0, scales=SCALES):
    table = read_tokens(table_path(folder, ROLLOUTS, number))
    tokens = token_tables(table, group)
    return Group(turn_tables(read_table(table_path(folder, TURNS, number))), tokens.rows, scales, tokens)


def group_about(found, question):
    return next(group for group in found.groups if group["question"] == question)


def shown_by(page, setting, transform):
    """What the page shows: it looks the turn's credit up and multiplies with the credit of one. Written without ours."""
    found = []
    for row, advantages in zip(page["rollouts"], setting["advantage"], strict=True):
        r = page["rollouts"].index(row)
        up = np.frombuffer(base64.b64decode(transform["up"][r]), "<f4")
        down = (
            -up if transform["down"] is None else np.frombuffer(base64.b64decode(transform["down"][r]), "<f4")
        )
        turn = np.array([advantages[k] for k in row["turn"]])
        found.append(np.where(turn < 0, -turn * down, turn * up))
    return found


def test_an_all_right_group_whose_good_searches_lose_is_told(run_dir):
    """p: gains .4, .1, .6 in turn 1: mean .3667, so .1 is below its siblings; .2 and .1 in turn 2: the latter is."""
    write_step(run_dir)
    group = group_about(lens(run_dir, 3, SCALES), "Who?")
    assert group["given"]["said"] == ALL_RIGHT
    assert [row["right"] for row in group["rollouts"]] == [True] * 3
    text = report(run_dir)
    assert "Credit is relative to the siblings" in Page(text).text and ALL_RIGHT in text


GAINED, ABOVE = "that gained information", "with a reward above 0"


@pytest.mark.parametrize(
    "outcomes, signals, advantage, said",
    [
        ([1, 1], "info_gain", [[-0.1, 1], [0, 1]], f"every rollout is right, and 1 search {GAINED} has negative credit."),
        ([0, 0], "info_gain", [[-0.1, 1], [-1, 1]], f"no rollout is right, and 2 searches {GAINED} have negative credit."),
        ([1, 0], "info_gain", [[0.1, -1], [0, -1]], f"1 of 2 rollouts are right; no search {GAINED} has negative credit."),
        ([1, 0], "judge", [[0.1, 1], [-2, 1]], f"1 of 2 rollouts are right, and 1 turn {ABOVE} has negative credit."),
    ],
)  # fmt: skip
def test_the_sentence(tmp_path, outcomes, signals, advantage, said):
    write_step(
        tmp_path,
        rows=[rollout("call", "page", "done")] * 2,
        gains=[[0.1], [0.2]],
        outcomes=outcomes,
        groups=["a"] * 2,
    )
    group = group_of(tmp_path)
    group.turns.pipeline["signals"] = {signals: 1.0}
    assert group.sentence(torch.tensor(advantage)) == f"In this group {said}"


def test_a_gain_of_zero_gained_nothing(tmp_path):
    rows = [rollout("call", "page", "done")] * 2
    write_step(tmp_path, rows=rows, gains=[[0.0], [0.2]], outcomes=[1.0, 1.0], groups=["a"] * 2)
    group = group_of(tmp_path)
    assert group.given_G_K1[0, 0] < 0 and group.sentence(group.given_G_K1).endswith(
        "; no search that gained information has negative credit."
    )


SAME = [rollout("call", "page", "done", prompt=prompt) for prompt in ("Who?", "Who?", "Where?", "Where?")]


def test_the_lens_opens_where_the_credit_differs_from_grpo_and_noise_is_not_counted(tmp_path):
    """Two gains that are 1e-6 apart: "Who?" is all right and has credit of .0013. "Where?" has GRPO's +-.707 (ddof 1)."""
    gains = [[0.395], [0.395 + 1e-6], [0.5], [0.1]]
    write_step(tmp_path, 3, rows=SAME, gains=gains, outcomes=[1.0, 1.0, 1.0, 0.0], groups=[*"aabb"])
    scales = {"advantage": Scale(1.0), "reward": Scale(0.1)}
    first, second = lens(tmp_path, 3, scales).groups
    assert (first["question"], second["question"]) == ("Where?", "Who?")
    credit = first["given"]["advantage"]
    assert first["grpo"] == [pytest.approx([half, half], abs=1e-5) for half in (0.5**0.5, -(0.5**0.5))]
    apart = np.array(credit) - np.array(first["grpo"])
    group = group_of(tmp_path, group=1, scales=scales)
    assert group.contrast == pytest.approx((apart**2).mean() ** 0.5, abs=1e-5) and group.contrast > 0.1
    noise = group_of(tmp_path, group=0, scales=scales)
    assert 0 < noise.given_G_K1.abs().max() < 0.05 and noise.contrast == 0.0
    assert second["given"]["said"].endswith("; no search that gained information has negative credit.")
    assert (first["limit"], first["floor"]) == (2.0, 0.05)
    assert first["given"]["said"].endswith("1 search that gained information has negative credit.")
    gained = [[turn["gained"] for turn in row["turns"]] for row in first["rollouts"]]
    assert gained == [[True, False], [True, False]]
    no_gain = group_of(tmp_path, group=1, scales=scales | {"reward": Scale(3.0)})
    assert no_gain.punished(no_gain.given_G_K1) == 0  # a gain of .1 is noise of gains as large as 3


@pytest.mark.slow
@pytest.mark.parametrize("transform_mode", ["none", "gtpo_sepa_hicra"])
def test_every_switch_shows_what_the_library_gives(tmp_path, transform_mode, all_settings):
    write_step(tmp_path, transform_mode=transform_mode, reject=[1])
    for number, page in enumerate(lens(tmp_path, 3, SCALES).groups):
        names = {"Who?": 0, "Where?": 2, "When?": 3}
        group = group_of(tmp_path, group=names[page["question"]])
        offered = [one for one in page["transforms"] if not one["reason"]]
        for mode in page["modes"]:
            for key, setting in mode["credit"].items():
                i, j = key.split("|")
                changes = {"alpha": page["alphas"][int(i)]} if i else {}
                changes |= {"gamma": page["gammas"][int(j)]} if j else {}
                credit = credit_of_turns(group.turns, mode["name"], **changes)
                turn_G_T = on_tokens(credit.advantage_B_K1[group.place_G], group.tokens)
                for transform in offered[:: 1 if number == 0 else 4]:
                    name, _, lam = transform["name"].partition(", \N{GREEK SMALL LETTER LAMDA} ")
                    want_G_T = credit_of_tokens(group.tokens, turn_G_T, name, float(lam) if lam else None)
                    for got, want, ids in zip(
                        shown_by(page, setting, transform), want_G_T, group.tokens.turn_ids_G_T, strict=True
                    ):
                        assert np.abs(got - want[ids >= 0].numpy()).max() < 3e-6
    own = [one["name"] for one in page["transforms"] if one["own"]]
    assert own == [
        transform_mode if transform_mode == "none" else "gtpo_sepa_hicra, \N{GREEK SMALL LETTER LAMDA} 0.50"
    ]


def test_as_the_run_was_trained_is_what_was_stored(tmp_path, all_settings):
    advantages_B_T, _, turns, *_ = write_step(
        tmp_path, transform_mode="gtpo_sepa_hicra", adv_rescale_alpha=0.45
    )
    page = group_about(lens(tmp_path, 3, SCALES), "Who?")
    for row, stored in enumerate(page["given"]["tokens"]):
        written = turns.turn_ids_B_T[row] >= 0
        assert (
            np.frombuffer(base64.b64decode(stored), "<f4").tolist()
            == advantages_B_T[row][written].float().tolist()
        )
    assert page["alphas"] == [0.0, 0.3, 0.45, 1.0] and page["own"]["alpha"] == 2
    assert page["check"].startswith(
        "Made again with the run's own settings, every token's credit is the stored one"
    )


def test_a_run_that_cannot_be_made_again_says_so(tmp_path):
    write_step(tmp_path)
    group = group_of(tmp_path)
    group.tokens.advantage_G_T[0, 0] += 0.01
    assert check(group).startswith("Warning: made again") and "up to 0.01" in check(group)
    group.turns.pipeline["mode"] = "mine.own_mode"
    assert "cannot be made again: mine.own_mode is an operator of yours" in check(group)
    modes = settings_of(group)["modes"]
    assert modes[0]["name"] == "mine.own_mode" and modes[0]["reason"] and not modes[0]["credit"]


def test_reasons_stand_beside_what_is_not_offered(tmp_path):
    write_step(tmp_path)
    (page, *_) = lens(tmp_path, 3, SCALES).groups
    reasons = {mode["name"]: mode["reason"] for mode in page["modes"]}
    assert reasons["turn_gae"] == "it needs values, which this run did not record"
    assert reasons["gigpo"] == "it needs anchors, which this run did not record" and reasons["joint"] == ""
    assert not any(one["reason"] for one in page["transforms"])  # lambda 1 stands in where a run has no SEPA


def test_groups_are_the_telling_ones_and_bounded(tmp_path, monkeypatch):
    for number in range(1, 5):
        write_step(tmp_path, number)
    found = lens(tmp_path, 4, SCALES)
    assert [(one["question"], one["step"]) for one in found.groups] == [
        ("Where?", step) for step in (4, 3, 2, 1)
    ]
    assert len(found.groups) == GROUPS and [one["step"] for one in lens(tmp_path, 2, SCALES).groups][:2] == [
        2,
        1,
    ]
    monkeypatch.setattr(lens_module, "TOKENS_IN_ALL", 10)
    assert len(lens(tmp_path, 4, SCALES).groups) == 1
    for module in (lens_module, lens_settings):
        monkeypatch.setattr(module, "ROLLOUTS", 2)
        monkeypatch.setattr(module, "TOKENS_A_ROLLOUT", 5)
    (page,) = lens(tmp_path, 4, SCALES).groups
    assert page["notes"] == ["1 of 3 rollouts are not shown."]
    assert [len(row["text"]) for row in page["rollouts"]] == [5, 5] and page["rollouts"][0]["more"] > 0
    assert all(len(base64.b64decode(row)) == 20 for row in page["given"]["tokens"])


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


def test_tables_that_do_not_fit_together_are_named(run_dir):
    write_step(run_dir, 3)
    small = run_dir / "small"
    write_step(small, 3, rows=ROWS[:1], gains=GAINS[:1], outcomes=[1.0], groups=["p"])
    table_path(small, TURNS, 3).replace(table_path(run_dir, TURNS, 3))
    found = lens(run_dir, 3, SCALES)
    assert "The tables of step 3 do not fit together" in found.problems[0] and not found.groups


@pytest.mark.parametrize(
    "change", [{"shared": {"gamma": float("nan")}}, {"shared": []}, {"gtpo_beta": "x"}, {"signals": 3}]
)
def test_settings_that_cannot_be_cost_no_page(run_dir, change):
    write_step(run_dir, 3)
    for kind in (TURNS, ROLLOUTS):
        table = read_table(table_path(run_dir, kind, 3))
        write_table(run_dir, kind, 3, table.columns, table.pipeline | change)
    text = Page(report(run_dir)).text
    assert "The tables of step 3 do not fit together" in text and "First and last values" in text


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
    rows = [
        rollout("call <b>", ATTACK.replace("\ud800", ""), "done", prompt=ATTACK.replace("\ud800", "")),
        *ROWS[1:],
    ]
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
