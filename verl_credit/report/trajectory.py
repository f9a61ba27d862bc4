"""Trajectories as HTML: every turn's text and observation, its advantage and its gain."""

from __future__ import annotations

from verl_credit.report.choose import solved
from verl_credit.report.colour import colour, limit
from verl_credit.report.markup import dialogue, escape
from verl_credit.report.numbers import plain, signed

# Longer blocks scroll, so that one page of search results does not push the next turn out of sight.
SCROLL_CHARACTERS = 1200

_STOPPED = {
    "answer": "stopped with an answer",
    "no_answer": "stopped without an answer",
    "turn_length": "cut at the token budget of its turn",
    "bad_call": "stopped by a call that cannot be read",
    "length": "stopped by the length limit",
    "max_turns": "stopped by the turn limit",
    "tool_fault": "stopped by a fault of the search tool",
}


_GAIN_MEANS = {
    "observation": "after reading it than before",
    "call": "at the end of the turn's call than at the end of the call before (what it returned counts next turn)",
}


def trajectories_html(chosen: list[dict], gain_context: str = "observation") -> str:
    """Legend and trajectories; the two colour scales are shared, so that colours compare across turns.

    ``gain_context`` is the run's ``algorithm.info_gain_context``, which decides what a gain's sign means.
    """
    turns = [turn for row in chosen for turn in row["turns"]]
    scales = {name: limit(turn.get(name) for turn in turns) for name in ("advantage", "info_gain")}
    return _legend(scales, _GAIN_MEANS.get(gain_context, "than before")) + "".join(
        _trajectory(row, scales) for row in chosen
    )


def _legend(scales: dict[str, float], compared: str) -> str:
    ends = "".join(
        f'<div class="scale"><span class="scale-name">{label}</span>'
        f'<span class="scale-end">{signed(-scales[name])}</span>'
        f'<span class="ramp"></span><span class="scale-end">{signed(scales[name])}</span></div>'
        for name, label in (("advantage", "Advantage"), ("info_gain", "Information gain"))
    )
    return (
        f'<div class="legend">{ends}<dl>'
        "<dt>Advantage</dt><dd>colours what the policy wrote. Above 0 (blue) the update makes the turn's tokens "
        "more likely; below 0 (orange) less likely; at 0 it leaves them.</dd>"
        "<dt>Information gain</dt><dd>colours what the search returned. Above 0 (blue) the policy gives the gold "
        f"answer a higher probability {compared}; below 0 (orange) a lower one. "
        "The answer turn reads nothing new, so none is computed for it.</dd></dl></div>"
    )


def _trajectory(row: dict, scales: dict[str, float]) -> str:
    turns, won = row["turns"], solved(row)
    outcome = row.get("outcome")
    stop = str(row.get("stop_reason", "unknown"))
    facts = [
        f"outcome {plain(outcome) if outcome is not None else 'unknown'}",
        f"step {escape(row.get('step', '?'))}",
        f"{len(turns)} turn{'s' if len(turns) != 1 else ''}",
        escape(_STOPPED.get(stop, f"stop reason {stop}")),
    ]
    golds = " or ".join(f"<b>{escape(gold)}</b>" for gold in row.get("golds") or ["not recorded"])
    body = "".join(_turn(i, turn, i == len(turns) - 1, scales) for i, turn in enumerate(turns))
    return (
        f'<article class="trajectory"><header><p class="facts"><span class="verdict {"won" if won else "lost"}">'
        f"{'Solved' if won else 'Failed'}</span> {' · '.join(facts)}</p>"
        f'<h3>{escape(row.get("question", ""))}</h3><p class="gold">Gold answer: {golds}</p></header>'
        f'<ol class="turns">{body}</ol></article>'
    )


def _turn(index: int, turn: dict, last: bool, scales: dict[str, float]) -> str:
    advantage, gain, clip = (turn.get(name) for name in ("advantage", "info_gain", "clip_scale"))
    observation = str(turn.get("observation") or "").strip("\n")
    name = f"Turn {index + 1}" + (", answer" if last else "")
    update = (
        "not recorded"
        if advantage is None
        else _direction(advantage, "more likely", "less likely", "unchanged")
    )
    chip = _chip("Advantage", advantage, update, colour(advantage, scales["advantage"]))
    if not last and clip is not None:
        chip += f'<span class="aside">clip range &times; {plain(clip)}</span>'
    policy = _block("policy", name, chip, str(turn.get("text") or ""), colour(advantage, scales["advantage"]))
    if last and not observation and gain is None:
        return f'<li>{policy}<p class="aside">no gain: nothing is read after the answer turn</p></li>'
    if gain is None:
        chip = '<span class="chip none">no gain</span>'
    else:
        read = _direction(gain, "gold answer likelier", "gold answer less likely", "no difference")
        chip = _chip("Information gain", gain, read, colour(gain, scales["info_gain"]))
    return f"<li>{policy}{_block('observation', 'Observation', chip, observation, colour(gain, scales['info_gain']))}</li>"


def _direction(value: float, above: str, below: str, zero: str) -> str:
    return zero if signed(value) == "0.000" else above if value > 0 else below


def _chip(name: str, value: float | None, words: str, background: str) -> str:
    number = "&ndash;" if value is None else signed(value)
    return f'<span class="chip" style="background:{background}">{name} <b>{number}</b> <i>{words}</i></span>'


def _block(kind: str, name: str, chips: str, text: str, edge: str) -> str:
    scroll = f' tabindex="0" role="region" aria-label="{name}, text"' if len(text) > SCROLL_CHARACTERS else ""
    shown = dialogue(text.strip("\n")) or '<span class="mark">(empty)</span>'
    return (
        f'<section class="block {kind}" style="border-color:{edge}"><div class="head"><h4>{name}</h4>{chips}</div>'
        f'<div class="text" dir="auto"{scroll}>{shown}</div></section>'
    )
