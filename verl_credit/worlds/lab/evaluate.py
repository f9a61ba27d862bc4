"""Search over the lab's index and multi-turn rollouts in one process, for the build and its gate on dev questions; training
uses the retriever service."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean as mean

from transformers import PreTrainedTokenizerFast

from verl_credit.policy.generation import BatchGenerator, SamplingParams
from verl_credit.turns.rollout.reward.qa import exact_match, extract_answer
from verl_credit.turns.rollout.thoughts import without_thoughts
from verl_credit.worlds.lab import protocol
from verl_credit.worlds.lab.encyclopedia import Question
from verl_credit.worlds.lab.limits import MAX_NEW_TOKENS, SEARCHES_OF_MIX, TOP_K
from verl_credit_retriever.encoder import SentenceEncoder
from verl_credit_retriever.index.search import SearchIndex


class LocalRetriever:
    """Finds documents for queries; every distinct query is searched once."""

    def __init__(self, encoder: Path, index: Path, *, k: int = TOP_K):
        self._encoder, self._index, self._k = SentenceEncoder(encoder), SearchIndex.load(index), k
        self._index.check_encoder(self._encoder)
        self._known: dict[str, list[dict]] = {}

    @property
    def fingerprint(self) -> str:
        """The index's fingerprint, as its server reports it."""
        return self._index.fingerprint

    def search(self, queries: Iterable[str]) -> list[list[dict]]:
        """Returns for each query the k best documents ({"id", "contents"}), best first."""
        queries = list(queries)
        missing = sorted(set(queries) - self._known.keys())
        if missing:
            results = self._index.search(self._encoder.encode_queries(missing), self._k)
            self._known |= {q: [doc for doc, _ in hits] for q, hits in zip(missing, results, strict=True)}
        return [self._known[q] for q in queries]


@dataclass
class Rollout:
    """A trajectory: the prompt, then the policy's turns and their observations."""

    question: Question
    prompt_ids: list[int]
    response_ids: list[int] = field(default_factory=list)
    turns: list[str] = field(default_factory=list)
    found_ids: list[list[str]] = field(default_factory=list)

    @property
    def answer(self) -> str | None:
        """The answer of the last turn; None when the trajectory is badly formatted."""
        return extract_answer(without_thoughts(self.turns[-1])) if self.turns else None

    @property
    def em(self) -> float:
        return exact_match(self.answer, [self.question.gold])


class Roller:
    """Rolls out questions with a policy and a retriever, as the agent loop does."""

    def __init__(
        self,
        model,
        tokenizer: PreTrainedTokenizerFast,
        retriever: LocalRetriever,
        *,
        max_searches: int = SEARCHES_OF_MIX,
    ):
        self._generator = BatchGenerator(model, pad_token_id=tokenizer.pad_token_id)
        self._tokenizer, self._retriever, self._max_searches = tokenizer, retriever, max_searches

    def roll(self, questions: Sequence[Question], *, temperature: float, seed: int) -> list[Rollout]:
        """Rolls out each question once (repeat a question for several samples)."""
        rng = random.Random(seed)
        rollouts = [Rollout(q, self._encode(protocol.prompt_text(q.text))) for q in questions]
        active = rollouts
        for turn in range(self._max_searches + 1):
            params = [
                SamplingParams(
                    max_new_tokens=MAX_NEW_TOKENS,
                    temperature=temperature,
                    seed=rng.randrange(2**31),
                    stop_token_ids=(self._tokenizer.eos_token_id,),
                )
                for _ in active
            ]
            prompts = [r.prompt_ids + r.response_ids for r in active]
            calls = []
            for rollout, output in zip(active, self._generator.generate(prompts, params), strict=True):
                rollout.response_ids += output.token_ids
                rollout.turns.append(self._tokenizer.decode(output.token_ids))
                text, ended = without_thoughts(rollout.turns[-1]), output.finish_reason == "stop"
                query = protocol.parse_query(text) if ended else None
                if query is not None and turn < self._max_searches:
                    calls.append((rollout, query))
            for (rollout, _), results in zip(calls, self._retriever.search(q for _, q in calls), strict=True):
                rollout.found_ids.append([doc["id"] for doc in results])
                text = protocol.observation_text(protocol.pages(doc["contents"] for doc in results))
                rollout.response_ids += self._encode(text)
            active = [rollout for rollout, _ in calls]
            if not active:
                break
        return rollouts

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)


def summarize(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Exact match (all, and per number of hops), answered share, searches and the longest response."""
    summary = {
        "em": mean(r.em for r in rollouts),
        "answered": mean(r.answer is not None for r in rollouts),
        "searches": mean(len(r.found_ids) for r in rollouts),
        "response_tokens_max": max(len(r.response_ids) for r in rollouts),
    }
    for hops in sorted({r.question.hops for r in rollouts}):
        summary[f"em_{hops}hop"] = mean(r.em for r in rollouts if r.question.hops == hops)
    return summary


OPEN = (0.05, 0.95)
"""A decision is open where a turn succeeds with a probability between these."""


def right_turns(rollouts: Sequence[Rollout]) -> list[float]:
    """P(a turn is right | k searches were right before it) for k = 0, 1, ... up to the hops of the longest question.

    A search is right when it returns the article of the next hop, an answer after all hops when it is the gold answer. Other
    searches leave k as it is. A k that no rollout reaches has probability 0.
    """
    longest = max(r.question.hops for r in rollouts)
    turns, right = [0] * (longest + 1), [0] * (longest + 1)
    for rollout in rollouts:
        needed, done = rollout.question.gold_ids, 0
        for found in rollout.found_ids:
            turns[done] += 1
            if done < len(needed) and needed[done] in found:
                right[done] += 1
                done += 1
        if len(rollout.turns) > len(rollout.found_ids):
            turns[done] += 1
            right[done] += int(done == len(needed) and rollout.em)
    return [one / max(of, 1) for one, of in zip(right, turns, strict=True)]


def open_decisions(probabilities: Sequence[float]) -> int:
    """The number of turns whose success is neither rare nor nearly certain."""
    return sum(OPEN[0] < one < OPEN[1] for one in probabilities)
