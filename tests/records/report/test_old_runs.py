"""A run whose tables version 1 wrote: its page and its probe are as they were."""

import json
import shutil
from pathlib import Path

import pytest

from kit.report_page import SCALES, report, write_run
from kit.stored_facts import facts_of
from kit.stored_rollouts import COLUMNS, UPDATE
from verl_credit.records.report.lens import lens
from verl_credit.records.report.page import choose
from verl_credit.records.report.run_data import read_run
from verl_credit.records.run.tables import ROLLOUTS, table_path
from verl_credit.study.probe.rollouts import read_rollouts

OLD = Path(__file__).parent / "old_run"


@pytest.fixture
def old(tmp_path):
    write_run(tmp_path)
    return Path(shutil.copytree(OLD, tmp_path, dirs_exist_ok=True))


@pytest.mark.slow
def test_its_page_is_as_it_was(old, all_settings):
    """`page.json`: what version 1 put on the page of the same files, but for the credit of other settings."""
    before = json.loads((OLD / "page.json").read_text())
    groups = lens(old, 3, SCALES).groups
    for group in groups:
        assert group.pop("modes") and group.pop("transforms") and group.pop("grpo")
        assert (group.pop("limit"), group.pop("floor")) == (1.0, 0.0)
        for turn in [turn for row in group["rollouts"] for turn in row["turns"]]:
            assert turn.pop("gained") is (turn["reward"] or "").startswith("+")
    for group in before["lens"]:
        del group["limit"]  # version 1: the group's largest advantage

    def place(group):
        return group["step"], group["question"]

    assert json.loads(json.dumps(sorted(groups, key=place))) == sorted(before["lens"], key=place)
    assert len(groups) == 4
    run = read_run(old)
    assert choose(run.trajectories) == before["chosen"] and not run.trajectory_problems
    assert "Made again with the run's own settings" in report(old)


def test_its_rollouts_can_be_probed(old):
    path = table_path(old, ROLLOUTS, 12)
    rollouts, facts = read_rollouts(path)[0], facts_of(path)
    assert [ids.tolist() for ids in rollouts.response_ids] == COLUMNS["response_ids"]
    assert facts.policy_step == UPDATE["policy_step"] and facts.uid == COLUMNS["uid"]
