"""The settings that the lens offers for one group, each with the credit that the library gives."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from verl_credit.credit.plugins.load import shipped_mode
from verl_credit.credit.token.token_transforms import TRANSFORMS
from verl_credit.credit.turn.modes import MODES
from verl_credit.records.report.again import (
    NotOffered,
    TokenTables,
    TurnTables,
    as_the_run_did,
    credit_of_tokens,
    credit_of_turns,
    places,
)
from verl_credit.records.report.text import Scale, plain

ALPHAS, GAMMAS = (0.0, 0.3, 1.0), (0.0, 0.5, 0.9, 1.0)
EQUAL = 1e-6
# The page shows at most this much of a group; the credit is computed from the whole group.
ROLLOUTS, TOKENS_A_ROLLOUT = 16, 1500


@dataclass(frozen=True)
class Group:
    """The rollouts of one prompt at one step; G of them."""

    turns: TurnTables
    rows: list[int]
    scales: Mapping[str, Scale]
    """Of advantages and rewards; they decide what is noise."""
    tokens: TokenTables | None = None
    """The tokens are large, so they are None until they are needed."""

    @property
    def place_G(self) -> torch.Tensor:
        return places(self.turns, self.rows)

    @property
    def shown_tokens(self) -> int:
        lengths_G = self.turns.tokens_B_K1[self.place_G[:ROLLOUTS]].sum(dim=1)
        return int(lengths_G.clamp(max=TOKENS_A_ROLLOUT).sum())

    @property
    def reward_G_K(self) -> torch.Tensor:
        """The turns' rewards; NaN for a turn without a reward."""
        known = self.turns.has_reward_B_K & self.turns.valid_B[:, None]
        return torch.where(known, self.turns.reward_B_K, torch.nan)[self.place_G]

    @property
    def gained_G_K(self) -> torch.Tensor:
        """Turns with a reward above 0 that is no noise."""
        return self.reward_G_K > self.scales["reward"].floor

    @property
    def right_G(self) -> list[bool]:
        return (self.turns.outcome_B[self.place_G] > 0.5).tolist()

    @property
    def given_G_K1(self) -> torch.Tensor:
        """Each turn's advantage, as it was given."""
        return self.turns.advantage_B_K1[self.place_G]

    @property
    def grpo_G_K1(self) -> torch.Tensor:
        return self.turns.grpo_B_K1[self.place_G]

    @property
    def contrast(self) -> float:
        """Root mean square of the given advantage minus GRPO's, over the group's turns; 0 where it is noise."""
        turn_G_K1 = torch.arange(self.given_G_K1.shape[1]) <= self.turns.n_tool_turns_B[self.place_G, None]
        apart = (self.given_G_K1 - self.grpo_G_K1)[turn_G_K1].square().mean().sqrt().item()
        return apart if self.scales["advantage"].counts(apart) else 0.0

    def punished(self, advantage_G_K1: torch.Tensor) -> int:
        """Turns that gained and have an advantage below 0 that is no noise."""
        lower_G_K1 = advantage_G_K1 < -self.scales["advantage"].floor
        return int((self.gained_G_K & lower_G_K1[:, : self.gained_G_K.shape[1]]).sum())

    def sentence(self, advantage_G_K1: torch.Tensor) -> str:
        """Returns the group's result and the number of rewarded turns with negative credit."""
        right, count = sum(self.right_G), len(self.right_G)
        whole = {count: "every rollout is right", 0: "no rollout is right"}
        whole_group = f"In this group {whole.get(right, f'{right} of {count} rollouts are right')}"
        gains = list(self.turns.pipeline["signals"]) == ["info_gain"]
        one, many, which = ("turn", "turns", "with a reward above 0")
        if gains:
            one, many, which = ("search", "searches", "that gained information")
        n = self.punished(advantage_G_K1)
        if not n:
            return f"{whole_group}; no {one} {which} has negative credit."
        number = f"{n} {one} {which} has" if n == 1 else f"{n} {many} {which} have"
        return f"{whole_group}, and {number} negative credit."


def settings_of(group: Group) -> dict:
    """Returns the settings that the page's script switches between; the script computes no credit itself.

    A turn's credit is given for every mode, alpha and gamma. A token's is |A| c(sign A), with A its turn's advantage and c
    the library's credit in a group whose turns all have +1 (`up`) or all -1 (`down`, left out where it is -`up`): every
    transform is a weight, and HICRA adds to the magnitude of its input.
    """
    shared = group.turns.pipeline["shared"]
    alphas, gammas = sorted({*ALPHAS, shared["alpha"]}), sorted({*GAMMAS, shared["gamma"]})
    return {
        "alphas": alphas,
        "gammas": gammas,
        "modes": [_mode(group, name, alphas, gammas) for name in _names(group.turns.pipeline["mode"], MODES)],
        "transforms": [
            _transform(group.tokens, name, lam)
            for name in _names(group.turns.pipeline["transform"], TRANSFORMS)
            for lam in _lambdas(group.tokens, name)
        ],
        "own": {
            "mode": group.turns.pipeline["mode"],
            "alpha": alphas.index(shared["alpha"]),
            "gamma": gammas.index(shared["gamma"]),
        },
        "given": {
            **_numbers(group.given_G_K1, group.turns.clip_scale_B_K1[group.place_G], group),
            "tokens": packed(group.tokens.advantage_G_T, group.tokens),
        },
        "grpo": _rounded(group.grpo_G_K1, group),
        "check": check(group),
    }


