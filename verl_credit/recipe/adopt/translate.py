"""Translates the keys of a launch of verl, one by one; `fit_to_turns` then decides what several keys decide together."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from difflib import get_close_matches

from verl_credit.config.engines import ENGINE, ENGINES
from verl_credit.config.gone import longest
from verl_credit.config.keys import LOSS
from verl_credit.config.keys.verl import VERLS_LOSSES
from verl_credit.config.resolved import select
from verl_credit.credit.turn.modes import MODES
from verl_credit.recipe import compose
from verl_credit.recipe.adopt import chosen_hardware as hardware
from verl_credit.recipe.adopt.adapt import ESTIMATOR, FORKS, fit_to_turns
from verl_credit.recipe.adopt.adoption import CHOICES, NULL, Adoption, Change, key_of, shown
from verl_credit.recipe.adopt.deciding import closes, decides
from verl_credit.recipe.adopt.entry import MAIN
from verl_credit.recipe.older_verl import (
    ACTOR,
    COUNTS_ROWS,
    ESTIMATORS,
    GONE,
    IN_OUR_PLACE,
    LEAVES_ONE_OUT,
    NEAREST,
    NO_BASELINE,
    NPU,
    OLDER,
    PER_GPU,
    VALUES,
    remedy_of,
    renamed,
)
from verl_credit.recipe.rules.engines import ROLLOUT_MODE
from verl_credit.recipe.rules.estimator import ELSEWHERE
from verl_credit.recipe.rules.known import REWARD_KWARGS, known_keys, read_by_own_code

RECIPE = "verl"
"""The recipe that an adopted launch starts from."""
OPERATOR, MODE = "algorithm.advantage_mode", "algorithm.info_gain_norm_mode"
CLOSE_ESTIMATOR = (OPERATOR, MODE)
ONE_MODE = "verl 0.9.1 has async alone, whose engines answer the requests of agent loops"


def adopt(
    pairs: Iterable[tuple[str, str]],
    entry: str = MAIN,
    unknown: Mapping[str, str] = {},
    chosen: Iterable[str] = (),
) -> Adoption:
    """``pairs``: the keys with their values in the launch's order; a later one wins. ``unknown``: arguments of the launch
    whose values are not known, with the reasons. ``chosen``: the keys that are given beside the launch."""
    given: dict[str, str] = {}
    for key, text in pairs:
        given.pop(key, None)
        given[key] = text
    beside = {renamed(key) or key for key in chosen}
    machine = hardware.values_of(given["hardware"]) if "hardware" in beside else {}
    adoption = Adoption(chosen=frozenset(beside | machine.keys()))
    for key, text in machine.items():
        if key not in beside and given.get(key, text) != text:
            why = f"hardware={given['hardware']} is given beside the launch"
            adoption.translated.append(Change(shown(key, given[key]), shown(key, text), why))
            given[key] = text
    known = _Known({renamed(key) or key: text for key, text in given.items() if text != NULL})
    for argument, why in unknown.items():
        _unknown(adoption, known, argument, why)
    for key, text in given.items():
        _one(adoption, known, key, text)
    _estimator(adoption, given.get(ESTIMATOR))
    open_keys = {key_of(argument) for argument in unknown}
    fit_to_turns(adoption, given, entry, open_keys)
    if any(key in FORKS or key in COUNTS_ROWS or longest(OLDER, key) for key in {*given} | open_keys):
        _moved_defaults(adoption)
    adoption.new_keys = {key for key in adoption.given if key not in CHOICES and not known.listed(key)}
    return adoption


def _unknown(adoption: Adoption, known: _Known, argument: str, why: str) -> None:
    key, equals = key_of(argument), "=" in argument
    if not equals or key.startswith("-"):  # it may be any key, or a file of keys
        adoption.lose(key, why, ())
    elif decides(key):
        now = renamed(key) or key
        adoption.lose(now, why, closes(key, known.takes(now)))


def _one(adoption: Adoption, known: _Known, key: str, text: str) -> None:
    place = renamed(key)
    if key in FORKS or key in PER_GPU or key == ESTIMATOR:  # decided with other keys
        adoption.given[key] = text
    elif (key, text) in VALUES:
        value, why = VALUES[key, text]
        if value is None:
            adoption.drop(key, text, why, lost=why == NPU)
        else:
            adoption.put(key, value, why, old=shown(key, text))
    elif key == ROLLOUT_MODE and text != "async":
        # Forks call their engines with tools sync_with_tool.
        adoption.drop(key, text, ONE_MODE, lost=text not in ("sync", NULL))
    elif key == ENGINE and text not in ENGINES:  # as forks call theirs: vllm_with_search
        adoption.drop(key, text, f"verl_credit has {', '.join(ENGINES)}; vllm takes its place", lost=True)
    elif place is not None:
        if text == NULL:
            return
        if known.takes(place):
            adoption.put(place, text, "the key's place now", old=shown(key, text))
        else:
            why = GONE.get(key) or f"verl 0.9.1 has no {place}"
            adoption.drop(key, text, why, lost=key not in GONE and decides(place.rpartition(".")[2], text))
    elif (gone := longest(GONE, key)) is not None:
        if text.lower() not in (NULL, "none") and not _same(key, text):
            adoption.drop(
                key, text, GONE[gone], lost=False if gone in ("env", "async_training", "rollout") else None
            )
    elif key in known.keys.sections and text not in (NULL, "{}"):
        _text_for_section(adoption, known, key, text)
    elif key in CHOICES or known.takes(key):
        adoption.given[key] = text
    else:
        hint, meant = known.near(key)
        adoption.drop(
            key, text, f"neither verl 0.9.1 nor verl_credit reads it{hint}", lost=decides(meant or key, text)
        )


def _text_for_section(adoption: Adoption, known: _Known, key: str, text: str) -> None:
    if key == LOSS and text in VERLS_LOSSES:
        adoption.put(f"{LOSS}.loss_mode", text, "the key's place now", old=shown(key, text))
    elif text.startswith("{"):
        adoption.given[key] = text
    else:
        names = ", ".join(name for name in known.keys.names[key] if name != "_target_")
        lost = decides(key) and not (key == LOSS and text in ("grpo", "ppo"))  # which are verl's default
        adoption.drop(key, text, f"a section in verl 0.9.1, whose keys are {names}", lost=lost)


KL_IN_REWARD = "algorithm.use_kl_in_reward"
MOVED = ((f"{ACTOR}.entropy_coeff", "0.001", "0"), (KL_IN_REWARD, "on without use_kl_loss", "false"))
"""Keys with their default in older versions of verl, and now."""
_SAME = {
    "trainer.use_v1": "true", "actor_rollout_ref.model.use_fused_kernels": "false", "trainer.critic_warmup": "0",
}  # fmt: skip


def _same(key: str, text: str) -> bool:
    """Does a key that has no place say what is the case anyway?"""
    one_rank = key.endswith("ulysses_sequence_parallel_size") and text == "1"
    return one_rank or text.lower() == _SAME.get(key)


def _estimator(adoption: Adoption, name: str | None) -> None:
    """An estimator of verl would switch every turn's credit off; ours takes its place, with its outcome operator."""
    adoption.given.pop(ESTIMATOR, None)
    if name is None:
        why = f"it is not given, and verl's default is gae: {ESTIMATORS['gae'][1]}"
        adoption.notes.append(f"{ESTIMATOR}: {why}")
        if MODE not in adoption.given:
            adoption.lose(ESTIMATOR, why, CLOSE_ESTIMATOR)
        return
    old, plain = shown(ESTIMATOR, name), name.lower().replace("-", "_")
    operator, why = ESTIMATORS.get(plain, ("grpo", NEAREST))
    modes = {mode.replace("-", "_"): f"{MODE}={mode}" for mode in MODES if mode != "none"}
    key, _, value = (modes | ELSEWHERE).get(plain, "").partition("=")
    if LEAVES_ONE_OUT.search(plain):
        operator, why = "rloo", IN_OUR_PLACE
    elif key.startswith("algorithm.") and plain not in ESTIMATORS:
        adoption.put(key, value, "verl has no such estimator; here it is that key", old=old)
        why = IN_OUR_PLACE
    if OPERATOR not in adoption.given:
        adoption.put(OPERATOR, operator, why, old=old)
    if why in (NEAREST, NO_BASELINE, ESTIMATORS["gae"][1]):
        adoption.lose(ESTIMATOR, why, CLOSE_ESTIMATOR)


