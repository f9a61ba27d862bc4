"""What a device reaches where SDPA stands in for flash-attn."""

import pytest

from verl_credit.recipe.plan.hardware import find_hardware


@pytest.mark.parametrize(("name", "block", "mfu"), [
    ("h100", {}, 0.35), ("h100", {"flash_attn": False}, 0.175), ("h100", {"flash_attn": False, "mfu": 0.3}, 0.3),
    ("gb10", {"flash_attn": False}, 0.30),
])  # fmt: skip
def test_without_flash_attn_half_of_the_mfu_is_assumed_unless_it_is_given(name, block, mfu):
    """A GB10's is for SDPA already: it has no wheel of flash-attn."""
    assert find_hardware(name, block).mfu == pytest.approx(mfu)
