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
from verl_credit.turns.step.signals.signal import StepRows, blamed, listed

ANCHORS = (AUTO, "observation", "state", "prefix")
ANCHOR_KEY = "algorithm.turn_anchor"


def anchor_table(settings: CreditSettings, rows: StepRows) -> torch.Tensor:
    """anchor_B_K1: equal ids are equal states of a prompt, -1 is none.

    ``turn_anchor`` observation: the state is the last observation (every rollout's first turn starts from the prompt).
    state: the name of the state in the agent loop's record. auto: the name where the record has names, else the observation.
    prefix: the state is all tokens before the turn, the prompt's among them. Otherwise it is the path of
    `f(trajectory) -> a state per turn`.
    """
    turns, algorithm = rows.turns, settings.algorithm
    states: list[list[Any]] = [[] for _ in turns.records]
    own = None if algorithm.turn_anchor in ANCHORS else load(algorithm.turn_anchor, ANCHOR_KEY)
    observed = observations(rows) if algorithm.turn_anchor in (AUTO, "observation") else []
    for row in rows.turns.valid_rows:
        n_turns = int(turns.n_turns_B[row])
        if own is not None:
            states[row] = _own_states(own, algorithm.turn_anchor, rows, row, n_turns)
        elif algorithm.turn_anchor == "prefix":
            turn_ids, before = turns.turn_ids_B_T[row].tolist(), 0
            digest = blake2b(array("q", turns.prompt_ids[row]), digest_size=16)
            for start in map(turn_ids.index, range(n_turns)):
                digest.update(array("q", turns.response_ids[row][before:start]))
                states[row].append(digest.digest())
                before = start
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
