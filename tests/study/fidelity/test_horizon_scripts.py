"""evidence/horizon: every credit of the chain is measured, and differences are paired."""

import json
from pathlib import Path

import numpy as np
import pytest

from verl_credit.study.campaign.file import read_campaign

HORIZON = Path(__file__).parents[3] / "evidence" / "horizon"


@pytest.fixture(autouse=True)
def scripts(monkeypatch):
    monkeypatch.syspath_prepend(str(HORIZON))


@pytest.mark.slow
def test_the_chains_script_measures_every_credit(tmp_path, monkeypatch, capsys):
    import chain

    size = {"hops": [1], "batches": 4, "learns": [1], "runs": 2, "steps": 2}
    found = json.loads(chain.as_text(chain.measure(**size)))
    assert set(found["area"]) == set(chain.credits()) and set(chain.SHOWN) < set(found["own_cosine"])
    assert all(np.isfinite(half) for of in found["own_cosine"].values() for _, half in of)
    assert "GRPO's area" in chain.page(found)


def test_what_is_declared_has_pairs_enough_and_a_choice_on_other_seeds():
    curves, _ = read_campaign(str(HORIZON / "curves.yaml"))
    choice, _ = read_campaign(str(HORIZON / "choice.yaml"))
    assert curves.cannot_resolve() == "" and len(curves.blocks()) == 16
    assert curves.budget.runs == len(curves.blocks()) * len(curves.conditions)
    assert not set(curves.seeds) & set(choice.seeds)
    learned = {*curves.conditions["learned"]} - {*choice.overrides}
    assert learned in [set(of) for of in choice.conditions.values()]


def test_only_pairs_that_both_conditions_have_are_compared():
    import curves

    a, b = {(1, 0): 3.0, (2, 0): 5.0, (3, 0): 9.0}, {(1, 0): 1.0, (2, 0): 1.0, (4, 0): 0.0}
    mean, half, above, pairs, p = curves.difference(a, b)
    assert (mean, above, pairs) == (3.0, 2, 2)
    assert half == pytest.approx(12.706 * 1.0, abs=0.01) and p == pytest.approx(0.2048, abs=1e-3)
    assert np.isnan(curves.difference(a, {})[0])


@pytest.mark.slow
def test_areas_and_held_out_answers_are_two_families():
    import curves

    of = {"grpo": 0.0, "half_negative": 3.0, "gigpo": 1.0, "turn-group-v1d": 0.0, "learned": 4.0}
    same = {"campaign": "horizon_curves", "hops": 4, "world": 0, "greedy": 90.0, "em": [0.25, 0.5]}
    rows = [
        {
            **same,
            "condition": name,
            "seed": seed,
            "area": value + seed * (1 + value / 10),
            "sampled": value * seed,
        }
        | {"explained": [0.5] if name == "learned" else []}
        for name, value in of.items()
        for seed in (1, 2, 3)
    ]
    printed = curves.page(rows)
    assert "| learned | 3 | 6.8 | 25.0 | 50.0 | 90.0 | 8.0 | 0.50 |" in printed
    assert "| area, 3 pairs | learned - grpo | +4.8 ± 1.0 | 3 of 3 | 0.0023 | 0.0115 |" in printed
    assert "| sampled, 3 pairs | learned - grpo | +8.0 ± 9.9 | 3 of 3 | 0.0742 |" in printed
