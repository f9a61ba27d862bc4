"""What ends a run at its first step."""

from unittest.mock import MagicMock

import pytest
from omegaconf import OmegaConf

from kit.byte_world import make_tokenizer
from kit.turn_rows import Row, estimate, step_inputs, turn_batch
from verl_credit.errors import IntegrityError
from verl_credit.turns.rollout.book import RowRecord
from verl_credit.turns.step.step_checks import StepChecks, check_environments_begin_alike, check_tool_faults


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


def faulty(code, detail, of=4):
    records = [RowRecord(environment={"score": 0.0}).as_dict() for _ in range(of)]
    records[0] |= {"tool_fault": code, "fault_detail": detail}
    return records


def test_faults_of_environments_are_named_as_theirs():
    with pytest.raises(
        IntegrityError, match=r"environments \(environment\.path\): 1 env_raised .*KeyError"
    ) as caught:
        check_tool_faults(faulty("env_raised", "KeyError: 'x'"), 0.1, None)
    assert "search server" not in str(caught.value)


def test_a_first_observation_that_differs_ends_the_first_step():
    check_environments_begin_alike(faulty("env_raised", "x"))
    with pytest.raises(IntegrityError, match=r"1 of 4 rows .*room 1.*prepare env"):
        check_environments_begin_alike(faulty("env_differs", "it begins with 'room 1'"))
