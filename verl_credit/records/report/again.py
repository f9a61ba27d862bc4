"""Credit recomputed from a step's tables, by the functions that computed it in the run."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch.nn.utils.rnn import pad_sequence

from verl_credit.credit.outcome import OUTCOME_OPERATORS
from verl_credit.credit.plugins.load import shipped_mode
from verl_credit.credit.token.token_credit import token_credit
from verl_credit.credit.token.token_transforms import TRANSFORMS
from verl_credit.credit.token.uncertainty import canonical_kind, uncertainty
from verl_credit.credit.turn.mode import OPTIONAL_TABLES, TurnCredit, TurnMode
from verl_credit.credit.turn.modes import MODES
from verl_credit.credit.turn.turn_credit import BatchTables, credit_of
from verl_credit.records.run.tables import StepTable


class NotOffered(ValueError):
    """A setting that the stored tables do not allow; the message has the reason."""


def _not_loaded(name: str) -> NotOffered:
    return NotOffered(f"{name} is an operator of yours, and a report loads none")


@dataclass(frozen=True)
class TurnTables:
    """All rows of a step, as a turn mode reads them, and the credit that was given."""

    pipeline: dict
    rows: list[int]
    uids: list[str]
    outcome_B: torch.Tensor
    reward_B_K: torch.Tensor
    has_reward_B_K: torch.Tensor
    group_B: torch.Tensor
    valid_B: torch.Tensor
    n_tool_turns_B: torch.Tensor
    tokens_B_K1: torch.Tensor
    anchor_B_K1: torch.Tensor | None
    advantage_B_K1: torch.Tensor
    clip_scale_B_K1: torch.Tensor
    value_B_K1: torch.Tensor | None = None

    @property
    def batch(self) -> BatchTables:
        optional = {"anchor_B_K1": self.anchor_B_K1, "value_B_K1": self.value_B_K1}
        known = {name: table for name, table in optional.items() if table is not None}
        return BatchTables(
            self.outcome_B, self.reward_B_K, self.has_reward_B_K, self.group_B, self.valid_B, self.n_tool_turns_B,
            {"turn_tokens_B_K1": self.tokens_B_K1} | known,
        )  # fmt: skip

    @cached_property
    def credits(self) -> dict[tuple, TurnCredit]:
        """What the lens computed already: the credit of a setting is that of all groups of the step."""
        return {}

    @cached_property
    def grpo_B_K1(self) -> torch.Tensor:
        """GRPO's advantage, every turn's that of its rollout, with the run's `norm_adv_by_std_in_grpo`."""
        norm = {key: value for key, value in self.pipeline["shared"].items() if key == "norm_by_std"}
        return credit_of(MODES["none"], self.batch, norm).advantage_B_K1


def turn_tables(table: StepTable) -> TurnTables:
    c, order = table.columns, {}
    for row in c["row"]:
        order.setdefault(row, len(order))
    wide = max(c["turn"], default=0) + 1

    def filled(name: str, fill: float, dtype: torch.dtype = torch.float64) -> torch.Tensor:
        out = torch.full((len(order), wide), fill, dtype=dtype)
        for row, turn, value in zip(c["row"], c["turn"], c[name], strict=True):
            if value is not None:
                out[order[row], turn] = value
        return out

    def per_row(name: str) -> list:
        return list(dict(zip(c["row"], c[name], strict=True)).values())

    anchored, valued = (any(one is not None for one in c[name]) for name in ("anchor", "value"))
    return TurnTables(
        pipeline=table.pipeline,
        rows=list(order),
        uids=per_row("uid"),
        outcome_B=torch.tensor(per_row("outcome"), dtype=torch.float64),
        reward_B_K=filled("reward", torch.nan)[:, :-1],
        has_reward_B_K=filled("has_reward", 0, torch.bool)[:, :-1],
        group_B=torch.tensor(per_row("group")),
        valid_B=torch.tensor(per_row("valid")),
        n_tool_turns_B=torch.tensor(per_row("turn")),  # the last line of a row is its answer turn
        tokens_B_K1=filled("tokens", 0, torch.int64),
        anchor_B_K1=filled("anchor", -1, torch.int64) if anchored else None,
        advantage_B_K1=filled("advantage", 0.0),
        clip_scale_B_K1=filled("clip_scale", 1.0),
        value_B_K1=filled("value", torch.nan) if valued else None,
    )


def credit_of_turns(tables: TurnTables, mode: str | TurnMode, **changes: float) -> TurnCredit:
    """The credit of every row by ``mode``, with the run's settings but for ``changes`` (alpha, gamma).

    Raises NotOffered where the tables lack what the mode reads, and for the name of a mode of the user's.
    """
    turn_mode = mode if isinstance(mode, TurnMode) else shipped_mode(mode)
    if turn_mode is None:
        raise _not_loaded(mode)
    pipeline, batch = tables.pipeline, tables.batch
    for name in turn_mode.reads:
        if any(one in turn_mode.needs and one not in batch.optional for one in OPTIONAL_TABLES.get(name, ())):
            raise NotOffered(f"it needs {name}, which this run did not record")
    known_B_K = tables.has_reward_B_K & tables.valid_B[:, None] & tables.reward_B_K.isfinite()
    if turn_mode.reads_turn_rewards and not known_B_K.any() and turn_mode.name != pipeline["mode"]:
        raise NotOffered("no turn of this step has a reward")
    options = {name: value for name, value in pipeline["shared"].items() if name in turn_mode.options}
    if turn_mode.name == pipeline["mode"]:
        options |= pipeline["turn_params"]
    if turn_mode.any_outcome_operator:
        if pipeline["outcome_operator"] not in OUTCOME_OPERATORS:
            raise _not_loaded(pipeline["outcome_operator"])
        options["outcome_operator"] = pipeline["outcome_operator"]
    try:
        return credit_of(turn_mode, batch, {"tied_groups": pipeline["tied_groups"]} | options | changes)
    except ValueError as error:
        raise NotOffered(str(error)) from error


