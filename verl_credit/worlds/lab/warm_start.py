"""The tiny Qwen3 policy, its training on demonstrations until sampled dev EM is inside the gate, and the optimizer Muon."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from verl_credit.errors import PreflightError
from verl_credit.worlds.lab.config import LabConfig, WarmStart
from verl_credit.worlds.lab.demos import Demonstrator, Segment
from verl_credit.worlds.lab.encoder import NamePermuter
from verl_credit.worlds.lab.encyclopedia import Article, Question, World, make_questions
from verl_credit.worlds.lab.evaluate import LocalRetriever, Roller, open_decisions, right_turns, summarize
from verl_credit.worlds.lab.limits import limits_of
from verl_credit.worlds.lab.protocol import name_groups
from verl_credit.worlds.supervised import token_losses, updates

# Quintic Newton-Schulz coefficients: they push every singular value towards 1, fast rather than exactly.
_A, _B, _C = 3.4445, -4.7750, 2.0315

# The weight of the last norm, and so every logit, is multiplied by a scale: the lowest, the first to be tried, the highest.
LOGIT_SCALES = (0.4, 1.0, 2.5)


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
    """The policy and its measurements on dev questions. Raises LabGateError when sampled EM is above the gate, or still
    below it after the extra chunks; with hops, when no scale of the logits brings it inside."""
    style, gate = config.warm_start, config.gate
    names = name_groups(tokenizer, world)
    copied = {i for group in names for i in group}
    written = make_demonstrations(world, retriever, config, seed)
    demos = [encode_demo(segments, tokenizer, copied, style.name_weight) for segments in written]
    policy = make_policy(tokenizer, seed)
    trainer = Trainer(policy, demos, names, style, seed)
    roller = Roller(trainer.model, tokenizer, retriever, max_searches=limits_of(config.hops).max_searches)
    planned = style.steps + (gate.chunk_steps * gate.max_chunks if gate else 0)

    def show(step: int) -> None:
        progress(step / planned, f"policy: supervised step {step}")

    trainer.run(style.steps, show)
    norm, (low, scale, high) = trainer.model.model.norm, LOGIT_SCALES
    learned_D = norm.weight.detach().clone()
    for chunk in range(gate.max_chunks + 1 if gate else 1):
        sampled = roller.roll(dev, temperature=1.0, seed=seed)
        em, right = summarize(sampled)["em"], right_turns(sampled)
        found = f"sampled dev EM {em:.3f}, {open_decisions(right)} of {len(right)} decisions open"
        progress(trainer.step / planned, f"policy: {found} after {trainer.step} steps")
        if gate is None or gate.low <= em <= gate.high:
            break
        if chunk == gate.max_chunks or (em > gate.high and not gate.scales_logits):
            raise LabGateError(
                f"world seed {seed}: sampled dev EM is {em:.3f} after {trainer.step} supervised steps, outside "
                f"[{gate.low}, {gate.high}]: GRPO would learn too little. Use another world seed"
            )
        if gate.scales_logits:
            low, high = (scale, high) if em < gate.low else (low, scale)
            scale = (low * high) ** 0.5
            norm.weight.data.copy_(learned_D * scale)
        else:
            trainer.run(gate.chunk_steps, show, lr_scale=0.5)
    greedy = summarize(roller.roll(dev, temperature=0.0, seed=seed))
    measured = {f"dev_{k}": round(v, 4) for k, v in summarize(sampled).items()}
    measured |= {f"dev_greedy_{k}": round(v, 4) for k, v in greedy.items() if k.startswith("em")}
    measured |= {f"dev_right_turn_{k}": round(share, 4) for k, share in enumerate(right)}
    measured |= {"dev_open_decisions": open_decisions(right), "supervised_steps": trainer.step}
    measured |= {"logit_scale": round(scale, 4)}
    return trainer.model, measured


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
    questions = make_questions(
        world, "train", config.demonstrations, rng, hop_shares=config.demo_hops, repeat=True
    )
    return [demonstrator.write(question) for question in questions]


@dataclass(frozen=True)
class Demo:
    """Token ids [T] and the loss weight of each token (0: not written by the policy)."""

    ids_T: torch.Tensor
    weight_T: torch.Tensor


def make_policy(tokenizer: PreTrainedTokenizerFast, seed: int, *, layers: int = 3) -> Qwen3ForCausalLM:
    """A Qwen3 of about 0.7 M parameters. With the library's initial std of 0.02 it learns to copy much later."""
    config = Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=128, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, intermediate_size=256, tie_word_embeddings=True,
        initializer_range=0.06, max_position_embeddings=1024, pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id, bos_token_id=None,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(random.Random(f"policy {seed}").randrange(2**31))
        return Qwen3ForCausalLM(config)


