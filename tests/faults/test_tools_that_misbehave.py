"""A search server and a judge that misbehave over HTTP: rows are masked, rewards are lost, and a 0 never stands for either.

Whole trajectories of the search agent, its own client, a real server on loopback; the policy alone is scripted.
"""

import dataclasses
import math
import random
from collections import Counter
from functools import cache

import httpx
import pytest
import torch

from kit import trajectories
from kit.byte_world import make_tokenizer
from kit.recipes import OWN, load_config
from kit.scripted_server import hits, scripted_server
from kit.settings import settings
from kit.trajectories import record, run
from kit.turn_rows import Row, turn_batch
from verl_credit.errors import IntegrityError
from verl_credit.host.rollout.search_agent import SearchTool
from verl_credit.turns.rollout.book import RowRecord
from verl_credit.turns.rollout.search.client import client_for
from verl_credit.turns.step.signals import own
from verl_credit.turns.step.signals.built_in import find_signal
from verl_credit.turns.step.signals.signal import StepRows, step_rewards
from verl_credit.turns.step.step_checks import check_tool_faults
from verl_credit.turns.step.step_metrics import row_metrics
from verl_credit.worlds.lab.protocol import answer_turn, search_turn

INDEX, JUDGE = "a" * 64, "test_tools_that_misbehave.judge"
GOOD = {"result": [hits(1.0, 0.9, 0.8)]}
LONG = {"result": [[{"document": {"id": "d0", "contents": "T\n" + "long " * 200_000}, "score": 1.0}]]}
PAGES = {
    "good": (200, GOOD, {"X-Index-Fingerprint": INDEX}),
    "1 MB": (200, LONG, {"X-Index-Fingerprint": INDEX}),
}
BUSY = {"busy": (503, b"", {"Retry-After": "0"}), "reset": "close"}
FAULTS = {
    "500": ((500, b"out of memory"), "http_5xx"),
    "no JSON": ((200, b"<html>"), "bad_answer"),
    "no pages": ((200, {"result": []}, {"X-Index-Fingerprint": INDEX}), "bad_answer"),
    "another index": ((200, GOOD, {"X-Index-Fingerprint": "b" * 64}), "bad_answer"),
    "no index": ((200, GOOD), "bad_answer"),
}
tokenizer, composed = cache(make_tokenizer), cache(load_config)


@pytest.fixture(autouse=True)
def once(monkeypatch):
    """Recipes are composed once: no loop changes them."""
    monkeypatch.setattr(trajectories, "load_config", lambda name, overrides: composed(name, tuple(overrides)))


@pytest.fixture
def server():
    with scripted_server() as scripted:
        yield scripted


def tool_of(server, **changes) -> SearchTool:
    """The search tool of a run that searches this server and requires its index."""
    told = {"url": server.url, "timeout_s": 30, "index_fingerprint": INDEX, **changes}
    chosen = load_config(
        "search_cpu", [*OWN, *(f"search.{name}={value}" for name, value in told.items())]
    ).search
    tool = SearchTool(chosen)
    tool.client = client_for(chosen)
    return tool


def rollout(tool, *overrides):
    """One search and an answer, with the tool's own client."""

    async def lookup(query):
        try:
            return await tool.lookup(query)
        finally:
            await tool.client.aclose()  # every trajectory of these tests has a loop of its own

    gold = {"reward_model": {"ground_truth": {"target": ["c"]}}}
    return run(tokenizer(), [search_turn("a"), answer_turn("c")], *overrides, lookup=lookup, **gold)[0]


def batch_of(outputs, outcomes):
    """The step's rows, as the trainer gets them of these trajectories."""
    keys = {field.name for field in dataclasses.fields(RowRecord)}
    rows = []
    for output, outcome in zip(outputs, outcomes, strict=True):
        told = {name: value for name, value in record(output).items() if name in keys}
        parts = () if told.get("tool_fault") else ("ask", "page", "done")
        rows.append(Row(parts, scores={"em": outcome}, record=RowRecord(**told)))
    return turn_batch(rows, tokenizer())


def masked(output) -> bool:
    return not any(output.response_mask) and set(output.turn_ids) == {-1}


