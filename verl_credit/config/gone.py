"""Keys, values and plug-in paths that verl_credit had and has no more, each with its place now or its last commit.

The rules refuse them by this table, so that a recipe of before never runs without what it names.
"""

from __future__ import annotations

LAST = "23dae403"
"""The commit that last had what the tables below call gone."""


def no_more(reason: str, commit: str = LAST) -> str:
    """The remedy for what has no successor: why it went, and the commit that last had it."""
    return f"leave it out: {reason} (commit {commit} last had it)"


_STATES = "states by hidden states won nothing over equal observations"

_AGAIN = "at equal rollouts continuations lost to more questions at every horizon that was measured"

KEYS: dict[str, str] = {
    "fork_workers": f"leave it out: every worker starts Python itself (commit {LAST} last had forks)",
    "phase_memory": no_more("`plan` counts the phases' memory"),
    "prompt_date": no_more("the start warns of a chat template that writes today's date"),
    "plan.encoder_core_seconds": "plan.search_core_seconds=SECONDS of index and encoder",
    "algorithm.turn_continuations": no_more(_AGAIN),
    "algorithm.turn_anchor_similarity": no_more("no recipe set it, and no measurement used it"),
    "algorithm.turn_anchor_distance": no_more(_STATES),
    "algorithm.turn_anchor_layer": no_more(_STATES),
}
"""A key, or the section of a key, and what to write in its place; `no_more` where there is nothing to write."""

_TURNS, _ANCHOR, _VALUES = (
    f"algorithm.{name}" for name in ("info_gain_norm_mode", "turn_anchor", "turn_values")
)
VALUES: dict[tuple[str, str], str] = {
    (_TURNS, "bipace"): f"gigpo: bipace was not told apart from GRPO (commit {LAST} last had it)",
    (_ANCHOR, "hidden"): f"observation or prefix: {_STATES} (commit {LAST} last had them)",
    (_VALUES, "monte_carlo"): f"features, and more questions a step: {_AGAIN} (commit {LAST} last had them)",
}
"""A key with a value that it accepted, and what to write in its place; `no_more` where there is nothing to write."""

PATHS: dict[str, str] = {}
"""A dotted path, or a module, that a recipe may name, and its place now."""


def gone_key(key: str) -> str:
    """What to write in place of a key of before; "" for any other key. The longest name that fits is the key's own."""
    name = max((name for name in KEYS if f"{key}.".startswith(f"{name}.")), key=len, default=None)
    return "" if name is None else KEYS[name]


def gone_value(key: str, value: object) -> str:
    """What to write in place of a value of before; "" for any other value."""
    if not isinstance(value, str | bool):
        return ""
    text = str(value).lower() if isinstance(value, bool) else value
    path = text.replace(":", ".")
    name = max((name for name in PATHS if f"{path}.".startswith(f"{name}.")), key=len, default=None)
    return VALUES.get((key, text), "") or (
        "" if name is None else f"{key}={PATHS[name] + path.removeprefix(name)}"
    )
