"""The report of a run: what it shows, what it survives, and that nothing in a trajectory can act on the page."""

import base64
import html
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("matplotlib")

from kit.report_page import Page, report, training, trajectory, turn, write_lines, write_trajectories
from verl_credit.records.report.page import RECENT_STEPS, choose
from verl_credit.records.report.run_data import Series, read_run, read_settings
from verl_credit.records.report.text import (
    MINUS,
    clean,
    dialogue,
    percent,
    plain,
    points,
    seconds_change,
    signed,
)
from verl_credit.records.report.write import write_report
from verl_credit.records.run.table_files import SAMPLES, tables_of

ATTACK = '<script>alert("1")</script><img src=x onerror=alert(2)>"\'&amp;\x00\ud800'


def test_first_and_last_values(run_dir):
    rows = [row[:] for row in Page(report(run_dir)).rows]
    assert ["Held-out questions", "Step 0", "Step 3", "Change"] in rows
    assert ["Exact match (EM), greedy", "37.5 %", "62.5 %", "+25.0 points"] in rows
    assert ["EM of well-formatted answers, sampled", "25.0 %", "50.0 %", "+25.0 points"] in rows
    assert ["EM of well-formatted answers, greedy", "not recorded"] in rows
    assert ["Training", "Step 1", "Step 3", "Change"] in rows
    assert ["Exact match (EM)", "25.0 %", "75.0 %", "+50.0 points"] in rows
    assert ["Turns cut at their token budget", "4.0 %", "12.0 %", "+8.0 points"] in rows
    assert ["Turns per trajectory", "2.75", "2.25", f"{MINUS}0.500"] in rows
    assert ["Information gain, mean", "+0.062", "+0.188", "+0.125"] in rows
    assert ["Clipped tokens", "1.2 %", "3.8 %", "+2.5 points"] in rows
    assert ["Time per step", "11.0 s", "13.0 s", "+2.0 s"] in rows


@pytest.mark.slow
def test_page_is_one_offline_accessible_document(run_dir, pictures):
    text = report(run_dir)
    page = Page(text)
    assert page.values("html", "lang") == ["en"]
    assert page.tags.isdisjoint({"script", "link", "iframe", "object"})
    addresses = [value for _, name, value in page.attributes if name in ("src", "href", "srcset", "action")]
    assert addresses and all(address.startswith("data:image/svg+xml;base64,") for address in addresses)
    assert "http://" not in text and "https://" not in text and "@import" not in text and "url(" not in text
    alts = page.values("img", "alt")
    assert len(alts) == len(addresses) == 6
    assert alts[0].startswith("Exact match") and "greedy: 37.5 % at step 0, 62.5 % at step 3" in alts[0]
    for address in addresses:
        assert b"<svg" in base64.b64decode(address.split(",", 1)[1])
    assert not list(run_dir.glob("*.partial"))


@pytest.mark.slow
def test_ten_megabytes_of_text_make_no_large_page(run_dir):
    """The file stays whole: what is left out of the page is counted."""
    huge = "x" * 10_000_000
    turns = [turn(huge, huge), turn("<answer>x</answer>", "", None)]
    write_trajectories(run_dir, [trajectory(turns=turns, question=huge, golds=[huge], stop_reason=huge)])
    (path,) = tables_of(run_dir, SAMPLES).values()
    before = path.read_bytes()
    text = report(run_dir)
    assert len(text) < 300_000 and text.count("9,980,000 more characters") >= 4
    assert path.read_bytes() == before


@pytest.mark.parametrize("character", ["\u202e", "\u2066", "\u200f", "\u2028", "\x85", "\ufeff"])
def test_characters_that_change_what_stands_beside_them_are_named(run_dir, character):
    write_trajectories(run_dir, [trajectory(turns=[turn(f"a{character}b"), turn("", "", None)])])
    text = report(run_dir)
    assert character not in text and f"a[U+{ord(character):04X}]b" in text


def test_no_gain_is_not_a_zero_gain(run_dir):
    turns = [turn(gain=None), turn(gain=0.0), turn("<answer>x</answer>", "", None)]
    write_trajectories(run_dir, [trajectory(turns=turns)])
    text = Page(report(run_dir)).text
    assert text.count("no gain") == 2
    assert "Information gain 0.000 no difference" in text


@pytest.mark.slow
def test_nothing_in_the_files_acts_on_the_page(run_dir, pictures):
    text = ATTACK.rstrip("\ud800")  # which no table holds
    turns = [turn(text, text), turn(text, "", None)]
    hostile = trajectory(question=text, golds=[text], stop_reason=text, turns=turns)
    write_trajectories(run_dir, [hostile])
    write_lines(run_dir / "events.jsonl", [{"time": 0, "kind": "banner", "text": ATTACK}])
    write_lines(run_dir / "validation.jsonl", [{"step": 0, f"val-core/{ATTACK}-greedy/em/mean@1": 0.5}])
    (run_dir / "config.yaml").write_text('seed: <script>alert("1")</script>\n')
    text = report(run_dir)
    page = Page(text)
    assert "<script" not in text and "\x00" not in text
    assert page.tags.isdisjoint({"script"})
    assert not [name for _, name, _ in page.attributes if name.startswith("on")]
    assert all(address.startswith("data:") for address in page.values("img", "src"))
    assert page.text.count('<script>alert("1")</script>') >= 7  # shown as text in every place


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.sampled_from([*"<>&;|/\"'#x3 \n\té", "think>", "<|im_end|>", "amp;", "span", "</"])).map(
        "".join
    )
)
def test_escaping_keeps_every_readable_character(text):
    shown = str(dialogue(f"<think>{text}</think>"))
    assert html.unescape(re.sub(r"</?span[^<>]*>", "", shown)) == f"<think>{text}</think>"
    assert "<" not in re.sub(r'<span class="mark">|</span>', "", shown)
    assert clean(text) == text
    assert clean("a\x00\x1b\x7f\ud800\n") == "a\u2400\u241b\u2421\ufffd\n"


