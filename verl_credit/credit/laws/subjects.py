"""Runs operators of all levels, ours and a user's, from a batch to token advantages: one suite of laws tests them all."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial, wraps
from typing import Any

import torch

from verl_credit.credit import REGISTRY
from verl_credit.credit.laws.drawn_world import World
from verl_credit.credit.operator import Operator
from verl_credit.credit.plugins import (
    AlgorithmContext,
    TransformContext,
    TransformSpec,
    TurnInputs,
    UncertaintyContext,
    as_transform_spec,
    as_uncertainty_spec,
    run_algorithm,
    run_transform,
    run_uncertainty,
)
from verl_credit.credit.plugins.calls import outcome_operator
from verl_credit.credit.plugins.load import kind_of, on_lists
from verl_credit.credit.token.gtpo import gtpo_weights
from verl_credit.credit.token.token_credit import token_credit
from verl_credit.credit.token.uncertainty import uncertainty
from verl_credit.credit.turn.mode import TurnMode, as_turn_mode
from verl_credit.credit.turn.modes import MODES
from verl_credit.credit.turn.turn_credit import BatchTables, credit_of
from verl_credit.credit.turn.turns import spread

GAMMA = 0.9
BESIDE = "turn-group-v1d"  # gives turns of a row different advantages
NO_EPS = 1e-300  # an eps of 0 is refused
GTPO_BETA = 1.0  # the largest at which no weight of an uncertainty can fall below 0
STRENGTHS: dict[str, Any] = {"sepa_lambda": 0.6, "gtpo_beta": GTPO_BETA}
# The small input of `Subject.call`.
REWARDS, TOKENS, PLANNING = [1.0, 0.0], [[0.5, 1.0], [2.0, 0.25, 1.0]], [[0, 1], [1, 0, 0]]
LOG_PROBS = [[-h for h in row] for row in TOKENS]
TURNS: dict[str, Any] = {"turn_ids_G": [[0, 0], [0, 1, 1]], "turn_rewards_G": [[], [0.5]]}


@dataclass(frozen=True)
class Result:
    """Float outputs per token, and counts."""

    advantage_B_T: torch.Tensor
    clip_scale_B_T: torch.Tensor
    counts: Mapping[str, int] = field(default_factory=dict)

    def outputs(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.advantage_B_T, self.clip_scale_B_T


@dataclass(frozen=True)
class Subject:
    """An operator that the laws examine."""

    name: str
    level: str
    """outcome, turn, token, or whole (canonical methods and algorithms, which replace the others)."""
    function: Any
    run: Callable[[World], Result]
    apply: Callable[[World, torch.Tensor], torch.Tensor] | None = None
    """Token level: from the turns' advantages to the tokens' advantages."""
    unfloored: Callable[[World], Result] | None = None
    """Our turn modes that declare `normalised`: `run` with nothing added to a variance or a std."""
    given: Callable[[World], Result] | None = None
    """Token level: the turns' advantages that `run` applies it to."""
    reads_turns: bool = False
    """Token level: it can stand beside a turn mode."""
    reads: frozenset[str] = frozenset()
    """The inputs that it reads among those that may be absent: "planning mask", "entropy", "gains"."""
    uncertainty: Callable[[World], torch.Tensor] | None = None
    call: Callable[[], Any] | None = None
    """The bare function on a small input, to be called many times."""
    tables: tuple[str, ...] = ()
    """Turn level: the optional tables that it reads."""
    scope: str = "group"
    properties: frozenset[str] | None = None
    """The declared properties; None: it declares nothing, so that every finding is accepted."""
    exempt: Mapping[str, str] = field(default_factory=dict)
    operator: Operator | None = None


def registered_subject(level: str, name: str) -> Subject:
    """An operator of ours, by level (outcome, turn, token, canonical) and name."""
    operator = REGISTRY[level, name]
    more: dict[str, Any] = {key: getattr(operator, key) for key in ("scope", "properties", "exempt")}
    if level == "outcome":
        more["run"] = partial(run_turn_mode, mode=MODES["none"], outcome_operator=name)
    elif level == "turn":
        more |= {"run": partial(run_turn_mode, mode=MODES[name]), "tables": tables_given(MODES[name])}
        if "normalised" in operator.properties:
            more["unfloored"] = partial(more["run"], variance_floor=0.0, eps=NO_EPS)
    elif level == "token":
        more |= _token_level(partial(_apply_token, mode=name), beside=BESIDE) | {"reads_turns": True}
    else:
        level, more["run"] = "whole", partial(_run_canonical, function=operator.function)
    reads = frozenset(operator.reads)
    return Subject(name, level, operator.function, reads=reads, operator=operator, **more)


