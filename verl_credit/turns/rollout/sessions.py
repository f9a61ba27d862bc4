"""Rollouts that return several outputs (context resets, sub-agents): the rows of a session are joined to one rollout.

verl's key of a row is PROMPT_SESSION_OUTPUT. Outputs of one chain follow each other in the order of their numbers. A
sub-agent is a chain with a parent, ``{"chain": 1, "parent": [0, 2]}``: its turns stand after turn 2 of chain 0, whose later
turns go on after them. The prompt of an output that is not the first is an observation of the turn before it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from verl_credit.credit.turn.session_map import Sessions
from verl_credit.lazy import torch
from verl_credit.names import LINK
from verl_credit.turns.rollout.book import TurnBatch

Link = tuple[int, tuple[int, int] | None]
"""(number of the chain, (chain, turn) of its parent)"""
Piece = tuple[int, int, int]
"""(row, first token, end) of tokens that follow each other in a session"""
COUNTS = ("n_searches", "n_retries", "bad_calls", "n_other_calls", "other_errors")


def session_of(key: str) -> str:
    return key.rpartition("_")[0]


def sessions_of(keys: Sequence[str]) -> list[list[int]]:
    """The places of each session's outputs among verl's keys, in the order of the outputs' numbers."""
    places: dict[str, list[int]] = defaultdict(list)
    for place, key in enumerate(keys):
        places[session_of(key)].append(place)
    return [sorted(rows, key=lambda row: int(keys[row].rpartition("_")[2])) for rows in places.values()]


def link_of(extra_fields: Mapping, row: int) -> Link:
    """The chain of an output. Raises ValueError for an entry that is none."""
    given = extra_fields.get(LINK)
    if given is None:
        return 0, None
    try:
        chain, parent = given["chain"], given.get("parent")
        parent = None if parent is None else (parent[0], parent[1])
        numbers = [chain, *(parent or ())]
        if all(type(one) is int and one >= 0 for one in numbers) and (parent is None) == (chain == 0):
            return chain, parent
    except (TypeError, KeyError, IndexError, AttributeError):
        pass
    expected = '{"chain": 0} for the main chain, {"chain": 1, "parent": [CHAIN, TURN]} for a sub-agent'
    raise ValueError(f"row {row}: extra_fields[{LINK!r}]={given!r:.80}; expected {expected}")


def joined(turns: TurnBatch) -> TurnBatch:
    """The batch with one row per session, and the map to its rows (``sessions``). The same batch where each rollout has one
    output.

    Turns are numbered over the session. The outcome, the reward function's values, the final text and the stop reason are
    those of the last output. A session is valid if all of its outputs are.
    """
    outputs_S = sessions_of(turns.keys)
    if len(outputs_S) == len(turns.keys) and not any(chain for chain, _ in turns.links):
        return turns
    ends_B = [_turn_ends(turns, row) for row in range(len(turns.keys))]
    token_B_T = torch.full(turns.turn_ids_B_T.shape, -1)
    turn_B_K1 = torch.full((len(turns.keys), max(1, *map(len, ends_B))), -1)
    session_B = torch.zeros(len(turns.keys), dtype=torch.long)
    responses: list[list[int]] = []
    for session, rows in enumerate(outputs_S):
        session_B[rows] = session
        ids: list[int] = []
        number = 0
        for place, (row, begin, end) in enumerate(_pieces(turns, rows, ends_B)):
            if place and not begin:
                ids += turns.prompt_ids[row]
            token_B_T[row, begin:end] = torch.arange(len(ids), len(ids) + end - begin)
            ids += turns.response_ids[row][begin:end]
            for turn, written in enumerate(ends_B[row]):
                if begin < written <= end:
                    turn_B_K1[row, turn], number = number, number + 1
        responses.append(ids)
    last_S = torch.tensor([rows[-1] for rows in outputs_S])
    sessions = Sessions(session_B, last_S, token_B_T, turn_B_K1, max(map(len, responses)))
    ids_B_T = turns.turn_ids_B_T
    ids_B_T = torch.where(ids_B_T >= 0, turn_B_K1.gather(1, ids_B_T.clamp(min=0)), -1)
    numbers_B, last = turn_B_K1.tolist(), last_S.tolist()
    n_turns = [sum(len(ends_B[row]) for row in rows) for rows in outputs_S]
    places = list(zip(outputs_S, n_turns, strict=True))
    return replace(
        turns,
        prompt_ids=[turns.prompt_ids[next(_pieces(turns, rows, ends_B))[0]] for rows in outputs_S],
        response_ids=responses,
        turn_ids_B_T=sessions.join(ids_B_T, -1),
        response_mask_B_T=sessions.join(turns.response_mask_B_T),
        records=[_record([(turns.records[row], numbers_B[row]) for row in rows], n) for rows, n in places],
        scores=[turns.scores[row] for row in last],
        ground_truths=[turns.ground_truths[row] for row in last],
        extra_infos=[turns.extra_infos[row] for row in last],
        columns=[turns.columns[row] for row in last],
        is_padding=[turns.is_padding[row] for row in last],
        row_valid_B=torch.stack([turns.row_valid_B[rows].all() for rows in outputs_S]),
        n_turns_B=torch.tensor(n_turns),
        turn_rewards=[
            _of_turns([(turns.turn_rewards[row], numbers_B[row]) for row in rows], n) for rows, n in places
        ],
        keys=[turns.keys[row] for row in last],
        sessions=sessions,
        outputs=turns,
    )


