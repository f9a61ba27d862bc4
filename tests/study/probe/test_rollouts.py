"""Stored rollouts as a probe reads them: padded on the right, groups by prompt, facts of the update beside them."""

import pytest
import torch

from kit.stored_facts import facts_of
from kit.stored_rollouts import COLUMNS, UPDATE, stored
from verl_credit.records.run.table_files import DamagedTable
from verl_credit.study.probe.kept_rollouts import read_rollouts


def test_rows_are_padded_and_the_rest_is_as_it_was_stored(tmp_path):
    rollouts, facts = read_rollouts(stored(tmp_path))[0], facts_of(stored(tmp_path))
    assert [ids.tolist() for ids in rollouts.prompt_ids] == COLUMNS["prompt_ids"]
    assert [ids.tolist() for ids in rollouts.response_ids] == COLUMNS["response_ids"]
    assert rollouts.written_B_T.tolist() == [[True, False, True], [True, False, False], [True, True, False]]
    assert rollouts.trained.tolist() == [[False, False, True], [True, False, False], [True, True, False]]
    assert rollouts.advantage_B_T.tolist() == [[0, 0, 0.5], [-0.5, 0, 0], [0.25, 0.25, 0]]
    assert facts.log_prob_B_T.tolist() == [[-1, 0, -2], [-0.5, 0, 0], [-3, -4, 0]]
    assert rollouts.group_B.tolist() == [0, 0, 1] and facts.outcome_B.tolist() == [1, 0, 0.5]
    assert rollouts.advantage_B_T.dtype == torch.float64
    assert (facts.step, facts.policy_step, facts.temperature, facts.top_p, facts.top_k) == (
        12,
        11,
        0.7,
        0.9,
        -1,
    )
    assert (facts.rows, facts.loss_tokens, facts.updates) == (4, 9, 1)
    assert facts.objective == UPDATE["objective"] and facts.uid == ["a", "a", "b"]
    assert facts.turn_ids_B_T.tolist() == [[0, -1, 1], [0, -1, -1], [0, 0, -1]]
    assert facts.clip_scale_B_T[2].tolist() == [1, 0.75, 0]
    assert facts.entropy_B_T is None
    assert facts.rollout_is_weight_B_T.tolist() == [[1, 1, 2], [1, 0, 0], [0.5, 1, 0]]


def test_a_prompt_that_the_data_has_twice_is_one_group(tmp_path):
    rollouts, _ = read_rollouts(
        stored(tmp_path, prompt_ids=[[5, 6], [7], [5, 6]], uid=["a", "b", "c"], group=[0, 1, 2])
    )
    assert rollouts.group_B.tolist() == [0, 1, 0]


@pytest.mark.parametrize(
    "update, changes, said",
    [
        (UPDATE, {"advantage": [[0.0], [0.0], [0.0, 0.0]]}, "row 0 has 3 response_ids and 1 of advantage"),
        (UPDATE, {"advantage": [[0.0] * 3, None, None]}, "cannot be read: TypeError"),
        ({name: value for name, value in UPDATE.items() if name != "sampling"}, {}, "KeyError: 'sampling'"),
        (UPDATE, {name: [] for name in COLUMNS}, "there is no rollout"),
    ],
)
def test_what_does_not_fit_together_is_refused_by_name(tmp_path, update, changes, said):
    path = stored(tmp_path, update, **changes)
    with pytest.raises(DamagedTable, match=said) as raised:
        read_rollouts(path)
    assert str(path) in str(raised.value)
