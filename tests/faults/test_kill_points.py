"""The points at which `make reliability` kills a run, which must go on exactly with the same command."""

from kit.faults import KILL_POINTS


def test_every_point_has_a_name_of_its_own():
    names = [point.name for point in KILL_POINTS]
    assert len(set(names)) == len(names) >= 20
