"""provenance: which turn first showed the page that the answer rests on, right or wrong.

STAMP (2607.11172) and ECHO (2606.31650) credit such turns; their formulas were not read, so this one is ours.
"""

from __future__ import annotations

from collections.abc import Sequence

from verl_credit.turns.reward.qa import final_answer, stands_in
from verl_credit.turns.signals.signal import Signal, StepRows, Table, Turn
from verl_credit.turns.thoughts import without_thoughts


class ProvenanceSignal(Signal):
    says = "1 for a turn that first showed a page that the last turn cites ([id]), or where none is cited the first page "
    says += "with the answer's text; 0 for other turns that searched; a turn without a search has no reward"
    reads = "the ids of the pages, what the tools returned, the policy's last turn; no gold answer"

    def rewards(self, rows: StepRows) -> Table:
        def values_of(row: int) -> list[float | None]:
            turns, searches = rows.trajectory(row).turns, rows.turns.records[row]["searches"]
            text = without_thoughts(turns[-1].text) if turns else ""
            return provenance(turns, searches, text, final_answer(text, rows.turns.ground_truths[row]))

        return self.table(rows, values_of)


def provenance(
    turns: Sequence[Turn], searches: Sequence[dict], text: str, answer: str | None
) -> list[float | None]:
    """A value per tool turn. ``text``: of the last turn; ``answer``: the answer in it."""
    first_of: dict[str, int] = {}
    for search in searches:
        for page in search["pages"]:
            first_of.setdefault(page, search["turn"])
    searched = {search["turn"] for search in searches}
    credited = {turn for page, turn in first_of.items() if f"[{page}]" in text}
    if answer and not credited:
        holding = (turn for turn in sorted(searched) if stands_in(turns[turn].observation, [answer]))
        credited = {next(holding, -1)}
    return [float(turn in credited) if turn in searched else None for turn in range(len(turns) - 1)]
