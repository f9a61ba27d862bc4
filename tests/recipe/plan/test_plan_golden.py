"""The counted memory of recipes for GPUs, of their variants and of the lab on a laptop: each part of a phase, in bytes."""

import json
from pathlib import Path

import pytest

from verl_credit.cli.recipe.plan import _load as load_plan
from verl_credit.recipe.plan.plan import make_plan

GOLDEN = json.loads(Path(__file__).with_name("golden.json").read_text())


@pytest.mark.slow
@pytest.mark.parametrize("case", GOLDEN)
def test_the_parts_of_every_phase(case):
    name, *overrides = case.split()
    plan = make_plan(load_plan(name, overrides, None))
    assert {p.name: {part: round(size) for part, size in p.parts.items()} for p in plan.phases} == GOLDEN[
        case
    ]
