"""A recipe's own world, and the keys that a user has to set.

A section names the folder of the world's files, and the run builds absent files. A recipe has at most one such section.
Without it, the user sets data, model and search server.
`python -m verl_credit.recipe.world FILE` builds the world of a configuration in a file, in a separate process.
"""

from __future__ import annotations

import shlex
import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from omegaconf import DictConfig, OmegaConf

from verl_credit.built_folder import Progress, read_manifest
from verl_credit.config.fit import DEFAULT
from verl_credit.config.keys.run import Doorkey, Lab, Real
from verl_credit.config.keys.section import Section
from verl_credit.errors import ExitCode, PreflightError, show_value
from verl_credit.names import ENV_AGENT
from verl_credit.records.run.progress_line import Throttled, say_at_once


class World(ABC):
    """The world of a configuration. ``called``: its name in messages."""

    section: ClassVar[str]
    keys: ClassVar[type[Section]]
    called: ClassVar[str]
    serves = True
    """The world has an index to search."""
    asks: Sequence[str] = ()
    """The keys that the user has to set."""

    def __init__(self, config: DictConfig) -> None:
        self.config, self.at = config, config[self.section]

    @abstractmethod
    def build(self, progress: Progress) -> tuple[Path, Path] | None:
        """Builds absent files. Returns (index, encoder) of the run's own search server; None for a world without a search.
        Raises PreflightError."""

    @abstractmethod
    def command(self) -> str:
        """The command that builds the world without a run, as a shell takes it."""

    def identity(self) -> str:
        """A text that is equal for configurations whose worlds have the same files in the same folder."""
        return OmegaConf.to_yaml(self.at, resolve=True)


class LabWorld(World):
    section, keys, called = "lab", Lab, "the lab"

    def build(self, progress: Progress) -> tuple[Path, Path]:
        from verl_credit.worlds.lab.build import build_lab
        from verl_credit.worlds.lab.config import NAME
        from verl_credit.worlds.lab.warm_start import LabGateError

        at, folder = self.at, Path(self.at.dir)
        self._require_same(NAME)
        try:
            lab = build_lab(folder, world_seed=at.world_seed, size=at.size, hops=at.hops, progress=progress)
        except (LabGateError, FileExistsError) as error:
            raise PreflightError(f"lab.dir={at.dir}: {error}") from error
        return Path(at.index) if at.index else lab.index, lab.encoder

    def _require_same(self, name: str) -> None:
        """A lab of other settings is not replaced: other runs may need it."""
        try:
            there = read_manifest(Path(self.at.dir), name)
        except ValueError:  # none is there, or it is damaged
            return
        for key in ("world_seed", "size", "hops"):
            if (known := there.get(key)) != self.at[key]:
                use = f"expected {show_value(known)}, as the lab in lab.dir={self.at.dir} has it, or another lab.dir"
                raise PreflightError(f"lab.{key}={show_value(self.at[key])}: {use}")

    def command(self) -> str:
        at = self.at
        given = ["--dir", str(at.dir), "--world-seed", str(at.world_seed), "--size", at.size]
        given += [] if at.hops is None else ["--hops", str(at.hops)]
        return shlex.join(["verl-credit", "lab", *given])


class RealWorld(World):
    section, keys, called = "real", Real, "the world of trained weights"

    def __init__(self, config: DictConfig) -> None:
        super().__init__(config)
        self.serves = self.at.task == "multihop"
        self.asks = ("real.questions",) if self.serves else ()

    def build(self, progress: Progress) -> tuple[Path, Path] | None:
        from verl_credit.worlds.real.build import build_real
        from verl_credit.worlds.real.multihop import View
        from verl_credit.worlds.real.packages import RealError

        at, view = self.at, View(*self._shown())
        settings = {"task": at.task, "size": at.size, "questions": at.questions, "seed": at.data_seed}
        try:
            paths = build_real(Path(at.dir), view=view, progress=progress, **settings)
        except (RealError, OSError) as error:
            raise PreflightError(f"real.dir={at.dir}: {error}") from error
        return (paths.index, paths.encoder) if self.serves else None

    def command(self) -> str:
        at, data, search = self.at, self.config.data, self.config.search
        given = ["verl-credit", "real", "--dir", str(at.dir), "--task", at.task, "--size", at.size]
        given += ["--seed", str(at.data_seed)]
        if self.serves:
            given += ["--questions", str(at.questions), f"search.topk={search.topk}"]
            given += [f"search.max_page_chars={search.max_page_chars}"]
            given += [f"data.{key}={data[key]}" for key in ("max_prompt_length", "max_response_length")]
        return shlex.join(given)

    def identity(self) -> str:
        return f"{super().identity()} {self._shown()}"

    def _shown(self) -> tuple[str | None, int, int, int]:
        """Returns the chat template, results, page characters and row tokens with which the supervised start writes."""
        data, search = self.config.data, self.config.search
        template = self.config.actor_rollout_ref.model.get("custom_chat_template")
        return template, search.topk, search.max_page_chars, data.max_prompt_length + data.max_response_length


