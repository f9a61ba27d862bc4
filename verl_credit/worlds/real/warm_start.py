"""A short supervised start: what the policy writes in the demonstrations, by AdamW over weights in fp32, computed in
the precision that the CPU multiplies fastest."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedModel

from verl_credit.precision import cpu_precision

Demo = tuple[list[int], list[int]]  # token ids, 1 where the policy wrote the token


@dataclass(frozen=True)
class WarmStart:
    epochs: int = 3
    batch: int = 4
    lr: float = 5e-5
    warmup: int = 5
    """updates"""


def train(
    model: PreTrainedModel,
    demos: Sequence[Demo],
    style: WarmStart,
    seed: int,
    on_step: Callable[[int, int, float], None] = lambda step, steps, loss: None,
) -> list[float]:
    """The loss of every update: the mean over the tokens that the policy wrote, in nats.

    The learning rate rises over ``warmup`` updates and falls linearly to zero.
    """
    rng = random.Random(f"supervised start {seed}")
    per_epoch = -(-len(demos) // style.batch)
    steps, losses = style.epochs * per_epoch, []
    optimizer = torch.optim.AdamW(model.parameters(), lr=style.lr, weight_decay=0.0, betas=(0.9, 0.95))
    model.train()
    for epoch in range(style.epochs):
        order = rng.sample(range(len(demos)), len(demos))
        for start in range(0, len(order), style.batch):
            step = epoch * per_epoch + start // style.batch
            scale = min((step + 1) / style.warmup, (steps - step) / steps)
            optimizer.param_groups[0]["lr"] = style.lr * scale
            optimizer.zero_grad()
            batch = [demos[i] for i in order[start : start + style.batch]]
            written = sum(sum(mask) for _, mask in batch)
            loss = 0.0
            for ids, mask in batch:  # a row at a time: no padding, and the logits of one row
                part = _summed(model, ids, mask) / written
                part.backward()
                loss += part.item()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            losses.append(loss)
            on_step(step + 1, steps, loss)
    model.eval()
    return losses


def _summed(model: PreTrainedModel, ids: Sequence[int], mask: Sequence[int]) -> torch.Tensor:
    """- sum over the policy's tokens of log p(token | tokens before it)."""
    ids_T, mask_T = torch.tensor(ids), torch.tensor(mask, dtype=torch.bool)
    with torch.autocast("cpu", torch.bfloat16, enabled=cpu_precision() == "bf16"):
        hidden_1_T_D = model.model(input_ids=ids_T[None], use_cache=False).last_hidden_state
        logits_N_V = model.lm_head(hidden_1_T_D[0, :-1][mask_T[1:]])
    return nn.functional.cross_entropy(logits_N_V.float(), ids_T[1:][mask_T[1:]], reduction="sum")
