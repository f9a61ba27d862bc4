"""One measurement on lakes: rollouts of a policy, values by dynamic programming and by continuations, and credit beside A*.

Where the context is the state, A* is of dynamic programming and has no noise. Where it is the history, A* is of
continuations, and what is made of values (`turn_gae`, Monte Carlo) has their first half and is compared with the second.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from lakes.credit import grid_credits, grid_tables, with_values
from lakes.dynamic import ExactValue, state_values
from lakes.integrity import Agreement as ValueAgreement
from lakes.integrity import compare
from lakes.score import by_second_half, score_moves, states_to_value
from lakes.world import GridWorld, roll
from verl_credit.study.fidelity.agreements import Agreement, Agreements, Measure
from verl_credit.study.fidelity.credits import Credit, controls, per_turn
from verl_credit.study.fidelity.values import ScoredTurn, ZScore, martingale, part_of, values_of
from verl_credit.worlds.rollouts.protocol import State
from verl_credit.worlds.rollouts.rollout import Start, Trajectory
from verl_credit.worlds.rollouts.sampler import Decoder, TurnSampler, digest


@dataclass(frozen=True)
class Result:
    groups: list[list[Trajectory]]
    turns: list[ScoredTurn]
    luck: list[float]
    """Of each turn: what the ice did."""
    dynamic: ValueAgreement
    """Continuations against dynamic programming; in histories, that of a policy that forgets."""
    credits: list[Credit]
    agreements: list[Agreement | None]
    reliability: Measure
    sure_pairs: tuple[int, int]
    integrity: list[ZScore]
    contexts: int


def measure(
    world: GridWorld,
    sampler: TurnSampler,
    decoder: Decoder,
    *,
    repeats: int,
    rollouts: int,
    continuations: int,
    seed: int,
    every: int = 1,
    path: Path | None = None,
    say: Callable[[int, int], None] = lambda done, of: None,
) -> Result:
    """``rollouts`` of every ``every``-th start make a prompt, ``repeats`` times."""
    places = world.starts()[::every]
    starts = [Start(at, rollouts, seed, f"rollout {n}") for n in range(repeats) for at in places]
    roll_on = partial(roll, sampler, world)
    groups = roll_on(starts)
    states = states_to_value(world, groups)
    by_continuations = values_of(
        states, roll_on, continuations=continuations, seed=seed, path=path, prompts_at_once=1, say=say
    )
    exact = of_states(world, states, state_values(world, decoder))
    known = world.context == "state"
    values = exact if known else by_continuations
    turns, luck = score_moves(world, groups, values)
    tables = grid_tables(groups)
    credits = grid_credits(tables, groups)
    if known:
        credits += with_values(tables, groups, exact, "exact V")
    else:
        half = part_of(by_continuations, slice(continuations // 2))
        credits += with_values(tables, groups, half, f"V by {continuations // 2}", held_out=True)
        forgets, _ = score_moves(world, groups, exact)
        credits.append(
            Credit("A* by the state alone", per_turn(groups, [t.a_star for t in forgets]), kind="control")
        )
    made = controls(tables, groups, by_continuations, [{}] * len(world.lakes), seed)
    credits += [replace(credit, held_out=credit.held_out and not known) for credit in made]
    agreements = Agreements(turns)
    second = (
        agreements
        if known
        else Agreements(by_second_half(turns, world, groups, by_continuations), one_half=True)
    )
    return Result(
        groups,
        turns,
        luck,
        compare(by_continuations, exact),
        credits,
        [_agreement(credit, turns, second if credit.held_out else agreements) for credit in credits],
        agreements.reliability,
        agreements.sure,
        martingale(turns),
        len(states),
    )


def of_states(
    world: GridWorld, states: Sequence[State], exact: Mapping[str, ExactValue]
) -> dict[str, ExactValue]:
    """By the digest of each context, the value of an episode that begins where it stands."""
    found = {}
    for state in states:
        name = digest(state.ids)
        found[name] = replace(
            exact[digest(world.start(state.question, state.cell, state.turn).ids)], context=name
        )
    return found


def _agreement(credit: Credit, turns: list[ScoredTurn], agreements: Agreements) -> Agreement | None:
    if credit.advantages is None:
        return None
    return agreements.of([credit.advantages[t.prompt][t.trajectory][t.turn] for t in turns])
