"""Hands a launch of verl.trainer.main_ppo that has our keys over to `verl-credit train`, with its checks and its records.

verl imports our plugin in the launching process, too, before Hydra looks for a configuration that only we have.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping, Sequence
from itertools import count
from pathlib import Path

from verl_credit import names
from verl_credit.errors import ExitCode, printable

MODULE = "verl.trainer.main_ppo"
FULLY_ASYNC = "verl.experimental.fully_async_policy.fully_async_main"
FILE = os.path.join(*MODULE.split(".")) + ".py"
OURS = {
    "algorithm.adv_estimator": (names.ADV_ESTIMATOR,),
    "trainer.v1.trainer_mode": names.TRAINER_MODES,
    "actor_rollout_ref.actor.policy_loss.loss_mode": (names.LOSS_MODE,),
    "actor_rollout_ref.rollout.agent.default_agent_loop": names.AGENTS,
}
"""Keys of verl with values that only verl_credit registers."""


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


def read(arguments: Sequence[str]) -> tuple[Namespace, list[str]]:
    """(Hydra's options that `verl-credit train` has too, and two that argparse would misread; all other words)"""
    options = ArgumentParser(add_help=False, allow_abbrev=False)
    options.add_argument("-cn", "--config-name", default="ppo_trainer")  # verl's
    options.add_argument("-cp", "-cd", "--config-path", "--config-dir")
    options.add_argument("-m", "--multirun", action="store_true")
    options.add_argument("-c", "--cfg")
    return options.parse_known_args(arguments)


def our_keys_in(overrides: Sequence[str]) -> list[str]:
    from verl_credit.config.keys import our_keys

    verls = {"algorithm.gamma", "algorithm.lam", "algorithm.norm_adv_by_std_in_grpo"}
    own = {key.name for key in our_keys()} - verls - {*OURS}
    words = ((word, *word.lstrip("+~").partition("=")[::2]) for word in overrides)
    return [word for word, key, value in words if key in own or value in OURS.get(key, ())]


def entry_of(command: Sequence[str]) -> str:
    """The module of verl whose launch this process is; "" for any other process."""
    if arguments_of(command) is not None:
        return MODULE
    words = list(command)
    return FULLY_ASYNC if "-m" in words[:-1] and words[words.index("-m") + 1] == FULLY_ASYNC else ""


def adopt(command: Sequence[str], entry: str, task: Mapping[str, str | None]) -> None:
    """Adopts the launch in this process's place, and trains or writes the recipe, under a new name for a second launch."""
    with open(task["noted"] or os.devnull, "a", encoding="utf-8") as noted:
        noted.write(f"{entry}\n")
    place = (
        command.index("-m") + 2 if entry == FULLY_ASYNC else len(command) - len(arguments_of(command) or [])
    )
    how, file = ["--train"], Path(task["write"] or "")
    if task["write"]:
        names = (file.with_stem(f"{file.stem}-{n}") if n > 1 else file for n in count(1))
        how = ["--write", str(next(name for name in names if not name.exists()))]
    words = ["adopt", "--entry", entry, *how, "--", *command[place:]]
    say(f"this launch runs as {shlex.join(['verl-credit', *words])}")
    os.execv(sys.executable, [sys.executable, "-m", "verl_credit.cli", *words])


def hand_over(command: Sequence[str]) -> None:
    """Returns where this process is no launch, or one without our keys; else does not return."""
    entry, task = entry_of(command), os.environ.get(names.TAKE_OVER)
    if task and entry:
        del os.environ[names.TAKE_OVER]
        adopt(command, entry, json.loads(task))
    arguments = arguments_of(command)
    if arguments is None:
        return
    from verl_credit.recipe.recipe_files import folders, lists_ours

    launch, words = read(arguments)
    name, folder = launch.config_name.removesuffix(".yaml"), launch.config_path
    overrides = [word for word in words if not word.startswith("-")]
    if lists_ours(name, folders(folder if folder and Path(folder).is_dir() else None)):
        if launch.multirun:
            end(
                "-m: `verl-credit train` makes one run; start it in a loop, or run a campaign (docs/campaigns.md)"
            )
        if others := [*["--cfg"] * bool(launch.cfg), *(word for word in words if word.startswith("-"))]:
            end(f"{others[0]}: `verl-credit train` has no such option of Hydra; leave it out")
        own_folder = ["--config-dir", folder] if folder else []
        train = ["train", "--config-name", name, *own_folder, "--", *overrides]
        say(f"this launch runs as {shlex.join(['verl-credit', *train])}")
        os.execv(sys.executable, [sys.executable, "-m", "verl_credit.cli", *train])
    elif ours := our_keys_in(overrides):
        use = "add --config-name=verl, or in a YAML of yours `defaults: [verl, _self_]`, or translate the launch"
        end(
            f"{ours[0]}: --config-name={name} has no defaults for our keys; {use}: verl-credit adopt (docs/adopt.md)"
        )


def say(sentence: str) -> None:
    print(printable(f"verl_credit: {sentence}"), flush=True)


def end(sentence: str) -> None:
    say(sentence)
    raise SystemExit(int(ExitCode.PREFLIGHT))
