"""The credit lens: whole groups of rollouts side by side, each turn and token with its credit, and GRPO's beside it."""

import base64
import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from markupsafe import Markup

from verl_credit.records.report.lens_group import ROLLOUTS, TOKENS_A_ROLLOUT, Group, StepTurns
from verl_credit.records.report.text import STOPPED, Scale, clean, colour, plain, signed
from verl_credit.records.run.rollouts import read_tokens, token_steps
from verl_credit.records.run.table_files import TURNS, DamagedTable, StepTable, read_table, tables_of

# What bounds the page: a token takes about 120 bytes of it.
GROUPS, TOKENS_IN_ALL = 4, 40_000
OBSERVATION = 1500
SHADES = 40  # the colour scale has so many on each side of 0
NO_TABLES = "tables/ has no rollouts of a finished step token by token: its advantages are verl's own, or its rollouts have "
NO_TABLES += "several outputs, or keep_rollouts.steps or keep_rollouts.groups is 0."


@dataclass(frozen=True)
class Lens:
    """``data``: JSON for the page's script; empty without groups. ``problems``: what could not be read or displayed."""

    groups: list[dict]
    problems: list[str]

    @property
    def data(self) -> Markup:
        shades = [colour(place / SHADES, 1.0) for place in range(-SHADES, SHADES + 1)]
        text = json.dumps({"groups": self.groups, "shades": shades}, allow_nan=False)
        for character in "<>&":
            text = text.replace(character, f"\\u{ord(character):04x}")
        return Markup(text)

    @property
    def script(self) -> Markup:
        return Markup((Path(__file__).parent / "lens.js").read_text(encoding="utf-8"))

    @property
    def script_hash(self) -> str:
        """The hash in the page's content security policy, so that no other script runs."""
        return base64.b64encode(hashlib.sha256(self.script.encode()).digest()).decode("ascii")


def lens(run_dir: Path, last_step: int, scales: Mapping[str, Scale]) -> Lens:
    """Makes the lens of the last steps up to ``last_step``; later tables belong to a step that is not finished.

    The group whose credit differs most from GRPO's comes first, then mixed ones, then the latest. ``scales``: of the run's
    advantages and rewards.
    """
    problems: list[str] = []
    ranked: list[tuple[tuple, int, Group]] = []
    turn_paths, token_paths = tables_of(run_dir, TURNS), token_steps(run_dir)
    for step in [step for step in token_paths if step <= last_step]:
        if step not in turn_paths:
            problems.append(f"tables/ has no {TURNS} of step {step}: its groups are left out.")
            continue
        with _problems_named(problems, step):
            c = read_table(token_paths[step], ("group", "row")).columns
            turns = StepTurns.of(read_table(turn_paths[step]))
            for number in dict.fromkeys(c["group"]):
                rows = [row for row, one in zip(c["row"], c["group"], strict=True) if one == number]
                group = Group(turns, rows, scales)
                mixed = 0 < sum(group.right_G) < len(rows)
                ranked.append(((group.contrast, mixed, step), step, group))
    groups, left = [], TOKENS_IN_ALL
    for _, step, group in sorted(ranked, key=lambda entry: entry[0], reverse=True)[:GROUPS]:
        if groups and group.shown_tokens > left:
            continue
        with _problems_named(problems, step):
            table = read_tokens(token_paths[step])
            cut = _cut(group, table)
            json.dumps(cut, allow_nan=False)  # one NaN would break the whole page
            groups.append(cut)
            left -= group.shown_tokens
    return Lens(groups, list(dict.fromkeys(problems)))


@contextmanager
def _problems_named(problems: list[str], step: int) -> Iterator[None]:
    """A table that is damaged, or does not fit the other of its step, is a line on the page."""
    try:
        yield
    except DamagedTable as error:
        problems.append(f"{error}.")
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError, IndexError) as error:
        problems.append(f"The tables of step {step} do not fit together: {type(error).__name__}: {error}.")


def _cut(group: Group, table: StepTable) -> dict:
    """The group as the script reads it: rollouts and tokens beyond the bounds are left out, with a note."""
    c = table.columns
    lines = {row: place for place, row in enumerate(c["row"])}
    rows, turns = group.rows[:ROLLOUTS], group.turns
    first, whole = lines[rows[0]], len(group.rows)
    notes = [f"{whole - len(rows)} of {whole} rollouts are not shown."] if whole > len(rows) else []
    return {
        "step": table.step,
        "mode": table.pipeline["mode"],
        "said": group.sentence,
        "advantage": group.by_turn(turns.advantage_B_K1),
        "clip": group.by_turn(turns.clip_scale_B_K1),
        "grpo": group.by_turn(turns.grpo_B_K1),
        "factor": group.factor,
        "question": clean(c["question"][first]),
        "golds": [clean(gold) for gold in c["golds"][first][:5]],
        "notes": notes,
        "limit": group.scales["advantage"].limit,
        "floor": group.scales["advantage"].floor,
        "reward": "gain" if list(table.pipeline["signals"]) == ["info_gain"] else "reward",
        "rollouts": [_rollout(group, c, place, lines[row]) for place, row in enumerate(rows)],
    }


def _rollout(group: Group, c: dict, place: int, line: int) -> dict:
    at = group.place_G[place]
    n_turns, seen = int(group.turns.n_tool_turns_B[at]) + 1, [*c["observations"][line]]
    rewards, gained = [*group.reward_G_K[place].tolist(), None], [*group.gained_G_K[place].tolist(), False]
    seen += [""] * (n_turns - len(seen))
    turns = [
        {
            "reward": None if rewards[k] is None or math.isnan(rewards[k]) else signed(rewards[k]),
            "gained": gained[k],
            "seen": clean(seen[k][:OBSERVATION]),
            "more": max(len(seen[k]) - OBSERVATION, 0),
        }
        for k in range(n_turns)
    ]
    keep, stop = slice(TOKENS_A_ROLLOUT), c["stop_reason"][line]
    return {
        "right": group.right_G[place],
        "outcome": plain(float(group.turns.outcome_B[at])),
        "stop": STOPPED.get(stop, f"stop reason {clean(stop)}"),
        "turns": turns,
        "text": [clean(text) for text in c["pieces"][line][keep]],
        "turn": c["turn"][line][keep],
        "credit": [round(value, 6) for value in c["advantage"][line][keep]],
        "planning": [place for place, plans in enumerate((c["planning"][line] or [])[keep]) if plans],
        "rejected": [place for place, trained in enumerate(c["trained"][line][keep]) if not trained],
        "uncertainty": [round(value, 3) for value in (c["uncertainty"][line] or [])[keep]],
        "more": max(len(c["pieces"][line]) - TOKENS_A_ROLLOUT, 0),
    }
