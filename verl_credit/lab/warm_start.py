"""Demonstrations to a gated policy: supervised training goes on until sampled dev EM lies in the band."""

from __future__ import annotations

import random
from collections.abc import Callable

from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from verl_credit.lab.config import Gate, LabConfig
from verl_credit.lab.demos import Demonstrator, Segment
from verl_credit.lab.evaluate import Roller, Rollout, summarize
from verl_credit.lab.policy import Trainer, encode_demo, make_policy
from verl_credit.lab.questions import Question, make_questions
from verl_credit.lab.retrieval import LocalRetriever
from verl_credit.lab.tokenizer import name_groups
from verl_credit.lab.world import Article, World

# More long questions than are asked later: every further hop is rarer in a trajectory that may stop early.
DEMO_HOPS = {1: 0.30, 2: 0.40, 3: 0.30}


class LabGateError(RuntimeError):
    """The warm start ended outside the wanted band."""


def warm_start(
    world: World,
    tokenizer: PreTrainedTokenizerFast,
    retriever: LocalRetriever,
    dev: list[Question],
    config: LabConfig,
    seed: int,
    progress: Callable[[float, str], None],
) -> tuple[Qwen3ForCausalLM, dict[str, float]]:
    """The policy and what was measured on dev questions.

    Raises LabGateError when sampled EM is above the band, or still below it after the extra chunks.
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
            raise LabGateError(_outside(em, gate, seed, trainer.step))
        trainer.run(gate.chunk_steps, show, lr_scale=0.5)
    greedy = roller.roll(dev, temperature=0.0, seed=seed)
    return trainer.model, _measured(sampled, greedy, trainer.step)


def make_demonstrations(
    world: World, retriever: LocalRetriever, config: LabConfig, seed: int
) -> list[list[Segment]]:
    """Demonstrations on training questions, with the results that the index really gives."""
    rng = random.Random(f"demonstrations {seed}")
    articles = {article.id: article for article in world.articles.values()}
    retriever.search(f" {n} {r}" for n, r in world.articles if world.entities[n].split == "train")

    def search(query: str) -> list[Article]:
        return [articles[doc["id"]] for doc in retriever.search([query])[0]]

    demonstrator = Demonstrator(search, config.style, rng)
    questions = make_questions(world, "train", config.demonstrations, rng, hop_shares=DEMO_HOPS, repeat=True)
    return [demonstrator.write(question) for question in questions]


def _outside(em: float, gate: Gate, seed: int, steps: int) -> str:
    return (
        f"world seed {seed}: sampled dev EM is {em:.3f} after {steps} supervised steps, outside "
        f"[{gate.low}, {gate.high}]: GRPO would hardly move, or have no room. Use another world seed"
    )


def _measured(sampled: list[Rollout], greedy: list[Rollout], steps: int) -> dict[str, float]:
    """What the manifest records about the warm-started policy, on dev questions."""
    kept = {f"dev_{k}": round(v, 4) for k, v in summarize(sampled).items()}
    kept |= {f"dev_greedy_{k}": round(v, 4) for k, v in summarize(greedy).items() if k.startswith("em")}
    return kept | {"supervised_steps": steps}
