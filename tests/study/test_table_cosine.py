"""The own cosine of the table of credits: one measurement gives every row its column."""

from types import SimpleNamespace

import pytest

from verl_credit.study import table_cosine
from verl_credit.study.stats import Measure
from verl_credit.study.table_cosine import OWN, measure_cosines, shown_cosine
from verl_credit.study.table_row import Measured, row_of

ROWS = {
    "grpo": row_of("none"),
    "gigpo": row_of("gigpo"),
    "default": row_of("turn_gae"),
    "silent": row_of("trace"),
    "small": row_of("turn_gae", {"lam": 0.5}, "state", 2),
    "true": row_of("turn_gae", {"lam": 0.5}, "true"),
}


@pytest.fixture
def asked(monkeypatch):
    """The runs that were measured, without a lab."""
    runs = []

    def load(recipe, overrides):
        return SimpleNamespace(overrides=overrides)

    def on_two(base, work, *, also, **sizes):
        runs.append({name: config.overrides for name, config in also.items()})
        for number, policy in enumerate(("early", "late")):
            own = Measure(0.5 + number / 10, 0.4, 0.6, 9)
            agreements = {"none, grpo": SimpleNamespace(own=own, own_difference=Measure(0.0, 0.0, 0.0))}
            agreements |= {
                name: SimpleNamespace(own=own, own_difference=Measure(0.02, -0.01, 0.05))
                for name in also
                if name != "trace"
            }
            credits = [
                (SimpleNamespace(name=name, reason="no gains" * (name == "trace")), None) for name in also
            ]
            yield policy, SimpleNamespace(gradients=agreements, credits=credits)

    monkeypatch.setattr(table_cosine, "load_config", load)
    monkeypatch.setattr(table_cosine, "world_of", lambda config: SimpleNamespace(build=lambda say: None))
    monkeypatch.setattr(table_cosine, "on_two_policies", on_two)
    return runs


def test_one_measurement_gives_all_rows_their_column_once(asked, tmp_path):
    measure_cosines([*ROWS.values()], tmp_path, tmp_path)
    measured = {key: Measured.of(row, tmp_path).columns[OWN] for key, row in ROWS.items()}
    assert shown_cosine(measured["grpo"], difference=False) == "0.500 ± 0.100; 0.600 ± 0.100"
    assert shown_cosine(measured["gigpo"], difference=True) == "+0.020 ± 0.030; +0.020 ± 0.030"
    assert shown_cosine(measured["silent"], difference=True) == "no gains; no gains"
    assert measured["small"]["why"] == "the lab is at n 8" and "true values" in measured["true"]["why"]
    measure_cosines([*ROWS.values()], tmp_path, tmp_path)
    (runs,) = asked
    assert [*runs] == ["gigpo", "turn_gae", "trace"]


def test_a_run_of_a_row_has_its_values(asked, tmp_path):
    """A row without --values has those of the group, as its areas do."""
    measure_cosines([ROWS["default"]], tmp_path, tmp_path)
    (runs,) = asked
    assert "algorithm.turn_values=group" in runs["turn_gae"]
