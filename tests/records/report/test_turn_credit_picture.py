"""The README's picture of turn credit is drawn from a run's files."""

import runpy
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from kit.report_page import sibling, trajectory, turn, write_run, write_trajectories

SCRIPT = runpy.run_path(str(Path(__file__).parents[3] / "evidence/lab/picture.py"))
CALL = '<tool_call>\n{"name": "search", "arguments": {"query": " a <town>"}}\n</tool_call>'
CLIP = "actor_rollout_ref: {actor: {clip_ratio_low: 0.02, clip_ratio_high: 0.028}}\n"


def words(path):
    return [element.text for element in ElementTree.parse(path).getroot() if element.text]


@pytest.mark.parametrize("sign, shown", [(1.0, "+0.500"), (-1.0, "\N{MINUS SIGN}0.500")])
def test_the_picture_has_every_turn_with_its_numbers(tmp_path, sign, shown):
    group = [
        sibling(1.0, (0.25, 1.0, sign * 0.5), (None, None, sign * 0.75)),
        sibling(0.0, (0.125, -1.0, -0.5), (None, None, -0.5)),
    ]
    group[0]["turns"][0]["clip_scale"] = 1.1
    turns = [turn(CALL), turn("<answer> here</answer>", "", None)]
    write_run(tmp_path)
    write_trajectories(tmp_path, [trajectory(turns=turns, group=group)])
    (tmp_path / "config.yaml").write_text(CLIP)
    SCRIPT["main"](str(tmp_path), "the town", str(tmp_path / "out.svg"))
    found = words(tmp_path / "out.svg")
    for said in (
        "Where is the town?",
        "a <town>",
        "A town.",
        "+0.250",
        "siblings +0.125",
        "z +1.000",
        shown,
        "here",
    ):
        assert said in found, said
    assert {"0.978 to 1.031", "0.980 to 1.028"} <= set(found)  # scales 1.1 and 1
