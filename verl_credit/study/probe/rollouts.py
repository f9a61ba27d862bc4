"""The rollouts that a probe reads, and their division into E (entropy) and U (update) without a shared prompt."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import torch


@dataclass(frozen=True)
class Rollouts:
    """Rollouts of one policy, right-padded over the response axis T.

    ``written_B_T`` marks the tokens that the policy wrote: prompts, observations and padding are False. Only these have an
    entropy and a log-prob here. Rows with the same ``group_B`` are rollouts of one prompt.
    """

    prompt_ids: list[torch.Tensor]
    """int64 [P_i] per row"""
    response_ids: list[torch.Tensor]
    """int64 [R_i] per row, observations included"""
    written_B_T: torch.Tensor
    """bool"""
    group_B: torch.Tensor
    """int64, the prompt of the row"""
    outcome_B: torch.Tensor
    """float64, the reward of the whole rollout"""
    trained_B_T: torch.Tensor | None = None
    """bool, the written tokens that the loss counts; None: all of them"""
    advantage_B_T: torch.Tensor | None = None
    """float64, the run's own credit per token; None where the rollouts were stored without it"""
    log_prob_B_T: torch.Tensor | None = None
    """float64, log-probs by the training engine at the parameters that wrote the rollouts"""

    def __post_init__(self) -> None:
        rows = len(self.prompt_ids)
        longest = max((len(ids) for ids in self.response_ids), default=0)
        for name in ("written_B_T", "trained_B_T", "advantage_B_T", "log_prob_B_T"):
            value = getattr(self, name)
            if value is not None and tuple(value.shape) != (rows, longest):
                raise ValueError(f"{name} has shape {tuple(value.shape)}, expected {(rows, longest)}")
        for name in ("response_ids", "group_B", "outcome_B"):
            if len(getattr(self, name)) != rows:
                raise ValueError(f"{name} has {len(getattr(self, name))} rows, expected {rows}")
        if rows == 0:
            raise ValueError("there is no rollout")
        for row, ids in enumerate(self.response_ids):
            if not len(self.prompt_ids[row]):
                raise ValueError(f"row {row} has an empty prompt: nothing comes before its first token")
            if self.written_B_T[row, len(ids) :].any():
                raise ValueError(f"row {row}: written_B_T marks padding")

    def __len__(self) -> int:
        return len(self.prompt_ids)

    @property
    def trained(self) -> torch.Tensor:
        return self.written_B_T if self.trained_B_T is None else self.trained_B_T & self.written_B_T

    @property
    def prompts(self) -> list[int]:
        """The groups, in the order of their first row."""
        return list(dict.fromkeys(self.group_B.tolist()))

    def of_prompts(self, groups: list[int]) -> Rollouts:
        """The rows of these prompts, in the order of the rows."""
        wanted = set(groups)
        return self.rows([row for row, group in enumerate(self.group_B.tolist()) if group in wanted])

    def rows(self, chosen: list[int]) -> Rollouts:
        """These rows; the response axis is cut to the longest of them."""
        longest = max((len(self.response_ids[row]) for row in chosen), default=0)
        cut = {}
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, list):
                cut[field.name] = [value[row] for row in chosen]
            elif value is not None:
                cut[field.name] = value[chosen, :longest] if value.dim() == 2 else value[chosen]
        return replace(self, **cut)
