"""The place of every row's tokens and turns in its session: a rollout whose rows are joined to one."""

from __future__ import annotations

from dataclasses import dataclass

from verl_credit.lazy import torch


@dataclass(frozen=True)
class Sessions:
    """B rows of S sessions. What is joined has S rows and the tokens, or the turns, of all rows of a session."""

    session_B: torch.Tensor
    """The number of each row's session."""
    last_S: torch.Tensor
    """The row of each session's last output, whose outcome is the session's."""
    token_B_T: torch.Tensor
    """The place of each token among its session's tokens; -1: the row has no such token."""
    turn_B_K1: torch.Tensor
    """The number of each turn among its session's turns; -1: the row has no such turn."""
    tokens: int
    """The tokens of the longest session."""

    def join(self, values_B_T: torch.Tensor, fill: float = 0) -> torch.Tensor:
        """values_S_T: every token's value at its place in the session, ``fill`` elsewhere."""
        return self._joined(values_B_T, self.token_B_T, self.tokens, fill)

    def join_turns(self, values_B_K1: torch.Tensor, fill: float = 0) -> torch.Tensor:
        """values_S_K1: every turn's value at its number in the session, ``fill`` elsewhere."""
        return self._joined(values_B_K1, self.turn_B_K1, max(int(self.turn_B_K1.max()) + 1, 1), fill)

    def split(self, values_S_T: torch.Tensor, fill: float = 0) -> torch.Tensor:
        """values_B_T: what `join` has put together, back at each row's own places."""
        found_B_T = values_S_T[self.session_B[:, None], self.token_B_T.clamp(min=0)]
        return torch.where(self.token_B_T >= 0, found_B_T, fill)

    def _joined(self, values_B_N, place_B_N, width: int, fill: float) -> torch.Tensor:
        row, column = (place_B_N >= 0).nonzero(as_tuple=True)
        joined = values_B_N.new_full((len(self.last_S), width), fill)
        joined[self.session_B[row], place_B_N[row, column]] = values_B_N[row, column]
        return joined
