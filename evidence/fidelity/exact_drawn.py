"""Are the two questions special? The exact bias on questions with numbers drawn at random, groups of four.

    python evidence/fidelity/exact_drawn.py            # minutes of one core

Both question graphs of `fidelity/exact/question.py` with new numbers: the success of an answer at each place is uniform in 0
to 1, a potential is the mean of the success and another uniform number, shares and the stop probability are uniform.
Prints a table and writes exact_drawn.json: for every mode and question the cosine with grad E[r], the one with the gradient
of the mode's own objective, and the share of E[g] beyond r and gain. Operators whose scope is the batch are left out: one
call a group takes too long.
"""

from __future__ import annotations

import json
import random
import time
from dataclasses import replace
from pathlib import Path

import torch

from verl_credit.fidelity.exact.modes import all_credits
from verl_credit.fidelity.exact.question import QUESTIONS, Place, Question
from verl_credit.fidelity.exact.table import exact_bias

HERE = Path(__file__).parent
DRAWS, SIZE = 40, 4
KEPT = ("cosine", "cosine_own", "beyond_r_and_gain")


def drawn(question: Question, seed: int) -> tuple[Question, float]:
    """(the question with other numbers, a stop probability)."""
    numbers = random.Random(f"{question.name} {seed}")
    places = {}
    for name, place in question.places.items():
        success = numbers.random()
        weights = [numbers.uniform(0.1, 1) for _ in place.searches]
        searches = {
            query: (to, weight / sum(weights))
            for (query, (to, _)), weight in zip(place.searches.items(), weights, strict=True)
        }
        places[name] = Place((success + numbers.uniform(0.01, 1)) / 2, success, searches)
    return replace(question, name=f"{question.name}, draw {seed}", places=places), numbers.uniform(0.1, 0.7)


def main() -> None:
    torch.set_num_threads(1)
    begun, subjects = time.time(), [credit for credit in all_credits() if credit.scope != "batch"]
    found: dict[str, list] = {credit.name: [] for credit in subjects}
    for seed in range(DRAWS):
        for question in QUESTIONS.values():
            asked, stop = drawn(question, seed)
            for row in exact_bias(subjects, [asked], group_sizes=[SIZE], stops=[stop]):
                found[row["mode"]].append(
                    [row[key] if row[key] is None else round(row[key], 6) for key in KEPT]
                )
        print(f"{time.time() - begun:.0f} s, draw {seed}", flush=True)
    lines = ",\n".join(f"{json.dumps(mode)}: {json.dumps(rows)}" for mode, rows in found.items())
    head = json.dumps(
        {"group_size": SIZE, "draws": DRAWS, "columns": KEPT, "seconds": round(time.time() - begun)}
    )
    (HERE / "exact_drawn.json").write_text(f'{head[:-1]}, "modes": {{\n{lines}\n}}}}\n')
    print("| mode | cosine: lowest | 10 % | median | own: lowest | beyond r and gain: median | largest |")
    print("|---|---|---|---|---|---|---|")
    for mode, rows in found.items():
        columns = [[value for value in column if value is not None] for column in zip(*rows, strict=True)]
        if not columns[0]:
            continue
        cosine, own, beyond = (sorted(column) for column in columns)
        middle = len(cosine) // 2
        numbers = [cosine[0], cosine[len(cosine) // 10], cosine[middle]]
        own_text = f"{own[0]:.3f}" if own else "-"
        print(
            f"| {mode} | {' | '.join(f'{n:.3f}' for n in numbers)} | {own_text} | {beyond[middle]:.3f} | {beyond[-1]:.3f} |"
        )


if __name__ == "__main__":
    main()
