"""The plan against FSDP2 with fake tensors, for every recipe with sizes x {1, 8} ranks x {full, LoRA} (evidence/plan)."""

import importlib.util
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from verl_credit.recipe.plan.model_shape import PUBLISHED
from verl_credit.recipe.recipe_files import shipped_recipes

pytestmark = pytest.mark.nightly
WITHIN = 0.05
SMALL = 4 * 2**20
"""Bytes by which DoorKey's plan with an adapter may be off: its moments are so small that a twentieth is less."""


@pytest.fixture(scope="module")
def fake():
    path = Path(__file__).parents[3] / "evidence" / "plan" / "fake_fsdp.py"
    spec = importlib.util.spec_from_file_location("fake_fsdp", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclasses look there
    spec.loader.exec_module(module)
    module.measure = cache(module.measure)  # recipes share cases
    yield module
    del sys.modules[spec.name]


def off(fake, case, small: int = 0) -> dict:
    """Planned over found bytes, less one, of each moment; 0 where they differ by at most ``small`` bytes."""
    found = {key: bytes_["Total"] for key, bytes_ in fake.measure(case).items()}
    planned = {key: sum(parts.values()) for key, parts in fake.planned(case).items()}
    return {key: (abs(n - found[key]) > small) * (n / found[key] - 1) for key, n in planned.items()}


@pytest.mark.parametrize("adapter", [False, True], ids=["full", "LoRA"])
@pytest.mark.parametrize("ranks", [1, 8])
@pytest.mark.parametrize("recipe", [one for one in shipped_recipes() if one != "verl"])
def test_live_bytes_of_each_moment(fake, recipe, ranks, adapter):
    case = fake.case_of(recipe, ranks, adapter)
    small = SMALL if recipe == "doorkey" and adapter else 0
    assert off(fake, case, small) == {key: pytest.approx(0, abs=WITHIN) for key in fake.planned(case)}
    found, planned = fake.measure(case), fake.planned(case)
    for key, part in {
        ("backward", 2): "weights",
        ("loss", 2): "gradients",
        ("log-prob", 0): "optimizer",
    }.items():
        # AdamW has a step count per tensor, and a shard is padded to the first one's size.
        assert found[key][fake.STATE[part]] == pytest.approx(planned[key][part], rel=0.03), part


@pytest.mark.parametrize("tokens", [256, 8192])
def test_short_and_long_micro_batches(fake, tokens):
    """The embedding's gradient is the peak of the one, the logits that of the other."""
    case = fake.case_of("multihop_qwen3_4b", 8, False, tokens=tokens)
    assert off(fake, case) == {key: pytest.approx(0, abs=WITHIN) for key in fake.planned(case)}


def test_untied_embeddings_are_groups_of_their_own(fake):
    tied = fake.case_of("multihop_qwen3_4b", 8, False)
    case = replace(tied, shape=replace(PUBLISHED["qwen3-8b"], layers=2, positions=None))
    assert off(fake, case) == {key: pytest.approx(0, abs=WITHIN) for key in fake.planned(case)}
