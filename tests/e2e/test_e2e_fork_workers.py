"""Workers that are forks of one process compute, bit for bit, what workers compute that start Python themselves."""

import pytest

from kit.faults import NOT_COMPARED, run_straight
from verl_credit.host.process.fork_server import IMPORTED, KIND
from verl_credit.records.run.files import EVENTS, METRICS, VALIDATION, read_json_lines

pytestmark = [pytest.mark.e2e, pytest.mark.nightly]


def test_forked_workers_compute_what_fresh_ones_do(tiny_lab, tmp_path):
    folders = {
        choice: run_straight(tmp_path / choice, tiny_lab.root, f"fork_workers={choice}", "seed=2")
        for choice in ("false", "auto")
    }
    rows, events = {}, {}
    for choice, folder in folders.items():
        rows[choice] = [
            {name: value for name, value in row.items() if not NOT_COMPARED.search(name)}
            for file in (METRICS, VALIDATION)
            for row in read_json_lines(folder / file)
        ]
        events[choice] = [row for row in read_json_lines(folder / EVENTS)]
    assert len(rows["false"]) > 4 and rows["false"] == rows["auto"]
    texts = {choice: [row["text"] for row in events[choice]] for choice in events}
    kinds = {choice: [row["kind"] for row in events[choice]] for choice in events}
    assert IMPORTED in texts["auto"] and KIND not in kinds["auto"]
    assert IMPORTED not in texts["false"] and kinds["false"].count(KIND) == 1
