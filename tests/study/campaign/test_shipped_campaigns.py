"""Every condition of every shipped campaign composes, and the pairs are those that the file's comment promises."""

import pytest

from verl_credit.names import ADV_ESTIMATOR
from verl_credit.recipe.recipe_files import recipes_folder
from verl_credit.study.campaign.design import composed, planned
from verl_credit.study.campaign.file import fewest_pairs, read_campaign

SHIPPED = sorted(file.stem for file in (recipes_folder() / "campaigns").glob("*.yaml"))


@pytest.mark.slow
@pytest.mark.parametrize("name", SHIPPED)
def test_every_condition_composes(name, tmp_path):
    campaign, _ = read_campaign(name)
    configs = composed(campaign, tmp_path, complete=False)
    assert list(configs) == list(campaign.conditions) and campaign.name == name
    assert all(config.algorithm.adv_estimator == ADV_ESTIMATOR for config in configs.values())
    assert campaign.budget.runs == len(planned(campaign))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sepa_factorial_lab", "sepa_factorial_full", "sepa_factorial_twin"])
def test_the_factorial_is_the_papers(name, tmp_path):
    campaign, _ = read_campaign(name)
    levels = campaign.levels()
    for key, config in composed(campaign, tmp_path, complete=False).items():
        outcome, token = levels["outcome"][key], levels["token"][key]
        assert config.algorithm.advantage_mode == outcome
        expected = {"none": "none", "gtpo": "gtpo", "hicra": "gtpo_hicra", "sepa": "gtpo_sepa"}[token]
        assert config.algorithm.transform_mode == expected
        assert (
            config.algorithm.sepa.delay_steps + config.algorithm.sepa.steps
            <= config.trainer.total_training_steps
        )
        if outcome == "grpo":
            assert config.algorithm.norm_adv_by_std_in_grpo is False


def test_what_the_files_say_about_pairs():
    campaign, _ = read_campaign("sepa_factorial_lab")
    assert len(campaign.blocks()) == 3 and fewest_pairs(len(campaign.pairs())) == 8
    for name in (
        "turn_modes_lab",
        "sepa_schedule_lab",
        "sepa_schedule_full",
        "sepa_factorial_full",
        "sepa_factorial_twin",
    ):
        campaign, _ = read_campaign(name)
        assert len(campaign.blocks()) >= fewest_pairs(len(campaign.pairs()))
