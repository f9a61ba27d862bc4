"""evidence/doorkey: the page has the table of the file of runs, and the policy reads every state in words of its own."""

import runpy
from pathlib import Path

import pytest
import torch

from verl_credit.records.run.files import read_json_lines

FOLDER = Path(__file__).parents[2] / "evidence" / "doorkey"
pairs = runpy.run_path(str(FOLDER / "pairs.py"))


def test_the_page_has_the_table_of_the_runs():
    assert pairs["table"](read_json_lines(FOLDER / "runs.jsonl")) in (FOLDER / "README.md").read_text()


def test_a_difference_is_of_the_seeds_that_both_arms_have():
    """Seeds 1, 2, 3 differ by 1, 2, 3: a mean of 2 and half an interval of 4.303 / sqrt(3); seed 4 lacks GRPO's run."""
    measured = dict.fromkeys(pairs["MEASURES"], 10.0)
    rows = [{"arm": "grpo", "seed": seed, **measured} for seed in (1, 2, 3)]
    rows += [{"arm": "state", "seed": seed, **measured, "area": 10.0 + seed} for seed in (3, 2, 1, 4)]
    lines = pairs["table"](rows).splitlines()
    assert (
        lines[5]
        == "| state | 4 | 12.5 | 10.0 | 10.0 | 10.0 | +2.0 ± 2.5 (3 of 3) | +0.0 ± 0.0 (0 of 3) | +0.0 ± 0.0 (0 of 3) |"
    )


@pytest.mark.slow
def test_equal_words_are_equal_states_and_only_asked_states_are_read():
    mdp = pairs["door_key"](pairs["SIZE"], pairs["LIMIT"], 2, 6, 0)
    words_U_8 = pairs["words"](mdp.x_U_F)
    assert len(words_U_8.unique(dim=0)) == len(mdp.x_U_F) > 500
    reader = pairs["Reader"](mdp.actions, 1)
    assert words_U_8.min() >= 0 and words_U_8.max() < reader.model.config.vocab_size - mdp.actions
    whole_U_A = reader.prob(mdp)[0]
    assert torch.allclose(whole_U_A.sum(1), torch.ones(len(whole_U_A)))
    reader.asked_N = torch.tensor([7, 3])
    part_U_A = reader.prob(mdp)[0]
    assert torch.allclose(part_U_A[[3, 7]], whole_U_A[[3, 7]]) and int((part_U_A.sum(1) > 0).sum()) == 2
    again = torch.tensor([3, 7, 3])
    assert torch.allclose(reader.log_prob(mdp.x_U_F[again][None])[0].exp(), whole_U_A[again], atol=1e-6)
