"""SEPA's diagnostic with trained weights: what does pooling take from execution tokens, and what of it is sampling noise?

    python evidence/real/sepa.py --policy DIR --questions open_domain_qa_420.jsonl --work runs/real_sepa --out evidence/real

DIR is the policy's folder (`verl-credit real`). Writes OUT/sepa.json and OUT/sepa.png. Generation is resumable: a shard in
--work is not made again. One thread.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter, defaultdict
from pathlib import Path

import matplotlib
import numpy as np
import torch
from sepa_tokens import SETS, generate, in_fp32, stem
from transformers import AutoTokenizer

from verl_credit.credit.planning.planning import planning_matches
from verl_credit.credit.planning.token_text import Pieces
from verl_credit.credit.token.sepa import sepa_pool
from verl_credit.credit.token.uncertainty import uncertainty
from verl_credit.real.arithmetic import ARITHMETIC, make_records
from verl_credit.reward.qa import compute_score

DRAWS = 2000
EDGES = np.append(np.linspace(0, 15, 31), 50.0)
WHATS = ("surprisal", "entropy", "after")
TOLD = (
    "planning share",
    "execution mean surprisal",
    "execution mean entropy",
    "planning mean surprisal",
    "planning mean entropy",
    "execution variance",
    "execution variance after",
    "execution reduction",
    "removed",
    "removed, share of entropy",
    "removed, share of noise",
    "removed, share of covariance",
    "execution variance, entropy",
    "execution variance, noise",
    "execution mean varentropy",
    "execution variance, covariance",
    "planning variance",
    "planning variance, share of entropy",
    "planning variance, share of noise",
    "planning variance, share of covariance",
)
FOUNDING_PAPER = {
    "tokens": 318_225,
    "planning tokens": 9_899,
    "trajectories": 2_560,
    "trajectories with planning": 1_655,
    "execution mean surprisal": 0.645,
    "planning mean surprisal": 0.677,
    "execution variance": 0.614,
    "execution variance after": 0.013,
}


def rows_of(work: Path, name: str, decoded: Pieces) -> dict:
    """Sums of every trajectory, R x 2 kinds x MOMENTS in float64, and what is said of the whole set."""
    moments, histograms, grams, question, changed = [], 0, Counter(), [], 0.0
    for path in sorted(work.glob(f"{stem(name)}-[0-9]*.npz")):
        with np.load(path) as shard:
            shard = {key: torch.from_numpy(shard[key]) for key in shard}
        mask_B_T = torch.arange(shard["ids"].shape[1]) < shard["length"][:, None]
        matches = planning_matches(shard["ids"], mask_B_T, decoded)
        surprisal_B_T = uncertainty("surprisal", -shard["surprisal"].double(), mask_B_T)
        pooled_B_T = sepa_pool(surprisal_B_T, matches.planning_B_T, mask_B_T, 1.0)
        kinds = (mask_B_T & ~matches.planning_B_T, matches.planning_B_T)
        changed = max(changed, float((pooled_B_T - surprisal_B_T)[kinds[1]].abs().sum()))
        values = (surprisal_B_T, shard["entropy"].double(), shard["varentropy"].double(), pooled_B_T)
        moments.append(torch.stack([_moments(kind, *values) for kind in kinds], dim=1))
        histograms = histograms + np.array(
            [[np.histogram(v[kind], EDGES)[0] for v in (values[0], values[1], values[3])] for kind in kinds]
        )
        grams.update(matches.gram_counts)
        question.append(shard["question"])
    return {
        "moments": torch.cat(moments).numpy(),
        "question": torch.cat(question).numpy(),
        "histograms": histograms,
        "grams": {gram: count for gram, count in grams.items() if count},
        "planning_changed_by": changed,
    }


def _moments(kind_B_T, s_B_T, h_B_T, v_B_T, pooled_B_T) -> torch.Tensor:
    """B x MOMENTS. The last three are around the trajectory's own mean."""
    share_B_T = kind_B_T.double()
    n_B_1 = share_B_T.sum(dim=1, keepdim=True)
    ds_B_T, dh_B_T = (
        (x - (x * share_B_T).sum(dim=1, keepdim=True) / n_B_1.clamp(min=1)) for x in (s_B_T, h_B_T)
    )
    products = (
        torch.ones_like(s_B_T),
        *(s_B_T, s_B_T**2, h_B_T, h_B_T**2, s_B_T * h_B_T, v_B_T, pooled_B_T, pooled_B_T**2),
        *(ds_B_T**2, dh_B_T**2, ds_B_T * dh_B_T),
    )
    return torch.stack([(x * share_B_T).sum(dim=1) for x in products], dim=1)


