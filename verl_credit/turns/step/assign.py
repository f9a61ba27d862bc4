"""The credit of one step: turn rewards, the turn mode, then the token level, on the tokens that the policy wrote.

The trainer, the twin and `fidelity` make `StepInputs` after the policy's forward of the step (`step_inputs`), and call
`assign` when outcomes and groups are known. The inputs are not changed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from verl_credit.config.settings import INFO_GAIN, CreditSettings
from verl_credit.credit import TurnCredit, spread, turn_table
from verl_credit.credit.groups import SOLVED_ABOVE
from verl_credit.credit.plugins import TurnInputs
from verl_credit.credit.turn.session_map import Sessions
from verl_credit.credit.turn.turn_credit import BatchTables, credit_of
from verl_credit.errors import IntegrityError
from verl_credit.lazy import torch
from verl_credit.names import ANSWER_WHEN_SOLVED
from verl_credit.turns.rollout.book import TurnBatch
from verl_credit.turns.score.gains import score_gains
from verl_credit.turns.score.scorers import Forward, GainPlan
from verl_credit.turns.step.anchor_table import anchor_table, observations
from verl_credit.turns.step.signals.built_in import signals_of
from verl_credit.turns.step.signals.signal import Signal, StepRows, Table, step_rewards
from verl_credit.turns.step.token_stage import TokenInputs, TokenStage
from verl_credit.turns.step.turn_values import TurnValues, learned_by_critic


@dataclass(frozen=True)
class CreditRun:
    """The parts that all steps of a run share. The token level's SEPA controller and the values change between steps."""

    settings: CreditSettings
    tokenizer: Any
    """The policy's tokenizer, from transformers."""
    signals: Mapping[Signal, float] = field(default_factory=dict)
    stage: TokenStage | None = None
    """Outcome operator and token level; None: GRPO and no token level."""
    tolerated_share: float = 0.0
    """The share of a signal's turn rewards that may be missing (``faults.max_lost_rewards``)."""
    note: Callable[[str], None] = print
    """The function that gets messages about missing rewards and their reason."""
    values: TurnValues | None = None
    """The values of turns' states (`algorithm.turn_values`), for a turn mode that reads them."""

    @classmethod
    def of(cls, settings: CreditSettings, tokenizer, **faults) -> CreditRun:
        """verl's own estimators have neither turn signals nor a token level. ``faults``: share and note."""
        if not settings.turn_estimator:
            return cls(settings, tokenizer)
        stage, values = TokenStage(settings.algorithm, tokenizer), TurnValues.of(settings)
        return cls(settings, tokenizer, signals_of(settings), stage, values=values, **faults)

    @property
    def columns(self) -> list[str]:
        """The data file's columns that turn signals and values read."""
        of_signals = [name for signal in self.signals for name in signal.columns]
        return [*of_signals, *(self.values.provider.columns if self.values else ())]


@dataclass(frozen=True)
class StepInputs:
    """The inputs of a step's credit beside outcomes and groups, row for row as verl's data.

    Where rollouts have several outputs, ``turns`` and the gains have a row per rollout (`sessions.joined`), and the token
    level's inputs and the critic's values have one per output until `assign` joins them.
    """

    run: CreditRun
    turns: TurnBatch
    gain_B_K: torch.Tensor
    has_gain_B_K: torch.Tensor
    answer_B: torch.Tensor | None = None
    """The gold answer's probability before the answer turn (`Gains`); None where no gain was planned."""
    gold_B_K1: torch.Tensor | None = None
    """The gold answer's probability before every turn."""
    scored: bool = True
    """False: no gain is measured in this step (`info_gain_every`, `info_gain_warmup_steps`)."""
    gain_scale: float = 1.0
    outcome_scale: float = 1.0
    tokens: TokenInputs | None = None
    """The token level's inputs; None when no token level is active."""
    value_B_T: torch.Tensor | None = None
    """The critic's value of the state before each token; None without a critic that has the values."""

    @property
    def rewarding(self) -> bool:
        """False: a step without turn rewards, because the run's only signal is information gain."""
        return self.scored or set(self.run.settings.turn_signals) != {INFO_GAIN}


@dataclass(frozen=True)
class StepCredit:
    """The credit of a step, and its inputs."""

    inputs: StepInputs
    tables: BatchTables
    """The turn rewards and states in the turn mode's call."""
    credit: TurnCredit
    advantage_B_T: torch.Tensor
    clip_scale_B_T: torch.Tensor
    metrics: dict[str, float]
    """Metrics of signals and of the token level."""
    signals: Mapping[str, Table] = field(default_factory=dict)
    """Each turn signal's own (values_B_K, has_B_K), before weights."""
    return_B_T: torch.Tensor | None = None
    """What the critic learns; None without a critic that has the values."""

    @property
    def settings(self) -> CreditSettings:
        return self.inputs.run.settings

    @property
    def rewarded_B_K(self) -> torch.Tensor:
        """Turns of valid rows whose reward is known."""
        t = self.tables
        return t.has_reward_B_K & t.valid_B[:, None] & t.reward_B_K.isfinite()


