"""`algorithm.turn_values`: the value of the state before every turn, by a regression over this step and the last ones.

The features are those of the group and what a provider observes (`credit/turn/value_providers.py`); `credit/turn/values.py`
fits. No value follows its own row's outcome: the fit has not seen the row's prompt, and no provider sees the outcome. verl
computes its critic's values before advantages, by weights that no outcome of the step has changed.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Mapping, Sequence
from hashlib import blake2b

from verl_credit.config.settings import CreditSettings
from verl_credit.credit import spread
from verl_credit.credit.turn.tables import return_to_go
from verl_credit.credit.turn.value_providers import KEY, Seen
from verl_credit.credit.turn.values import (
    States,
    connected,
    crossfit,
    explained_variance,
    explained_variance_of_changes,
    group_features,
    loo_mean,
    state_features,
)
from verl_credit.errors import IntegrityError
from verl_credit.lazy import torch
from verl_credit.names import EXPLAINED_VARIANCE
from verl_credit.turns.step.anchor_table import anchor_table
from verl_credit.turns.step.signals.signal import StepRows
from verl_credit.turns.step.state_features import provider_of, seen_of


class TurnValues:
    """The values of a run's steps. The states of the last steps are kept for the next fits, and saved with checkpoints."""

    def __init__(self, settings: CreditSettings):
        a, self._settings = settings.algorithm, settings
        self.provider, self._name = provider_of(settings), a.turn_values
        self._gamma = settings.turn_options.get("gamma", 1.0)
        self._shrink, self._folds = a.turn_values_ridge, a.turn_values_folds
        self._replay: deque[States] = deque(maxlen=a.turn_values_replay)

    @classmethod
    def of(cls, settings: CreditSettings) -> TurnValues | None:
        return None if settings.algorithm.turn_values is None else cls(settings)

    def of_step(
        self,
        rows: StepRows,
        reward_B_K: torch.Tensor,
        n_tool_turns_B: torch.Tensor,
        *,
        gold_B_K1: torch.Tensor | None = None,
        value_B_T: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, dict[str, float]]:
        """(value_B_K1, return_B_K1, metrics) of the step, which then joins the replay.

        V_k estimates the return that turn_gae passes back, sum over j >= k of gamma^(j-k) r_j with the outcome at the end.
        ``reward_B_K``: NaN is lost, 0 is none. Turns that are not a valid row's have the value 0 and the return NaN.
        """
        outcome_B, valid_B = rows.outcome_B.to(torch.float64), rows.turns.row_valid_B
        columns_K1 = torch.arange(reward_B_K.shape[1] + 1)
        turn_B_K1 = valid_B[:, None] & (columns_K1 <= n_tool_turns_B[:, None])
        at_end_B_K1 = torch.where(columns_K1 == n_tool_turns_B[:, None], outcome_B[:, None], 0.0)
        reward_B_K1 = torch.nn.functional.pad(reward_B_K.to(torch.float64), (0, 1)) + at_end_B_K1
        return_B_K1 = return_to_go(torch.where(turn_B_K1, reward_B_K1, 0.0), self._gamma)
        return_B_K1 = torch.where(turn_B_K1, return_B_K1, torch.nan)
        seen, metrics = seen_of(rows, turn_B_K1, gold_B_K1, value_B_T), {}
        if self.provider.value is not None:
            value_B_K1 = self.provider.value(seen)
        else:
            value_B_K1, metrics["credit/values/states"] = self._fitted(rows, seen, return_B_K1)
        explained: dict[str, float | None] = {
            EXPLAINED_VARIANCE: explained_variance(value_B_K1[turn_B_K1], return_B_K1[turn_B_K1]),
            f"{EXPLAINED_VARIANCE}_of_changes": explained_variance_of_changes(
                value_B_K1, return_B_K1, turn_B_K1, self._gamma
            ),
        }
        metrics |= {name: value for name, value in explained.items() if value is not None}
        return value_B_K1, return_B_K1, metrics

    def _fitted(self, rows: StepRows, seen: Seen, return_B_K1: torch.Tensor) -> tuple[torch.Tensor, float]:
        """(value_B_K1, the number of states of the fit)."""
        turn_B_K1 = seen.turn_B_K1
        valid_B = rows.turns.row_valid_B
        mean_B = loo_mean(return_B_K1[:, 0], rows.group_B, valid_B)
        x_B_K1_D = group_features(mean_B, turn_B_K1.shape[1])
        if self.provider.observe is not None:
            x_B_K1_D = torch.cat([x_B_K1_D, self.provider.observe(seen)], dim=2)
        if self.provider.by_state:
            anchor_B_K1 = anchor_table(self._settings, rows)
            further = state_features(anchor_B_K1, return_B_K1, turn_B_K1, rows.group_B, mean_B)
            x_B_K1_D = torch.cat([x_B_K1_D, further], dim=2)
        prompt_B = torch.tensor([_number(ids) for ids in rows.turns.prompt_ids])
        part_B = prompt_B.masked_scatter(valid_B, connected(prompt_B[valid_B], rows.group_B[valid_B]))
        row_N = turn_B_K1.nonzero()[:, 0]
        states = States(x_B_K1_D[turn_B_K1], return_B_K1[turn_B_K1], prompt_B[row_N])
        replay, mean_N = self._pooled(states), mean_B[row_N]
        shrink, folds, part_N = self._shrink, self._folds, part_B[row_N]
        value_N, fitted = crossfit(states, replay, mean_N, shrink=shrink, folds=folds, part_N=part_N)
        self._replay.append(states)
        value_B_K1 = torch.zeros(turn_B_K1.shape, dtype=torch.float64).masked_scatter(turn_B_K1, value_N)
        return value_B_K1, float(fitted)

    def _pooled(self, states: States) -> States | None:
        if not self._replay:
            return None
        before, now = self._replay[-1].x_N_D.shape[1], states.x_N_D.shape[1]
        if before != now:
            said = f"{KEY}={self._name} gave {now} features for each state, group's included"
            raise IntegrityError(f"{said}, and {before} in the step before; expected as many in every step")
        return States.joined(self._replay)

    def state_dict(self) -> dict:
        """The replay, for a checkpoint."""
        steps = [vars(states) for states in self._replay]
        return {"provider": self._name, "features": list(self.provider.names), "steps": steps}

    def load_state_dict(self, saved: Mapping) -> None:
        """Takes over the replay of a checkpoint. Raises IntegrityError for one with other features."""
        names = list(self.provider.names)
        if (saved["provider"], saved["features"]) != (self._name, names):
            raise IntegrityError(
                f"{KEY}={self._name} observes {names}, and the checkpoint has states of {KEY}={saved['provider']} with "
                f"{saved['features']}; go on as they were saved, or begin again (trainer.resume_mode=disable)"
            )
        self._replay.extend(States(**states) for states in saved["steps"])


def _number(prompt_ids: Sequence[int]) -> int:
    """The prompt as a number, the same in every step and process."""
    return int.from_bytes(blake2b(array("q", prompt_ids).tobytes(), digest_size=7).digest())


def learned_by_critic(
    value_B_T: torch.Tensor, return_B_K1: torch.Tensor, turn_ids_B_T: torch.Tensor, mask_B_T: torch.Tensor
) -> torch.Tensor:
    """return_B_T: all tokens of turn k have its return G_k; a token without a known return (a lost turn reward, a row that
    is not valid) has the critic's own value, and so no error."""
    return_B_T = spread(return_B_K1, turn_ids_B_T, mask_B_T, fill=torch.nan)
    return torch.where(return_B_T.isfinite(), return_B_T, value_B_T.to(return_B_T.dtype))
