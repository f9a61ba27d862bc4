"""Trains the policy on demonstrations until its sampled dev EM is inside the gate."""

from __future__ import annotations

import random
from collections.abc import Callable

from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from verl_credit.errors import PreflightError
from verl_credit.worlds.lab.config import LabConfig
from verl_credit.worlds.lab.demos import Demonstrator, Segment
from verl_credit.worlds.lab.evaluate import Roller, summarize
from verl_credit.worlds.lab.questions import Question, make_questions
from verl_credit.worlds.lab.retrieval import LocalRetriever
from verl_credit.worlds.lab.tiny_policy import Trainer, encode_demo, make_policy
from verl_credit.worlds.lab.tokenizer import name_groups
from verl_credit.worlds.lab.world import Article, World

# More long questions than in the splits: demonstrations that stop early contain fewer later hops.
DEMO_HOPS = {1: 0.30, 2: 0.40, 3: 0.30}


class LabGateError(PreflightError):
    """The warm start ended outside the gate."""


def warm_start(
    world: World,
    tokenizer: PreTrainedTokenizerFast,
    retriever: LocalRetriever,
    dev: list[Question],
    config: LabConfig,
    seed: int,
    progress: Callable[[float, str], None],
) -> tuple[Qwen3ForCausalLM, dict[str, float]]:
    """The policy and its measurements on dev questions.

    Raises LabGateError when sampled EM is above the gate, or still below it after the extra chunks.
    """
    style, gate = config.warm_start, config.gate
    names = name_groups(tokenizer, world)
    copied = {i for group in names for i in group}
    demos = [
        encode_demo(segments, tokenizer, copied, style.name_weight)
        for segments in make_demonstrations(world, retriever, config, seed)
    ]
    trainer = Trainer(make_policy(tokenizer, seed), demos, names, style, seed)
    roller = Roller(trainer.model, tokenizer, retriever)
    planned = style.steps + (gate.chunk_steps * gate.max_chunks if gate else 0)

    def show(step: int) -> None:
        progress(step / planned, f"policy: supervised step {step}")

    trainer.run(style.steps, show)
    for chunk in range(gate.max_chunks + 1 if gate else 1):
        sampled = roller.roll(dev, temperature=1.0, seed=seed)
        em = summarize(sampled)["em"]
        progress(trainer.step / planned, f"policy: sampled dev EM {em:.3f} after {trainer.step} steps")
        if gate is None or gate.low <= em <= gate.high:
            break
        if em > gate.high or chunk == gate.max_chunks:
            raise LabGateError(
                f"world seed {seed}: sampled dev EM is {em:.3f} after {trainer.step} supervised steps, outside "
                f"[{gate.low}, {gate.high}]: GRPO would learn too little. Use another world seed"
            )
        trainer.run(gate.chunk_steps, show, lr_scale=0.5)
    greedy = summarize(roller.roll(dev, temperature=0.0, seed=seed))
    measured = {f"dev_{k}": round(v, 4) for k, v in summarize(sampled).items()}
    measured |= {f"dev_greedy_{k}": round(v, 4) for k, v in greedy.items() if k.startswith("em")}
    return trainer.model, measured | {"supervised_steps": trainer.step}


def make_demonstrations(
    world: World, retriever: LocalRetriever, config: LabConfig, seed: int
) -> list[list[Segment]]:
    """Demonstrations on training questions, with the index's real results."""
    rng = random.Random(f"demonstrations {seed}")
    articles = {article.id: article for article in world.articles.values()}
    retriever.search(f" {n} {r}" for n, r in world.articles if world.entities[n].split == "train")

    def search(query: str) -> list[Article]:
        return [articles[doc["id"]] for doc in retriever.search([query])[0]]

    demonstrator = Demonstrator(search, config.style, rng)
    questions = make_questions(world, "train", config.demonstrations, rng, hop_shares=DEMO_HOPS, repeat=True)
    return [demonstrator.write(question) for question in questions]