def _moved_defaults(adoption: Adoption) -> None:
    """Notes the defaults of older versions of verl that are others now and that the launch does not set."""
    moved = [f"{key} was {before} and is {now}" for key, before, now in MOVED if key not in adoption.given]
    if adoption.is_on(f"{ACTOR}.use_kl_loss"):
        moved = [one for one in moved if not one.startswith(KL_IN_REWARD)]
    if moved:
        adoption.notes.append(
            f"the launch has keys of an older verl or a fork, whose defaults may be others: {'; '.join(moved)}"
        )


class _Known:
    """The keys that verl 0.9.1, verl_credit and the code of the ``launch`` read."""

    def __init__(self, launch: Mapping[str, str]) -> None:
        self.keys, self.recipe, self.launch = known_keys("dp"), compose.compose_recipe(RECIPE, []), launch

    def listed(self, key: str) -> bool:
        """Does the recipe have the key, so that an override needs no plus?"""
        parent, _, name = key.rpartition(".")
        section = select(self.recipe, parent) if parent else self.recipe
        return isinstance(section, Mapping) and name in section

    def takes(self, key: str) -> bool:
        own = (one for one in ("data", REWARD_KWARGS) if key.startswith(f"{one}."))
        return self.keys.take(key) or any(read_by_own_code(one, self.launch.get) for one in own)

    def near(self, key: str) -> tuple[str, str]:
        """What to write in place of a key that nothing reads, and the key that is probably meant."""
        if remedy := remedy_of(key):
            return f"; {remedy}", remedy.partition("=")[0].lstrip("+")
        parent, _, name = key.rpartition(".")
        near = get_close_matches(name, self.keys.names.get(parent, ()), n=1)
        meant = ".".join(filter(None, [parent, *near])) if near else ""
        return (f" (did you mean {meant}?)" if meant else ""), meant