def test_missing_or_empty_metrics_name_the_file(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"metrics\.jsonl does not exist"):
        write_report(tmp_path)
    (tmp_path / "project" / "run").mkdir(parents=True)
    (tmp_path / "project" / "run" / "metrics.jsonl").touch()
    with pytest.raises(FileNotFoundError, match=f"below it are {tmp_path}/project/run$"):
        write_report(tmp_path)
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "cred')
    with pytest.raises(ValueError, match=r"metrics\.jsonl holds no complete line"):
        write_report(tmp_path)
    (tmp_path / "metrics.jsonl").write_text('{"credit/outcome/em": 1}\n')
    with pytest.raises(ValueError, match=r"metrics\.jsonl.*step=None"):
        write_report(tmp_path)
    assert not (tmp_path / "report.html").exists()


def test_metrics_alone_make_a_report_that_says_what_is_missing(tmp_path):
    write_lines(tmp_path / "metrics.jsonl", [{"step": 5, "credit/outcome/em": 0.5}])
    page = Page(report(tmp_path))
    for words in (
        "validation.jsonl is missing",
        "no trajectories to show",
        "events.jsonl has no banner",
        "config.yaml is missing",
        "No data: critic/score/mean in metrics.jsonl",
        "No data: credit/gain/mean in metrics.jsonl",
    ):
        assert words in page.text, words
    assert ["Exact match (EM)", "50.0 %", "recorded once"] in page.rows
    assert ["Exact match (EM), greedy", "not recorded"] in page.rows


def test_held_out_series_by_source_and_mode(run_dir):
    row = {
        "step": 0,
        "val-core/a/b-greedy/em/mean@1": 0.1,
        "val-core/a/b-greedy/em/mean@4": 0.2,
        "val-core/nq-sampled/em/mean@1": 0.3,
        "val-core/nq-sampled/em/best@4/mean": 0.9,
        "val-aux/nq-sampled/format_ok/mean@1": 0.0,
    }
    write_lines(run_dir / "validation.jsonl", [row])
    held_out = read_run(run_dir).held_out()
    found = {(e.source, e.mode): (e.score.values, e.em_well_formatted.values) for e in held_out}
    assert found == {("a/b", "greedy"): ((0.2,), ()), ("nq", "sampled"): ((0.3,), ())}
    assert "Exact match (EM), sampled, nq" in Page(report(run_dir)).text


def test_a_step_written_twice_counts_as_last_written(run_dir):
    rows = [training(2), training(1), training(2) | {"critic/score/mean": 9.0}]
    write_lines(run_dir / "metrics.jsonl", rows)
    assert read_run(run_dir).series("critic/score/mean") == Series((1, 2), (0.2, 9.0))


@pytest.mark.slow
def test_same_run_same_bytes(run_dir, pictures):
    assert report(run_dir) == report(run_dir)


def test_solved_and_failed_are_both_chosen():
    rows = [trajectory(step=s, question=f"q{s}", n_turns=2 + s % 2) for s in range(30)]
    only_failure = trajectory(step=4, outcome=0.0, question="lost")
    chosen = choose([*rows, only_failure])
    assert len(chosen) == 3
    assert only_failure in chosen
    recent = [row for row in chosen if row is not only_failure]
    assert all(row["step"] >= 30 - RECENT_STEPS and len(row["turns"]) == 3 for row in recent)
    assert recent[0]["step"] == 29
    assert chosen[-1] is only_failure
    partly = [trajectory(step=29, outcome=0.6 + 0.1 * i, question=f"p{i}") for i in range(4)]
    lost = trajectory(step=0, outcome=0.0, question="p0")
    assert lost in choose([*partly, *rows, lost])


def test_numbers_are_rounded_with_their_sign():
    assert signed(-0.0004) == "0.000" and signed(-0.0006) == f"{MINUS}0.001"
    assert (plain(-0.001), percent(-0.0001), signed(-0.0001)) == ("0.00", "0.0 %", "0.000")
    assert points(-0.127) == f"{MINUS}12.7 points" and percent(0.5) == "50.0 %"
    assert seconds_change(0.19) == "+0.2 s" and seconds_change(-0.01) == "0.0 s"


def test_settings_are_read_by_place_not_by_name_alone(tmp_path):
    (tmp_path / "config.yaml").write_text(
        "critic:\n  optim:\n    lr: 9\nactor_rollout_ref:\n  actor:\n    optim:\n      betas:\n      - 0.9\n"
        "      lr: 0.001\n  rollout:\n    'n': 8\n  model:\n    path: '/models/a: b'\nseed: 1\nalgorithm:\n  gamma: 1.0\n"
    )
    assert read_settings(tmp_path / "config.yaml")[0] == {
        "seed": "1",
        "actor_rollout_ref.model.path": "/models/a: b",
        "algorithm.gamma": "1.0",
        "actor_rollout_ref.actor.optim.lr": "0.001",
        "actor_rollout_ref.rollout.n": "8",
    }
    (tmp_path / "config.yaml").write_text("seed: [1\n")
    assert read_settings(tmp_path / "config.yaml")[0] == {}
