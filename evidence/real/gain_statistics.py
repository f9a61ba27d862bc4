"""What scores of hand-written trajectories say about each kind of page: mean gains, AUCs, who gets the credit of a pair."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from common import with_interval
from questions70 import BOTH, ONE, YES_NO
from rollouts import ANSWER, BRIDGE, DISTRACTOR

from verl_credit.credit.turn.info_gain import INFO_GAIN_TYPES, info_gain

Gains = dict[tuple[str, str], list[float]]
"""(page, page before it or "") -> gains of one question. Distractors share one name."""
PLACES = {
    "answer page, first": (ANSWER, ""),
    "bridge page, first": (BRIDGE, ""),
    "distractor, first": (DISTRACTOR, ""),
    "answer page after the bridge page": (ANSWER, BRIDGE),
    "answer page after a distractor": (ANSWER, DISTRACTOR),
    "bridge page after the answer page": (BRIDGE, ANSWER),
    "bridge page after a distractor": (BRIDGE, DISTRACTOR),
    "distractor after the answer page": (DISTRACTOR, ANSWER),
    "distractor after the bridge page": (DISTRACTOR, BRIDGE),
    "distractor after a distractor": (DISTRACTOR, DISTRACTOR),
}
AGAINST = {
    "answer page, first": "distractor, first",
    "bridge page, first": "distractor, first",
    "answer page after the bridge page": "distractor after the bridge page",
    "answer page after a distractor": "distractor after a distractor",
    "bridge page after the answer page": "distractor after the answer page",
    "bridge page after a distractor": "distractor after a distractor",
}


def gains_of(rows: list[dict], info_gain_type: str) -> Gains:
    """The same first page stands in several rows and counts once."""
    found: dict[tuple[str, str], dict[str, float]] = {}
    for row, values in zip(rows, gain_table(rows, info_gain_type).tolist(), strict=True):
        before = ""
        for page, value in zip(row["pages"], values, strict=True):
            found.setdefault((page.split()[0], before), {})[page] = value
            before = page.split()[0]
    return {place: list(values.values()) for place, values in found.items()}


def auc(high: np.ndarray, low: np.ndarray) -> float:
    """P(high > low) + P(high = low) / 2."""
    apart = high[:, None] - low[None]
    return float((apart > 0).mean() + (apart == 0).mean() / 2)


def summary(scores: list[dict]) -> dict:
    kinds = {kind: [q for q in scores if q["kind"] == kind] for kind in (ONE, BOTH, YES_NO)}
    by_type = {
        kind: {name: sum(q["type"] == name for q in found) for name in ("bridge", "comparison")}
        for kind, found in kinds.items()
    }
    return {
        "questions": {kind: len(found) for kind, found in kinds.items()},
        "questions_by_type": by_type,
        "answer_stands_in_the_question": sum(q["answer_in_question"] for q in kinds[ONE] + kinds[BOTH]),
        "results": {kind: {t: _of_kind(found, t) for t in INFO_GAIN_TYPES} for kind, found in kinds.items()},
        "prob_diff_against_log_prob_diff": _disagreement(scores),
    }


def _of_kind(questions: list[dict], info_gain_type: str) -> dict:
    gains = [gains_of(question["rows"], info_gain_type) for question in questions]

    def values(place: str) -> list[list[float]]:
        return [of.get(PLACES[place], []) for of in gains]

    report = {"mean": {}, "auc": {}, "auc_within_the_question": {}, "above_0": {}}
    for place in PLACES:
        report["mean"][place] = _mean(values(place))
        report["above_0"][place] = _mean([[float(v > 0) for v in own] for own in values(place)])
    for place, other in AGAINST.items():
        high, low = values(place), values(other)
        report["auc"][place] = _over(high, low, lambda a, b: auc(np.concatenate(a), np.concatenate(b)))
        report["auc_within_the_question"][place] = _over(
            high, low, lambda a, b: float(np.mean([auc(x, y) for x, y in zip(a, b, strict=True)]))
        )
    return report | {"pair": _pair(gains)}


def _mean(values: list[list[float]]) -> dict:
    """Over questions, of each question's own mean."""
    own = np.array([np.mean(of) for of in values if of])
    return with_interval(len(own), lambda chosen: float(own[chosen].mean()))


