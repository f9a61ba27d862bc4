"""Clusters of hidden states of a prompt: by a plain loop, at distance 0, and whatever the order of the batch."""

import math

import pytest
import torch

from verl_credit.credit.turn.anchors import exact_anchors
from verl_credit.credit.turn.near_anchors import near_anchors


def partition(table: torch.Tensor) -> list[list[int | None]]:
    """Ids renumbered in the order of their appearance."""
    number: dict[int, int] = {}
    return [[None if i < 0 else number.setdefault(i, len(number)) for i in row] for row in table.tolist()]


def drawn(seed: int, rows: int = 8, turns: int = 4):
    """Directions around three poles, so that some are near each other, and rows of different length."""
    random = torch.Generator().manual_seed(seed)
    pole_B_K1 = torch.randint(0, 3, (rows, turns), generator=random)
    state_B_K1_D = torch.nn.functional.one_hot(pole_B_K1, 6).double()
    state_B_K1_D += 0.25 * torch.randn(rows, turns, 6, generator=random).double()
    lengths_B = torch.randint(1, turns + 1, (rows,), generator=random)
    state_B_K1_D[torch.arange(turns) >= lengths_B[:, None]] = torch.nan
    return (
        state_B_K1_D,
        torch.randint(0, 2, (rows,), generator=random),
        torch.randperm(rows, generator=random).tolist(),
    )


def by_loops(states, groups, keys, distance):
    """One list of member lists for each prompt; cosine of the mean of the members' unit vectors, in Python's floats."""

    def unit(vector):
        length = math.sqrt(sum(x * x for x in vector))
        return [x / length for x in vector]

    found, clusters = [[None] * len(row) for row in states], {}
    for row in sorted(range(len(states)), key=lambda row: keys[row]):
        for k, state in enumerate(states[row]):
            if any(x != x for x in state):
                continue
            one, best = unit(state), None
            mine = clusters.setdefault(groups[row], [])
            for number, members in enumerate(mine):
                middle = unit([sum(column) / len(members) for column in zip(*members, strict=True)])
                far = 1 - sum(a * b for a, b in zip(one, middle, strict=True))
                if best is None or far < best[0]:
                    best = far, number
            if best is None or best[0] > distance:
                mine.append([])
                best = 0, len(mine) - 1
            mine[best[1]].append(one)
            found[row][k] = groups[row], best[1]
    number = {}
    return [[None if one is None else number.setdefault(one, len(number)) for one in row] for row in found]


@pytest.mark.parametrize("distance", [0.01, 0.05, 0.2, 0.6])
def test_clusters_are_those_of_a_plain_loop(distance):
    sizes = set()
    for seed in range(20):
        state_B_K1_D, group_B, key_B = drawn(seed)
        table = near_anchors(state_B_K1_D, group_B, distance=distance, row_key_B=key_B)
        assert partition(table) == by_loops(state_B_K1_D.tolist(), group_B.tolist(), key_B, distance)
        sizes.add(len(table[table >= 0].unique()))
    assert len(sizes) > 2


def test_at_distance_0_they_are_the_exact_states_of_each_prompt():
    """So a mode that reads anchors is the same with both, as GiGPO is BiPACE at 0."""
    random = torch.Generator().manual_seed(1)
    seen = [
        torch.randint(0, 3, (int(n),), generator=random).tolist()
        for n in torch.randint(1, 5, (30,), generator=random)
    ]
    groups = [row % 4 for row in range(30)]
    vector_S_D = torch.randn(3, 5, generator=random)
    state_B_K1_D = torch.full((30, 4, 5), torch.nan)
    for row, states in enumerate(seen):
        scale_K_1 = (
            torch.rand(len(states), 1, generator=random) + 0.5
        )  # the length of a vector does not count
        state_B_K1_D[row, : len(states)] = vector_S_D[states] * scale_K_1
    table = near_anchors(state_B_K1_D.double(), groups, distance=0.0, row_key_B=range(30))
    assert partition(table) == partition(exact_anchors(seen, groups))


def test_the_order_of_the_batch_does_not_matter():
    state_B_K1_D, group_B, key_B = drawn(3)
    order = [5, 2, 7, 0, 1, 6, 4, 3]
    usual = near_anchors(state_B_K1_D, group_B, distance=0.1, row_key_B=key_B)
    keys = [key_B[row] for row in order]
    shuffled = near_anchors(state_B_K1_D[order], group_B[order], distance=0.1, row_key_B=keys)
    assert torch.equal(shuffled, usual[order])


@pytest.mark.parametrize("distance", [-0.1, 1.0, float("nan"), True])
def test_a_distance_is_from_0_to_below_1(distance):
    with pytest.raises(ValueError, match="distance=.*expected a number at least 0 and below 1"):
        near_anchors(torch.zeros(1, 1, 2), [0], distance=distance, row_key_B=[0])