def encode_demo(
    segments: list[Segment], tokenizer: PreTrainedTokenizerFast, names: set[int], name_weight: float
) -> Demo:
    """Encode every segment separately, as in a rollout, which appends observations as tokens."""
    ids, weights = [], []
    parts = tokenizer([text for text, _ in segments], add_special_tokens=False)["input_ids"]
    for part, (_, by_policy) in zip(parts, segments, strict=True):
        ids += part
        weights += [(name_weight if i in names else 1.0) if by_policy else 0.0 for i in part]
    return Demo(torch.tensor(ids), torch.tensor(weights))


class Trainer:
    """Supervised training by steps; ``run`` may be called again to continue.

    Names are permuted within their kind in every sample, so that the policy must copy them from the context. It cannot
    memorise the world, and held-out entities are as easy as training ones.
    """

    def __init__(
        self, model: Qwen3ForCausalLM, demos: list[Demo], names: list[list[int]], style: WarmStart, seed: int
    ):
        self.model, self._style, self._rng = model, style, random.Random(f"warm start {seed}")
        self._demos = sorted(demos, key=lambda d: len(d.ids_T))
        self._permute = NamePermuter(names, model.config.vocab_size, self._rng.randrange(2**31))
        matrices = [p for p in model.model.layers.parameters() if p.ndim == 2]
        chosen = {id(p) for p in matrices}
        rest = [p for p in model.parameters() if id(p) not in chosen]
        self._optimizers = [
            Muon(matrices, lr=style.muon_lr, weight_decay=style.weight_decay),
            torch.optim.AdamW(rest, lr=style.adamw_lr, weight_decay=style.weight_decay, betas=(0.9, 0.95)),
        ]
        self.step = 0

    def run(
        self, steps: int, on_step: Callable[[int], None] = lambda step: None, lr_scale: float = 1.0
    ) -> None:
        """``steps`` updates: the learning rate rises, stays, and falls linearly over the last half."""
        warmup = self._style.warmup
        scales = [lr_scale * min(1.0, (step + 1) / warmup, 2 * (1 - step / steps)) for step in range(steps)]
        for _ in updates(self.model, self._optimizers, scales, self._backward):
            self.step += 1
            on_step(self.step)

    def _backward(self) -> float:
        batch = self._batch()
        rows = [self._permute.draw()[demo.ids_T] for demo in batch]
        ids_B_T = nn.utils.rnn.pad_sequence(rows, batch_first=True)
        weight_B_T = nn.utils.rnn.pad_sequence([d.weight_T for d in batch], batch_first=True)
        loss_N = token_losses(self.model, ids_B_T, weight_B_T > 0)
        weight_N = weight_B_T[:, 1:][weight_B_T[:, 1:] > 0]
        loss = (loss_N * weight_N).sum() / weight_N.sum()
        loss.backward()
        return loss.item()

    def _batch(self) -> list[Demo]:
        """Samples of similar length, which saves padding."""
        style, rng = self._style, self._rng
        share = style.short_share if self.step < style.short_steps else 1.0
        available = int(len(self._demos) * share)
        start = rng.randrange(max(1, available - 4 * style.batch))
        window = self._demos[start : start + 4 * style.batch]
        return rng.sample(window, min(style.batch, len(window)))


class Muon(torch.optim.Optimizer):
    """W <- W (1 - lr wd) - lr sqrt(max(1, rows / columns)) NS(g + momentum * m),  m <- momentum * m + g.

    NS(.) is five Newton-Schulz steps towards the nearest (semi-)orthogonal matrix. Only for 2-D parameters.
    Source: K. Jordan et al., "Muon: an optimizer for hidden layers" (2024).
    """

    def __init__(self, params: Iterable, lr: float = 0.02, momentum: float = 0.95, weight_decay: float = 0.0):
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    def step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self._update(p, group)

    @torch.no_grad()
    def _update(self, p: torch.Tensor, group: dict) -> None:
        m = self.state[p].setdefault("momentum", torch.zeros_like(p))
        m.mul_(group["momentum"]).add_(p.grad)
        update = orthogonalize(p.grad + group["momentum"] * m)
        p.mul_(1 - group["lr"] * group["weight_decay"])
        p.add_(update, alpha=-group["lr"] * max(1.0, p.shape[0] / p.shape[1]) ** 0.5)


def orthogonalize(matrix: torch.Tensor, steps: int = 5) -> torch.Tensor:
    """A matrix with (roughly) the singular vectors of ``matrix`` and all singular values near 1."""
    wide = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
    x = wide / (wide.norm() + 1e-7)
    for _ in range(steps):
        gram = x @ x.T
        x = _A * x + (_B * gram + _C * gram @ gram) @ x
    return x.T if matrix.shape[0] > matrix.shape[1] else x
