"""The command: which checks there are, what is printed, which exit code."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable

from omegaconf import DictConfig

from verl_credit.config.compose import load_config
from verl_credit.config.rules import validate
from verl_credit.doctor.hardware.device import check_cuda, check_ptxas
from verl_credit.doctor.hardware.disk import check_disk
from verl_credit.doctor.hardware.first_start import check_compilation, check_flashinfer
from verl_credit.doctor.hardware.kernels import check_flash, check_flex, check_sdpa
from verl_credit.doctor.hardware.machine import check_memory, check_ports, check_shm
from verl_credit.doctor.hardware.orphans import check_processes
from verl_credit.doctor.hardware.room import check_room
from verl_credit.doctor.hardware.software import (
    check_environment,
    check_python,
    check_requirements,
    check_torch,
    check_vllm,
    wants_cuda,
)
from verl_credit.doctor.inputs.recipe import (
    check_data_files,
    check_model_files,
    check_retriever,
    parameters_of,
)
from verl_credit.doctor.node_checks import check_nodes
from verl_credit.doctor.ray_checks import check_cluster, check_ray
from verl_credit.doctor.result import Result, Status, failed, passed, skipped
from verl_credit.errors import ConfigError, ExitCode, PreflightError
from verl_credit.machine.facts import Facts
from verl_credit.machine.gather import gather

Check = Callable[[Facts, DictConfig | None], "Result | list[Result]"]


def _disk(facts: Facts, config: DictConfig | None) -> Result:
    return check_disk(facts, config, parameters_of(config))


# Quick ones first; those that start processes last.
CHECKS: tuple[Check, ...] = (
    check_python,
    check_torch,
    check_requirements,
    check_environment,
    check_vllm,
    check_flashinfer,
    check_cuda,
    check_ptxas,
    check_memory,
    check_room,
    check_compilation,
    check_shm,
    _disk,
    check_ports,
    check_processes,
    check_model_files,
    check_data_files,
    check_retriever,
    check_ray,
    check_nodes,
    check_flash,
    check_sdpa,
    check_flex,
)
# Those that `verl-credit train` makes before anything heavy; their failures are refusals.
BEFORE_TRAINING: tuple[Check, ...] = (
    check_environment,
    check_vllm,
    check_memory,
    _disk,
    check_ports,
    check_cluster,
    check_nodes,
)
BEFORE_TRAINING_ON_CUDA: tuple[Check, ...] = (
    check_torch,
    check_cuda,
    *BEFORE_TRAINING,
    check_room,
    check_flashinfer,
    check_compilation,
)

SIGNS = {Status.PASS: "ok  ", Status.WARN: "warn", Status.FAIL: "FAIL", Status.SKIP: "-   "}


def doctor(
    name: str | None, overrides: list[str], config_dir: str | None = None, as_json: bool = False
) -> int:
    """Look at this machine, and at what recipe ``name`` asks of it. Exit code 0, or 4 when a check failed."""
    config, first = _recipe(name, overrides, config_dir)
    results = [first, *examine(gather(), config)]
    failures = [r for r in results if r.status is Status.FAIL]
    if as_json:
        print(json.dumps({"passed": not failures, "checks": [r.as_dict() for r in results]}, indent=1))
    else:
        print("\n".join(page(results)))
    return ExitCode.PREFLIGHT if failures else ExitCode.DONE


def examine(facts: Facts, config: DictConfig | None, checks: Iterable[Check] = CHECKS) -> list[Result]:
    """Every check's results. A check that breaks is a failure of its own and ends no other."""
    results: list[Result] = []
    for check in checks:
        try:
            found = check(facts, config)
        except Exception as error:
            name = check.__name__.strip("_").removeprefix("check_")
            found = failed(
                name, f"the check itself broke: {type(error).__name__}: {error}", "a check that answers"
            )
        results += found if isinstance(found, list) else [found]
    return results


def refuse_unfit_machine(config: DictConfig) -> list[str]:
    """Raise PreflightError for the first thing that would stop the run later, after minutes; returns warnings."""
    cuda = wants_cuda(config)
    results = examine(gather(torch=cuda), config, BEFORE_TRAINING_ON_CUDA if cuda else BEFORE_TRAINING)
    for result in results:
        if result.status is Status.FAIL:
            raise PreflightError(f"{result.name}: {result.line()}")
    return [f"warning: {r.name}: {r.line()}" for r in results if r.status is Status.WARN]


def page(results: list[Result]) -> list[str]:
    width = max(len(r.name) for r in results)
    lines = []
    for result in results:
        lines.append(f"{SIGNS[result.status]}  {result.name:<{width}}  {result.found}")
        indent = " " * (width + 8)
        lines += [f"{indent}right: {result.right}"] if result.right else []
        lines += [f"{indent}mend:  {result.mend}"] if result.mend else []
    count = Counter(r.status for r in results)
    told = ", ".join(f"{count[s]} {word}" for s, word in WORDS.items() if count[s])
    return [*lines, "", told]


WORDS = {
    Status.FAIL: "failed",
    Status.WARN: "with a warning",
    Status.PASS: "passed",
    Status.SKIP: "not applicable",
}


def _recipe(
    name: str | None, overrides: list[str], config_dir: str | None
) -> tuple[DictConfig | None, Result]:
    if name is None:
        if overrides:
            return None, failed("recipe", f"overrides without a recipe: {' '.join(overrides)}",
                                "a recipe that they belong to", "--config-name NAME")  # fmt: skip
        return None, skipped("recipe", "none was given: the machine alone is looked at (--config-name NAME)")
    try:
        config = load_config(name, overrides, config_dir)
        validate(config)
    except ConfigError as error:
        return None, failed(
            "recipe", str(error), "a recipe that `verl-credit explain` accepts", "mend that key"
        )
    device = f"{config.trainer.nnodes} x {config.trainer.n_gpus_per_node} {config.trainer.device}"
    return config, passed("recipe", f"{name}: {device}, rollouts by {config.actor_rollout_ref.rollout.name}")
