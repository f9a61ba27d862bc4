"""What ends a run at its first step."""

from unittest.mock import MagicMock

import pytest
from omegaconf import OmegaConf

from kit.byte_world import make_tokenizer
from kit.turn_rows import Row, estimate, step_inputs, turn_batch
from verl_credit.errors import IntegrityError
from verl_credit.turns.step.step_checks import StepChecks


def test_states_that_no_second_turn_starts_from_end_the_run(tmp_path):
    """A mode that compares turns of one state would be GRPO."""
    turns = turn_batch([Row(("ask", "page", "done")), Row(("seek", "map", "done"))], make_tokenizer())
    inputs = step_inputs(turns, [[0.0], [0.0]], info_gain_norm_mode="gigpo", turn_signal="none")
    config = OmegaConf.create({
        "run_dir": str(tmp_path), "faults": {"max_unrewarded_steps": None}, "actor_rollout_ref": {"rollout": {"n": 2}},
    })  # fmt: skip
    shared, apart = (estimate(inputs, turns, [1.0, 0.0], groups) for groups in ([0, 0], [0, 1]))
    host = MagicMock(step=1)
    StepChecks(config, inputs.run.settings).credit(host, shared)
    with pytest.raises(IntegrityError, match="none of the 4 states .*turn_anchor=auto"):
        StepChecks(config, inputs.run.settings).credit(host, apart)
