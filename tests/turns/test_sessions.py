"""Rollouts of several outputs."""

from dataclasses import replace
from unittest.mock import MagicMock

import pytest
from omegaconf import OmegaConf

from kit.byte_world import make_tokenizer
from kit.settings import settings
from kit.turn_rows import Row, turn_batch
from verl_credit.errors import IntegrityError
from verl_credit.turns.step.sessions import sessions_of
from verl_credit.turns.step.step_checks import StepChecks

TOKENIZER = make_tokenizer()


def test_a_session_has_its_outputs_in_the_order_of_their_numbers():
    assert sessions_of(["a_0_1", "a_0_10", "a_0_2", "a_1_0", "b_0_0"]) == [[0, 2, 1], [3], [4]]


CONFIG = OmegaConf.create({"run_dir": ".", "faults": {"max_tool_faults": 0.0, "max_unrewarded_steps": None},
                           "search": {"url": None, "max_new_tokens": 8}})  # fmt: skip


@pytest.mark.parametrize("estimator", ["info_gain", "rloo", "grpo"])
def test_a_second_output_is_refused_by_row_rollout_and_key(estimator):
    """verl's GRPO takes the last output of every session into its statistics."""
    turns = replace(turn_batch([Row(("a",))] * 3, TOKENIZER), keys=["q_0_0", "q_1_0", "q_1_1"])
    checks = StepChecks(CONFIG, settings(adv_estimator=estimator))
    if estimator == "grpo":
        checks.rows(MagicMock(step=1), turns)
        return
    with pytest.raises(IntegrityError) as refused:
        checks.rows(MagicMock(step=1), turns)
    for part in ("row 2", "q_1", "2 outputs", f"algorithm.adv_estimator={estimator}"):
        assert part in str(refused.value)
