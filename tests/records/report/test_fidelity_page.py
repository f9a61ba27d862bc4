"""The page of a fidelity measurement: every number of ``fidelity.json``, what is not defined, and what is not measured."""

import re

import pytest

from verl_credit.records.report.fidelity_page import fidelity_page

VALUE = {"value": 0.5, "low": -0.25, "high": 0.75, "n": 9}
NONE = {"value": None, "low": None, "high": None, "n": 9}


def credit(kind="mode", **measures):
    found = {name: VALUE for name in ("pearson", "same_turn", "pairs", "end_pairs")}
    return {"kind": kind, "held_out": False, **found, **measures}


def policy(step, **changes):
    return {
        "policy": "/runs/<a>/checkpoints",
        "step": step,
        "prompts": 8,
        "of_prompts": 8,
        "turns": 3,
        "contexts": 5,
        "sure_pairs": [4, 6],
        "reliability": VALUE,
        "credits": {
            "this run: my_module:<mode>": credit(
                "run", pearson={**VALUE, "value": 0.125, "low": None, "high": None}
            ),
            "none": credit(same_turn=NONE),
            "turn_gae": {"kind": "mode", "held_out": False, "reason": "it needs values"},
            "constant": credit("control", pearson=NONE, same_turn=NONE, pairs=NONE, end_pairs=NONE),
        },
        "gradients": {},
        "headroom": {},
        "integrity": [
            {"name": "turn 1", "mean": 0.01, "z": -3.5, "n": 3},
            {"name": "turn 2", "mean": 0.0, "z": None, "n": 1},
        ],
        **changes,
    }


SETTINGS = {"prompts": 8, "rollouts": 4, "continuations": 16, "split": "train", "seed": 0}


def page(*policies):
    text = fidelity_page({"settings": SETTINGS, "policies": list(policies)})
    return text, re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", text))


@pytest.mark.slow
def test_a_policy_has_its_table_its_pictures_and_its_checks(pictures):
    html, said = page(policy(3, prompts=4))
    assert "my_module:&lt;mode&gt; 0.12 0.50 [\N{MINUS SIGN}0.25, 0.75]" in said
    assert "constant undefined undefined undefined undefined" in said
    assert "turn_gae not measured: it needs values" in said
    assert "The first 4 of 8 prompts" in said and "4 + 6 sure pairs" in said
    assert "turn 1: z = \N{MINUS SIGN}3.50" in said and "turn 2: z" not in said
    assert html.count("data:image/svg+xml;base64,") == 1 and "<a>" not in html
    assert not re.search(r"<script|https?://|src=\"(?!data:)", html)
    assert "Correlation with A*" not in said.split("Step 3")[0]
