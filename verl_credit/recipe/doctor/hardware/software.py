"""Checks Python, torch, and the packages that verl's and our metadata require."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from importlib.metadata import PackageNotFoundError, requires

from omegaconf import DictConfig
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from verl_credit.recipe.doctor.context import Context
from verl_credit.recipe.doctor.result import Result, failed, passed, warned

PLUGINS, PLATFORM = "VERL_USE_EXTERNAL_PLUGINS", "VERL_PLATFORM"
OURS = "verl_credit"  # the name of our entry point in the group verl.plugins
CUDA_13 = "pip install --force-reinstall torch --index-url https://download.pytorch.org/whl/cu130"
PYTHON = ((3, 11), (3, 13))  # (first accepted, first refused): pyproject.toml


def check_python(context: Context) -> Result:
    python, (low, high) = context.facts.python, PYTHON
    version, *ends = (".".join(map(str, v)) for v in (python, low, high))
    if low <= python[:2] < high:
        return passed(f"Python {version}")
    return failed(
        f"Python {version}",
        "at least {}, below {}".format(*ends),
        "python3.12 -m venv .venv, and install there",
    )


def check_torch(context: Context) -> Result:
    """Is torch installed, and is it the CPU build while the recipe wants CUDA?"""
    torch, config = context.facts.torch, context.config
    if torch.version is None:
        return failed(f"torch does not import: {torch.error}", "a torch that imports", "pip install torch")
    build = f"torch {torch.version}, built for {f'CUDA {torch.cuda}' if torch.cuda else 'CPUs only'}"
    if wants_cuda(config) and torch.cuda is None:
        return failed(f"{build}, and trainer.device=cuda", "a CUDA build", CUDA_13)
    spark = next((d for d in torch.devices if d.unified), None)
    uses_cuda = config is None or wants_cuda(config)
    if uses_cuda and spark is not None and torch.cuda is not None and torch.cuda.startswith("12."):
        return warned(
            f"{build}, on {spark.name}",
            "built for CUDA 13: reports say 1.9 to 2.9 times as fast there (docs/spark.md)",
            f"{CUDA_13} for the same version, and a vLLM built for CUDA 13",
        )
    return passed(build)


def check_requirements(context: Context) -> list[Result]:
    """Returns a result for verl's requirements and a result for ours, each with all packages missing or out of range."""
    installed = context.facts.packages
    return [
        judge_requirements("verl's requirements", requirements_of("verl"), "", installed),
        judge_requirements("our requirements", requirements_of("verl-credit"), "verl", installed, warned),
    ]


def judge_requirements(
    name: str, lines: Iterable[str] | None, extra: str, installed: Mapping[str, str], outside=failed
) -> Result:
    """Judges the ``lines`` of a distribution's metadata, the requirements of ``extra`` included.

    ``outside`` judges a version out of range; a missing package is a failure. Our ranges end where our tests end, verl's
    where verl breaks.
    """
    if lines is None:
        return failed("the distribution is not installed", "stock verl 0.9.1 beside verl-credit",
                      "pip install 'verl-credit[verl]'", name)  # fmt: skip
    wrong, counted, judge = [], 0, outside
    for requirement in map(Requirement, lines):
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": extra}):
            continue
        counted += 1
        version = installed.get(canonicalize_name(requirement.name))
        plain = f"{requirement.name}{requirement.specifier}"
        if version is None:
            wrong.append((plain, f"{requirement.name} is missing"))
            judge = failed
        elif not requirement.specifier.contains(version, prereleases=True):
            wrong.append((plain, f"{requirement.name} {version}"))
    if not wrong:
        return passed(f"{counted} packages, all in range", name)
    return judge(
        ", ".join(found for _, found in wrong),
        ", ".join(right for right, _ in wrong),
        "pip install " + " ".join(f"'{right}'" for right, _ in wrong),
        name,
    )


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


def wants_cuda(config: DictConfig | None) -> bool:
    return config is not None and config.trainer.device == "cuda"


def requirements_of(distribution: str) -> list[str] | None:
    try:
        return requires(distribution) or []
    except PackageNotFoundError:
        return None
