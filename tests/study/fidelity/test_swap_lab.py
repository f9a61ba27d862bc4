"""Swaps on a tiny lab, through the command."""

import json

import pytest

from verl_credit.cli import main

pytestmark = pytest.mark.slow  # a lab is trained


def command(capsys, *words):
    code = main(["fidelity", *map(str, words)])
    return code, capsys.readouterr().out.splitlines()


def test_the_command_measures_swaps_and_goes_on_where_it_was_cut_off(tiny_lab, tmp_path, capsys):
    words = (
        tiny_lab.policy, "--dir", tmp_path, "--prompts", 4, "--rollouts", 3, "--continuations", 10,
        "--modes", "none,turn-group,turn_gae",
    )  # fmt: skip
    assert command(capsys, *words, "--swaps", 9)[1][-1].endswith("expected at most 8")
    code, said = command(capsys, *words, "--swaps", 4)
    assert code == 0
    (at,) = [place for place, line in enumerate(said) if line.startswith("swaps: 4 of 4 decisions, ")]
    table = said[at:]
    assert any(line.startswith("turn-group ") for line in table)
    assert any(line.startswith("turn_gae ") and "not measured: it needs values" in line for line in table)
    (policy,) = json.loads((tmp_path / "fidelity.json").read_text())["policies"]
    swaps = policy["swaps"]
    lines = [json.loads(line) for line in (tmp_path / "policy/swaps.jsonl").read_text().splitlines()]
    assert (swaps["decisions"], swaps["alternatives"]) == (4, len(lines)) and len(lines) >= 8
    assert swaps["ending"] == sum(line["ends"] for line in lines)
    made = {name for name, credit in swaps["credits"].items() if "reason" not in credit}
    assert {"none, grpo", "turn-group", "random", "brought a needed article", "Monte Carlo, 4"} <= made
    assert all(set(line["credits"]) == made for line in lines)
    assert {len(credit) for line in lines for credit in line["credits"].values()} == {swaps["completions"]}
    assert "own alternatives" in (tmp_path / "fidelity.html").read_text()
    values = tmp_path / "policy/values.jsonl"
    all_values = values.read_text().splitlines()
    values.write_text("\n".join(all_values[:-3]) + "\n")
    assert command(capsys, *words, "--swaps", 4)[0] == 0
    assert sorted(values.read_text().splitlines()) == sorted(all_values)
    assert json.loads((tmp_path / "fidelity.json").read_text())["policies"] == [policy]
