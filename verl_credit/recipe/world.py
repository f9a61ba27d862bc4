"""The world that a recipe brings with it: a section of its own says where the files are, and the run builds what is absent.

A recipe has one such section at most; one without brings nothing, and its user gives data, model and search server.
`python -m verl_credit.recipe.world FILE` builds the world of a configuration in a file, in a process of its own.
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
    """What the run's own search server serves."""

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
        """None: nothing is searched. Raises PreflightError."""

    @abstractmethod
    def arguments(self) -> Sequence[str]:
        """Arguments of the command that builds it without a run."""

    def serves(self) -> bool:
        """Whether it has an index to search."""
        return True

    def asks(self) -> Sequence[str]:
        """Keys that its user has to give."""
        return ()

    def identity(self) -> str:
        """Equal for configurations whose worlds have the same files in the same folder."""
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
        """Chat template, results, characters of a page and tokens of a row: the supervised start writes with these."""
        data, search = self.config.data, self.config.search
        template = self.config.actor_rollout_ref.model.get("custom_chat_template")
        return template, search.topk, search.max_page_chars, data.max_prompt_length + data.max_response_length


WORLDS: tuple[type[World], ...] = (LabWorld, RealWorld)


def world_of(config: DictConfig) -> World | None:
    return next((world(config) for world in WORLDS if world.keys.prefix in config), None)


def serves_search(config: DictConfig) -> bool:
    """The run starts a search server of its own where no address is given."""
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
