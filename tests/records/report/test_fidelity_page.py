"""The page of a fidelity measurement: every number of ``fidelity.json``, what is not defined, and what is not measured."""

import re

from verl_credit.records.report.fidelity_page import fidelity_page, kind_of

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


def turn(number, kind, a_star, brought, before, value, gold):
    """A line of turns.jsonl."""
    found = {"turn": number, "kind": kind, "a_star": a_star, "brought": brought}
    return found | {"before": before, "value": value, "gold_probability": gold}


TURNS = [
    turn(0, "tool", 0.5, True, "a", 0.25, 0.5),
    turn(0, "tool", -0.1, False, "a", 0.25, 0.5),
    turn(1, "ending", 0.2, False, "b", 0.8, 1.0),
    turn(1, "ending", 0.2, False, "c", 0.15, 0.75),
    turn(1, "ending", 0.3, False, "d", 0.7, None),
]
SETTINGS = {"prompts": 8, "rollouts": 4, "continuations": 16, "split": "train", "seed": 0}


def page(*policies, turns=TURNS):
    text = fidelity_page({"settings": SETTINGS, "policies": list(policies)}, [turns] * len(policies))
    return text, re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", text))


def test_a_policy_has_its_table_its_pictures_and_its_checks(pictures):
    html, said = page(policy(3, prompts=4))
    assert "my_module:&lt;mode&gt; 0.12 0.50 [\N{MINUS SIGN}0.25, 0.75]" in said
    assert "constant undefined undefined undefined undefined" in said
    assert "turn_gae not measured: it needs values" in said
    assert "The first 4 of 8 prompts" in said and "4 + 6 sure pairs" in said
    assert "turn 1: z = \N{MINUS SIGN}3.50" in said and "turn 2: z" not in said
    assert html.count("data:image/svg+xml;base64,") == 2 and "<a>" not in html
    assert not re.search(r"<script|https?://|src=\"(?!data:)", html)
    assert "Correlation with A*" not in said.split("Step 3")[0]


def test_gradients_have_a_table_and_two_pictures(pictures):
    of = {name: VALUE for name in ("own", "own_difference", "bias", "signal_to_noise")}
    silent = dict.fromkeys(of, NONE)
    given = {"gradients": {"none, grpo": of, "constant": silent}, "headroom": {"says": "Worth it? <Yes>."}}
    html, said = page(policy(3, **given))
    assert "Worth it? &lt;Yes&gt;." in said
    assert html.count("data:image/svg") == 3
    assert "minus GRPO" in said and "constant undefined undefined undefined undefined" in said


def test_several_steps_stand_beside_each_other():
    other = policy(15)
    del other["credits"]["none"]
    html, said = page(policy(0), other)
    assert "Step 0 Step 15" in said and html.count("data:image/svg") == 4
    assert "none 0.50 [\N{MINUS SIGN}0.25, 0.75] not measured" in said


def test_turns_that_never_search_have_a_picture(pictures):
    html, _ = page(policy(3), turns=TURNS[2:])
    assert html.count("data:image/svg") == 2


def test_searches_that_bring_a_needed_article_are_a_kind_of_turn_where_the_data_name_them():
    assert [kind_of(one) for one in TURNS[:3]] == ["brought", "other", "ending"]
    assert [kind_of({**one, "brought": None}) for one in TURNS[:3]] == ["tool", "tool", "ending"]
