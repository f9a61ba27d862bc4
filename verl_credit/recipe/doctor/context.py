"""The inputs of the checks: the machine's facts, the recipe, and its input files, each read once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from verl_credit.config.settings import CreditSettings
from verl_credit.recipe.agent_loops import agents_of_rows, tools_given
from verl_credit.recipe.doctor.inputs.data import Row, read_rows, rows_needed
from verl_credit.recipe.doctor.inputs.model import parameters_of
from verl_credit.recipe.doctor.inputs.prompt_lengths import NotHere, load_tokenizer
from verl_credit.recipe.doctor.probe import VerlProcess
from verl_credit.recipe.doctor.result import Result
from verl_credit.recipe.machine.facts import Facts
from verl_credit.recipe.world import MODEL, world_of


@dataclass
class Context:
    facts: Facts
    config: DictConfig | None = None
    with_verl: Callable[[str, Context], Result] = field(default_factory=VerlProcess)
    """Makes the check of that name with verl, in this process or in a separate process."""
    may_fetch: bool = False
    """The tokenizer may come from the hub."""
    index_fingerprint: str | None = None
    """The fingerprint of the index that the search servers serve, once they have answered."""
    _rows: dict[str, list[Row]] = field(default_factory=dict)

    def value(self, key: str):
        """The key's value; None where the user has not set it."""
        try:
            return OmegaConf.select(self.config, key)
        except OmegaConfBaseException:
            return None

    def unbuilt(self, *paths: object) -> str:
        """The reason to accept an absent file: the run builds its world's own files; else ""."""
        world = world_of(self.config)
        if world is None:
            return ""
        folder = Path(str(self.config[world.section].dir)).expanduser()
        given = [Path(path) for path in paths if isinstance(path, str)]
        if all(path.exists() or not path.is_relative_to(folder) for path in given):
            return ""
        return f"{world.called} is not built yet: `verl-credit train` or `{world.command()}` builds it"

    def rows(self, key: str) -> list[Row]:
        if key not in self._rows:
            at_least, searches = rows_needed(self.config, key), bool(self.config.search.max_searches)
            others = bool(tools_given(self.config))
            self._rows[key] = read_rows(
                self.value(key),
                key,
                at_least=at_least,
                searches=searches,
                other_tools=others,
                agents=agents_of_rows(self.config, tools=others),
                prompt_key=self.config.data.prompt_key,
                default_loop=self.config.actor_rollout_ref.rollout.agent.default_agent_loop,
            )
        return self._rows[key]

    @cached_property
    def settings(self) -> CreditSettings:
        return CreditSettings.from_config(self.config)

    @property
    def tokenizer(self):
        """Loads the tokenizer once. Raises PreflightError, and NotHere where it cannot be loaded."""
        if isinstance(self._tokenizer, NotHere):
            raise self._tokenizer
        return self._tokenizer

    @cached_property
    def _tokenizer(self):
        try:
            return load_tokenizer(self.config.actor_rollout_ref.model, may_fetch=self.may_fetch)
        except NotHere as error:
            return error

    @cached_property
    def parameters(self) -> int | None:
        """The number of the model's parameters; None where its files are not on this machine."""
        return parameters_of(self.value(MODEL))