def step_inputs(
    run: CreditRun, plan: GainPlan, forward: Forward, metrics: dict, *, step: int, planned_steps: int
) -> StepInputs:
    """The inputs after the forward of the step; ``metrics`` gets the gains' metrics."""
    gains = score_gains(plan, forward, metrics)
    return StepInputs(
        run, plan.rollouts, *gains, plan.scored, *run.settings.curriculum_at(step, planned_steps)
    )


def assign(
    inputs: StepInputs, outcome_B: torch.Tensor, group_B: torch.Tensor, mask_B_T: torch.Tensor
) -> StepCredit:
    """Advantages and clip scales of the step's tokens.

    ``mask_B_T``: the response mask after rejection by rollout correction. Rejected tokens get 0 and are in no token
    statistic. Rows and turns that lost tokens keep their outcome and gain in the statistics of their group, as with verl's
    own estimators. Rollouts of several outputs are rows of their own in between, with the outcome of their last output; what
    is returned per token has verl's rows again.
    Modes, equations and edge cases: ``verl_credit.credit.turn.turn_credit``. An outcome that is not finite stops the run; a
    turn reward that is NaN is a missing one.
    """
    run, turns, sessions = inputs.run, inputs.turns, inputs.turns.sessions
    if sessions is not None:
        inputs = _of_sessions(inputs, sessions)
        outcome_B, group_B = outcome_B[sessions.last_S], group_B[sessions.last_S]
        mask_B_T = sessions.join(mask_B_T)
    _check_outcomes(inputs, outcome_B)
    rows = StepRows(turns, run.tokenizer.decode, outcome_B, group_B, inputs.gain_B_K, inputs.has_gain_B_K)
    signals: dict[str, Table] = {}
    tables, return_B_K1, metrics = _tables(inputs, rows, signals)
    if inputs.answer_B is not None:
        solved_B = turns.row_valid_B & (outcome_B > SOLVED_ABOVE) & inputs.answer_B.isfinite()
        if solved_B.any():
            metrics[ANSWER_WHEN_SOLVED] = inputs.answer_B[solved_B].double().mean().item()
    credit = credit_of(run.settings.algorithm.turn_mode, tables, _options(inputs))
    clip_scale_B_T = spread(credit.clip_scale_B_K1, turns.turn_ids_B_T, mask_B_T, fill=1.0)
    advantage_B_T = spread(credit.advantage_B_K1, turns.turn_ids_B_T, mask_B_T)
    if run.stage is not None and run.stage.active:
        assert inputs.tokens is not None
        advantage_B_T, token_metrics = run.stage.apply(
            advantage_B_T,
            credit.outcome_advantage_B,
            outcome_B,
            group_B,
            inputs.tokens,
            mask_B_T,
            TurnInputs(
                turns.turn_ids_B_T,
                tables.reward_B_K,
                tables.has_reward_B_K,
                tables.optional.get("anchor_B_K1"),
                None if run.settings.algorithm.algorithm_mode is None else observations(rows),
            ),
        )
        metrics |= token_metrics
        if run.settings.algorithm.replaces_turns:
            credit = _mean_over_turns(
                advantage_B_T, tables.n_tool_turns_B, turns.turn_ids_B_T, mask_B_T, credit
            )
    counted_B_T = mask_B_T.bool() & turns.row_valid_B[:, None]
    if counted_B_T.any():
        spread_t = advantage_B_T[counted_B_T].double().std(correction=0)
        metrics["credit/advantage/token_std"] = spread_t.item()
    return_B_T = None
    if inputs.value_B_T is not None and return_B_K1 is not None:
        return_B_T = learned_by_critic(inputs.value_B_T, return_B_K1, turns.turn_ids_B_T, mask_B_T)
    if sessions is not None:
        advantage_B_T, clip_scale_B_T = sessions.split(advantage_B_T), sessions.split(clip_scale_B_T, 1.0)
        return_B_T = None if return_B_T is None else sessions.split(return_B_T)
    return StepCredit(inputs, tables, credit, advantage_B_T, clip_scale_B_T, metrics, signals, return_B_T)


def _of_sessions(inputs: StepInputs, sessions: Sessions) -> StepInputs:
    """The inputs with the tokens of a rollout's outputs in one row."""
    tokens, value_B_T = inputs.tokens, inputs.value_B_T
    if tokens is not None:
        names = ("mask_B_T", "token_ids_B_T", "log_prob_B_T", "entropy_B_T")
        given = {name: values for name in names if (values := getattr(tokens, name)) is not None}
        together: dict[str, Any] = {name: sessions.join(values) for name, values in given.items()}
        tokens = replace(tokens, **together, row_valid_B=inputs.turns.row_valid_B)
    return replace(inputs, tokens=tokens, value_B_T=None if value_B_T is None else sessions.join(value_B_T))


