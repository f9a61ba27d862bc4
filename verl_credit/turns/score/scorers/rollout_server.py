"""Information gain by the rollout server: its log-probs of a prompt that ends with the gold answer.

The trajectory's own tokens are still in the server's prefix cache, so that an answer costs little more than its own
tokens. Scores are those of the rollout engine (its precision, its kernels), not of the trainer's forward.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

from omegaconf import DictConfig

from verl_credit.config.engines import engine_of
from verl_credit.config.fit import does_not_fit, turns_at_most
from verl_credit.config.settings import CreditSettings
from verl_credit.lazy import torch
from verl_credit.turns.rollout.book import RowRecord
from verl_credit.turns.score.requests import Request
from verl_credit.turns.score.scorers.scorer import Forward, GainPlan, Generate, Scorer


class ServerScorer(Scorer):
    name = "server"
    in_rollout = True

    def answers_behind_row(self, config: DictConfig) -> int:
        return 0

    async def score_rollout(
        self,
        requests: Sequence[Request],
        sequence: Sequence[int],
        generate: Generate,
        max_model_len: int | None,
        record: RowRecord,
    ) -> None:
        """A request that fails scores NaN; `info_gain_on_error` decides about it as with every other scorer."""
        begin = time.time()
        for request in requests:
            answer = request.answer
            tokens, n_gold = answer.token_ids[: answer.gold_end], answer.gold_end - answer.gold_start
            try:
                value = await server_score(generate, sequence[: request.base], tokens, n_gold, max_model_len)
            except Exception as error:
                value, record.score_error = math.nan, f"{type(error).__name__}: {error}"[:300]
            record.scores.append([request.column, request.alias, value])
        record.score_span = [begin, time.time()]

    def score(self, plan: GainPlan, forward: Forward) -> torch.Tensor:
        """The scores in the agent loops' records; NaN where a row lacks one."""
        scores_B = [
            {(k, alias): value for k, alias, value in record["scores"]} for record in plan.turns.records
        ]
        values = [scores_B[r.row].get((r.column, r.alias), math.nan) for r in plan.requests]
        return torch.tensor(values, dtype=torch.float64)

    def n_scored(self, plan: GainPlan) -> int:
        """Every trajectory requests its own scores."""
        return len(plan.requests)

    def cost(self, plan: GainPlan, around_s: float, forward_s: float) -> dict[str, float]:
        """The seconds hold those in which at least one trajectory was being scored. Other rollouts went on meanwhile, so
        this is the most that scoring can have cost. ``request_seconds``: the same, summed over trajectories."""
        records = zip(plan.turns.records, plan.turns.is_padding, strict=True)
        spans = [record["score_span"] for record, pad in records if not pad and record.get("score_span")]
        covered, until = 0.0, -math.inf  # the length of the union of the spans
        for begin, end in sorted(spans):
            covered += max(0.0, end - max(begin, until))
            until = max(until, end)
        request_s = sum(end - begin for begin, end in spans)
        return {"credit/gain/seconds": around_s + covered, "credit/gain/request_seconds": request_s}

    def says(self, config: DictConfig, settings: CreditSettings) -> str:
        contexts = turns_at_most(config)[1]
        prompts = "a prompt per context" if contexts is None else f"up to {contexts} prompts per trajectory"
        cheap = "" if engine_of(config).ours else ", cheap where its prefix cache still has them"
        return f"{prompts} and alias to the replica that wrote it{cheap}"


async def server_score(
    generate: Generate,
    context: Sequence[int],
    token_ids: Sequence[int],
    n_gold: int,
    max_model_len: int | None = None,
) -> float:
    """Mean log-prob of the last ``n_gold`` tokens of ``context + token_ids``, at temperature 1.

    A request whose answer `read_score` does not believe is repeated without the prefix cache. Raises RuntimeError when
    that answer is not believed either, and ValueError for a request beyond ``max_model_len``, which is not sent.
    """
    prompt = [*context, *token_ids]
    if why := does_not_fit(len(context), len(token_ids), max_model_len):
        raise ValueError(why)
    params = {"max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0, "detokenize": False}
    reasons: list[str] = []
    for skip_cache in (False, True):
        output = await generate(prompt, params | {"skip_reading_prefix_cache": skip_cache})
        score = read_score(output, prompt, n_gold, cacheless=skip_cache)
        if not isinstance(score, str):
            return score
        reasons.append(score)
    cached, without = reasons
    raise RuntimeError(
        f"algorithm.info_gain_scorer=server: {without} without the prefix cache, and {cached} with it"
    )


def read_score(output, prompt: Sequence[int], n_gold: int, *, cacheless: bool) -> float | str:
    """Mean of the log-probs of the last ``n_gold`` tokens of ``prompt``, if the answer certainly holds them; else the reason
    why it is not believed.

    With n tokens, of which c came out of the prefix cache, verl's vLLM server gives a list that ends with a dummy, and
    before it one entry for each of the last tokens of the prompt:

        n entries      the first c are uninitialised memory (vLLM's first model runner)
        n - c entries  what was computed, nothing else      (its second one)

    So the gold tokens are read from the end, and only if all of them were predicted at positions c and later: c <= n - 1 -
    n_gold. A list of another length, one without c, and one with other tokens' ids are not believed. ``cacheless``: the
    request forbade the server to read its cache; then a full list needs no c.
    """
    fields = output.extra_fields
    values, ids, cached = (
        fields.get(name) for name in ("prompt_logprobs", "prompt_ids", "num_cached_tokens")
    )
    if values is None or ids is None or len(values) != len(ids):
        return f"no prompt log-probs (stop reason {output.stop_reason!r})"
    if cached is None and cacheless:
        cached = 0
    counts = f"{len(values)} prompt log-probs for {len(prompt)} tokens, {'?' if cached is None else cached} of them cached"
    if cached is None or len(values) not in (len(prompt), len(prompt) - cached):
        return counts
    if cached > len(prompt) - 1 - n_gold:
        return f"{counts}, the answer's own among them"
    end = len(values) - 1
    if [entry[0] for entry in ids[end - n_gold : end]] != list(prompt[-n_gold:]):
        return f"{counts}, which are not those of the answer's tokens"
    return math.fsum(entry[0] for entry in values[end - n_gold : end]) / n_gold
