"""Information gain as vLLM computes it on a CPU in bf16, against fp32: what the `server` scorer sees.

    .venv-vllm/bin/python evidence/real/precision_vllm.py --real DIR --questions hotpotqa_dev_distractor_70.json

The trajectories of gains.py. vLLM's own log-probs of the answers' tokens behind every context (`prompt_logprobs`), without
its prefix cache. Statistics as in precision.py. Writes precision_vllm.json.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence

import torch
from common import HERE, arguments, machine, write
from forward import planned, score_table_of
from precision_statistics import errors
from questions70 import read_questions
from rollouts import SETTINGS, rollouts
from transformers import AutoTokenizer

from verl_credit.turns.scorers import ScoreRow

LONGEST = 4096
CACHE = 1 << 30


class ServerForward:
    """The scorer `rows` asks, and vLLM answers: the same contexts and answers as the `server` scorer has."""

    budget = None

    def __init__(self, engine, params):
        self._engine, self._params = engine, params

    def score_rows(self, rows: Sequence[ScoreRow]) -> torch.Tensor:
        different = list(dict.fromkeys(rows))
        prompts = [{"prompt_token_ids": [*row.context_ids, *row.answer.token_ids]} for row in different]
        outputs = self._engine.generate(prompts, self._params, use_tqdm=False)
        values = {
            row: mean_log_prob(row, output.prompt_logprobs)
            for row, output in zip(different, outputs, strict=True)
        }
        return torch.tensor([values[row] for row in rows], dtype=torch.float64)


def mean_log_prob(row: ScoreRow, of_tokens: Sequence) -> float:
    first, answer = len(row.context_ids), row.answer
    places = range(answer.gold_start, answer.gold_end)
    return sum(of_tokens[first + at][answer.token_ids[at]].logprob for at in places) / len(places)


def main() -> None:
    parser = arguments(__doc__, "precision_vllm")
    parser.add_argument("--limit", type=int, default=70, help="only the first questions")
    options = parser.parse_args()
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "WARNING"}
    from vllm import LLM, SamplingParams

    begin = time.perf_counter()
    tokenizer = AutoTokenizer.from_pretrained(options.real / "policy")
    engine = LLM(
        model=str(options.real / "policy"),
        dtype="bfloat16",
        enforce_eager=True,
        max_model_len=LONGEST,
        kv_cache_memory_bytes=CACHE,
        block_size=32,
        enable_prefix_caching=False,
    )
    forward = ServerForward(engine, SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0))
    exact = json.loads((HERE / "gains.json").read_text())["scores"][: options.limit]
    tables = []
    for question, known in zip(read_questions(options.questions), exact, strict=False):
        written = rollouts(question, tokenizer)
        assert (question.text, len(written.roles)) == (known["question"], len(known["rows"]))
        plan = planned(written.turns, SETTINGS, tokenizer, "rows")
        plan = plan.scorer.before_forward(plan, forward)
        tables.append(score_table_of(plan, forward).round(decimals=6).tolist())
        print(len(tables), f"{time.perf_counter() - begin:.0f} s", flush=True)
    report = {
        "command": f".venv-vllm/bin/python evidence/real/precision_vllm.py --real DIR --questions {options.questions.name}",
        "machine": machine("torch", "transformers", "vllm"),
        "seconds": round(time.perf_counter() - begin),
        "results": errors(exact, tables),
        "scores": tables,
    }
    print(json.dumps(report["results"], indent=1))
    write(options.json, report)


if __name__ == "__main__":
    main()
