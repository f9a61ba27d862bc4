"""g2po: numbers of released code (golden/turn_methods_2026.json), and worked ones."""

import json
from pathlib import Path

import pytest
import torch

from kit.modes import batch
from kit.turn_lists import close, turns
from verl_credit.credit import exact_anchors, g2po, grpo

CASES = json.loads((Path(__file__).parents[1] / "golden" / "turn_methods_2026.json").read_text())["cases"]
EACH = [pytest.param(case, id=case["name"]) for case in CASES if case["method"] == "g2po"]


@pytest.mark.parametrize("case", EACH)
def test_released_numbers(case):
    rows = case["trajectories"]
    group = [sorted({t["prompt"] for t in rows}).index(t["prompt"]) for t in rows]
    for expected in case["expected"]:
        options = {name: value for name, value in expected.items() if name != "released"}
        lengths = [len(row) for row in expected["released"]]
        given, more = batch([[0.0] * (n - 1) for n in lengths], [t["outcome"] for t in rows], group)
        anchors = exact_anchors([t["anchors"] for t in rows], group)
        credit = g2po(*given, **more, anchor_B_K1=anchors, parity="released", **options)
        assert turns(credit, lengths) == close(expected["released"], 1e-4), options


def test_g2po_worked():
    """Outcomes 1 and 0 by the states 0, 1 and 0, 2, gamma 1/2: V_0 = 1/8, V_1 = 1/2, V_2 = 0.

    From state 0 to V 1/2 and 0, whose mean is 1/4. Gains 3/8 and -1/8, then 1/2 and 0: their mean is 3/16.
    """
    given, more = batch([[None], [None]], [1.0, 0.0])
    anchors = torch.tensor([[0, 1], [0, 2]])
    credit = g2po(*given, **more, anchor_B_K1=anchors, gamma=0.5)
    expected = (0.5 + 0.25 + 3 / 16, 0.5 + 5 / 16), (-0.5 - 0.25 - 5 / 16, -0.5 - 3 / 16)
    assert turns(credit, (2, 2)) == close(expected)
    without = g2po(*given, **more, anchor_B_K1=anchors, step_weight=0.0)
    plain = grpo(given[0], given[-1], norm_by_std=False)
    assert torch.equal(without.advantage_B_K1, plain[:, None].expand(2, 2))