def _token_level(apply: Callable, beside: str) -> dict[str, Any]:
    given = partial(run_turn_mode, mode=MODES[beside])
    return {"apply": apply, "given": given, "run": partial(run_token, apply=apply, given=given)}


def run_turn_mode(world: World, *, mode: TurnMode, **options) -> Result:
    options = {"gamma": GAMMA, **options} if "gamma" in mode.options else options
    tables = BatchTables(
        world.outcome_B, world.gain_B_K, world.has_gain_B_K, world.group_B, world.valid_B, world.n_tool_turns_B,
        {name: getattr(world, name) for name in tables_given(mode, options.get("parity"))},
    )  # fmt: skip
    credit = credit_of(mode, tables, options)
    advantage_B_T = spread(credit.advantage_B_K1, world.turn_ids_B_T, world.mask_B_T)
    scale_B_T = spread(credit.clip_scale_B_K1, world.turn_ids_B_T, world.mask_B_T, fill=1.0)
    return Result(advantage_B_T, scale_B_T, credit.counts)


def tables_given(mode: TurnMode, parity: str | None = None) -> tuple[str, ...]:
    """The optional tables that it reads: mt_grpo reads ``result_turn_B`` only with parity="released"."""
    return tuple(name for name in mode.tables if name != "result_turn_B" or parity == "released")


def run_token(world: World, *, apply, given) -> Result:
    turns = given(world)
    return Result(apply(world, turns.advantage_B_T), turns.clip_scale_B_T, turns.counts)


def _apply_token(world: World, turn_advantage_B_T: torch.Tensor, *, mode: str) -> torch.Tensor:
    mask_B_T = world.counted_B_T
    return token_credit(
        turn_advantage_B_T,
        mask_B_T,
        transform_mode=mode,
        uncertainty_B_T=uncertainty("surprisal", world.log_prob_B_T, mask_B_T),
        planning_B_T=world.planning_B_T,
        group_B=world.group_B,
        **STRENGTHS,
    ).advantage_B_T


def _run_canonical(world: World, *, function) -> Result:
    advantage = function(
        world.outcome_B, world.entropy_B_T, world.mask_B_T, world.group_B, row_valid_B=world.valid_B
    )
    if advantage.dim() == 1:
        advantage = torch.where(world.mask_B_T, advantage[:, None], 0.0)
    return Result(advantage, torch.ones_like(advantage))


def own_subject(operator: Any, name: str, *, kind: str | None = None, params: dict | None = None) -> Subject:
    """A user's operator. It may declare ``scope`` ("batch"), ``properties``, ``reads`` and ``exempt`` ({law: reason})."""
    kind, small_params = kind or kind_of(operator, name), dict(params or {})
    properties = getattr(operator, "properties", None)
    more: dict[str, Any] = {
        "level": {"outcome": "outcome", "turn": "turn", "algorithm": "whole"}.get(kind, "token"),
        "scope": getattr(operator, "scope", "group"),
        "properties": None if properties is None else frozenset(properties),
        "exempt": getattr(operator, "exempt", {}),
        "reads": frozenset(getattr(operator, "reads", ())),
    }
    if kind == "outcome":
        own, function = outcome_operator(operator, name, params), on_lists(operator, name, small_params)
        more["call"] = lambda: function(list(REWARDS))
        more["run"] = partial(run_turn_mode, mode=MODES["none"], outcome_operator=own)
    elif kind == "turn":
        mode = as_turn_mode(operator, name)
        more |= {"run": partial(_run_own_mode, mode=mode, params=params or {}), "tables": tables_given(mode)}
    elif kind == "transform":
        spec = as_transform_spec(operator, name)
        reads_turns = spec.compute_context is None or spec.uses_turn_advantages
        apply = partial(_apply_own, spec=spec, params=params)
        more |= _token_level(apply, beside=BESIDE if reads_turns else "none") | {"reads_turns": reads_turns}
        if spec.needs_planning or spec.uses_sepa_controller:
            more["reads"] |= {"planning mask"}
        if spec.compute_context is not None:  # parts get lists through our code, one small call at a time
            more["call"] = partial(spec.compute_context, _small_context(spec, small_params))
    elif kind == "uncertainty":
        measure = as_uncertainty_spec(operator, name)
        more["uncertainty"] = partial(_uncertainties, spec=measure, params=params)
        more |= _token_level(partial(_apply_uncertainty, values=more["uncertainty"]), beside="none")
        more["reads"] |= set(getattr(measure.compute, "reads", ()))
        token = UncertaintyContext(LOG_PROBS[0], None, TOKENS[0], PLANNING[0], small_params)
        more["call"] = partial(measure.compute, token)
    else:
        more["run"] = partial(_run_algorithm, function=operator, name=name, params=params)
        more["reads"] |= {"planning mask", "gains"}  # an algorithm always gets them
        whole = AlgorithmContext(
            REWARDS, LOG_PROBS, PLANNING, small_params, precomputed_entropies_G=TOKENS, **TURNS
        )
        more["call"] = partial(operator, whole)
    return Subject(name=name, function=operator, **more)


