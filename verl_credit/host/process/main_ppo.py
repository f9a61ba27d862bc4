"""Hands a launch of verl.trainer.main_ppo that has our keys over to `verl-credit train`, with its checks and its records.

verl imports our plugin in the launching process, too, before Hydra looks for a configuration that only we have.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from verl_credit import names
from verl_credit.errors import ExitCode, printable

MODULE = "verl.trainer.main_ppo"
FILE = os.path.join(*MODULE.split(".")) + ".py"
NAME, PATHS = ("--config-name", "-cn"), ("--config-path", "-cp", "--config-dir", "-cd")
MANY = ("--multirun", "-m")
VERLS = "ppo_trainer"
OURS = {
    "algorithm.adv_estimator": (names.ADV_ESTIMATOR,),
    "trainer.v1.trainer_mode": names.TRAINER_MODES,
    "actor_rollout_ref.actor.policy_loss.loss_mode": (names.LOSS_MODE,),
    "actor_rollout_ref.rollout.agent.default_agent_loop": names.AGENTS,
}
"""Keys of verl with values that only verl_credit registers."""


class Launch(NamedTuple):
    name: str
    folder: str | None
    many: bool
    overrides: list[str]
    other: str | None
    """An option of Hydra that `verl-credit train` does not have."""


def arguments_of(command: Sequence[str]) -> list[str] | None:
    """The arguments of verl's launch, from the words of Python's own command line; None for any other process."""
    for place, word in enumerate(command[1:], 1):
        if word == "-m":
            module = command[place + 1] if place + 1 < len(command) else ""
            return list(command[place + 2 :]) if module == MODULE else None
        if word == "-c":
            return None
        if not word.startswith("-") and command[place - 1] not in ("-X", "-W"):
            return list(command[place + 1 :]) if word.endswith(FILE) else None
    return None


def read(arguments: Sequence[str]) -> Launch:
    name, folder, many, overrides, other = VERLS, None, False, [], None
    rest = iter(arguments)
    for word in rest:
        option, equals, value = word.partition("=")
        if option in (*NAME, *PATHS):
            value = value if equals else next(rest, "")
            name, folder = (value.removesuffix(".yaml"), folder) if option in NAME else (name, value)
        elif word in MANY:
            many = True
        elif word.startswith("-"):
            other = other or word
        else:
            overrides.append(word)
    return Launch(name, folder, many, overrides, other)


def our_keys_in(overrides: Sequence[str]) -> list[str]:
    from verl_credit.config.keys import our_keys

    verls = {"algorithm.gamma", "algorithm.lam", "algorithm.norm_adv_by_std_in_grpo"}
    own = {key.name for key in our_keys()} - verls - {*OURS}
    words = ((word, *word.lstrip("+~").partition("=")[::2]) for word in overrides)
    return [word for word, key, value in words if key in own or value in OURS.get(key, ())]


def hand_over(command: Sequence[str]) -> None:
    """Returns where this process is no launch, or one without our keys; else does not return."""
    arguments = arguments_of(command)
    if arguments is None:
        return
    from verl_credit.recipe.recipe_files import folders, lists_ours

    launch = read(arguments)
    own_folder = launch.folder if launch.folder and Path(launch.folder).is_dir() else None
    if lists_ours(launch.name, folders(own_folder)):
        if launch.other is not None:
            end(f"{launch.other}: `verl-credit train` has no such option of Hydra; leave it out")
        folder = ["--config-dir", launch.folder] if launch.folder else []
        many = ["-m"] if launch.many else []
        words = ["train", *many, "--config-name", launch.name, *folder, "--", *launch.overrides]
        say(f"this launch runs as {shlex.join(['verl-credit', *words])}")
        os.execv(sys.executable, [sys.executable, "-m", "verl_credit.cli", *words])
    elif ours := our_keys_in(launch.overrides):
        use = "add --config-name=verl, or in a YAML of yours `defaults: [verl, _self_]`, or translate the launch"
        end(
            f"{ours[0]}: --config-name={launch.name} has no defaults for our keys; {use}: verl-credit adopt (docs/adopt.md)"
        )


def say(sentence: str) -> None:
    print(printable(f"verl_credit: {sentence}"), flush=True)


def end(sentence: str) -> None:
    say(sentence)
    raise SystemExit(int(ExitCode.PREFLIGHT))