@dataclass(frozen=True)
class TokenTables:
    """The rollouts of one prompt, over the tokens that the policy wrote; T the longest."""

    pipeline: dict
    rows: list[int]
    turn_ids_G_T: torch.Tensor
    trained_G_T: torch.Tensor
    planning_G_T: torch.Tensor | None
    uncertainty_G_T: torch.Tensor | None
    advantage_G_T: torch.Tensor

    @property
    def sepa_lambda(self) -> float | None:
        return self.pipeline["sepa_lambda"]


def token_tables(table: StepTable, group: int) -> TokenTables:
    c = table.columns
    places = [place for place, one in enumerate(c["group"]) if one == group]

    def padded(name: str, fill: float, dtype: torch.dtype = torch.float32) -> torch.Tensor | None:
        lists = [c[name][place] for place in places]
        if any(values is None for values in lists):
            return None
        rows = [torch.tensor(values, dtype=dtype) for values in lists]
        return pad_sequence(rows, batch_first=True, padding_value=fill)

    trained_G_T = padded("trained", 0, torch.bool)
    uncertainty_G_T, log_prob_G_T = padded("uncertainty", 0.0), padded("old_log_prob", 0.0)
    missing = uncertainty_G_T is None and log_prob_G_T is not None
    if missing and canonical_kind(table.pipeline["uncertainty"]) is None:
        uncertainty_G_T = uncertainty("surprisal", log_prob_G_T, trained_G_T)
    return TokenTables(
        pipeline=table.pipeline,
        rows=[c["row"][place] for place in places],
        turn_ids_G_T=padded("turn", -1, torch.int64),
        trained_G_T=trained_G_T,
        planning_G_T=padded("planning", 0, torch.bool),
        uncertainty_G_T=uncertainty_G_T,
        advantage_G_T=padded("advantage", 0.0),
    )


def credit_of_tokens(
    tokens: TokenTables, turn_advantage_G_T: torch.Tensor, transform: str, sepa_lambda: float | None = None
) -> torch.Tensor:
    """Advantages of the tokens by ``transform``; ``sepa_lambda`` None: the run's, at that step.

    Raises NotOffered where the tables lack what the transform reads.
    """
    if transform in ("gtpo_canonical", "grpo_s"):
        raise NotOffered("it replaces the turns' credit")
    if transform not in TRANSFORMS:
        raise _not_loaded(transform)
    operator, pipeline = TRANSFORMS[transform], tokens.pipeline
    if operator.weighted and tokens.uncertainty_G_T is None:
        raise NotOffered("no uncertainties of tokens were recorded")
    if operator.needs_planning and tokens.planning_G_T is None:
        raise NotOffered("no planning tokens were recorded")
    lam = tokens.sepa_lambda if sepa_lambda is None else sepa_lambda
    if operator.uses_sepa_controller and lam is None:
        raise NotOffered("this run has no SEPA lambda")
    return token_credit(
        turn_advantage_G_T,
        tokens.trained_G_T,
        transform_mode=transform,
        uncertainty_B_T=tokens.uncertainty_G_T,
        planning_B_T=tokens.planning_G_T,
        group_B=torch.zeros(len(tokens.rows), dtype=torch.int64),
        sepa_lambda=lam or 0.0,
        gtpo_beta=pipeline["gtpo_beta"],
        hicra_alpha=pipeline["hicra_alpha"],
        entropy_mask_rho=pipeline["entropy_mask_rho"],
    ).advantage_B_T


def places(tables: TurnTables, rows: list[int]) -> torch.Tensor:
    """Returns the indices of the group's rollouts among all rows."""
    place = {row: index for index, row in enumerate(tables.rows)}
    return torch.tensor([place[row] for row in rows])


def on_tokens(value_G_K1: torch.Tensor, tokens: TokenTables) -> torch.Tensor:
    """Every token's turn's value; 0 on tokens that are not trained."""
    of_turn_G_T = value_G_K1.gather(1, tokens.turn_ids_G_T.clamp(min=0))
    return torch.where(tokens.trained_G_T, of_turn_G_T, 0.0)


def as_the_run_did(tables: TurnTables, tokens: TokenTables) -> torch.Tensor:
    """advantage_G_T, recomputed with the run's own settings. Raises NotOffered."""
    pipeline = tables.pipeline
    if pipeline["algorithm"] is not None:
        raise _not_loaded(pipeline["algorithm"])
    advantage_B_K1 = credit_of_turns(tables, pipeline["mode"]).advantage_B_K1
    return credit_of_tokens(
        tokens, on_tokens(advantage_B_K1[places(tables, tokens.rows)], tokens), pipeline["transform"]
    )
