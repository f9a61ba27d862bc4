"""Anchors by hidden states: states of one prompt whose vectors point nearly the same way are one state.

Source: BiPACE (2606.25556). The clusters serve every mode that reads anchors; BiPACE's advantage is the mode `bipace`.
Departures: the layer is `algorithm.turn_anchor_layer`, the last one unless it is set, where the paper takes one in the
middle; the vector is the mean over the state's tokens, where the paper names no pooling.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

from verl_credit.credit.operator import Range
from verl_credit.lazy import torch

ROUNDING = 1e-9
"""Cosines of equal vectors differ from 1 by less."""


def near_anchors(
    state_B_K1_D: torch.Tensor, group_B: Sequence[Hashable], *, distance: float, row_key_B: Sequence[Any]
) -> torch.Tensor:
    """Ids of clusters, int64 [rows, turns]; -1 where a vector is not finite.

    One pass over a prompt's states by row (in the order of ``row_key_B``, so that the batch's does not matter) and turn: a
    state joins the cluster with the nearest centroid if 1 - cosine <= ``distance``, and opens one otherwise. The centroid is
    the mean of the members' unit vectors. At distance 0 equal vectors alone are one state.
    """
    Range(0.0, 1.0).check("distance", distance)
    unit_B_K1_D = torch.nn.functional.normalize(state_B_K1_D.double(), dim=2)
    anchor_B_K1 = torch.full(state_B_K1_D.shape[:2], -1, dtype=torch.long)
    has_B_K1, sums, opened = unit_B_K1_D.isfinite().all(dim=2), {}, 0
    groups = group_B.tolist() if isinstance(group_B, torch.Tensor) else list(group_B)
    for row in sorted(range(len(groups)), key=lambda row: row_key_B[row]):
        ids, sum_C_D = sums.setdefault(groups[row], ([], unit_B_K1_D.new_empty(0, unit_B_K1_D.shape[2])))
        for k in has_B_K1[row].nonzero().flatten().tolist():
            unit_D = unit_B_K1_D[row, k]
            far_C = 1 - torch.nn.functional.normalize(sum_C_D, dim=1) @ unit_D
            place = int(far_C.argmin()) if ids else -1
            if place >= 0 and far_C[place] <= distance + ROUNDING:
                sum_C_D[place] += unit_D
            else:
                place, opened = len(ids), opened + 1
                ids.append(opened - 1)
                sum_C_D = torch.cat([sum_C_D, unit_D[None]])
            anchor_B_K1[row, k] = ids[place]
        sums[groups[row]] = ids, sum_C_D
    return anchor_B_K1
