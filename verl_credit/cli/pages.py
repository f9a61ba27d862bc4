"""`verl-credit keys` writes docs/keys.md from the declared keys, `verl-credit modes` docs/modes.md from the registry."""

import sys

from verl_credit.cli.command import ends
from verl_credit.config.keys import OURS, Key, keys_of, our_keys
from verl_credit.credit import REGISTRY
from verl_credit.credit.operator import OUTPUTS, Operator
from verl_credit.credit.turn.mode import TurnMode
from verl_credit.credit.turn.modes import modes_that
from verl_credit.recipe.rules.turn_mode import KEYS


@ends("keys", OSError, to="stderr")
def keys() -> None:
    _print(keys_page())


@ends("modes", OSError, to="stderr")
def modes() -> None:
    _print(modes_page())


def _print(page: str) -> None:
    try:
        print(page, end="", flush=True)
    except OSError as error:
        sys.stdout = None  # else Python writes the rest again at exit
        if not isinstance(error, BrokenPipeError):  # a reader may close the pipe, as `head` does
            raise


def written(value) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(written, value))}]"
    return '""' if value == "" else str(value)


KEYS_HEAD = """# Every key

Written by `verl-credit keys > docs/keys.md` from `verl_credit/config/keys/`, where each key is declared once; the tests
compare the two. Set them in a recipe or on the command line: `verl-credit train --config-name lab algorithm.gamma=0.9`.
Keys of verl itself are in verl's documentation; `verl-credit explain --values` shows every value that is not a default.
"""


def keys_page() -> str:
    parts = [KEYS_HEAD]
    for section in OURS:
        title = f"`{section.prefix}.*`" if section.prefix else "The run"
        rows = "\n".join(_row(key) for key in keys_of(section))
        parts.append(f"## {title}\n\n| key | default | accepted | |\n|---|---|---|---|\n{rows}\n")
    return "\n".join(parts)


def _row(key: Key) -> str:
    cells = (f"`{key.name}`", f"`{written(key.default)}`", key.expected, key.sentence)
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"


MODES_HEAD = """# Every operator

Written by `verl-credit modes > docs/modes.md` from what each operator declares of itself; the tests compare the two.
`verl-credit explain [overrides]` shows the pipeline that a configuration runs, `verl-credit check` runs the laws.

    A[b, t] = A_turn[b, turn(t)] w[b, t]   (+ HICRA)         R of A_turn: the outcome operator

Properties, as the laws measure them: *centred*: a constant added to all outcomes does nothing. *normalised*: a
positive factor on all outcomes does nothing (up to the variance floor). *weighs*: a turn's advantage times something
non-negative. *conserves*: the mean over a trajectory's tokens stays. Scope: which other rows matter. Outputs of one
rollout: the [sessions](agent-loops.md#several-outputs-of-one-rollout) that it has a meaning for; others are refused.
"""
_DEFAULTS = {key.name: written(key.default) for key in our_keys()}
FROM_KEYS = ", ".join(f"`{option}` from `{key}` ({_DEFAULTS[key]})" for option, key in KEYS.items())
TITLES = {
    "outcome": (
        "Outcome level",
        "`algorithm.advantage_mode`, or a dotted path: `f(rewards)` or `f(rewards, params)`.",
    ),
    "turn": (
        "Turn level",
        f"`algorithm.info_gain_norm_mode`. `dynamic_clip` works with {modes_that('scales_clip')}; any outcome operator "
        f"works with {modes_that('any_outcome_operator')}, the others accept `grpo` only. Options stand with the library's "
        f"defaults. In training some come from keys, with the keys' defaults, whatever stands here: {FROM_KEYS}; the "
        "others come from `algorithm.turn_params`.",
    ),
    "token": (
        "Token level",
        "`algorithm.transform_mode`, or a dotted path: `f(TransformContext) -> TransformOutput`. h is the uncertainty "
        "that `algorithm.uncertainty_kind` names, means run over the policy tokens of a trajectory.",
    ),
    "canonical": (
        "Outcome and token level at once",
        "`algorithm.transform_mode` too, with `info_gain_norm_mode=none` and `uncertainty_kind=shannon_entropy`.",
    ),
}


def modes_page() -> str:
    sections = [MODES_HEAD]
    for level, (title, key) in TITLES.items():
        operators = [operator for (other, _), operator in REGISTRY.items() if other == level]
        sections.append(f"## {title}\n\n{key}\n\n" + "\n".join(map(_entry, operators)))
    return "\n".join(sections)


def _entry(operator: Operator) -> str:
    of_mode = []
    if isinstance(operator, TurnMode):
        choices = {name: f" ({' or '.join(map(str, values))})" for name, values in operator.choices.items()}
        options = [f"`{name}` {default}{choices.get(name, '')}" for name, default in operator.options.items()]
        of_mode = [f"- needs: {', '.join(operator.needs)}"] if operator.needs else []
        of_mode.append(f"- options: {', '.join(options)}")
    lines = [
        f"### `{operator.name}`",
        "",
        *(f"    {line}" for line in operator.equation.split("; ")),
        "",
        f"- reads: {', '.join(operator.reads) or 'the turns alone'}; scope: {operator.scope}",
        *of_mode,
        f"- reduces to: {operator.reduces_to}",
        f"- bias: {operator.bias}",
        *([f"- follows the gradient of: {operator.objective}"] if operator.objective else []),
        f"- departures from released code: {operator.departures}",
        f"- outputs of one rollout: {OUTPUTS[operator.outputs]}",
        f"- properties: {', '.join(sorted(operator.properties)) or 'none'}",
        *[f"- exempt from the law `{law}`: {reason}" for law, reason in operator.exempt.items()],
        f"- source: {operator.source}",
        "",
    ]
    return "\n".join(lines)
