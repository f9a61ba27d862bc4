"""The page of `verl-credit fidelity`: a table of credits for every policy, pictures, and the checks of the measurement."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from verl_credit.records.report.page import template
from verl_credit.records.report.studies.fidelity_pictures import (
    agreement_picture,
    bias_picture,
    difference_picture,
)
from verl_credit.records.report.studies.fidelity_turns import gold_against_value, gold_picture, star_picture
from verl_credit.records.report.text import plain, signed

KINDS = {"run": "As the run gives it", "mode": "Turn modes", "control": "Controls"}
MEASURES = ("pearson", "same_turn", "pairs", "end_pairs")
GRADIENT_MEASURES = ("own", "own_difference", "bias", "signal_to_noise")
SWAP_MEANS, SWAP_MEASURES = ("one", "mean"), ("pairs", "searches", "regret", "within")
FAR = 3.0
"""A z score above this needs another seed."""


def fidelity_page(result: Mapping[str, Any], turns: Sequence[Sequence[Mapping[str, Any]]]) -> str:
    """A complete HTML document without a script. ``result``: what ``fidelity.json`` has; ``turns``: of each of its policies,
    the lines of ``turns.jsonl``."""
    policies = result["policies"]
    return template("fidelity.html").render(
        settings=result["settings"],
        policies=[(one, _name(one), its) for one, its in zip(policies, turns, strict=True)],
        names=[_name(one) for one in policies],
        overview=_overview(policies) if len(policies) > 1 else [],
        kinds=KINDS,
        measures=MEASURES,
        gradient_measures=GRADIENT_MEASURES,
        swap_means=SWAP_MEANS,
        swap_measures=SWAP_MEASURES,
        of_kind=_of_kind,
        shown=shown,
        signed=signed,
        plain=plain,
        far=FAR,
        agreement_picture=agreement_picture,
        bias_picture=bias_picture,
        difference_picture=difference_picture,
        gold_against_value=gold_against_value,
        gold_picture=gold_picture,
        star_picture=star_picture,
    )


def shown(measure: Mapping[str, Any] | None) -> str:
    """A number with its interval."""
    if measure is None or measure["value"] is None:
        return "undefined" if measure is not None else "not measured"
    if measure["low"] is None:
        return plain(measure["value"])
    return f"{plain(measure['value'])} [{plain(measure['low'])}, {plain(measure['high'])}]"


def _name(policy: Mapping[str, Any]) -> str:
    return policy["policy"] if policy["step"] is None else f"Step {policy['step']}"


def _of_kind(policy: Mapping[str, Any], kind: str) -> list[tuple[str, Mapping[str, Any]]]:
    return [(name, credit) for name, credit in policy["credits"].items() if credit["kind"] == kind]


def _overview(policies: Sequence[Mapping[str, Any]]) -> list[tuple[str, list[str]]]:
    """Pearson of every credit, a column for each policy."""
    names = dict.fromkeys(name for policy in policies for name in policy["credits"])
    return [
        (name, [shown(policy["credits"].get(name, {}).get("pearson")) for policy in policies])
        for name in names
    ]
