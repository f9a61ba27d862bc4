"""Supervised training of a policy: updates under a schedule of learning rates, and the loss of chosen tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import nn
from transformers import PreTrainedModel


def updates(
    model: PreTrainedModel,
    optimizers: Sequence[torch.optim.Optimizer],
    scales: Sequence[float],
    backward: Callable[[], float],
) -> Iterator[float]:
    """The loss of every update, one per entry of ``scales``: a factor on each optimizer's own learning rate.

    ``backward`` adds the gradient of the next batch and returns its loss. Afterwards the model is in evaluation mode.
    """
    model.train()
    for scale in scales:
        for optimizer in optimizers:
            optimizer.param_groups[0]["lr"] = optimizer.defaults["lr"] * scale
            optimizer.zero_grad()
        loss = backward()
        for optimizer in optimizers:
            optimizer.step()
        yield loss
    model.eval()


def token_losses(
    model: PreTrainedModel, ids_B_T: torch.Tensor, chosen_B_T: torch.Tensor, reduction: str = "none"
) -> torch.Tensor:
    """- log p(token | tokens before it) of the chosen tokens, in float32. Causal attention of a real token never reaches
    padding on its right, so no mask is needed."""
    hidden_B_T_D = model.model(input_ids=ids_B_T, use_cache=False).last_hidden_state
    chosen_B_T = chosen_B_T[:, 1:]
    logits_N_V = model.lm_head(hidden_B_T_D[:, :-1][chosen_B_T])
    return nn.functional.cross_entropy(logits_N_V.float(), ids_B_T[:, 1:][chosen_B_T], reduction=reduction)
