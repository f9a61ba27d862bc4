"""verl's own losses beside the turn modes: taken where they read no clip scale, refused where one is asked of them."""

import pytest

from kit.recipes import check, refused
from verl_credit.config.keys import LOSS
from verl_credit.config.keys.verl import VERLS_LOSSES
from verl_credit.config.settings import CreditSettings
from verl_credit.credit.plugins import find_turn_mode

MODES = ("none", "joint", "separate", "turn-group", "turn-group-v1d", "turn-group-unbiased", "leave_one_out")


def chosen(loss, mode):
    needed = {
        "dro": [f"{LOSS}.dro_beta=0.1"],
        "bypass_mode": ["algorithm.rollout_correction.bypass_mode=true", "algorithm.info_gain_scorer=rows"],
    }
    return [f"{LOSS}.loss_mode={loss}", f"algorithm.info_gain_norm_mode={mode}", *needed.get(loss, ())]


@pytest.mark.slow
@pytest.mark.parametrize("loss", VERLS_LOSSES)
def test_every_loss_of_verls_is_taken_with_every_turn_mode_and_no_clip_is_scaled(loss):
    for mode in MODES:
        settings = CreditSettings.from_config(config := check(*chosen(loss, mode)))
        assert config.actor_rollout_ref.actor.policy_loss.dynamic_clip is False
        assert not settings.dynamic_clip
        if find_turn_mode(mode).scales_clip:
            assert settings.turn_options["clip_beta"] == 0


@pytest.mark.parametrize("loss", VERLS_LOSSES)
def test_a_clip_scale_is_refused_where_the_loss_reads_none(loss):
    error = refused(*chosen(loss, "turn-group-v1d"), f"{LOSS}.dynamic_clip=true")
    assert (error.key, error.value) == (f"{LOSS}.dynamic_clip", True)
    assert "set it to false, or loss_mode to turn_ppo" in error.accepted


@pytest.mark.slow
def test_dro_without_its_penalty_is_refused_before_the_start():
    for beta in ((), (f"{LOSS}.dro_beta=0",)):
        error = refused(f"{LOSS}.loss_mode=dro", *beta)
        assert error.key == f"{LOSS}.dro_beta" and not error.value and "a number above 0" in error.accepted
