"""The signals that have a name."""

from __future__ import annotations

import torch

from verl_credit.config.keys.reads import COLUMN
from verl_credit.config.settings import INFO_GAIN, INFOPO
from verl_credit.errors import IntegrityError
from verl_credit.turns.infopo import PLACEHOLDER
from verl_credit.turns.signals.signal import Signal, StepRows

NOT_SCORED = "log-probs that are not finite, or no room for what is scored"


class InfoGainSignal(Signal):
    """How much closer the policy's own probability of the gold answer moved (`turns/gains.py`)."""

    says = "how much closer the policy's own probability of the gold answer moved"
    reads = "the scorer's log-probs of the gold answer"

    def rewards(self, rows: StepRows) -> tuple[torch.Tensor, torch.Tensor]:
        return rows.gain_B_K.to(torch.float64), rows.has_gain_B_K

    def why_lost(self, record: dict) -> str:
        return record.get("score_error") or NOT_SCORED


class InfoPOSignal(Signal):
    """How much a turn's observation changes the policy's next response (`turns/infopo.py`)."""

    says = (
        "mean over the next response's tokens of log pi(token | the observation) - log pi(token | "
        f"{PLACEHOLDER!r} in its place); one value per turn"
    )
    reads = "old_log_probs, and the scorer's log-probs of the next response behind the masked tool messages; no gold answer"
    cost = (
        "per tool turn its masked tool messages and its next response: behind the row in the old_log_probs forward "
        "(info_gain_scorer=branch), or a row of its own (rows)"
    )

    def rewards(self, rows: StepRows) -> tuple[torch.Tensor, torch.Tensor]:
        return self.table(rows, lambda row: rows.infopo_B[row])

    def why_lost(self, record: dict) -> str:
        return NOT_SCORED


class ToolRewardSignal(Signal):
    """What verl's tools return per call, summed over the calls of a turn; or what the agent loop reports per turn."""

    says = "the sum of what a turn's tools returned; a turn whose tools gave nothing has no reward"
    reads = "the agent loop's turn_rewards"

    def rewards(self, rows: StepRows) -> tuple[torch.Tensor, torch.Tensor]:
        return self.table(rows, lambda row: rows.turns.turn_rewards[row][: rows.n_tool_turns[row]])


class ColumnSignal(Signal):
    """``column:NAME``: a list with an entry per tool turn, from the reward function's values or the row's extra_info."""

    says = "a list with an entry per tool turn; null: the turn has no reward"
    reads = "the reward function's values, or the row's extra_info"

    def rewards(self, rows: StepRows) -> tuple[torch.Tensor, torch.Tensor]:
        column = self.name.removeprefix(COLUMN)

        def values_of(row: int):
            scores, extra_info = rows.turns.scores[row], rows.turns.extra_infos[row]
            for place in (scores, extra_info):
                if place.get(column) is not None:
                    return place[column]
            if column in {**scores, **extra_info}:
                place = "among the reward function's values" if column in scores else "in extra_info"
                raise IntegrityError(
                    f"turn signal {self.name!r}: {column!r} of row {row} is null {place}; expected a list with a number or "
                    "null for each of its tool turns"
                )
            raise IntegrityError(
                f"turn signal {self.name!r}: row {row} has no {column!r}, neither among the reward function's values "
                f"({', '.join(scores) or 'none'}) nor in extra_info ({', '.join(extra_info) or 'empty'})"
            )

        return self.table(rows, values_of)


SIGNALS = {INFO_GAIN: InfoGainSignal, INFOPO: InfoPOSignal, "tool_reward": ToolRewardSignal}
