"""Providers of the value of the state before every turn (`algorithm.turn_values`): one entry each in `PROVIDERS`.

Keys, refusals, `explain`, `plan` and `fidelity` go through these entries and know no provider by its name. A provider sees
neither the row's outcome nor what was made of it, because a value may not follow it; ``by_state`` alone reads the others'.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from verl_credit.lazy import torch
from verl_credit.names import TRAINER_MODE

KEY = "algorithm.turn_values"


@dataclass(frozen=True)
class Seen:
    """What is known of a step's states before their turns' responses."""

    turn_B_K1: torch.Tensor
    """Marks the turns of valid rows."""
    turn_ids_B_T: torch.Tensor
    progress: Callable[[], torch.Tensor]
    """Makes [B, K1, 2] in float64: whether a gold answer was read, and the searches so far; NaN where there is no turn."""
    gold_B_K1: torch.Tensor | None = None
    """The policy's probability of the gold answer; None where no gain is measured."""
    value_B_T: torch.Tensor | None = None
    """The critic's value of the state before each token; None without a critic."""
    rows: Any = None
    """The step's rollouts, for a user's function and for columns (`turns.step.signals.signal.StepRows`)."""


Make = Callable[[Seen], "torch.Tensor"]


@dataclass(frozen=True)
class Need:
    """The only value that a key may have (null is 0, false and ""), and why."""

    key: str
    only: Any
    why: str


@dataclass(frozen=True)
class Provider:
    """A provider of values. A regression on features (``observe``) makes them, or they are there already (``value``)."""

    name: str
    says: str
    """What V is, for `explain`."""
    observe: Make | None = None
    """Makes the features beside the group's, float64 [B, K1, D]; NaN: not observed. None: there are none."""
    names: tuple[str, ...] = ()
    """The names of these features. A checkpoint with others is refused."""
    names_with_gains: tuple[str, ...] = ()
    """The names of further features where the run measures gains."""
    by_state: bool = False
    """Further features say what the prompt's other rollouts returned from an equal state (`algorithm.turn_anchor`)."""
    least_rollouts: int = 1
    """Rollouts of a prompt without which its features say nothing."""
    least_lam: float = 0.0
    """The smallest lam in an environment where success ends a rollout early. Below it V, which sees little but the turn's
    number there, makes late turns look bad (docs/turn-values.md)."""
    value: Make | None = None
    """Makes V itself, float64 [B, K1], 0 where there is no turn. None: a regression makes it."""
    field: str = ""
    """The per-token field of verl's that ``value`` reads, and whose model is trained on the turns' returns."""
    columns: tuple[str, ...] = ()
    """The data file's columns that it reads."""
    needs: tuple[Need, ...] = ()
    idle: tuple[Need, ...] = ()
    """Needs of a run without this provider."""
    cost: str = ""
    """What it costs a step, for `explain`."""
    uncounted: str = ""
    """What `plan` does not count."""
    training_alone: str = ""
    """Why there is no such value outside of training; "" where there is."""

    @property
    def fits(self) -> bool:
        """A regression makes the values."""
        return self.value is None

    def why_not(self, value_of: Callable[[str], Any], *, chosen: bool) -> Iterator[Need]:
        """Yields the needs that a run lacks, with this provider (``chosen``) or without it. ``value_of(key)``: its value."""
        for need in self.needs if chosen else self.idle:
            if (value_of(need.key) or type(need.only)()) != need.only:
                yield need


def _features(seen: Seen) -> torch.Tensor:
    """Whether a gold answer stands in what was observed so far, the searches so far, and the gold answer's probability."""
    parts = [seen.progress()]
    if seen.gold_B_K1 is not None:
        parts.append(seen.gold_B_K1.to(torch.float64)[:, :, None])
    return torch.cat(parts, dim=2)


def _critic(seen: Seen) -> torch.Tensor:
    """The critic's value at the first token of each turn: its output at the token before, which has read the state alone."""
    if seen.value_B_T is None:
        raise ValueError(f"{KEY}=critic needs verl's critic, which this trainer does not have")
    is_turn_B_K1_T = seen.turn_ids_B_T[:, None] == torch.arange(seen.turn_B_K1.shape[1])[:, None]
    value_B_K1 = seen.value_B_T.to(torch.float64).gather(1, is_turn_B_K1_T.byte().argmax(dim=2))
    return torch.where(seen.turn_B_K1, value_B_K1, 0.0)


_WARM_UP = Need(
    "trainer.critic_warmup", 0, "steps without an update of the policy are not built; set it to 0"
)

PROVIDERS = {provider.name: provider for provider in (
    Provider(
        "group",
        "V of each turn: a regression on the prompt's other outcomes and the turn's number",
        least_lam=0.9,
    ),
    Provider(
        "features",
        "V of each turn: as `group`, and on whether a gold answer was read, the searches, and its probability where gains "
        "are measured",
        observe=_features,
        names=("gold seen", "searches"),
        names_with_gains=("gold probability",),
    ),
    Provider(
        "state",
        "V of each turn: as `group`, and on what the prompt's other rollouts returned from an equal state (turn_anchor)",
        names=("mean there", "others there", "mean where others were", "was there", "visits before"),
        by_state=True,
        least_rollouts=2,
    ),
    Provider(
        "critic",
        "V of each turn: verl's critic at the token before it, trained on the returns",
        names=("critic",),
        value=_critic,
        field="values",
        needs=(
            Need("critic.enable", True, "those are the critic's values; set it to true"),
            _WARM_UP,
            Need(
                "critic.model.lora_rank", 0,
                "an adapter leaves the value head as it is, 0 at first, so that nothing is learned; set it to 0",
            ),
            Need(
                "trainer.v1.trainer_mode", TRAINER_MODE,
                f"a critic beside rollouts of older weights has not been tried; set it to {TRAINER_MODE}",
            ),
        ),
        idle=(
            Need(
                "critic.enable", False,
                "no turn mode reads its values, and it would learn advantages; set it to false, or "
                f"{KEY}=critic with algorithm.info_gain_norm_mode=turn_gae",
            ),
            _WARM_UP,
        ),
        cost="a forward and an update of a second model",
        uncounted="memory, time and disk of the critic are not counted: nearly those of the policy's update again",
        training_alone="the critic is there in training alone",
    ),
)}  # fmt: skip


def reads_states(name: str | None) -> bool:
    """Returns whether the values of this name compare equal states, and so read anchors."""
    return name in PROVIDERS and PROVIDERS[name].by_state


def regressed(name: str | None) -> bool:
    """Returns whether a regression makes the values of this name: a provider's, or that of a column or function."""
    return name is not None and (name not in PROVIDERS or PROVIDERS[name].fits)