def _small_context(spec: TransformSpec, params: dict) -> TransformContext:
    """Lists as in training: one advantage for all tokens of a turn."""
    return TransformContext(
        episode_advantages=[1.0, -1.0],
        logprobs_G=LOG_PROBS,
        planning_masks_G=PLANNING if spec.needs_planning else [[], []],
        params=params,
        uncertainties_G=TOKENS,
        turn_advantages_G=[[1.0, 1.0], [-0.5, -1.0, -1.0]],
    )


def _run_own_mode(world: World, *, mode: TurnMode, params: Mapping[str, Any]) -> Result:
    """Returns float32 where the function computed in less than float64: its rounding is no error."""
    coarse: list[torch.Tensor] = []

    @wraps(mode.function)
    def noting(*given, **options):
        outputs = mode.function(*given, **options)
        tensors = (
            [out for out in outputs if isinstance(out, torch.Tensor)]
            if isinstance(outputs, tuple | list)
            else []
        )
        coarse.extend(out for out in tensors if out.is_floating_point() and out.dtype != torch.float64)
        return outputs

    result = run_turn_mode(world, mode=replace(mode, function=noting), **params)
    return (
        Result(result.advantage_B_T.float(), result.clip_scale_B_T.float(), result.counts)
        if coarse
        else result
    )


def _apply_own(world: World, turn_advantage_B_T: torch.Tensor, *, spec, params) -> torch.Tensor:
    mask_B_T = world.counted_B_T
    answer_B_1 = torch.where(mask_B_T, world.turn_ids_B_T, -1).argmax(dim=1, keepdim=True)
    outcome_B = turn_advantage_B_T.gather(1, answer_B_1).squeeze(1)
    given = {
        "log_prob_B_T": world.log_prob_B_T,
        "planning_B_T": world.planning_B_T,
        "params": params,
        **STRENGTHS,
    }
    given["uncertainty_B_T"] = uncertainty("surprisal", world.log_prob_B_T, mask_B_T)
    rows = mask_B_T, world.group_B, world.valid_B
    return run_transform(spec, turn_advantage_B_T, outcome_B, *rows, **given)[0]


def _apply_uncertainty(world: World, turn_advantage_B_T: torch.Tensor, *, values) -> torch.Tensor:
    value_B_T, mask_B_T = values(world), world.counted_B_T
    return torch.where(mask_B_T, turn_advantage_B_T, 0.0) * gtpo_weights(value_B_T, mask_B_T, beta=GTPO_BETA)


def _uncertainties(world: World, *, spec, params) -> torch.Tensor:
    given = {"entropy_B_T": world.entropy_B_T, "planning_B_T": world.planning_B_T, "params": params}
    return run_uncertainty(spec, world.log_prob_B_T, world.counted_B_T, **given)


def _run_algorithm(world: World, *, function, name, params) -> Result:
    given = {
        "entropy_B_T": world.entropy_B_T,
        "planning_B_T": world.planning_B_T,
        "params": params,
        **STRENGTHS,
    }
    rows = world.outcome_B, world.log_prob_B_T, world.counted_B_T, world.group_B, world.valid_B
    turns = TurnInputs(world.turn_ids_B_T, world.gain_B_K, world.has_gain_B_K)
    advantage_B_T, _ = run_algorithm(function, *rows, name=name, turns=turns, **given)
    return Result(advantage_B_T, torch.ones_like(advantage_B_T))
