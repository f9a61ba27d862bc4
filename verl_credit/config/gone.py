"""Keys, values and plug-in paths that verl_credit had and has no more, each with its place now or its last commit.

The rules refuse them by this table, so that a recipe of before never runs without what it names.
"""

from __future__ import annotations

from collections.abc import Mapping

LAST = "23dae403"
"""The commit that last had what the tables below call gone."""


def no_more(reason: str, commit: str = LAST) -> str:
    """The remedy for what has no successor: why it went, and the commit that last had it."""
    return f"leave it out: {reason} (commit {commit} last had it)"


_BREAKER = no_more("five failures in a row pause it for some seconds; no recipe set another number")
_STATES = "states by hidden states won nothing over equal observations"
_AGAIN = "at equal rollouts continuations lost to more questions at every horizon that was measured"
_ENCODER = "the planning detector by a sentence encoder was in no recipe, and nothing was measured with it"

KEYS: dict[str, str] = {
    "fork_workers": f"leave it out: every worker starts Python itself (commit {LAST} last had forks)",
    "search.breaker_failures": _BREAKER,
    "search.breaker_pause_s": _BREAKER,
    "search.shuffle_seed": no_more("a control of one measurement, which is done"),
    "algorithm.turn_judge.breaker_failures": _BREAKER,
    "algorithm.turn_judge.breaker_pause_s": _BREAKER,
    "phase_memory": no_more("`plan` counts the phases' memory"),
    "prompt_date": no_more("the start warns of a chat template that writes today's date"),
    "plan.encoder_core_seconds": "plan.search_core_seconds=SECONDS of index and encoder",
    "algorithm.planning.model": no_more(_ENCODER),
    "algorithm.planning.threshold": no_more(_ENCODER),
    "algorithm.turn_signal_normalise": no_more(
        "several signals are always z-scored over their question's turns"
    ),
    "algorithm.info_gain_gap_epsilon": no_more("log_gap has TRACE's constant, .1"),
    "algorithm.turn_continuations": no_more(_AGAIN),
    "algorithm.turn_anchor_similarity": no_more("no recipe set it, and no measurement used it"),
    "algorithm.turn_anchor_distance": no_more(_STATES),
    "algorithm.turn_anchor_layer": no_more(_STATES),
}
"""A key, or the section of a key, and what to write in its place; `no_more` where there is nothing to write."""

_TURNS, _SIGNAL, _ANCHOR, _VALUES = (
    f"algorithm.{name}" for name in ("info_gain_norm_mode", "turn_signal", "turn_anchor", "turn_values")
)
VALUES: dict[tuple[str, str], str] = {
    ("actor_rollout_ref.rollout.multi_turn.format", "lfm2"): (
        f"auto, or a parser of your own: no recipe trains LFM2 (commit {LAST} last had its parser)"
    ),
    (_TURNS, "grpo"): "none: the outcomes' advantages alone, which algorithm.advantage_mode=grpo makes",
    (_TURNS, "bipace"): f"gigpo: bipace was not told apart from GRPO (commit {LAST} last had it)",
    (_SIGNAL, "lapo"): f"info_gain: measured, lapo points worse than GRPO (commit {LAST} last had it)",
    (_SIGNAL, "infopo"): f"info_gain: nothing was measured with infopo (commit {LAST} last had it)",
    ("algorithm.info_gain_scorer", "server"): (
        "branch or rows: the log-probs of the rollout server were up to .066 off the trainer's (commit 33b16abd last had it)"
    ),
    (_ANCHOR, "hidden"): f"observation or prefix: {_STATES} (commit {LAST} last had them)",
    (_VALUES, "monte_carlo"): f"features, and more questions a step: {_AGAIN} (commit {LAST} last had them)",
    ("algorithm.planning.detector", "anchors"): f"grams: {_ENCODER} (commit {LAST} last had it)",
}
"""A key with a value that it accepted, and what to write in its place; `no_more` where there is nothing to write."""

MOVED = {"anchors": "anchor_table", "values": "turn_values"}
"""Files of turns/ that have another name now."""

PATHS: dict[str, str] = (
    {
        f"verl_credit.credit.{home}{name}": f"verl_credit_recipes.methods.{name}.{name}"
        for name, homes in {
            "trace": ("", "turn.modes.trace."),
            "calibadv": ("", "turn.modes.calibadv."),
            "gagpo": ("", "turn.modes.graph."),
        }.items()
        for home in homes
    }
    | {
        f"verl_credit.turns.{name}": f"verl_credit.turns.{room}.{MOVED.get(name, name)}"
        for room, names in {
            "rollout": ("book", "calls", "header", "reward", "search", "thoughts"),
            "score": ("branches", "gains", "requests", "scorers"),
            "step": ("anchors", "assign", "signals", "staleness", "state_features", "token_stage", "values"),
        }.items()
        for name in names
    }
    | {"verl_credit.host.actor.policy_loss": "verl_credit.host.actor.policy_loss"}
)
"""A dotted path, or a module, that a recipe may name, and its place now."""


def gone_key(key: str) -> str:
    """What to write in place of a key of before; "" for any other key. The longest name that fits is the key's own."""
    return KEYS.get(longest(KEYS, key) or "", "")


def longest(table: Mapping[str, str], name: str) -> str | None:
    """The longest name in ``table`` that is this dotted name, or begins it."""
    while name and name not in table:
        name = name.rpartition(".")[0]
    return name or None


def place_now(value: str) -> str:
    """Returns a dotted path that has moved at its place now, and any other text as it is."""
    scheme = "pkg://" if value.startswith("pkg://") else ""
    path = value.removeprefix(scheme).replace(":", ".")
    name = longest(PATHS, path)
    return value if name is None else scheme + PATHS[name] + path.removeprefix(name)


def gone_value(key: str, value: object) -> str:
    """What to write in place of a value of before; "" for any other value."""
    if not isinstance(value, str | bool):
        return ""
    text = str(value).lower() if isinstance(value, bool) else value
    now = place_now(text)
    return VALUES.get((key, text), "") or ("" if now == text else f"{key}={now}")
