"""The environments that a process holds: their random numbers follow from the seed, and what was not reset is closed."""

import random

import pytest

from kit.environments import Faulty
from verl_credit.worlds.environments.process import Rollouts

CLOSED = []


class Closing(Faulty):
    def close(self):
        CLOSED.append(self)
        raise SystemExit("a close may raise")


@pytest.mark.parametrize("fault", ["raises", "exits", "none"])
def test_an_environment_whose_reset_failed_is_closed(fault):
    CLOSED.clear()
    rollouts, options = Rollouts(100), {"fault": fault, "at_reset": True}
    with pytest.raises(BaseException) as caught:
        rollouts.answer(0, "reset", f"{__name__}.Closing", {}, 0, options)
    assert len(CLOSED) == 1 and "a close" not in str(caught.value)
    assert rollouts.answer(0, "close") is None and len(CLOSED) == 1


def test_numbers_that_a_module_draws_when_it_is_imported_move_no_rollout(tmp_path, monkeypatch):
    lines = [
        "import random",
        "from kit.environments import Corridor",
        "random.random()",
        "class Late(Corridor): pass",
    ]
    (tmp_path / "drawing.py").write_text("\n".join(lines))
    monkeypatch.syspath_prepend(tmp_path)
    before, rollouts = random.getstate(), Rollouts(100)
    for row in (0, 1):
        rollouts.answer(row, "reset", "drawing.Late", {"length": 99, "slip": 0.5}, 0, {})
    walks = [[rollouts.answer(row, "step", "right")["state"] for _ in range(8)] for row in (0, 1)]
    random.setstate(before)
    assert walks[0] == walks[1]