def statistics(moments_2_M: np.ndarray) -> dict[str, np.ndarray]:
    """From sums over trajectories, [..., 2, M]: see sepa.md for the names."""
    out = {"planning share": moments_2_M[..., 1, 0] / moments_2_M[..., 0].sum(axis=-1)}
    with np.errstate(divide="ignore", invalid="ignore"):
        for kind, name in enumerate(("execution", "planning")):
            n = moments_2_M[..., kind, 0]
            s, ss, h, hh, sh, v, a, aa, in_ss, in_hh, in_sh = np.moveaxis(
                moments_2_M[..., kind, 1:] / n[..., None], -1, 0
            )
            out |= _split(f"{name} variance", ss - s**2, hh - h**2, sh - s * h)
            out |= {
                f"{name} mean surprisal": s,
                f"{name} mean entropy": h,
                f"{name} mean varentropy": v,
                f"{name} variance after": aa - a**2,
            }
            if kind == 0:
                out["execution reduction"] = 1 - out["execution variance after"] / out["execution variance"]
                out |= _split("removed", in_ss, in_hh, in_sh)
    return out


def _split(name: str, var_s, var_h, cov_sh) -> dict[str, np.ndarray]:
    """Var(s) = Var(H) + Var(s - H) + 2 Cov(H, s - H), and each part's share."""
    noise, both = var_s + var_h - 2 * cov_sh, 2 * (cov_sh - var_h)
    parts = {"entropy": var_h, "noise": noise, "covariance": both}
    return {
        name: var_s,
        **{f"{name}, {part}": value for part, value in parts.items()},
        **{f"{name}, share of {part}": value / var_s for part, value in parts.items()},
    }


def summary(rows: dict) -> dict:
    """Every statistic with its 95 % interval: questions are drawn again, with all their trajectories."""
    moments_R_2_M = rows["moments"]
    cluster_R = np.unique(rows["question"], return_inverse=True)[1]
    sums_C_2_M = np.zeros((cluster_R.max() + 1, *moments_R_2_M.shape[1:]))
    np.add.at(sums_C_2_M, cluster_R, moments_R_2_M)
    clusters = len(sums_C_2_M)
    draws = np.random.default_rng(0).multinomial(clusters, np.full(clusters, 1 / clusters), size=DRAWS)
    found = statistics(sums_C_2_M.sum(axis=0))
    drawn = statistics(np.tensordot(draws.astype(float), sums_C_2_M, axes=1))
    found = {
        k: v for k, v in found.items() if np.isfinite(v)
    }  # without planning tokens nothing is said of them
    low, high = ({k: np.nanpercentile(drawn[k], q) for k in found} for q in (2.5, 97.5))
    tokens_R_2 = moments_R_2_M[:, :, 0]
    return {
        "tokens": int(tokens_R_2.sum()),
        "planning tokens": int(tokens_R_2[:, 1].sum()),
        "trajectories": len(tokens_R_2),
        "questions": clusters,
        "trajectories with planning": int((tokens_R_2[:, 1] > 0).sum()),
        "planning changed by": rows["planning_changed_by"],
        "planning - execution": _within(moments_R_2_M),
        "matches": rows["grams"],
        "statistics": {k: [round(float(x), 5) for x in (found[k], low[k], high[k])] for k in found},
        "histograms": {
            kind: {what: rows["histograms"][i][j].tolist() for j, what in enumerate(WHATS)}
            for i, kind in enumerate(("execution", "planning"))
        },
    }


def _within(moments_R_2_M: np.ndarray) -> list[float]:
    """Mean surprisal of planning less that of execution tokens in trajectories with both: their mean, 95 % interval."""
    n_R_2, sum_R_2 = moments_R_2_M[:, :, 0], moments_R_2_M[:, :, 1]
    both_R = (n_R_2 > 0).all(axis=1)
    less_P = np.diff(sum_R_2[both_R] / n_R_2[both_R], axis=1)[:, 0]
    drawn = np.random.default_rng(0).choice(less_P, (DRAWS, len(less_P))).mean(axis=1)
    return [round(float(x), 3) for x in (less_P.mean(), *np.percentile(drawn, (2.5, 97.5)))]