class DoorkeyWorld(World):
    section, keys, called, serves = "doorkey", Doorkey, "DoorKey's world", False

    def build(self, progress: Progress) -> None:
        """Policy and rows of the user's own need none of it."""
        from verl_credit.worlds.doorkey.build import build_doorkey

        at = self.at
        if any(str(OmegaConf.select(self.config, key)).startswith(f"{at.dir}/") for key in (*DATA, MODEL)):
            try:
                build_doorkey(Path(at.dir), world_seed=at.world_seed, size=at.size, progress=progress)
            except OSError as error:
                raise PreflightError(f"doorkey.dir={at.dir}: {error}") from error

    def command(self) -> str:
        at = self.at
        given = ["--dir", str(at.dir), "--world-seed", str(at.world_seed), "--size", at.size]
        return shlex.join(["verl-credit", "doorkey", *given])


WORLDS: tuple[type[World], ...] = (LabWorld, RealWorld, DoorkeyWorld)


def world_of(config: DictConfig) -> World | None:
    return next((world(config) for world in WORLDS if world.section in config), None)


def serves_search(config: DictConfig) -> bool:
    """Does the run start its own search server? It does where no address is given."""
    world = world_of(config)
    return world is not None and world.serves


DATA = ("data.train_files", "data.val_files")
MODEL, SERVER, ENVIRONMENT = "actor_rollout_ref.model.path", "search.url", "environment.path"
HOW = {
    **dict.fromkeys(DATA, "parquet files; `verl-credit prepare` writes them"),
    MODEL: "a folder or a name on the hub",
    SERVER: "a server with POST /retrieve",
    ENVIRONMENT: "an adapter, or my_module.MyEnvironment",
    "real.questions": "HotpotQA's questions with their paragraphs: a file, or OWNER/NAME on the hub",
}


def without_value(config: DictConfig) -> list[str]:
    """The required keys that are null, ??? or empty, in the order of HOW. A recipe's own world has a search server.

    Without this check verl's defaults would apply: GSM8K and its authors' model.
    """

    def empty(key: str) -> bool:
        parent, _, leaf = key.rpartition(".")
        node = OmegaConf.select(config, parent)
        # A number is a wrong value, refused where the key is read.
        return node is None or OmegaConf.is_missing(node, leaf) or node.get(leaf) in (None, "", [])

    world = world_of(config)
    required = [*DATA, MODEL, *(world.asks if world else ())]
    if config.search.max_searches and not serves_search(config):
        required.append(SERVER)
    if OmegaConf.select(config, DEFAULT) == ENV_AGENT:
        required.append(ENVIRONMENT)
    return [key for key in required if empty(key)]


def with_expectations(keys: list[str]) -> list[str]:
    """``KEY, KEY (what is expected)``, one text for keys that expect the same."""
    ways = dict.fromkeys(HOW[key] for key in keys)
    return [f"{', '.join(key for key in keys if HOW[key] == how)} ({how})" for how in ways]


def missing_line(config: DictConfig) -> str | None:
    """A line that names all missing keys; None where no key is missing."""
    keys = "; ".join(with_expectations(without_value(config)))
    return f"no value for {keys}: give KEY=VALUE on the command line or in a recipe" if keys else None


def main(file: Path) -> int:
    config = OmegaConf.load(file)
    world = world_of(config) if isinstance(config, DictConfig) else None
    if world is None:
        raise ValueError(f"{file} has no world")
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
