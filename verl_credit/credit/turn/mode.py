"""A turn mode: a function of `Tables`, and what it declares about itself (`turn_mode`).

`f(tables, *, options) -> (advantage_B_K, outcome_advantage_B, clip_scale_B_K)`, in float64. Its keyword-only arguments are
its options, with their defaults; configuration keys, checks, `explain` and docs/modes.md read the declaration. A `TurnMode`
is the public function of its mode: call it with tensors. `as_turn_mode` makes one of a user's function.

A turn without a reward reads the advantage and clip scale of the row's next reward: `Tables.backward` does this. A mode that
compares whole returns leaves such a row out (`Tables.known_B`). Other modes say what they do with it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, get_args, get_origin

from verl_credit.credit.arguments import check_name, check_returned, output_dtype, refuse_rows
from verl_credit.credit.groups import tied_rows
from verl_credit.credit.operator import OUTPUTS, RESETS, Operator, Range, WithoutGains, refuse_unread
from verl_credit.credit.outcome import OUTCOME_OPERATORS
from verl_credit.credit.turn.tables import Tables, make_tables
from verl_credit.errors import did_you_mean
from verl_credit.lazy import torch

SHIPPED = (f"{__package__}.modes.", "verl_credit_recipes.methods.")
"""The packages of the modes whose options are known to be unread beside others."""
ModeOutput = tuple["torch.Tensor", "torch.Tensor", "torch.Tensor"]

# What a mode reads beside outcomes, groups and turn rewards: the name in `Operator.reads`, and its tables.
OPTIONAL_TABLES = {
    "anchors": ("anchor_B_K1",),
    "values": ("value_B_K1", "bootstrap_B"),
    "state scores": ("state_score_B_K1", "initial_score_B"),
    "turn tokens": ("turn_tokens_B_K1",),
    "first results": ("result_turn_B",),
}


@dataclass(frozen=True)
class TurnCredit:
    """Advantages and clip scales of the tool turns, and the answer turn's advantage (its clip scale is 1).

    Columns past a row's tool turns read the outcome advantage and scale 1, so that column n_tool_turns of every row of
    `advantage_B_K1` and `clip_scale_B_K1` is its answer turn, which `spread` looks up.
    """

    advantage_B_K: torch.Tensor
    outcome_advantage_B: torch.Tensor
    clip_scale_B_K: torch.Tensor
    counts: dict[str, int] = field(default_factory=dict)

    @property
    def advantage_B_K1(self) -> torch.Tensor:
        """The tool turns' advantages, then the answer turn's."""
        return torch.cat([self.advantage_B_K, self.outcome_advantage_B[:, None]], dim=1)

    @property
    def clip_scale_B_K1(self) -> torch.Tensor:
        """The tool turns' clip scales, then the answer turn's, which is 1."""
        return torch.nn.functional.pad(self.clip_scale_B_K, (0, 1), value=1.0)


@dataclass(frozen=True, kw_only=True)
class TurnMode(Operator):
    """Callable: `mode(outcome_B, turn_reward_B_K, turn_mask_B_K, group_B, **options) -> TurnCredit`."""

    level: str = "turn"
    reads: tuple[str, ...] = ("rewards", "groups", "gains")
    needs: tuple[str, ...] = ()
    """Optional tables without which it cannot run (`OPTIONAL_TABLES`)."""
    default_signal: str = "info_gain"
    """The signal that `algorithm.turn_signal=auto` selects; "none" for a mode that works without turn rewards."""
    per_turn: bool = False
    """It compares a turn with the same turn of the prompt's other trajectories, those that came so far."""
    whole_returns: bool = False
    """It leaves out a row whose turn rewards are not all known (`Tables.known_B`): such a row reads its outcome alone."""
    without_gains: WithoutGains = field(default_factory=WithoutGains)
    outputs: str = RESETS

    def __post_init__(self) -> None:
        super().__post_init__()
        accepted, mode = ("rewards", "groups", "gains", *OPTIONAL_TABLES), f"turn mode {self.name!r}"
        for name in self.reads:
            check_name(f"{mode}: reads", name, accepted)
        check_name(f"{mode}: outputs", self.outputs, OUTPUTS)
        for name in self.needs:
            check_name(f"{mode}: needs", name, self.tables or ("none: it reads no tables",))

    @property
    def _parameters(self) -> tuple[inspect.Parameter, ...]:
        return tuple(inspect.signature(self.function).parameters.values())

    @cached_property
    def options(self) -> Mapping[str, Any]:
        """Its keywords and their defaults."""
        return {p.name: p.default for p in self._parameters if p.kind is p.KEYWORD_ONLY}

    @cached_property
    def choices(self) -> Mapping[str, tuple[str, ...]]:
        """The accepted values of its text options, as their annotations say (`Literal`)."""
        texts = (p for p in self._parameters if get_origin(p.annotation) is Literal)
        return {p.name: get_args(p.annotation) for p in texts}

    @cached_property
    def ranges(self) -> Mapping[str, Range]:
        """The ranges of its numeric options, as their annotations say (`operator.Range`)."""
        metadata = ((p.name, getattr(p.annotation, "__metadata__", ())) for p in self._parameters)
        return {name: one for name, several in metadata for one in several if isinstance(one, Range)}

    @property
    def takes_any_option(self) -> bool:
        return any(p.kind is p.VAR_KEYWORD for p in self._parameters)

    @property
    def any_outcome_operator(self) -> bool:
        """False: the mode normalises outcomes itself and accepts ``grpo`` only."""
        return "outcome_operator" in self.options

    @property
    def compares(self) -> bool:
        """It compares rollouts of a prompt, or takes an outcome operator, which may."""
        return self.any_outcome_operator or "groups" in self.reads

    @property
    def scales_clip(self) -> bool:
        """It gives turns a clip scale (`dynamic_clip`)."""
        return "clip_beta" in self.options

    @property
    def curriculum(self) -> bool:
        """Turn rewards and outcomes can be weighed (`info_gain_curriculum`)."""
        return "gain_scale" in self.options

    @property
    def unbiased(self) -> bool:
        """True when it declares no bias."""
        return self.bias.startswith("none")

    @property
    def reads_turn_rewards(self) -> bool:
        return "gains" in self.reads

    @property
    def tables(self) -> tuple[str, ...]:
        """The optional tables that it reads."""
        return tuple(table for name in self.reads for table in OPTIONAL_TABLES.get(name, ()))

    def scope_with(self, options: Mapping[str, Any]) -> str:
        """Returns the scope with these options: an outcome operator that reads the batch makes it the batch."""
        operator = OUTCOME_OPERATORS.get(str(options.get("outcome_operator")))
        return self.scope if operator is None or operator.scope != "batch" else "batch"

    def __call__(
        self,
        outcome_B: torch.Tensor,
        turn_reward_B_K: torch.Tensor,
        turn_mask_B_K: torch.Tensor,
        group_B: torch.Tensor,
        *,
        row_valid_B: torch.Tensor | None = None,
        n_tool_turns_B: torch.Tensor | None = None,
        tied_groups: str = "keep",
        on_nonfinite: str = "drop",
        **keywords,
    ) -> TurnCredit:
        """See `turn_credit`."""
        check_name("tied_groups", tied_groups, ("keep", "skip"))
        check_name("on_nonfinite", on_nonfinite, ("drop", "raise"))
        given = {name: keywords.pop(name) for name in self.tables if keywords.get(name) is not None}
        options = {name: value for name, value in keywords.items() if value is not None}
        self.check_options(options)
        for name in self.needs:
            if name not in given:
                raise ValueError(f"info_gain_norm_mode={self.name!r} needs {name}, which is not given")
        with torch.no_grad():
            rows = (outcome_B, turn_reward_B_K, turn_mask_B_K, group_B, row_valid_B, n_tool_turns_B)
            tables, counts = make_tables(*rows, on_nonfinite, given)
            if self.whole_returns:
                counts["rows_left_out"] = int((tables.valid_B & ~tables.known_B).sum())
            advantage_B_K, outcome_advantage_B, scale_B_K = self._checked(
                self.function(tables, **options), tables
            )
            kept_B = tables.valid_B
            if tied_groups == "skip":
                tied_B = tied_rows(tables.outcome_B, tables.group_B, tables.valid_B)
                kept_B, counts["skipped_rows"] = kept_B & ~tied_B, int(tied_B.sum())
            dtype, kept_B_1 = output_dtype(outcome_B, turn_reward_B_K), kept_B[:, None]
            return TurnCredit(
                torch.where(kept_B_1, advantage_B_K, 0.0).to(dtype),
                torch.where(kept_B, outcome_advantage_B, 0.0).to(dtype),
                torch.where(kept_B_1, scale_B_K, 1.0).to(dtype),
                counts,
            )

    def check_options(self, options: Mapping[str, Any]) -> None:
        """Raise ValueError for options that it does not read, or whose values it does not take."""
        for name, value in options.items():
            if name not in self.options and not self.takes_any_option:
                hint = did_you_mean(name, self.options, repr)
                option = name if isinstance(value, torch.Tensor) else f"{name}={value!r}"
                raise ValueError(
                    f"{option} with info_gain_norm_mode={self.name!r}: that mode does not read it{hint}; "
                    f"it reads {', '.join([*self.options, *self.tables])}"
                )
            if name in self.ranges:
                self.ranges[name].check(name, value)
            if isinstance(self.options.get(name), bool) and not isinstance(value, bool):
                raise ValueError(f"{name}={value!r}: expected True or False")
            if name in self.choices:
                check_name(name, value, self.choices[name])
        shipped = getattr(self.function, "__module__", "").startswith(SHIPPED)
        if shipped and options.get("norm_by_std") is False:  # a user's function may read them all the same
            of_the_std = sorted(options.keys() & {"ddof", "variance_floor", "eps"})
            unread = {name: (options[name], self.options[name]) for name in of_the_std}
            refuse_unread("norm_by_std=False", "there is no std to divide by", **unread)
        operator = options.get("outcome_operator", "grpo")
        if not callable(operator):
            check_name("outcome_operator", operator, OUTCOME_OPERATORS)

    def _checked(self, outputs: Any, tables: Tables) -> list[torch.Tensor]:
        """Returns the function's outputs in float64. Errors: ValueError names what is wrong with them.

        Columns past a row's tool turns, where it may return anything, read the outcome's advantage and 1.
        """
        tool_B_K, returned = tables.turn_B_K1[:, 1:], f"info_gain_norm_mode={self.name!r} returned"
        names, members = (
            ("advantage_B_K", "outcome_advantage_B", "clip_scale_B_K"),
            (tool_B_K, tables.valid_B, tool_B_K),
        )
        if not isinstance(outputs, tuple | list) or len(outputs) != 3:
            got = f"{len(outputs)} values" if isinstance(outputs, tuple | list) else type(outputs).__name__
            raise ValueError(f"{returned} {got}; expected ({', '.join(names)})")
        advantage_B_K, outcome_B, scale_B_K = (
            check_returned(f"{returned} {name}", tensor, member)
            for name, tensor, member in zip(names, outputs, members, strict=True)
        )
        below = tool_B_K & (scale_B_K < 0)
        refuse_rows(f"{returned} clip_scale_B_K", below, "below 0; expected at least 0")
        advantage_B_K = torch.where(tool_B_K, advantage_B_K, outcome_B[:, None])
        return [advantage_B_K, outcome_B, torch.where(tool_B_K, scale_B_K, 1.0)]


def turn_mode(**declared) -> Callable[[Callable], Callable]:
    """Declares the function below as a mode, which is its attribute ``mode``."""

    def declare(function: Callable) -> Callable:
        vars(function)["mode"] = TurnMode(function=function, **declared)
        return function

    return declare


def as_turn_mode(function: Callable, name: str) -> TurnMode:
    """A user's function of `Tables` as a mode. It may declare ``keys`` as attributes."""
    if isinstance(function, TurnMode):
        return function
    keys = ("reads", "needs", "scope", "properties", "exempt", "default_signal", "whole_returns", "outputs")
    declared = {key: getattr(function, key) for key in keys if hasattr(function, key)}
    about: dict[str, Any] = {"equation": "yours", "source": name} | dict.fromkeys(
        ("reduces_to", "bias"), "not stated"
    )
    return TurnMode(name=name, function=function, **about, **declared)
