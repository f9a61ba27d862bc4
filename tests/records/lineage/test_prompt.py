"""KNOWLEDGE.md: the public page line by line, and texts that would break it."""

import pytest

from kit.trials import trial
from verl_credit.records.lineage import LineageStore

BY_HAND = """\
# Session start — monday
You are specialist **ana**. Current best: **exp_e1** (core_metric=0.349600).

## LEADERBOARD.md

## Current Best
- **exp_id**: e1
- **core_metric**: 0.349600
- **specialist**: turns
- **hypothesis**: clip by turn
- **snapshot**: `runs/e1`

## Top 2 Kept Trials

| exp | core_metric | Δ | specialist | hypothesis |
|-----|-------------|---|------------|------------|
| e1 | 0.349600 | +0.017500 | turns | clip by turn |
| e3 | — | — |  |  |

## KNOWLEDGE.md

**Current-best lineage** (root → best):
```
exp_e0 [baseline, baseline, metric=0.332100, Δ=—] GRPO
 └─ exp_e1 [turns, keep, metric=0.349600, Δ=+0.017500] clip by turn ← BEST
```

## Recent Activity (last 2)

| exp | specialist | status | core_metric | hypothesis |
|-----|------------|--------|-------------|------------|
| e3 |  | keep | — |  |
| e2 |  | discard | 0.360000 | lucky discard newline |

## Recent Activity (most recent 3 — full hypothesis)
- exp_e3 [, keep, metric=—, Δ=—]\N{SPACE}
- exp_e2 [, discard, metric=0.360000, Δ=—] lucky discard newline
- exp_e1 [turns, keep, metric=0.349600, Δ=+0.017500] clip by turn
  └─ seed 1

"""


@pytest.fixture
def store(tmp_path):
    store = LineageStore(tmp_path, lower_is_better=False)
    for one in (
        trial("e0", "baseline", 0.3321, hypothesis="GRPO"),
        trial("e1", "keep", 0.3496, delta_vs_best=0.0175, parent_exp="e0", specialist="turns", hypothesis="clip by turn",
              snapshot_path="runs/e1", notes="seed 1"),
        trial("e2", "discard", 0.36, hypothesis="lucky discard\nnewline", parent_exp="e1"),
        trial("e3", "keep"),
    ):  # fmt: skip
        store.append(lambda _, one=one: one)
    return store


def test_the_page_by_hand(store):
    assert store.render_prompt("ana", recent_n=2, last_m_full=3, session_timestamp="monday") == BY_HAND


NASTY = "a | b\n```\n`c`\r\n| d \x1b[31m\x00"[:-1]


def test_no_text_breaks_a_table_a_fence_or_a_line(tmp_path):
    store = LineageStore(tmp_path, lower_is_better=False)
    row = trial("p|q", "keep", 0.5, hypothesis=NASTY, specialist=NASTY, notes=NASTY, snapshot_path="a`b``c")
    store.append(lambda _: row)
    lines = store.render_prompt(NASTY).splitlines()
    plain = store.render_prompt("x").splitlines()
    assert len(lines) == len(plain)
    rows = [line.replace("\\|", "") for line in lines if line.startswith("| p")]
    assert [row.count("|") for row in rows] == [6, 6]
    assert not any("`" in row.replace("\\`", "") for row in rows)
    assert [line for line in lines if line.startswith("```")] == ["```", "```"]
    assert not any("\x1b" in line or "\r" in line for line in lines)


def test_long_texts_are_cut_and_prefixes_are_not_doubled(tmp_path):
    store = LineageStore(tmp_path, lower_is_better=False)
    store.append(lambda _: trial("base", "baseline", 0.1))
    with store.path.open("a") as file:  # of a writer that kept the prefix
        file.write("exp_001" + "\t" * 6 + "x" * 300 + "\t\tkeep\t0.5" + "\t" * 7 + "n" * 300 + "\n")
    text = store.render_prompt("ana")
    assert "exp_exp" not in text and "**exp_001**" in text
    cut = {n: "x" * (n - 1) + "…" for n in (80, 100, 110)}
    shown = (
        f"- **hypothesis**: {cut[110]}\n",
        f" {cut[100]} |\n",
        f" {cut[80]} |\n",
        f"] {cut[100]} ← BEST\n",
    )
    for part in (*shown, f"Δ=—] {'x' * 300}\n", f"  └─ {'n' * 199}…\n"):
        assert part in text
