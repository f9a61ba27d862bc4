"""A user's operator as a subject of the laws."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial, wraps
from typing import Any

import torch

from verl_credit.credit.laws.subjects import (
    BESIDE,
    GTPO_BETA,
    SEPA_LAMBDA,
    Result,
    Subject,
    run_outcome,
    run_token,
    run_turn_mode,
    tables_given,
)
from verl_credit.credit.laws.world import World
from verl_credit.credit.plugins import (
    AlgorithmContext,
    TransformContext,
    TransformSpec,
    TurnInputs,
    UncertaintyContext,
    UncertaintySpec,
    as_transform_spec,
    as_uncertainty_spec,
    run_algorithm,
    run_transform,
    run_uncertainty,
)
from verl_credit.credit.plugins.run import on_lists, outcome_operator
from verl_credit.credit.token.gtpo import gtpo_weights
from verl_credit.credit.token.uncertainty import uncertainty
from verl_credit.credit.turn.mode import TurnMode, as_turn_mode
from verl_credit.credit.turn.modes import MODES
from verl_credit.credit.turn.tables import Tables

KINDS = ("outcome", "turn", "transform", "algorithm", "uncertainty")
# The small input of `small_call`.
REWARDS, TOKENS, PLANNING = [1.0, 0.0], [[0.5, 1.0], [2.0, 0.25, 1.0]], [[0, 1], [1, 0, 0]]
LOG_PROBS = [[-h for h in row] for row in TOKENS]
TURNS = {"turn_ids_G": [[0, 0], [0, 1, 1]], "turn_rewards_G": [[], [0.5]]}


def own_subject(operator: Any, name: str, *, kind: str | None = None, params: dict | None = None) -> Subject:
    """A user's operator. It may declare ``scope`` ("batch"), ``properties``, ``reads`` and ``exempt`` ({law: reason})."""
    kind = kind or kind_of(operator, name)
    properties = getattr(operator, "properties", None)
    more = {
        "level": {"outcome": "outcome", "turn": "turn", "algorithm": "whole"}.get(kind, "token"),
        "scope": getattr(operator, "scope", "group"),
        "properties": None if properties is None else frozenset(properties),
        "exempt": getattr(operator, "exempt", {}),
        "reads": frozenset(getattr(operator, "reads", ())),
        "call": partial(small_call, operator, name, kind, params),
    }
    if kind == "outcome":
        more["run"] = partial(run_outcome, operator=outcome_operator(operator, name, params))
    elif kind == "turn":
        mode = as_turn_mode(operator, name)
        more["run"] = partial(_run_own_mode, mode=mode, params=params or {})
        more["tables"] = tables_given(mode)
        more["call"] = None
    elif kind == "transform":
        spec = as_transform_spec(operator, name)
        reads_turns = spec.compute_context is None or spec.uses_turn_advantages
        more["apply"] = partial(_apply_own, spec=spec, params=params)
        more["reads_turns"] = reads_turns
        more["given"] = partial(run_turn_mode, mode=MODES[BESIDE if reads_turns else "none"])
        if spec.needs_planning or spec.uses_sepa_controller:
            more["reads"] |= {"planning mask"}
    elif kind == "uncertainty":
        spec = as_uncertainty_spec(operator, name)
        more["apply"] = partial(_apply_uncertainty, spec=spec, params=params)
        more["uncertainty"] = partial(_uncertainties, spec=spec, params=params)
        more["given"] = partial(run_turn_mode, mode=MODES["none"])
        more["reads"] |= set(getattr(spec.compute, "reads", ()))
    else:
        more["run"] = partial(_run_algorithm, function=operator, name=name, params=params)
        more["reads"] |= {"planning mask", "gains"}  # an algorithm always gets them
    if "given" in more:
        more["run"] = partial(run_token, apply=more["apply"], given=more["given"])
    return Subject(name=name, function=operator, **more)


def kind_of(operator: Any, name: str) -> str:
    """The kind of an operator, from its spec, or from the annotation or the name of its first argument."""
    if isinstance(operator, TransformSpec | UncertaintySpec):
        return "transform" if isinstance(operator, TransformSpec) else "uncertainty"
    if isinstance(operator, TurnMode):
        return "turn"
    parameters = list(inspect.signature(operator).parameters.values()) if callable(operator) else []
    if not parameters and callable(operator):
        return kind_of(operator(), name)
    if parameters:
        first = parameters[0]
        annotation = getattr(first.annotation, "__name__", str(first.annotation)).strip("'\"")
        contexts = (Tables, TransformContext, AlgorithmContext, UncertaintyContext)
        for kind, context in zip(("turn", "transform", "algorithm", "uncertainty"), contexts, strict=True):
            if annotation.endswith(context.__name__):
                return kind
        if first.name in ("tables", "rewards", "rewards_G", "outcomes"):
            return "turn" if first.name == "tables" else "outcome"
    raise ValueError(f"{name}: cannot tell what kind of operator this is; give --kind {'|'.join(KINDS)}")


