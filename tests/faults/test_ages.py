"""The check of a run of an asynchronous trainer finds what it says that it finds."""

import pytest

from kit.faults import AGES, wrong_ages
from verl_credit.records.run.files import METRICS, append_json
from verl_credit.records.run.tables import TURNS, TURNS_SCHEMA, write_table

AGE = {"turns_unknown": 0, "mean": 0.0, "oldest": 0}


def run_of(folder, *steps):
    """``steps``: the draws of each, and what differs of its ages."""
    for step, (uids, ages) in enumerate(steps, start=1):
        given = AGE | {"ratio_off_at_age_0": 1e-6} | ages
        kept = {f"{AGES}{name}": value for name, value in given.items() if value is not None}
        append_json(folder / METRICS, {"step": step} | kept)
        columns = dict.fromkeys(TURNS_SCHEMA.names, [None] * len(uids)) | {"uid": uids}
        write_table(folder, TURNS, step, columns, {})
    return wrong_ages(folder)


NONE_OF_ITS_OWN = {"mean": 1.0, "oldest": 1, "ratio_off_at_age_0": None}


def test_nothing_is_found_where_nothing_is_wrong(tmp_path):
    assert run_of(tmp_path, (["a", "a", "b"], {}), (["c"], NONE_OF_ITS_OWN)) == []


@pytest.mark.parametrize(
    "second, words",
    [
        ((["c", "a"], {}), "draw a was trained on in steps 1 and 2"),
        ((["c"], {"ratio_off_at_age_0": 0.01}), "step 2: rollouts of its own weights are off by 0.01"),
        ((["c"], {"turns_unknown": 3}), "step 2: {'turns_unknown': 3"),
        ((["c"], {"mean": 2.0, "oldest": 2}), "step 2: {"),  # by weights that came later
    ],
)
def test_what_is_wrong_is_found(tmp_path, second, words):
    (found,) = run_of(tmp_path, (["a", "b"], {}), second)
    assert words in found


def test_log_probs_that_were_never_compared_are_no_proof(tmp_path):
    (found,) = run_of(tmp_path, (["a"], {"ratio_off_at_age_0": None}), (["b"], NONE_OF_ITS_OWN))
    assert found == "no step has tokens of its own weights: none were compared"