def _turn_ends(turns: TurnBatch, row: int) -> list[int]:
    """The end of each turn's own tokens."""
    ids_T = turns.turn_ids_B_T[row]
    return [int((ids_T == turn).nonzero()[-1]) + 1 for turn in range(int(turns.n_turns_B[row]))]


def _pieces(turns: TurnBatch, rows: list[int], ends_B: list[list[int]]) -> Iterator[Piece]:
    """The pieces of a session in the order of time. After a fault, a chain without its parent's turn is the last.

    Raises ValueError for two parents of a chain; in a valid session also for a sub-agent without its parent's turn, and
    where the last output is not the main chain's.
    """

    links = turns.links or [(0, None)] * len(turns.keys)

    def refused(row: int, expected: str) -> ValueError:
        chain, parent = links[row]
        link = {"chain": chain} | ({"parent": list(parent)} if parent else {})
        return ValueError(f"row {row}: extra_fields[{LINK!r}]={link}; expected {expected}")

    chains: dict[int, list[int]] = defaultdict(list)
    children: dict[tuple[int, int], list[int]] = defaultdict(list)
    for row in rows:
        chain, parent = links[row]
        if before := chains[chain]:
            if parent != (first := links[before[0]][1]):
                raise refused(
                    row, f"the parent that row {before[0]} names for chain {chain}: {list(first or ())}"
                )
        elif parent:
            children[parent].append(chain)
        chains[chain].append(row)

    def of_chain(chain: int) -> Iterator[Piece]:
        number = 0
        for row in chains.pop(chain, ()):
            begin = 0
            for end in ends_B[row]:
                for child in children.pop((chain, number), ()):
                    yield row, begin, end
                    yield from of_chain(child)
                    begin = end
                number += 1
            yield row, begin, len(turns.response_ids[row])

    yield from of_chain(0)
    valid = bool(turns.row_valid_B[rows].all())
    for chain, left in list(chains.items()):
        if left and valid:
            raise refused(left[0], "a turn of a chain of the same rollout, which has a chain 0, as parent")
        yield from of_chain(chain)
    if valid and links[rows[-1]][0]:
        raise refused(rows[-1], "chain 0 for the last output of a rollout, which has the outcome")


def _of_turns(of_rows: list[tuple[list, list[int]]], n_turns: int) -> list:
    """The entries of the session's tool turns, from (an entry per turn, the turns' numbers in the session) of its rows."""
    found: list = [None] * n_turns
    for values, numbers in of_rows:
        for value, number in zip(values, numbers, strict=False):
            if number >= 0:
                found[number] = value
    return found[:-1]


def _record(of_rows: list[tuple[dict, list[int]]], n_turns: int) -> dict:
    """The session's record from (record, the turns' numbers in the session) of its outputs, the last of which says how it
    ended, unless one had a fault."""
    records = [record for record, _ in of_rows]
    faulty = next((record for record in records if record["tool_fault"]), None)
    found = records[-1] | {name: sum(record[name] for record in records) for name in COUNTS}
    if faulty is not None:
        found |= {name: faulty[name] for name in ("tool_fault", "fault_detail", "stop_reason")}
    for name in ("calls", "searches"):
        found[name] = [
            one | {"turn": numbers[one["turn"]]}
            for record, numbers in of_rows
            for one in record[name]
            if one["turn"] < len(numbers)
        ]
    if any(record["states"] for record in records):
        found["states"] = _of_turns([(record["states"], numbers) for record, numbers in of_rows], n_turns + 1)
    names = {name for record in records for name in record["signals"]}
    found["signals"] = {
        name: _of_turns([(record["signals"].get(name, []), numbers) for record, numbers in of_rows], n_turns)
        for name in names
    }
    return found
