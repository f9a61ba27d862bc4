"""Scorer `server`: compares vLLM's log-probs of a prompt with a cached beginning, as our scorer reads them, with `branch`.

English text, an answer after every context, as in `branches`. One generation from each row caches its contexts, as in a
rollout; then the scorer requests every answer, as in training. Counted: cached tokens, lists shorter than the prompt
(vLLM's second model runner leaves cached positions out), and answers requested again without the cache.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace

import torch

from gpu.half_hour import world
from gpu.models import english, forward_script, load
from gpu.part_branches import _row
from gpu.record import at_least, at_most
from verl_credit.policy.attention.implementation import forced

ROWS, LENGTH, TURNS = 4, 2048, 6
SOURCE = "docs/engines.md; in bf16 log-probs with and without the cache differ by up to 0.045"


def run(setting, record) -> None:
    made = None if setting.model else _random(Path(setting.work).resolve(), setting.device)
    setting = replace(setting, model=setting.model or str(made))  # the same weights for both
    script, (ids, source) = forward_script(), english(setting)
    batch = [_row(script, ids, number, LENGTH, TURNS, setting.device) for number in range(ROWS)]
    model, weights = load(setting, torch.bfloat16)
    with forced("sdpa"), torch.no_grad():
        branch = [
            float(one.double().mean())
            for row in batch
            for one in script.run("branch", model, row[0], row[1], row[2])
        ]
    del model
    torch.cuda.empty_cache()
    server = Server(setting.model)
    found = server.scores(
        [(row.tolist(), [a.tolist() for a in answers], ends) for row, answers, ends in batch]
    )
    apart = (torch.tensor(found) - torch.tensor(branch)).abs()
    record.add(
        "server against branch",
        {
            "largest_error": float(apart.max()), "mean_error": float(apart.mean()), "scores": len(found),
            "cached_tokens": server.cached, "short_lists": server.short, "asked_again": server.again,
            "text": source, "model": f"random {weights}" if made else weights,
        },
        {"largest_error": at_most(2 * 0.045), "cached_tokens": at_least(1), "asked_again": at_most(0)}, SOURCE,
    )  # fmt: skip


def _random(work: Path, device: str) -> Path:
    world.prepare(work, tiny=False)
    return world.weights(work, "qwen3-4b", device)


@dataclass
class Server:
    """vLLM without verl's server; prompt log-probs have that server's form, by its own function."""

    folder: str
    cached: int = 0
    short: int = 0
    again: int = 0
    _engine: object = field(default=None, init=False)

    def scores(self, batch) -> list[float]:
        from vllm import LLM, SamplingParams

        from verl_credit.turns.score.scorers.rollout_server import server_score

        self._engine = LLM(
            self.folder, dtype="bfloat16", max_model_len=LENGTH + 64, gpu_memory_utilization=0.4,
            enable_prefix_caching=True, enforce_eager=True, seed=0,
        )  # fmt: skip
        found = []
        for row, answers, ends in batch:
            self._engine.generate([{"prompt_token_ids": row}], SamplingParams(max_tokens=1), use_tqdm=False)
            for answer, end in zip(answers, ends, strict=True):
                scoring = server_score(self.generate, row[:end], answer, len(answer) - 1)
                found.append(asyncio.run(scoring))
        return found

    async def generate(self, prompt: list[int], wanted: dict) -> SimpleNamespace:
        from verl.workers.rollout.vllm_rollout.utils import extract_prompt_logprobs
        from vllm import SamplingParams

        self.again += bool(wanted["skip_reading_prefix_cache"])
        (output,) = self._engine.generate(
            [{"prompt_token_ids": prompt}], SamplingParams(**wanted), use_tqdm=False
        )
        fields = {"num_cached_tokens": output.num_cached_tokens}
        extract_prompt_logprobs(output, wanted["prompt_logprobs"], fields)
        self.cached += output.num_cached_tokens or 0
        self.short += len(fields["prompt_logprobs"]) < len(prompt)
        return SimpleNamespace(extra_fields=fields, stop_reason="completed")
