"""A run that is killed goes on exactly with the same command. All points: `make reliability`; here one."""

import pytest

from kit.faults import KILL_POINTS, run_killed, run_straight
from verl_credit.records.run.files import METRICS, read_json_lines

# and the step that the second start goes on from
CUT = {"rollout: SIGKILL raylet, call 13 of TurnAgentLoop.run": 0}


def test_every_point_has_a_name_of_its_own_and_the_cut_is_among_them():
    names = [point.name for point in KILL_POINTS]
    assert len(set(names)) == len(names) >= 20 and CUT.keys() < set(names)


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    root = tmp_path_factory.mktemp("kills")
    run_dir = run_straight(root / "straight", root / "lab")
    # a policy that stands still would resume exactly from anywhere
    assert all(row["actor/grad_norm"] > 0 for row in read_json_lines(run_dir / METRICS)[1:])
    return root, run_dir


@pytest.mark.e2e
@pytest.mark.parametrize("point", [point for point in KILL_POINTS if point.name in CUT], ids=lambda p: p.name)
def test_a_killed_run_goes_on_exactly(point, straight):
    root, run_dir = straight
    outcome = run_killed(root / point.phase, root / "lab", point, run_dir)
    assert outcome.lost == [] and outcome.first != 0 == outcome.second, outcome
    assert outcome.resumed_from == CUT[point.name], outcome
