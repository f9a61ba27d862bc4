"""The rollouts that a probe reads, for example those that a step stored."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from pathlib import Path

import torch

from verl_credit.records.run.table_files import DamagedTable, read_table


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
    trained_B_T: torch.Tensor | None = None
    """bool, the written tokens in the loss; None: all of them"""
    advantage_B_T: torch.Tensor | None = None
    """float64, the run's own credit per token; None where the rollouts were stored without it"""

    def __post_init__(self) -> None:
        for row, ids in enumerate(self.prompt_ids):
            if not len(ids):
                raise ValueError(f"row {row} has an empty prompt: nothing comes before its first token")

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
        """The rows of these prompts, in the order of the rows; the response axis is cut to the longest of them."""
        chosen = [row for row, group in enumerate(self.group_B.tolist()) if group in groups]
        longest = max((len(self.response_ids[row]) for row in chosen), default=0)
        cut = {}
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, list):
                cut[field.name] = [value[row] for row in chosen]
            elif value is not None:
                cut[field.name] = value[chosen, :longest] if value.dim() == 2 else value[chosen]
        return replace(self, **cut)


@dataclass(frozen=True)
class RolloutFacts:
    """Facts that a step stored beside its `Rollouts`: how they were sampled, and the loss of the update."""

    policy_step: int
    """The parameters of checkpoint ``global_step_{policy_step}`` wrote them."""
    temperature: float
    top_p: float
    top_k: int
    """-1: all tokens"""
    objective: dict
    """``loss_mode``, ``loss_agg_mode``, clip ranges, KL and entropy coefficients, ``grad_clip``, ... by their keys"""
    rollout_is_weight_B_T: torch.Tensor | None


def read_rollouts(path: Path) -> tuple[Rollouts, RolloutFacts]:
    """Read `RUN/tables/rollouts_000012.parquet` (`keep_rollouts`). Rows with the same prompt are one group, also where the
    data has it twice.

    Raises DamagedTable, naming the file, for one that cannot be read, whose rows do not fit together, or that has not all
    rollouts of its step.
    """
    table = read_table(path)
    if table.update is None:
        raise DamagedTable(f"{path} has some groups of its step alone: train with keep_rollouts.groups=null")
    c, about = table.columns, table.update
    if not c["prompt_ids"]:
        raise DamagedTable(f"{path} cannot be read: there is no rollout")
    prompts: dict[tuple[int, ...], int] = {}
    try:
        rollouts = Rollouts(
            prompt_ids=[torch.tensor(ids, dtype=torch.int64) for ids in c["prompt_ids"]],
            response_ids=[torch.tensor(ids, dtype=torch.int64) for ids in c["response_ids"]],
            written_B_T=padded(c, "written", torch.bool),
            group_B=torch.tensor([prompts.setdefault(tuple(ids), len(prompts)) for ids in c["prompt_ids"]]),
            trained_B_T=padded(c, "trained", torch.bool),
            advantage_B_T=padded(c, "advantage"),
        )
        sampling = [about["sampling"][name] for name in ("temperature", "top_p", "top_k")]
        weight_B_T = padded(c, "rollout_is_weight")
        return rollouts, RolloutFacts(about["policy_step"], *sampling, about["objective"], weight_B_T)
    except (KeyError, TypeError, ValueError, IndexError, RuntimeError) as error:
        raise DamagedTable(f"{path} cannot be read: {type(error).__name__}: {error}") from error


def padded(
    c: dict[str, list], name: str, dtype: torch.dtype = torch.float64, fill: float = 0
) -> torch.Tensor | None:
    """[B, T] from a list per row; None for a column that the step did not make."""
    if all(row is None for row in c[name]):
        return None
    for place, (row, ids) in enumerate(zip(c[name], c["response_ids"], strict=True)):
        if len(row) != len(ids):
            raise ValueError(f"row {place} has {len(ids)} response_ids and {len(row)} of {name}")
    rows = [torch.tensor(row, dtype=dtype) for row in c[name]]
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=fill)
