"""The inputs of the checks: the machine's facts, the recipe, and its input files, each read once."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from verl_credit.config.settings import CreditSettings
from verl_credit.errors import PreflightError
from verl_credit.recipe.doctor.data import Reads, Row, read_rows, rows_needed
from verl_credit.recipe.doctor.lengths import NotHere, load_tokenizer
from verl_credit.recipe.doctor.status import Result, skipped
from verl_credit.recipe.model_files import parameters_of
from verl_credit.recipe.this_machine import Facts
from verl_credit.recipe.world import MODEL, world_of

DATASET = "data.custom_cls.path"


@dataclass
class Context:
    facts: Facts
    config: DictConfig | None = None
    with_verl: Callable[[str, Context], Result] = lambda name, context: skipped("verl is not asked")
    """Makes the check of that name with verl (`cli.train.with_verl`)."""
    may_fetch: bool = False
    """The tokenizer may come from the hub."""
    index_fingerprint: str | None = None
    """The fingerprint of the index that the search servers serve, once they have answered."""
    answer_prefix: str | None = None
    """The text between the chat template's header and a scored answer, once the tokenizer is read."""
    _rows: dict[str, list[Row]] = field(default_factory=dict)

    @property
    def recipe(self) -> DictConfig:
        """The configuration, for checks that need a recipe (`checks.RECIPE`). Raises PreflightError without one."""
        if self.config is None:
            raise PreflightError("no recipe was given")
        return self.config

    def value(self, key: str) -> Any:
        """Returns the key's value; None where the user has not set it."""
        with suppress(OmegaConfBaseException):
            return OmegaConf.select(self.recipe, key)
        return None

    def unbuilt(self, *paths: object) -> str:
        """The reason to accept an absent file: the run builds its world's own files; else ""."""
        world = world_of(self.recipe)
        if world is None:
            return ""
        folder = Path(str(self.recipe[world.section].dir)).expanduser()
        given = [Path(path) for path in paths if isinstance(path, str)]
        if all(path.exists() or not path.is_relative_to(folder) for path in given):
            return ""
        return f"{world.called} is not built yet: `verl-credit train` or `{world.command()}` builds it"

    def rows(self, key: str) -> list[Row]:
        """Reads the rows once. Raises PreflightError, and NotHere where a dataset class of the user's makes them."""
        if own := self.value(DATASET):
            raise NotHere(
                f"{DATASET}={own}: that class makes the rows of the files, and the start does not run it"
            )
        if key not in self._rows:
            config = self.recipe
            self._rows[key] = read_rows(self.value(key), key, Reads.of(config), rows_needed(config, key))
        return self._rows[key]

    @cached_property
    def settings(self) -> CreditSettings:
        return CreditSettings.from_config(self.recipe)

    @property
    def tokenizer(self):
        """Loads the tokenizer once. Raises PreflightError, and NotHere where it cannot be loaded."""
        if isinstance(self._tokenizer, NotHere):
            raise self._tokenizer
        return self._tokenizer

    @cached_property
    def _tokenizer(self):
        try:
            return load_tokenizer(self.recipe.actor_rollout_ref.model, may_fetch=self.may_fetch)
        except NotHere as error:
            return error

    @cached_property
    def parameters(self) -> int | None:
        """The number of the model's parameters; None where its files are not on this machine."""
        return parameters_of(self.value(MODEL))
