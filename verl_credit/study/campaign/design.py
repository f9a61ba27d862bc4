"""The runs of a campaign: which there are, in which order, with which overrides; all are checked before the first."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from omegaconf import DictConfig, OmegaConf, open_dict

from verl_credit.config.resolved import flat_values
from verl_credit.errors import ConfigError
from verl_credit.recipe.compose import load_config, quoted, unchecked_config
from verl_credit.recipe.world import missing_line
from verl_credit.redact import redact_value
from verl_credit.study.campaign.child import in_folder
from verl_credit.study.campaign.file import Campaign
from verl_credit.study.twin_check import check_twin

CHECKPOINTS = "trainer.default_local_dir"
LINEAGE = "lineage"  # the section of keys, and the folder of the table below the campaign's


@dataclass(frozen=True)
class PlannedRun:
    condition: str
    seed: int
    world: int | None

    @property
    def folder(self) -> str:
        """Below the campaign's folder."""
        world = "" if self.world is None else f"-world-{self.world}"
        return f"{self.condition}/seed-{self.seed}{world}"

    @property
    def block(self) -> tuple[int, int]:
        """Runs of the same block are paired."""
        return self.seed, -1 if self.world is None else self.world


def planned(campaign: Campaign) -> list[PlannedRun]:
    """Block by block: after every block all conditions have the same seeds and worlds, so that pairs are whole early."""
    return [PlannedRun(name, *block) for block in campaign.blocks() for name in campaign.conditions]


def overrides_of(campaign: Campaign, run: PlannedRun, folder: Path) -> list[str]:
    """``folder``: the campaign's."""
    trial = {  # the run's row in the table of trials; the campaign's own overrides win
        "dir": str(folder / LINEAGE),
        "exp_id": f"{campaign.name}-{run.folder.replace('/', '-')}",
        "hypothesis": " ".join(campaign.hypothesis.split()),
        "expected_delta": campaign.expected_delta,
    }
    row = [f"{LINEAGE}.{key}={quoted(text)}" for key, text in trial.items() if text]
    world = [] if run.world is None else [f"lab.world_seed={run.world}"]
    own = [*campaign.conditions[run.condition], f"seed={run.seed}", *world]
    return in_folder([*row, *campaign.overrides, *own], folder / run.folder)


def composed(campaign: Campaign, folder: Path, complete: bool = True) -> dict[str, DictConfig]:
    """The configuration of every condition, for its first seed and world. Raises ConfigError that names the condition.
    ``complete``: keys that the user has to give (data, model, server) are there, too."""
    seed, world = campaign.blocks()[0]
    if world is not None and "lab" not in unchecked_config(campaign.recipe, [], campaign.config_dir):
        use = f"recipe {campaign.recipe} has no lab, and so no worlds: leave worlds out"
        raise ConfigError(key="worlds", value=campaign.worlds, accepted=use)
    configs: dict[str, DictConfig] = {}
    taken: dict[str, str] = {}
    for name in campaign.conditions:
        run = PlannedRun(name, seed, world)
        try:
            config = load_config(campaign.recipe, overrides_of(campaign, run, folder), campaign.config_dir)
            if campaign.engine == "twin":
                check_twin(config)
            if complete and (missing := missing_line(config)):
                raise ConfigError(missing)
            _window(campaign, config)
        except ConfigError as error:
            message = f"campaign {campaign.name}, condition {name}: {error}"
            raise ConfigError(message, key=error.key, value=error.value, accepted=error.accepted) from error
        checkpoints = Path(OmegaConf.select(config, CHECKPOINTS)).expanduser().resolve()
        if not checkpoints.is_relative_to((folder / run.folder).resolve()):
            use = f"the runs of condition {name} would share their checkpoints; leave it below run_dir (its default)"
            raise ConfigError(key=CHECKPOINTS, value=checkpoints, accepted=use)
        if (other := taken.setdefault(str(sorted(flat(config).items())), name)) != name:
            same = f"conditions {other} and {name} are the same configuration: their runs would be equal"
            raise ConfigError(same, key="conditions", value=name)
        configs[name] = config
    return configs


def _window(campaign: Campaign, config: DictConfig) -> None:
    """Refuses a run that ends before the metric's window, or is first evaluated inside it."""
    (first, last), total = campaign.metric.window, config.trainer.total_training_steps
    window = f"[{first}, {last}]"
    if total is not None and last > total:
        use = f"the run ends at trainer.total_training_steps={total}; end the window there"
        raise ConfigError(key="metric.window", value=window, accepted=use)
    every = config.trainer.test_freq
    if campaign.metric.held_out:
        start = 0 if config.trainer.get("val_before_train", True) else every if every > 0 else total
        if start is not None and first < start:
            use = f"the first evaluation is at step {start}; begin the window there, or set trainer.val_before_train=true"
            raise ConfigError(key="metric.window", value=window, accepted=use)


def flat(config: DictConfig) -> dict[str, object]:
    """``key: value`` of the resolved configuration without the keys that differ for every run, secrets hidden."""
    plain = config.copy()
    with open_dict(plain):
        plain.run_dir, plain.seed = "RUN_DIR", 0
        if "lab" in plain:
            plain.lab.world_seed = 0
    keys = {key: redact_value(key, value) for key, value in flat_values(plain).items()}
    return {key: value for key, value in keys.items() if not key.startswith(f"{LINEAGE}.")}
