"""Information gain in bf16 against fp32, for several places in which the arithmetic changes from bf16 to fp32.

    python evidence/real/precision.py --real DIR --questions hotpotqa_dev_distractor_70.json [--again]

The same trajectories as in gains.py, whose fp32 scores are read from gains.json. Two forwards per question, one with bf16
weights and one with fp32 weights under bf16 autocast; the heads of `VARIANTS` read their hidden states. Writes
precision.json and precision.png. `--again` reads the scores from precision.json.
"""

from __future__ import annotations

import json
import time
from pathlib import Path

import torch
from common import HERE, arguments, machine, write
from forward import Head, ModelForward, load, planned, project_head, score_table_of
from precision_picture import draw
from precision_statistics import errors, scorers_apart
from questions70 import read_questions
from rollouts import SETTINGS, rollouts
from transformers import AutoTokenizer

from verl_credit.attention import PACK, pack_rows
from verl_credit.log_probs.chunks import log_probs_from_logits


def bf16_head(model, hidden_N_D, labels_N):
    """Everything in bf16, the log-softmax included."""
    return model.lm_head(hidden_N_D).log_softmax(-1).gather(1, labels_N[:, None])[:, 0].float()


def fp32_head(model, hidden_N_D, labels_N):
    """The head's product in fp32, of the weights as the model has them."""
    with torch.autocast("cpu", enabled=False):
        logits = hidden_N_D.float() @ model.lm_head.weight.float().T
    return log_probs_from_logits(logits, labels_N)


VARIANTS: dict[str, tuple[str, Head]] = {
    "bf16, log-softmax in bf16": ("bf16", bf16_head),
    "bf16, log-softmax in fp32": ("bf16", project_head),
    "bf16, lm_head and log-softmax in fp32": ("bf16", fp32_head),
    "autocast, log-softmax in fp32": ("autocast", project_head),
    "autocast, lm_head and log-softmax in fp32": ("autocast", fp32_head),
}
"""Name -> (body, head)."""
SCORED_BY = {"bf16": ("branch", "rows"), "autocast": ("branch",)}
ENGINES = "bf16, log-softmax in fp32"
"""What the project's engine does with param_dtype=bf16 (precision_engine.py compares)."""


def score(real: Path, file: Path, scored: list[dict]) -> tuple[list[dict], float]:
    """Per question the table of scores of every variant and scorer; seconds."""
    tokenizer = AutoTokenizer.from_pretrained(real / "policy")
    bodies = {"bf16": load(real / "policy", torch.bfloat16), "autocast": load(real / "policy", torch.float32)}
    # The attention's trial judges a kernel by its dtype, so it must not run under autocast.
    with torch.no_grad():
        bodies["autocast"](torch.zeros(1, 8, dtype=torch.long), **{PACK: pack_rows([8])})
    found, begin = [], time.perf_counter()
    for question, known in zip(read_questions(file), scored, strict=False):
        written, tables = rollouts(question, tokenizer), {}
        if (question.text, len(written.roles)) != (known["question"], len(known["rows"])):
            raise ValueError(
                f"gains.json has {known['question']!r} where {file} has {question.text!r}: run gains.py"
            )
        for body, model in bodies.items():
            forward = ModelForward(model, written.turns, autocast=body == "autocast")
            plans = {name: planned(written.turns, SETTINGS, tokenizer, name) for name in SCORED_BY[body]}
            plans = {name: plan.scorer.before_forward(plan, forward) for name, plan in plans.items()}
            for name, (of, head) in VARIANTS.items():
                if of != body:
                    continue
                forward.head = head
                of_scorer = {scorer: score_table_of(plan, forward) for scorer, plan in plans.items()}
                tables[name] = {
                    scorer: table.round(decimals=6).tolist() for scorer, table in of_scorer.items()
                }
        found.append({"question": question.text, **tables})
        print(len(found), f"{time.perf_counter() - begin:.0f} s", flush=True)
    return found, time.perf_counter() - begin


def main() -> None:
    parser = arguments(__doc__, "precision")
    parser.add_argument("--gains", type=Path, default=HERE / "gains.json")
    parser.add_argument("--again", action="store_true", help="read the scores from the JSON file")
    parser.add_argument("--limit", type=int, default=70, help="only the first questions")
    options = parser.parse_args()
    torch.set_num_threads(1)
    exact = json.loads(options.gains.read_text())["scores"][: options.limit]
    if options.again:
        report = json.loads(options.json.read_text())
    else:
        scores, seconds = score(options.real, options.questions, exact)
        report = {
            "command": "python evidence/real/precision.py --real DIR --questions hotpotqa_dev_distractor_70.json",
            "machine": machine("torch", "transformers"),
            "seconds": round(seconds),
            "scores": scores,
        }
        write(options.json, report)
    report["variant_of_the_engine"] = ENGINES
    report["branch_to_rows_in_bf16"] = scorers_apart(report["scores"], ENGINES)
    report["results"] = {
        f"{name}; {scorer}": errors(exact, [question[name][scorer] for question in report["scores"]])
        for name, (body, _) in VARIANTS.items()
        for scorer in SCORED_BY[body]
    }
    print(json.dumps(report["results"], indent=1))
    write(options.json, report)
    draw(exact, report, options.json.with_suffix(".png"))


if __name__ == "__main__":
    main()
