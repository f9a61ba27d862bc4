"""A scripted policy that plays a whole trajectory against a search that finds anything, and the laws of its row."""

from __future__ import annotations

from functools import cache

from kit.byte_world import make_tokenizer
from kit.fuzz import ACCEPTED, REFUSED
from kit.trajectories import record, run
from verl_credit.names import TURN_IDS
from verl_credit.turns.rollout.book import STOP_REASONS
from verl_credit.turns.rollout.search.client import SearchFault

tokenizer = cache(make_tokenizer)


def play(script: list[str], found: list[str | None], overrides: tuple[str, ...], row: dict) -> str:
    """The trajectory, and its laws. ``found``: what each search gives, None a fault of the server.

    Refused: the policy wrote a wrong call."""
    answers = iter(found)

    async def lookup(query):
        query.encode()  # it has to be sent
        text = next(answers)
        if text is None:
            raise SearchFault("connect", "refused", 2)
        return text, ["7"], 1

    output, policy = run(tokenizer(), script, *overrides, lookup=lookup, **row)
    said = record(output)
    assert said["stop_reason"] in STOP_REASONS
    assert len(output.response_ids) == len(output.response_mask) == len(output.turn_ids)
    assert output.response_logprobs is None or len(output.response_logprobs) == len(output.response_ids)
    assert [turn >= 0 for turn in output.turn_ids] == [bool(mask) for mask in output.response_mask]
    turns = [turn for turn in output.turn_ids if turn >= 0]
    assert turns == sorted(turns) and set(turns) <= set(range(len(policy.requests)))
    assert all(0 <= search["turn"] < len(policy.requests) for search in said["searches"])
    assert len(said["searches"]) == said["n_searches"]
    assert bool(said["tool_fault"]) == (said["stop_reason"] == "tool_fault")
    assert not (said["tool_fault"] and turns)
    assert output.as_dict()[TURN_IDS].tolist() == output.turn_ids
    return REFUSED if said["bad_calls"] or said["stop_reason"] == "bad_call" else ACCEPTED