def _over(high: list[list[float]], low: list[list[float]], statistic: Callable) -> dict:
    pairs = [(np.array(a), np.array(b)) for a, b in zip(high, low, strict=True) if a and b]
    return with_interval(
        len(pairs), lambda chosen: statistic([pairs[i][0] for i in chosen], [pairs[i][1] for i in chosen])
    )


def _pair(gains: list[Gains]) -> dict:
    """Both supporting pages in both orders: their joint gain, and what each place of the pair gets of it."""

    def difference(a: tuple[str, str], b: tuple[str, str]) -> dict:
        own = np.array([of[a][0] - of[b][0] for of in gains if a in of and b in of])
        return with_interval(len(own), lambda chosen: float(own[chosen].mean()))

    both = {
        "both pages, the bridge page first": [[of[BRIDGE, ""][0] + of[ANSWER, BRIDGE][0]] for of in gains],
        "both pages, the answer page first": [[of[ANSWER, ""][0] + of[BRIDGE, ANSWER][0]] for of in gains],
    }
    return {name: _mean(values) for name, values in both.items()} | {
        "answer page: after the bridge page minus first": difference((ANSWER, BRIDGE), (ANSWER, "")),
        "answer page: after the bridge page minus after a distractor": difference(
            (ANSWER, BRIDGE), (ANSWER, DISTRACTOR)
        ),
        "bridge page: after the answer page minus first": difference((BRIDGE, ANSWER), (BRIDGE, "")),
        "second place: bridge page minus distractor, after the answer page": difference(
            (BRIDGE, ANSWER), (DISTRACTOR, ANSWER)
        ),
    }


def gain_table(rows: list[dict], info_gain_type: str) -> np.ndarray:
    """Gains of all rollouts of a question, [rollouts, turns]."""
    score = torch.tensor([row["scores"] for row in rows], dtype=torch.float64)
    return info_gain(score, torch.ones_like(score), info_gain_type=info_gain_type).info_gain_B_K.numpy()


def groups_of(rows: list[dict], info_gain_type: str) -> list[np.ndarray]:
    """Per turn the gains of a question's rollouts, each different beginning once: what turn modes compare."""
    table, found = gain_table(rows, info_gain_type), []
    for turn in range(table.shape[1]):
        first = {tuple(row["pages"][: turn + 1]): place for place, row in reversed([*enumerate(rows)])}
        found.append(table[sorted(first.values()), turn])
    return found


def flips(a_B: np.ndarray, b_B: np.ndarray, gap: float = 0.0) -> tuple[int, int]:
    """(pairs that ``b`` has in another order, pairs) among pairs of which ``a`` is more than ``gap`` apart."""
    i, j = np.triu_indices(len(a_B), 1)
    apart = a_B[i] - a_B[j]
    clear = np.abs(apart) > gap
    return int((clear & (apart * (b_B[i] - b_B[j]) < 0)).sum()), int(clear.sum())


def _disagreement(scores: list[dict]) -> dict:
    """How often the two types differ in a turn: in the sign of its gain, in that of the gain minus the mean of the
    question's rollouts, and in the order of two rollouts."""
    found = {}
    groups = [[groups_of(question["rows"], t) for t in INFO_GAIN_TYPES] for question in scores]
    for turn in (0, 1):
        columns = [(p[turn], log_p[turn]) for p, log_p in groups]
        count = sum(len(p) for p, _ in columns)
        counted = np.array([flips(*pair) for pair in columns]).sum(axis=0)
        found[f"turn {turn + 1}"] = {
            "turns": count,
            "sign_of_the_gain": sum(int((p * log_p < 0).sum()) for p, log_p in columns) / count,
            "sign_of_the_gain_minus_the_group_mean": sum(
                int(((p - p.mean()) * (log_p - log_p.mean()) < 0).sum()) for p, log_p in columns
            )
            / count,
            "pairs": int(counted[1]),
            "order_of_a_pair": float(counted[0] / counted[1]),
        }
    return found
