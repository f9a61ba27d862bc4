"""The world that a recipe brings with it: a section of its own says where the files are, and the run builds what is absent.

A recipe has one such section at most; one without brings nothing, and its user gives data, model and search server.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from verl_credit.built_folder import Progress
from verl_credit.config.keys.run import Lab, Real
from verl_credit.config.keys.section import Section
from verl_credit.errors import PreflightError


@dataclass(frozen=True)
class Served:
    """What the run's own search server serves."""

    index: Path
    encoder: Path


@dataclass(frozen=True)
class World:
    keys: type[Section]
    called: str
    build: Callable[[DictConfig, Progress], Served | None]
    """Raises PreflightError. None: nothing is searched."""
    arguments: Callable[[DictConfig], Sequence[str]]
    """Of a command that builds it without a run."""
    decides: Callable[[DictConfig], object] = lambda config: None
    """What beside its section makes its files others."""
    serves: Callable[[DictConfig], bool] = lambda config: True
    """Whether it has an index to search."""
    asks: Callable[[DictConfig], Sequence[str]] = lambda config: ()
    """Keys that its user has to give."""

    @property
    def section(self) -> str:
        return self.keys.prefix


def world_of(config: DictConfig) -> World | None:
    return next((world for world in WORLDS if world.section in config), None)


def serves_search(config: DictConfig) -> bool:
    """The run starts a search server of its own where no address is given."""
    world = world_of(config)
    return world is not None and world.serves(config)


def build_command(config: DictConfig) -> str:
    """As a shell takes it."""
    return shlex.join(["verl-credit", *world_of(config).arguments(config)])


def same_world(config: DictConfig) -> str:
    """Equal for configurations whose worlds have the same files in the same folder."""
    world = world_of(config)
    return f"{OmegaConf.to_yaml(config[world.section], resolve=True)} {world.decides(config)}"


def _build_lab(config: DictConfig, progress: Progress) -> Served:
    from verl_credit.worlds.lab.build import build_lab
    from verl_credit.worlds.lab.warm_start import LabGateError

    at = config.lab
    try:
        lab = build_lab(Path(at.dir), world_seed=at.world_seed, size=at.size, progress=progress)
    except (LabGateError, FileExistsError) as error:
        raise PreflightError(f"lab.dir={at.dir}: {error}") from error
    return Served(Path(at.index) if at.index else lab.index, lab.encoder)


def _build_real(config: DictConfig, progress: Progress) -> Served | None:
    from verl_credit.worlds.real.build import build_real
    from verl_credit.worlds.real.multihop import View
    from verl_credit.worlds.real.packages import RealError

    at = config.real
    view = View(*_real_decides(config))
    try:
        paths = build_real(
            Path(at.dir),
            task=at.task,
            size=at.size,
            questions=at.questions,
            view=view,
            seed=at.data_seed,
            progress=progress,
        )
    except (RealError, OSError) as error:
        raise PreflightError(f"real.dir={at.dir}: {error}") from error
    return Served(paths.index, paths.encoder) if _real_serves(config) else None


def _lab_arguments(config: DictConfig) -> list[str]:
    at = config.lab
    return ["lab", "--dir", str(at.dir), "--world-seed", str(at.world_seed), "--size", at.size]


def _real_arguments(config: DictConfig) -> list[str]:
    at = config.real
    found = ["real", "--dir", str(at.dir), "--task", at.task, "--size", at.size, "--seed", str(at.data_seed)]
    if at.task == "arithmetic":
        return found
    _, topk, characters, _ = _real_decides(config)
    lengths = [f"data.{key}={config.data[key]}" for key in ("max_prompt_length", "max_response_length")]
    return [
        *found,
        "--questions",
        str(at.questions),
        f"search.topk={topk}",
        f"search.max_page_chars={characters}",
        *lengths,
    ]


def _real_decides(config: DictConfig) -> tuple[str | None, int, int, int]:
    """How the policy is shown its tool and its results in the supervised start."""
    lengths = config.data.max_prompt_length + config.data.max_response_length
    template = config.actor_rollout_ref.model.get("custom_chat_template")
    return template, config.search.topk, config.search.max_page_chars, lengths


def _real_serves(config: DictConfig) -> bool:
    return config.real.task == "multihop"


def _real_asks(config: DictConfig) -> Sequence[str]:
    return ("real.questions",) if config.real.task == "multihop" else ()


WORLDS = (
    World(Lab, "the lab", _build_lab, _lab_arguments),
    World(
        Real,
        "the world of trained weights",
        _build_real,
        _real_arguments,
        _real_decides,
        _real_serves,
        _real_asks,
    ),
)
