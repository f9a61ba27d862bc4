"""Draws turn credit on one trajectory of a run: python evidence/lab/picture.py RUN_DIR QUESTION_PART OUT.svg

docs/turn-credit.svg is of `make demo`: python evidence/lab/picture.py runs/demo Drakgam docs/turn-credit.svg
Everything drawn comes from the run's tables and config.yaml. Of several trajectories the last is taken.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from html import escape
from pathlib import Path

from omegaconf import OmegaConf

from verl_credit.records.report.text import signed
from verl_credit.records.run.rollouts import read_samples

WIDTH, TOP, ROW = 1000, 150, 100
READS, GAIN, STRIP, BAR, CLIP = 24, 322, 446, 640, 850  # left edges of the columns
INK, SOFT, LINE, PAPER, MORE, LESS = "#1d2126", "#5b626b", "#d9dbdf", "#f7f7f5", "#2f7fc4", "#d9772b"

BELOW = (
    "A search that helped more than its siblings\N{RIGHT SINGLE QUOTATION MARK} (z above 0) gets a larger advantage and "
    "more room to change;",
    "one that helped less gets less of both. Earlier searches share in the z of later ones.",
)


def text(x: float, y: float, words: str, size: int = 14, fill: str = INK, more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" fill="{fill}" {more}>{escape(words)}</text>'


def line(x1: float, y1: float, x2: float, y2: float, color: str = LINE, more: str = "") -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{color}" {more}/>'


def dot(x: float, y: float, own: bool) -> str:
    return (
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{5.5 if own else 3.5}" fill="{MORE if own else "#b4bac2"}"/>'
    )


def draw(row: dict, low: float, high: float) -> str:
    """The picture of one trajectory with its group; ``low`` and ``high``: the clip range at scale 1."""
    turns, group = row["turns"], row["group"]
    outcome = turns[-1]["advantage"]
    height = TOP + ROW * len(turns) + 64
    solved = sum(one["outcome"] > 0.5 for one in group)
    own = "solved it" if row["outcome"] > 0.5 else "failed"
    about = f"Gold answer: {' or '.join(row['golds'])}. {len(group)} rollouts, {solved} solved it; this one {own}."
    parts = [
        f'<rect width="{WIDTH}" height="{height}" rx="8" fill="#ffffff"/>',
        text(READS, 38, row["question"], 20, more='font-weight="700"'),
        text(READS, 64, about, fill=SOFT),
    ]
    heads = [
        (READS, "The policy searches and reads", ""),
        (GAIN, "Gain", "in P(gold answer)"),
        (STRIP, "z among its siblings", "same turn, same question"),
        (BAR, "Advantage", f"dashed: outcome alone, {signed(outcome)}"),
        (CLIP, "Clip range", "of the turn\N{RIGHT SINGLE QUOTATION MARK}s ratio"),
    ]
    for x, head, below in heads:
        parts += [text(x, 106, head, 14, more='font-weight="700"'), text(x, 124, below, 12, SOFT)]
    parts.append(line(READS, 138, WIDTH - READS, 138))
    scale = 150 / max(abs(turn["advantage"]) for turn in turns)
    zero = BAR if min(turn["advantage"] for turn in turns) >= 0 else BAR + 75
    scale = scale if zero == BAR else scale / 2
    for k, turn in enumerate(turns):
        y = TOP + ROW * k + ROW / 2
        parts += _reads(row, k, y) + _siblings(group, row["place"], k, turn, y)
        parts += _bar(turn["advantage"], zero, scale, y) + _clip(turn["clip_scale"], low, high, y)
        parts.append(line(READS, y + ROW / 2, WIDTH - READS, y + ROW / 2, "#eceef0"))
    at = zero + scale * outcome
    parts.append(line(at, TOP + 6, at, TOP + ROW * len(turns) - 6, INK, 'stroke-dasharray="4 4"'))
    parts += [text(READS, height - 36 + 20 * n, words, fill=SOFT) for n, words in enumerate(BELOW)]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        'font-family="system-ui, -apple-system, Segoe UI, Roboto, Liberation Sans, Arial, sans-serif" role="img">\n'
        f"<title>Turn credit on one trajectory: {escape(row['question'])}</title>\n"
        + "\n".join(parts)
        + "\n</svg>\n"
    )


def _reads(row: dict, k: int, y: float) -> list[str]:
    """The query and the first page, or the answer."""
    written = row["turns"][k]["text"]
    mono = 'font-family="ui-monospace, Menlo, Consolas, Liberation Mono, monospace"'
    if call := re.search(r"<tool_call>\s*(.*?)\s*</tool_call>", written, re.DOTALL):
        query = str(json.loads(call[1])["arguments"]["query"]).strip()
        page = re.search(r"Page 1: (.*)\n(.*)", row["turns"][k]["observation"])
        head, said = f"Search {k + 1}", [query, *(page.groups() if page else ())]
    else:
        answer = re.search(r"<answer>\s*(.*?)\s*</answer>", written, re.DOTALL)
        head, said = "Answer", [answer[1] if answer else "none"]
    parts = [text(READS, y - 20, head, 12, SOFT), text(READS + 62, y - 20, said[0], 14, more=mono)]
    if said[1:]:
        parts.append(f'<rect x="{READS}" y="{y - 8}" width="280" height="44" rx="4" fill="{PAPER}"/>')
        parts.append(text(READS + 10, y + 9, said[1], 12, SOFT, mono))
        parts.append(text(READS + 10, y + 26, said[2][:36], 12, more=mono))
    return parts


def _siblings(group: list[dict], place: int, k: int, turn: dict, y: float) -> list[str]:
    """A dot for every rollout that has a z at this turn; equal ones are stacked."""
    if turn["z"] is None:
        words = "no gain" if turn["reward"] is None else "not compared"
        return [text(GAIN, y + 5, words, 12, SOFT)]
    middle, half = STRIP + 85, 75
    parts = [text(GAIN, y + 6, signed(turn["reward"]), 16, more='font-weight="700"')]
    parts += [line(middle - half - 8, y, middle + half + 8, y), line(middle, y - 5, middle, y + 5, SOFT)]
    have = [n for n, one in enumerate(group) if k < len(one["turns"]) and one["turns"][k]["z"] is not None]
    others = [group[n]["turns"][k]["reward"] for n in have if n != place]
    if others:
        parts.append(text(GAIN, y + 24, f"siblings {signed(sum(others) / len(others))}", 12, SOFT))
    stacked: Counter = Counter()
    for n in sorted(have, key=lambda n: n != place):
        x = middle + half * max(-3.0, min(3.0, group[n]["turns"][k]["z"])) / 3
        level = stacked[round(x / 4)]
        stacked[round(x / 4)] += 1
        parts.append(dot(x, y - 8 * level, n == place))
        if n == place:
            parts.append(text(x, y + 24, f"z {signed(turn['z'])}", 13, more='text-anchor="middle"'))
    return parts


def _bar(advantage: float, zero: float, scale: float, y: float) -> list[str]:
    x, width = min(zero, zero + scale * advantage), abs(scale * advantage)
    color, anchor = (MORE, "start") if advantage > 0 else (LESS, "end")
    return [
        f'<rect x="{x:.1f}" y="{y - 12}" width="{width:.1f}" height="22" rx="3" fill="{color}" opacity="0.8"/>',
        text(zero, y + 28, signed(advantage), 14, more=f'font-weight="700" text-anchor="{anchor}"'),
    ]


def _clip(scale: float, low: float, high: float, y: float) -> list[str]:
    """The range in which the turn's ratio may move, around 1."""
    one, pixel = CLIP + 50, 38 / (1.3 * max(low, high))
    left, right = one - pixel * low * scale, one + pixel * high * scale
    ends = [line(x, y - 8, x, y + 8, INK, 'stroke-width="2"') for x in (left, right)]
    return [
        line(left, y, right, y, INK, 'stroke-width="2"'),
        *ends,
        f'<circle cx="{one}" cy="{y}" r="2.5" fill="{INK}"/>',
        text(
            one, y + 26, f"{1 - low * scale:.3f} to {1 + high * scale:.3f}", 12, SOFT, 'text-anchor="middle"'
        ),
    ]


def main(run_dir: str, question: str, out: str) -> None:
    samples, problems = read_samples(Path(run_dir))
    rows = [row for row in samples if question in row["question"]]
    if not rows:
        sys.exit(" ".join([f"{run_dir} has kept no rollout of a question with {question!r}.", *problems]))
    actor = OmegaConf.load(Path(run_dir) / "config.yaml").actor_rollout_ref.actor
    Path(out).write_text(draw(rows[-1], actor.clip_ratio_low, actor.clip_ratio_high), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