def _tables(
    inputs: StepInputs, rows: StepRows, signals: dict[str, Table]
) -> tuple[BatchTables, torch.Tensor | None, dict[str, float]]:
    """(tables of the turn mode, returns where there are values, metrics). ``signals`` gets each signal's own rewards."""
    run, turns, algorithm = inputs.run, inputs.turns, inputs.run.settings.algorithm
    reward_B_K, has_reward_B_K, metrics = step_rewards(
        run.signals,
        run.settings,
        rows,
        scored=inputs.scored,
        tolerated_share=run.tolerated_share,
        parts=signals,
        note=run.note,
    )
    table, return_B_K1 = turn_table(turns.turn_ids_B_T, turns.turn_ids_B_T >= 0), None
    optional = {"turn_tokens_B_K1": table.n_tokens_B_K1}
    if algorithm.algorithm_mode is not None or "anchor_B_K1" in algorithm.turn_mode.tables:
        optional["anchor_B_K1"] = anchor_table(run.settings, rows)
    if run.values is not None:
        optional["value_B_K1"], return_B_K1, of_values = run.values.of_step(
            rows,
            torch.where(has_reward_B_K, reward_B_K, 0.0),
            table.n_tool_turns_B,
            gold_B_K1=inputs.gold_B_K1 if run.settings.scores_gain else None,
            value_B_T=inputs.value_B_T,
        )
        metrics |= of_values
    known = reward_B_K, has_reward_B_K, rows.group_B, turns.row_valid_B, table.n_tool_turns_B
    return BatchTables(rows.outcome_B, *known, optional), return_B_K1, metrics


def _options(inputs: StepInputs) -> dict[str, Any]:
    """The turn mode's arguments beside its tables."""
    settings, stage = inputs.run.settings, inputs.run.stage
    mode, options = settings.algorithm.turn_mode, settings.turn_options
    options["tied_groups"] = settings.algorithm.tied_groups
    if mode.any_outcome_operator:
        options["outcome_operator"] = "grpo" if stage is None else stage.outcome_operator
    if mode.curriculum:
        options |= {"gain_scale": inputs.gain_scale, "outcome_scale": inputs.outcome_scale}
    return options


def _check_outcomes(inputs: StepInputs, outcome_B: torch.Tensor) -> None:
    valid_B, maxrl = inputs.turns.row_valid_B, inputs.run.settings.algorithm.advantage_mode == "maxrl"
    for row in (valid_B & ~outcome_B.isfinite()).nonzero()[:, 0].tolist():
        raise IntegrityError(
            f"outcome of row {row} is {float(outcome_B[row])}: the reward function returned no finite number"
        )
    for row in (valid_B & (outcome_B < 0)).nonzero()[:, 0].tolist() if maxrl else ():
        raise IntegrityError(
            f"algorithm.advantage_mode=maxrl divides by the mean outcome, and row {row} of this step has outcome "
            f"{float(outcome_B[row]):g}; use another advantage_mode, or scores of at least 0"
        )


def _mean_over_turns(
    advantage_B_T: torch.Tensor,
    n_tool_turns_B: torch.Tensor,
    turn_ids_B_T: torch.Tensor,
    mask_B_T: torch.Tensor,
    like: TurnCredit,
) -> TurnCredit:
    """Means over turns of advantages that were made without turns, for metrics and trajectories.

    A turn whose tokens are all rejected by rollout correction has the mean 0.
    """
    ids_B_T = torch.where(mask_B_T.bool(), turn_ids_B_T, 0).long()
    zeros_B_K1 = torch.zeros(like.advantage_B_K1.shape, dtype=torch.float64)
    n_B_K1 = zeros_B_K1.scatter_add(1, ids_B_T, mask_B_T.double())
    sum_B_K1 = zeros_B_K1.scatter_add(1, ids_B_T, torch.where(mask_B_T.bool(), advantage_B_T, 0.0).double())
    mean_B_K1 = (sum_B_K1 / n_B_K1.clamp(min=1)).to(like.advantage_B_K)
    answer_B_1 = mean_B_K1.gather(1, n_tool_turns_B[:, None])
    own_B_K = torch.arange(mean_B_K1.shape[1] - 1) < n_tool_turns_B[:, None]
    tool_B_K = torch.where(own_B_K, mean_B_K1[:, :-1], answer_B_1)
    return TurnCredit(tool_B_K, answer_B_1.squeeze(1), like.clip_scale_B_K, like.counts)


def group_numbers(uids) -> torch.Tensor:
    """Prompt ids of any type -> 0, 1, ... in order of first appearance."""
    number: dict = {}
    return torch.tensor([number.setdefault(uid, len(number)) for uid in uids])
