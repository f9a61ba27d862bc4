"""The programs whose arguments are verl's keys: verl's own entry points, and those of other projects."""

from __future__ import annotations

import re
from collections.abc import Sequence

MAIN = "verl.trainer.main_ppo"
_ENTRY = re.compile(r"(^|\.)(async_)?main_(ppo|dapo|agent_ppo)(\.py)?$|(^|\.)fully_async_main(\.py)?$")
_VERLS_KEY = re.compile(r"[+~]*(actor_rollout_ref|algorithm)\.[\w.]+=")
_OTHER_WORK = re.compile(r"sft|generat|eval")


def is_launch(module: str, arguments: Sequence[str] = ()) -> bool:
    """Is it a trainer's entry point by its name, or a program that gets keys of verl's policy or algorithm?"""
    if _ENTRY.search(module):
        return True
    return not _OTHER_WORK.search(module) and any(map(_VERLS_KEY.match, arguments))


def is_fully_async(entry: str) -> bool:
    return "fully_async_main" in entry


def is_one_step_off(entry: str) -> bool:
    return "one_step_off" in entry


def note_of(entry: str) -> list[str]:
    """A sentence about an entry point that is not verl's usual one."""
    if entry == MAIN:
        return []
    return [f"the entry point is {entry}: its keys are read, and its own code does not come along"]
