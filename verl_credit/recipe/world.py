"""A recipe's own world: a section names the folder of its files, and the run builds absent files.

A recipe has at most one such section. Without it, the user sets data, model and search server.
`python -m verl_credit.recipe.world FILE` builds the world of a configuration in a file, in a separate process.
"""

from __future__ import annotations

import shlex
import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from omegaconf import DictConfig, OmegaConf

from verl_credit.built_folder import Progress
from verl_credit.config.keys.run import Lab, Real
from verl_credit.config.keys.section import Section
from verl_credit.errors import ExitCode, PreflightError
from verl_credit.records.run.progress import Throttled, say_at_once


@dataclass(frozen=True)
class Served:
    """The index and encoder of the run's own search server."""

    index: Path
    encoder: Path


class World(ABC):
    """The world of a configuration."""

    keys: ClassVar[type[Section]]
    called: ClassVar[str]

    def __init__(self, config: DictConfig) -> None:
        self.config = config

    @property
    def section(self) -> str:
        return self.keys.prefix

    @property
    def at(self) -> DictConfig:
        return self.config[self.section]

    @abstractmethod
    def build(self, progress: Progress) -> Served | None:
        """Builds absent files. Returns None for a world without a search. Raises PreflightError."""

    @abstractmethod
    def arguments(self) -> Sequence[str]:
        """The arguments of the command that builds the world without a run."""

    def serves(self) -> bool:
        """Does the world have an index to search?"""
        return True

    def asks(self) -> Sequence[str]:
        """The keys that the user has to set."""
        return ()

    def identity(self) -> str:
        """A text that is equal for configurations whose worlds have the same files in the same folder."""
        return OmegaConf.to_yaml(self.at, resolve=True)


class LabWorld(World):
    keys, called = Lab, "the lab"

    def build(self, progress: Progress) -> Served:
        from verl_credit.worlds.lab.build import build_lab
        from verl_credit.worlds.lab.warm_start import LabGateError

        at = self.at
        try:
            lab = build_lab(Path(at.dir), world_seed=at.world_seed, size=at.size, progress=progress)
        except (LabGateError, FileExistsError) as error:
            raise PreflightError(f"lab.dir={at.dir}: {error}") from error
        return Served(Path(at.index) if at.index else lab.index, lab.encoder)

    def arguments(self) -> list[str]:
        at = self.at
        return ["lab", "--dir", str(at.dir), "--world-seed", str(at.world_seed), "--size", at.size]


class RealWorld(World):
    keys, called = Real, "the world of trained weights"

    def build(self, progress: Progress) -> Served | None:
        from verl_credit.worlds.real.build import build_real
        from verl_credit.worlds.real.multihop import View
        from verl_credit.worlds.real.packages import RealError

        at = self.at
        try:
            paths = build_real(
                Path(at.dir),
                task=at.task,
                size=at.size,
                questions=at.questions,
                view=View(*self._shown()),
                seed=at.data_seed,
                progress=progress,
            )
        except (RealError, OSError) as error:
            raise PreflightError(f"real.dir={at.dir}: {error}") from error
        return Served(paths.index, paths.encoder) if self.serves() else None

    def arguments(self) -> list[str]:
        at, data = self.at, self.config.data
        given = ["real", "--dir", str(at.dir), "--task", at.task, "--size", at.size]
        given += ["--seed", str(at.data_seed)]
        if at.task == "arithmetic":
            return given
        _, topk, characters, _ = self._shown()
        lengths = [f"data.{key}={data[key]}" for key in ("max_prompt_length", "max_response_length")]
        given += ["--questions", str(at.questions)]
        return [*given, f"search.topk={topk}", f"search.max_page_chars={characters}", *lengths]

    def serves(self) -> bool:
        return self.at.task == "multihop"

    def asks(self) -> Sequence[str]:
        return ("real.questions",) if self.serves() else ()

    def identity(self) -> str:
        return f"{super().identity()} {self._shown()}"

    def _shown(self) -> tuple[str | None, int, int, int]:
        """Returns the chat template, results, page characters and row tokens with which the supervised start writes."""
        data, search = self.config.data, self.config.search
        template = self.config.actor_rollout_ref.model.get("custom_chat_template")
        return template, search.topk, search.max_page_chars, data.max_prompt_length + data.max_response_length


WORLDS: tuple[type[World], ...] = (LabWorld, RealWorld)


def world_of(config: DictConfig) -> World | None:
    return next((world(config) for world in WORLDS if world.keys.prefix in config), None)


def serves_search(config: DictConfig) -> bool:
    """Does the run start its own search server? It does where no address is given."""
    world = world_of(config)
    return world is not None and world.serves()


def build_command(config: DictConfig) -> str:
    """The command as a shell takes it."""
    return shlex.join(["verl-credit", *world_of(config).arguments()])


def main(file: Path) -> int:
    world = world_of(OmegaConf.load(file))
    try:
        world.build(Throttled(say_at_once, world.section))
    except PreflightError as error:
        print(error, flush=True)
        return ExitCode.PREFLIGHT
    except KeyboardInterrupt:
        return ExitCode.INTERRUPTED
    return ExitCode.DONE


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