@pytest.mark.slow
def test_a_server_with_every_fault_loses_those_rows_and_no_other(server):
    """40 rows; what happens to each search is drawn from a seed: 5 % errors 500, and some of every other kind."""
    draw, tool = random.Random(7), tool_of(server)
    names = ["good", "500", "no JSON", "no pages", "another index", "no index", "1 MB", "busy", "reset"]
    drawn = names + draw.choices(names, weights=[60, 5, 3, 3, 3, 3, 8, 8, 7], k=31)
    draw.shuffle(drawn)
    outputs = []
    for name in drawn:
        server.script = (
            [BUSY[name], PAGES["good"]]
            if name in BUSY
            else [(PAGES | {n: s for n, (s, _) in FAULTS.items()})[name]]
        )
        outputs.append(rollout(tool))
        assert not server.script  # each was sent once, but after "busy" and "reset" again
    for name, output in zip(drawn, outputs, strict=True):
        assert record(output)["tool_fault"] == (FAULTS[name][1] if name in FAULTS else ""), name
        assert masked(output) == (name in FAULTS) and record(output)["n_retries"] == (name in BUSY)
        assert len(output.response_ids) < 1500  # of 1 MB the policy reads search.max_page_chars
    lost = Counter(FAULTS[name][1] for name in drawn if name in FAULTS)
    metrics = row_metrics(batch_of(outputs, [1.0] * 40))
    assert metrics["credit/tool/fault_http_5xx"] == drawn.count("500") == lost["http_5xx"]
    assert metrics["credit/tool/fault_bad_answer"] == lost["bad_answer"]
    assert metrics["credit/tool/fault_rows"] == lost.total() == 40 - metrics["credit/rows_trained"]
    assert metrics["credit/stop/tool_fault"] == lost.total() / 40
    assert metrics["credit/tool/retries"] == sum(name in BUSY for name in drawn)
    records = [record(output) for output in outputs]
    check_tool_faults(records, 0.25, server.url)
    with pytest.raises(
        IntegrityError, match=f"{lost.total()} of 40 rows were masked out after faults of the search server"
    ):
        check_tool_faults(records, 0.1, server.url)


# --- a judge -----------------------------------------------------------------------------------


async def judge(trajectory, *, url):
    """As docs/turn-signals.md has it."""
    async with httpx.AsyncClient(trust_env=False, timeout=None, verify=False) as client:
        answer = await client.post(
            url, json={"topk": 1, "turns": [turn.text for turn in trajectory.tool_turns]}
        )
        return answer.raise_for_status().json()["rewards"]


def judged(server, steps, tool, *overrides):
    """A trajectory for every step of the judge's script."""
    told = (f"algorithm.turn_signal={JUDGE}", f"+algorithm.turn_signal_params.url={server.url}/judge")
    told += ("algorithm.turn_judge.retries=0", *overrides)
    outputs = []
    for step in steps:
        server.script = [step]
        outputs.append(rollout(tool, *told))
    return outputs


@pytest.mark.slow
def test_a_judge_that_hangs_fails_or_talks_nonsense_loses_its_rewards_and_none_is_0(server, monkeypatch):
    monkeypatch.setattr(own, "FAILURES", 99)  # every step of the script is asked for
    given = {
        "judged": (200, {"rewards": [0.5]}),
        "a 0": (200, {"rewards": [0.0]}),
        "none": (200, {"rewards": [None]}),
    }
    lost = {
        (500, b"x" * 1_000_000): "HTTPStatusError: Server error '500",
        (200, b"<html>"): "JSONDecodeError: ",
        (200, b"[" * 100_000): "RecursionError: ",
        (200, b'{"reward": [1.0]}'): "KeyError: 'rewards'",
        (200, b'{"rewards": [1.0, 2.0]}'): "gave 2 values for a trajectory",
        (200, b'{"rewards": ["high"]}'): "gave 'high' for a trajectory",
        (200, b'{"rewards": [1e999]}'): "gave inf for a trajectory",
        "close": "RemoteProtocolError: ",
        "hang": "no answer within 0.3 s",
    }
    with scripted_server() as pages:
        tool = tool_of(pages, index_fingerprint="null")
        outputs = judged(server, [*given.values(), *list(lost)[:-1]], tool)
        outputs += judged(server, ["hang"], tool, "algorithm.turn_judge.deadline_s=0.3")
    assert not any(record(output)["tool_fault"] for output in outputs)  # a judge masks no row
    turns = batch_of(outputs, [1.0] * len(outputs))
    signal = find_signal(JUDGE, {"url": server.url})
    empty = torch.zeros(len(outputs), 1, dtype=torch.float64)
    same = torch.zeros(len(outputs), dtype=torch.int64)
    rows = StepRows(turns, tokenizer().decode, torch.ones(len(outputs)), same, empty, empty.bool())
    reward, mask, metrics = step_rewards(
        {signal: 1.0}, settings(turn_signals={JUDGE: 1.0}), rows, scored=True, tolerated_share=0.9
    )
    shown = [
        ("lost" if math.isnan(value) else value) if has else None
        for (value,), (has,) in zip(reward, mask, strict=True)
    ]
    assert shown == [0.5, 0.0, None, *["lost"] * len(lost)]
    for output, reason in zip(outputs[3:], lost.values(), strict=True):
        assert reason in record(output)["signal_errors"][JUDGE]
        assert len(record(output)["signal_errors"][JUDGE]) <= 300
    counted = [metrics[f"credit/signal/{JUDGE}/{name}"] for name in ("turns", "without", "lost", "not_asked")]
    assert counted == [2 + len(lost), 1, len(lost), 0]
    assert metrics[f"credit/signal/{JUDGE}/mean"] == 0.25  # of 0.5 and 0: what was lost is in no mean
    with pytest.raises(IntegrityError, match=f"lost {len(lost)} of {2 + len(lost)} rewards"):
        step_rewards(
            {signal: 1.0}, settings(turn_signals={JUDGE: 1.0}), rows, scored=True, tolerated_share=0.25
        )