def small_call(operator: Any, name: str, kind: str, params: dict | None) -> Callable[[], Any]:
    params = dict(params or {})
    if kind == "outcome":
        call = on_lists(operator, name, params)
        return lambda: call(list(REWARDS))
    if kind == "algorithm":
        context = AlgorithmContext(
            REWARDS, LOG_PROBS, PLANNING, params, precomputed_entropies_G=TOKENS, **TURNS
        )
        return lambda: operator(context)
    if kind == "uncertainty":
        spec = as_uncertainty_spec(operator, name)
        context = UncertaintyContext(LOG_PROBS[0], None, TOKENS[0], PLANNING[0], params)
        return lambda: spec.compute(context)
    spec = as_transform_spec(operator, name)
    if spec.compute_context is None:
        return lambda: None  # its parts get lists through our code, one small call at a time
    context = TransformContext(
        episode_advantages=[1.0, -1.0],
        logprobs_G=LOG_PROBS,
        planning_masks_G=PLANNING if spec.needs_planning else [[], []],
        params=params,
        uncertainties_G=TOKENS,
        turn_advantages_G=[[1.0, 1.0], [-0.5, -1.0, -1.0]],
    )
    return lambda: spec.compute_context(context)


def _run_own_mode(world: World, *, mode: TurnMode, params: Mapping[str, Any]) -> Result:
    """Returns float32 where the function computed in less than float64: its rounding is no error."""
    dtypes: set[torch.dtype] = set()

    @wraps(mode.function)
    def noting(*given, **options):
        outputs = mode.function(*given, **options)
        several = outputs if isinstance(outputs, tuple | list) else ()
        dtypes.update(
            out.dtype for out in several if isinstance(out, torch.Tensor) and out.is_floating_point()
        )
        return outputs

    result = run_turn_mode(world, mode=replace(mode, function=noting), **params)
    outputs = result.outputs() if dtypes <= {torch.float64} else (out.float() for out in result.outputs())
    return Result(*outputs, result.counts)


def _apply_own(world: World, turn_advantage_B_T: torch.Tensor, *, spec, params) -> torch.Tensor:
    mask_B_T = world.counted_B_T
    answer_B_1 = torch.where(mask_B_T, world.turn_ids_B_T, -1).argmax(dim=1, keepdim=True)
    return run_transform(
        spec,
        turn_advantage_B_T,
        turn_advantage_B_T.gather(1, answer_B_1).squeeze(1),
        mask_B_T,
        world.group_B,
        world.valid_B,
        log_prob_B_T=world.log_prob_B_T,
        uncertainty_B_T=uncertainty("surprisal", world.log_prob_B_T, mask_B_T),
        planning_B_T=world.planning_B_T,
        params=params,
        sepa_lambda=SEPA_LAMBDA,
        gtpo_beta=GTPO_BETA,
    )[0]


def _apply_uncertainty(world: World, turn_advantage_B_T: torch.Tensor, *, spec, params) -> torch.Tensor:
    value_B_T, mask_B_T = _uncertainties(world, spec=spec, params=params), world.counted_B_T
    return torch.where(mask_B_T, turn_advantage_B_T, 0.0) * gtpo_weights(value_B_T, mask_B_T, beta=GTPO_BETA)


def _uncertainties(world: World, *, spec, params) -> torch.Tensor:
    return run_uncertainty(
        spec,
        world.log_prob_B_T,
        world.counted_B_T,
        entropy_B_T=world.entropy_B_T,
        planning_B_T=world.planning_B_T,
        params=params,
    )


def _run_algorithm(world: World, *, function, name, params) -> Result:
    advantage_B_T, _ = run_algorithm(
        function,
        world.outcome_B,
        world.log_prob_B_T,
        world.counted_B_T,
        world.group_B,
        world.valid_B,
        name=name,
        planning_B_T=world.planning_B_T,
        entropy_B_T=world.entropy_B_T,
        params=params,
        sepa_lambda=SEPA_LAMBDA,
        gtpo_beta=GTPO_BETA,
        turns=TurnInputs(world.turn_ids_B_T, world.gain_B_K, world.has_gain_B_K),
    )
    return Result(advantage_B_T, torch.ones_like(advantage_B_T))
