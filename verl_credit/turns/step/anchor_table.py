"""The state before every turn as a number (`algorithm.turn_anchor`), for turn modes that compare turns of equal states."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from hashlib import blake2b
from typing import Any

from verl_credit.config.keys import AUTO
from verl_credit.config.settings import CreditSettings
from verl_credit.credit.plugins import load
from verl_credit.credit.turn.anchors import exact_anchors
from verl_credit.errors import IntegrityError
from verl_credit.lazy import torch
from verl_credit.turns.rollout.book import TurnBatch
from verl_credit.turns.step.signals.signal import StepRows, blamed, listed

ANCHORS = (AUTO, "observation", "state", "prefix")
ANCHOR_KEY = "algorithm.turn_anchor"


def anchor_table(settings: CreditSettings, rows: StepRows) -> torch.Tensor:
    """anchor_B_K1: equal ids are equal states of a prompt, -1 is none.

    ``turn_anchor`` observation: the state is the last observation (every rollout's first turn starts from the prompt).
    state: the name of the state in the agent loop's record. auto: the name where the record has names, else the observation.
    prefix: the state is all tokens before the turn, the prompt's among them; in a rollout of several outputs those of the
    turn's own output. Otherwise it is the path of
    `f(trajectory) -> a state per turn`.
    """
    turns, algorithm = rows.turns, settings.algorithm
    states: list[list[Any]] = [[] for _ in turns.records]
    own = None if algorithm.turn_anchor in ANCHORS else load(algorithm.turn_anchor, ANCHOR_KEY)
    prefixes = _prefixes(turns) if algorithm.turn_anchor == "prefix" else []
    observed = observations(rows) if algorithm.turn_anchor in (AUTO, "observation") else []
    for row in rows.turns.valid_rows:
        n_turns = int(turns.n_turns_B[row])
        if own is not None:
            states[row] = _own_states(own, algorithm.turn_anchor, rows, row, n_turns)
        elif algorithm.turn_anchor == "prefix":
            states[row] = prefixes[row]
        elif algorithm.turn_anchor != "observation" and (names := turns.records[row]["states"]):
            expected = f"a name for each of its {n_turns} turns, None where there is none"
            states[row] = listed(
                names[:n_turns], n_turns, "the agent loop's record has states", f" for row {row}", expected
            )
        elif algorithm.turn_anchor == "state":
            use = "the agent loop's record names no states; set it to observation, or see that the environment names them"
            raise IntegrityError(f"{ANCHOR_KEY}=state, row {row}: {use}")
        else:
            states[row] = ["", *observed[row]][:n_turns]
    groups, columns = rows.group_B.tolist(), rows.gain_B_K.shape[1] + 1
    try:
        return exact_anchors(states, groups, columns=columns)
    except (TypeError, ValueError) as error:
        raise IntegrityError(f"{ANCHOR_KEY}={algorithm.turn_anchor}: {error}") from error


def _prefixes(turns: TurnBatch) -> list[list[bytes]]:
    """A digest per turn of the prompt and of what stands before it in its output."""
    outputs, sessions = turns.outputs or turns, turns.sessions
    states: list[list[bytes]] = [[b""] * n for n in turns.n_turns_B.tolist()]
    for row, prompt in enumerate(outputs.prompt_ids):
        rollout, n_turns = row, int(outputs.n_turns_B[row])
        numbers = list(range(n_turns))
        if sessions is not None:
            rollout, numbers = int(sessions.session_B[row]), sessions.turn_B_K1[row].tolist()
        turn_ids, before = outputs.turn_ids_B_T[row].tolist(), 0
        digest = blake2b(array("q", prompt), digest_size=16)
        for turn, start in enumerate(map(turn_ids.index, range(n_turns))):
            digest.update(array("q", outputs.response_ids[row][before:start]))
            states[rollout][numbers[turn]] = digest.digest()
            before = start
    return states


def observations(rows: StepRows) -> list[list[str]]:
    """The tools' texts, per row and tool turn; an empty list for an invalid row."""
    texts: list[list[str]] = [[] for _ in rows.turns.records]
    for row in rows.turns.valid_rows:
        texts[row] = [turn.observation for turn in rows.trajectory(row).tool_turns]
    return texts


def _own_states(own: Callable, name: str, rows: StepRows, row: int, n_turns: int) -> list:
    with blamed(f"{ANCHOR_KEY}={name} raised for row {row}"):
        states = own(rows.trajectory(row))
    expected = f"a state for each of its {n_turns} turns, None where there is none"
    return listed(states, n_turns, f"{ANCHOR_KEY}={name} returned", f" for row {row}", expected)
