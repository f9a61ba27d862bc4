"""Information gain on real text: pages with the answer, bridge pages and distractors, first and second in a trajectory.

    python evidence/real/gains.py --real DIR --questions hotpotqa_dev_distractor_70.json [--again]

Every question's seven trajectories (`rollouts.py`) are scored in fp32 by the scorer `branch`, those of the first ten
questions by `rows`, too. Writes gains.json (scores of every row, and what follows from them) and gains.png. `--again` reads
the scores from gains.json instead of computing them.
"""

from __future__ import annotations

import json
import time
from pathlib import Path

import torch
from common import arguments, machine, write
from forward import ModelForward, load, planned, score_table_of
from gain_statistics import summary
from gains_picture import draw
from questions70 import read_questions
from rollouts import SETTINGS, rollouts
from transformers import AutoTokenizer

COMPARED = 10
"""Questions that are scored by `rows`, too."""


def score(real: Path, file: Path) -> dict:
    """Rows of scores: mean log-prob of the answer's tokens behind the prompt, after the first and after the second page."""
    tokenizer, model = AutoTokenizer.from_pretrained(real / "policy"), load(real / "policy", torch.float32)
    found, apart, tokens, begin = [], 0.0, 0, time.perf_counter()
    for number, question in enumerate(read_questions(file)):
        written = rollouts(question, tokenizer)
        forward = ModelForward(model, written.turns)
        plan = planned(written.turns, SETTINGS, tokenizer, "branch")
        plan = plan.scorer.before_forward(plan, forward)
        table = score_table_of(plan, forward)
        if number < COMPARED:
            rows = score_table_of(planned(written.turns, SETTINGS, tokenizer, "rows"), forward)
            apart = max(apart, float((table - rows).abs().max()))
        pairs = zip(written.roles, table.tolist(), strict=True)
        found.append({
            "question": question.text, "answer": question.answer, "kind": question.kind, "type": question.type,
            "answer_in_question": question.answer_in_question,
            "titles": {role: page.title for role, page in written.pages.items()},
            "rows": [{"pages": list(roles), "scores": scores} for roles, scores in pairs],
        })  # fmt: skip
        tokens += sum(len(ids) for ids in written.turns.prompt_ids + written.turns.response_ids)
        print(number, question.kind, f"{time.perf_counter() - begin:.0f} s", flush=True)
    return {
        "command": "python evidence/real/gains.py --real DIR --questions hotpotqa_dev_distractor_70.json",
        "machine": machine("torch", "transformers"),
        "dtype": "float32",
        "seconds": round(time.perf_counter() - begin),
        "tokens": tokens,
        "branch_to_rows_largest_difference_of_a_score": apart,
        "rows_compared_in_questions": COMPARED,
        "scores": found,
    }


def main() -> None:
    parser = arguments(__doc__, "gains")
    parser.add_argument("--again", action="store_true", help="read the scores from the JSON file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    report = json.loads(options.json.read_text()) if options.again else score(options.real, options.questions)
    write(options.json, report)
    report |= summary(report["scores"])
    write(options.json, report)
    draw(report, options.json.with_suffix(".png"))


if __name__ == "__main__":
    main()
