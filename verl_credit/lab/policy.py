"""The tiny Qwen3 policy and its supervised warm start."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from verl_credit.lab.demos import Segment
from verl_credit.lab.encoder import NamePermuter
from verl_credit.lab.muon import Muon


@dataclass(frozen=True)
class WarmStart:
    """The supervised stage."""

    steps: int = 1000
    batch: int = 16
    muon_lr: float = 0.02
    adamw_lr: float = 3e-3
    weight_decay: float = 0.05
    warmup: int = 30
    short_share: float = 0.35
    """only this share of the demonstrations, the shortest, is used for the first ``short_steps``"""
    short_steps: int = 300
    name_weight: float = 2.0
    """weight of name tokens in the loss: copying is what is hard"""


@dataclass(frozen=True)
class Demo:
    """Token ids [T] and the loss weight of each token (0: not written by the policy)."""

    ids_T: torch.Tensor
    weight_T: torch.Tensor


def make_policy(tokenizer: PreTrainedTokenizerFast, seed: int, *, layers: int = 3) -> Qwen3ForCausalLM:
    """A Qwen3 of some 0.7 M parameters. The library's initial std of 0.02 learns to copy far too late."""
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
    """Every segment is encoded by itself, as in a rollout, where observations are appended as tokens."""
    ids, weights = [], []
    for text, by_policy in segments:
        part = tokenizer.encode(text, add_special_tokens=False)
        ids += part
        weights += [(name_weight if i in names else 1.0) if by_policy else 0.0 for i in part]
    return Demo(torch.tensor(ids), torch.tensor(weights))


class Trainer:
    """Supervised training by steps; ``run`` may be called again to go on.

    Names are permuted within their kind in every sample, so that copying from the context is the only way
    to name one: nothing about the world can be memorised, and held-out entities are as easy as training ones.
    """

    def __init__(
        self,
        model: Qwen3ForCausalLM,
        demos: list[Demo],
        names: list[list[int]],
        style: WarmStart,
        seed: int,
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
        self._full_lr = [style.muon_lr, style.adamw_lr]
        self.step = 0

    def run(
        self, steps: int, on_step: Callable[[int], None] = lambda step: None, lr_scale: float = 1.0
    ) -> None:
        """``steps`` updates: warm up, hold, decay linearly over the last half."""
        self.model.train()
        for done in range(steps):
            scale = lr_scale * min(1.0, (done + 1) / self._style.warmup, 2 * (1 - done / steps))
            for optimizer, lr in zip(self._optimizers, self._full_lr, strict=True):
                optimizer.param_groups[0]["lr"] = lr * scale
                optimizer.zero_grad()
            self._loss(self._batch()).backward()
            for optimizer in self._optimizers:
                optimizer.step()
            self.step += 1
            on_step(self.step)
        self.model.eval()

    def _batch(self) -> list[Demo]:
        """Neighbours in length, so that little is spent on padding."""
        style, rng = self._style, self._rng
        share = style.short_share if self.step < style.short_steps else 1.0
        available = int(len(self._demos) * share)
        start = rng.randrange(max(1, available - 4 * style.batch))
        window = self._demos[start : start + 4 * style.batch]
        return rng.sample(window, min(style.batch, len(window)))

    def _loss(self, batch: list[Demo]) -> torch.Tensor:
        rows = [self._permute.draw()[demo.ids_T] for demo in batch]
        ids_B_T = nn.utils.rnn.pad_sequence(rows, batch_first=True)
        weight_B_T = nn.utils.rnn.pad_sequence([d.weight_T for d in batch], batch_first=True)
        # Padding on the right is never looked at by the causal attention of real tokens: no mask needed.
        hidden_B_T_D = self.model.model(input_ids=ids_B_T, use_cache=False).last_hidden_state
        wanted = weight_B_T[:, 1:] > 0
        logits_N_V = self.model.lm_head(hidden_B_T_D[:, :-1][wanted])
        loss_N = nn.functional.cross_entropy(logits_N_V, ids_B_T[:, 1:][wanted], reduction="none")
        weight_N = weight_B_T[:, 1:][wanted]
        return (loss_N * weight_N).sum() / weight_N.sum()