def check(group: Group) -> str:
    """Is the recomputed credit equal to the credit that the run was trained with?"""
    try:
        made_G_T = as_the_run_did(group.turns, group.tokens)
    except NotOffered as error:
        return f"The run's own credit is shown as it was stored; it cannot be made again: {error}."
    apart = (made_G_T - group.tokens.advantage_G_T)[group.tokens.trained_G_T].abs().max().item()
    if apart > EQUAL:
        return (
            f"Warning: made again with the run's own settings, this group's credit differs from the stored one by up to "
            f"{apart:.1g}. The other settings may be off by as much."
        )
    return f"Made again with the run's own settings, every token's credit is the stored one (within {EQUAL:.0e})."


def packed(values_G_T: torch.Tensor, tokens: TokenTables) -> list[str]:
    """Returns for each rollout the values of its policy tokens: float32, little-endian, base64."""
    texts = []
    for row_T, written_T in zip(values_G_T[:ROLLOUTS], tokens.turn_ids_G_T[:ROLLOUTS] >= 0, strict=True):
        shown = row_T[written_T][:TOKENS_A_ROLLOUT].float().numpy().astype("<f4")
        texts.append(base64.b64encode(shown.tobytes()).decode("ascii"))
    return texts


def _names(own: str, known) -> list[str]:
    return list(known) if own in known else [own, *known]


def _mode(group: Group, name: str, alphas: list[float], gammas: list[float]) -> dict:
    mode = shipped_mode(name)
    options = {} if mode is None else mode.options
    reads = {"alpha": "alpha" in options, "gamma": "gamma" in options}
    setting = {"name": name, **reads, "reason": "", "credit": {}}
    try:
        for i, alpha in enumerate(alphas) if reads["alpha"] else [("", None)]:
            for j, gamma in enumerate(gammas) if reads["gamma"] else [("", None)]:
                at, known, key = group.place_G, group.turns.credits, (name, alpha, gamma)
                if key not in known:
                    changes = {"alpha": alpha, "gamma": gamma}
                    given = {option: value for option, value in changes.items() if value is not None}
                    known[key] = credit_of_turns(group.turns, name, **given)
                credit = known[key]
                numbers = _numbers(credit.advantage_B_K1[at], credit.clip_scale_B_K1[at], group)
                setting["credit"][f"{i}|{j}"] = numbers
    except NotOffered as error:
        return setting | {"reason": str(error), "credit": {}}
    return setting


def _numbers(advantage_G_K1: torch.Tensor, clip_G_K1: torch.Tensor, group: Group) -> dict:
    advantage, clip = (_rounded(values_G_K1, group) for values_G_K1 in (advantage_G_K1, clip_G_K1))
    return {"advantage": advantage, "clip": clip, "said": group.sentence(advantage_G_K1)}


def _rounded(values_G_K1: torch.Tensor, group: Group) -> list[list[float]]:
    counts = (group.turns.n_tool_turns_B[group.place_G] + 1).tolist()
    return [[round(v, 6) for v in row[:n]] for row, n in zip(values_G_K1.tolist(), counts, strict=True)]


def _lambdas(tokens: TokenTables, name: str) -> list[float | None]:
    """SEPA with the run's lambda, and with 1, where it acts in full."""
    if name not in TRANSFORMS or not TRANSFORMS[name].uses_sepa_controller:
        return [None]
    return [1.0] if tokens.sepa_lambda is None else sorted({tokens.sepa_lambda, 1.0})


def _transform(tokens: TokenTables, name: str, lam: float | None) -> dict:
    label = name if lam is None else f"{name}, \N{GREEK SMALL LETTER LAMDA} {plain(lam)}"
    own = name == tokens.pipeline["transform"] and lam in (None, tokens.sepa_lambda)
    setting = {"name": label, "own": own, "reason": "", "up": None, "down": None}
    one_G_T = torch.where(tokens.trained_G_T, 1.0, 0.0)
    try:
        up_G_T, down_G_T = (credit_of_tokens(tokens, sign * one_G_T, name, lam) for sign in (1.0, -1.0))
    except NotOffered as error:
        return setting | {"reason": str(error)}
    down = None if torch.equal(up_G_T, -down_G_T) else packed(down_G_T, tokens)
    return setting | {"up": packed(up_G_T, tokens), "down": down}