def together(parts: list[dict]) -> dict:
    """All sets as one; equal numbers of different sets are different questions."""
    return {
        "moments": np.concatenate([part["moments"] for part in parts]),
        "question": np.concatenate([part["question"] + 10_000 * i for i, part in enumerate(parts)]),
        "histograms": sum(part["histograms"] for part in parts),
        "grams": dict(sum((Counter(part["grams"]) for part in parts), Counter())),
        "planning_changed_by": max(part["planning_changed_by"] for part in parts),
    }


def solved(work: Path, tokenizer) -> dict[str, float]:
    """What the reward says of the sums in a box."""
    sums, scores = make_records(0, 896), defaultdict(list)
    for path in sorted(work.glob(f"{stem('sums in a box')}-[0-9]*.npz")):
        with np.load(path) as shard:
            for ids, length, question in zip(*(shard[k] for k in ("ids", "length", "question")), strict=True):
                text = tokenizer.decode(ids[:length], skip_special_tokens=True)
                truth = {"target": sums[question].answers, "form": ARITHMETIC.form}
                scores[question].append(compute_score(ARITHMETIC.name, text, truth))
    rates = np.array([np.mean([score["em"] for score in group]) for group in scores.values()])
    return {
        "questions": len(rates),
        "right": float(rates.mean()),
        "with a box": float(np.mean([score["format_ok"] for group in scores.values() for score in group])),
        "groups with right and wrong": float(((rates > 0) & (rates < 1)).mean()),
        "groups all right": float((rates == 1).mean()),
        "right by operation": {
            sign: float(np.mean([r for r, q in zip(rates, scores, strict=True) if sign in sums[q].question]))
            for sign in (" + ", " - ", " * ")
        },
    }


def table(result: dict) -> str:
    """The table of sepa.md: value [95 % interval]. sepa.json has every statistic."""
    names = ["all", *SETS]
    lines = ["| | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
    for what in ("tokens", "planning tokens", "trajectories", "trajectories with planning", "questions"):
        lines.append(f"| {what} | " + " | ".join(f"{result[name][what]:,}" for name in names) + " |")
    for what in TOLD:
        cells = [result[name]["statistics"].get(what) for name in names]
        texts = ["{:.3g} [{:.3g}, {:.3g}]".format(*cell) if cell else "" for cell in cells]
        lines.append(f"| {what} | " + " | ".join(texts) + " |")
    return "\n".join(lines)


def picture(result: dict, path: Path) -> None:
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (before, after, split) = pyplot.subplots(1, 3, figsize=(15, 4))
    histograms, names = result["all"]["histograms"], ["all", *SETS]
    for axis, what, title in (
        (before, "surprisal", "before"),
        (after, "after", "after SEPA, lambda = 1"),
    ):
        for kind, colour in (("execution", "tab:blue"), ("planning", "tab:orange")):
            count = np.array(histograms[kind][what])
            axis.stairs(count / count.sum() / np.diff(EDGES), EDGES, color=colour, label=kind)
        axis.set(title=f"Surprisal {title}", xlabel="nats", ylabel="density", yscale="log", xlim=(0, 15))
        axis.legend()
    removed, entropy, noise = (
        np.array([result[name]["statistics"][key][0] for name in names])
        for key in ("removed", "removed, entropy", "removed, noise")
    )
    split.barh(names, entropy, color="tab:green", label="entropy")
    split.barh(names, noise, left=entropy, color="tab:red", label="sampling noise")
    split.plot(removed, names, "k|", markersize=12, label="removed: both and their covariance")
    split.invert_yaxis()
    split.set(title="Variance removed from execution tokens", xlabel="nats squared")
    split.legend(fontsize="small", loc="lower right")
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name in ("policy", "questions", "work", "out"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    generate(args.policy, args.questions, args.work)
    tokenizer = AutoTokenizer.from_pretrained(args.policy)
    decoded = Pieces(lambda ids: tokenizer.batch_decode([[i] for i in ids]))
    parts = {name: rows_of(args.work, name, decoded) for name in SETS}
    result = {name: summary(rows) for name, rows in {"all": together(list(parts.values())), **parts}.items()}
    result["arithmetic"] = solved(args.work, tokenizer)
    result["read again in fp32"] = in_fp32(args.policy, args.questions, args.work)
    result |= {"edges": EDGES.tolist(), "founding paper": FOUNDING_PAPER, "torch": torch.__version__}
    (args.out / "sepa.json").write_text(json.dumps(result, allow_nan=False) + "\n")
    picture(result, args.out / "sepa.png")
    print(table(result))


if __name__ == "__main__":
    main()
