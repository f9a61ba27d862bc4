"""The checks before the start, in one list: `doctor` makes all, `train` those that must hold, `explain` names these.

A check is a function of the `Context`. It returns what it found, or a result for each of several things, or raises
PreflightError or ConfigError with a whole sentence. To add one, write the function and its entry in ``CHECKS``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial

from omegaconf import DictConfig

from verl_credit.doctor.context import Context
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
from verl_credit.doctor.inputs.data import TRAIN, VAL
from verl_credit.doctor.inputs.prompt_lengths import NotHere
from verl_credit.doctor.inputs.recipe import (
    check_answers,
    check_data,
    check_model,
    check_positions,
    check_prompts,
    check_retriever,
    check_tokenizer,
    check_weights,
)
from verl_credit.doctor.node_checks import check_nodes
from verl_credit.doctor.ray_checks import check_cluster, check_plugin
from verl_credit.doctor.result import Result, Status, failed, skipped
from verl_credit.errors import ConfigError, PreflightError


class Stage(StrEnum):
    MACHINE = "machine"
    """This machine: quick, and without the recipe's inputs."""
    CLUSTER = "cluster"
    """The Ray cluster that the run would join or start."""
    INPUTS = "inputs"
    """What the recipe reads: made when the lab is built."""
    TRIALS = "trials"
    """Small runs in processes of their own."""


class Train(StrEnum):
    """When `train` makes a check; what fails there ends it before Ray, with exit code 4."""

    ALWAYS = "always"
    ON_CUDA = "on CUDA"
    NEVER = "no"


@dataclass(frozen=True)
class Check:
    name: str
    stage: Stage
    train: Train
    function: Callable[[Context], Result | list[Result]]
    right: str
    """What has to hold."""
    needs: tuple[str, ...] = ()
    """Earlier checks without which this one has nothing to look at. ``recipe``: that one was given."""
    event: str = "idle"
    """Under which kind `train` keeps its warnings."""
    told: bool = False
    """`train` says what it found."""


RECIPE = ("recipe",)
LACKING = (Status.FAIL, Status.SKIP)
MACHINE, CLUSTER, INPUTS, TRIALS = Stage
ALWAYS, ON_CUDA, NEVER = Train


def with_verl(name: str) -> Callable[[Context], Result]:
    return lambda context: context.with_verl(name, context)


# Quick ones first; those that start processes last.
CHECKS: tuple[Check, ...] = (
    Check("python", MACHINE, NEVER, check_python, "a Python that verl and we support"),
    Check("torch", MACHINE, ON_CUDA, check_torch, "it imports, built for the recipe's device"),
    Check("requirements", MACHINE, NEVER, check_requirements, "what verl and we need, in range"),
    Check("environment", MACHINE, ALWAYS, check_environment, "verl loads the plugin, for the recipe's device"),
    Check("vllm", MACHINE, ALWAYS, check_vllm, "a vLLM that verl can start, where the recipe rolls out with it"),
    Check("flashinfer", MACHINE, ON_CUDA, check_flashinfer, "its packages are of one version"),
    Check("cuda", MACHINE, ON_CUDA, check_cuda, "driver and devices, as many as the recipe takes on a node"),
    Check("ptxas", MACHINE, NEVER, check_ptxas, "the assembler that triton calls knows the device (Blackwell)"),
    Check("memory", MACHINE, ALWAYS, check_memory, "free memory, of the host and of every device"),
    Check("room", MACHINE, ON_CUDA, check_room, "weights, gradients and optimiser fit a device", RECIPE),
    Check("compilation", MACHINE, ON_CUDA, check_compilation, "compilers of a first start fit beside the run (GB10)"),
    Check("/dev/shm", MACHINE, NEVER, check_shm, "room for Ray's object store"),
    Check("disk", MACHINE, ALWAYS, check_disk, "room for a checkpoint and those that are kept", RECIPE),
    Check("ports", MACHINE, ALWAYS, check_ports, "every port that the recipe gives a number to is free", RECIPE),
    Check("processes", MACHINE, NEVER, check_processes, "no engine process whose run has ended"),
    Check("ray", CLUSTER, ALWAYS, check_cluster, "a cluster that answers, or what a local one needs"),
    Check("nodes", CLUSTER, ALWAYS, check_nodes, "every node sees the run's folders and reaches the search servers",
          ("recipe", "ray")),
    Check("retriever", INPUTS, ALWAYS, check_retriever, "every search server answers a query, all from one index",
          RECIPE, told=True),
    Check("model", INPUTS, ALWAYS, check_model, "a folder in Hugging Face format, or a name on the hub", RECIPE),
    Check("weights", INPUTS, NEVER, check_weights, "config.json, weights and tokenizer can be read", ("model",)),
    Check("positions", INPUTS, ALWAYS, check_positions, "the model has a position for every token of the longest row",
          ("model",)),
    *(
        Check(key, INPUTS, ALWAYS, partial(check_data, key=key),
              "parquet files with a prompt and a gold answer in every row, and rows enough", RECIPE)
        for key in (TRAIN, VAL)
    ),
    Check("tokenizer", INPUTS, ALWAYS, check_tokenizer, "the model's tokenizer loads", ("model",), event="data"),
    Check("template", INPUTS, ALWAYS, with_verl("template"),
          "the chat template writes the search tool and what a search returns", ("tokenizer",)),
    *(
        Check(f"prompts of {key}", INPUTS, ALWAYS, partial(check_prompts, key=key),
              "every prompt fits data.max_prompt_length", ("tokenizer", key), event="data")
        for key in (TRAIN, VAL)
    ),
    Check("verl", INPUTS, ALWAYS, with_verl("verl"), "verl starts here and accepts the configuration", RECIPE),
    Check("tools", INPUTS, ALWAYS, with_verl("tools"), "verl loads the tools beside the search", RECIPE, event="tools"),
    Check("answers", INPUTS, ALWAYS, check_answers, "the longest row and its scored answers fit a micro-batch",
          ("tokenizer", TRAIN), told=True),
    Check("plugin", TRIALS, NEVER, check_plugin, "a fresh process, or a worker of every node, has the plugin",
          ("ray",)),
    Check("flash-attn", TRIALS, NEVER, check_flash, "it runs and agrees with the definition"),
    Check("sdpa", TRIALS, NEVER, check_sdpa, "it runs and agrees with the definition"),
    Check("flex-attention", TRIALS, NEVER, check_flex, "it compiles in time and agrees, where it is asked for"),
)  # fmt: skip


def before_training(config: DictConfig) -> list[Check]:
    """Those that must hold before `train` starts anything heavy."""
    wanted = (ALWAYS, ON_CUDA) if wants_cuda(config) else (ALWAYS,)
    return [check for check in CHECKS if check.train in wanted]


def require(context: Context, *stages: Stage) -> list[tuple[Check, Result]]:
    """What the checks of these stages found. Raises PreflightError or ConfigError for the first that fails."""
    found = []
    for check in before_training(context.config):
        for result in _made(check, context) if check.stage in stages else []:
            if result.status is Status.FAIL:
                raise PreflightError(f"{result.name}: {result.line()}")
            found.append((check, result))
    return found


def examine(context: Context, checks: Iterable[Check] = CHECKS, first: Iterable[Result] = ()) -> list[Result]:
    """All results, behind those that are known. What needs a check that failed or was skipped is skipped."""
    results = list(first)
    lacking = {r.name: r.name for r in results if r.status in LACKING}
    for check in checks:
        if roots := [lacking[name] for name in check.needs if name in lacking]:
            found, lacking[check.name] = [skipped(f"see {roots[0]}", check.name)], roots[0]
        else:
            try:
                found = _made(check, context)
            except (ConfigError, PreflightError) as error:
                found = [failed(str(error), check.right, name=check.name)]
            if any(r.status in LACKING for r in found):
                lacking[check.name] = check.name
        results += found
    return results


def _made(check: Check, context: Context) -> list[Result]:
    """Raises PreflightError and ConfigError; a check that breaks otherwise is a failure of its own and ends no other."""
    try:
        found = check.function(context)
    except (ConfigError, PreflightError):
        raise
    except NotHere as error:
        found = skipped(str(error))
    except Exception as error:
        found = failed(f"the check itself broke: {type(error).__name__}: {error}", "a check that answers")
    return [replace(r, name=r.name or check.name) for r in (found if isinstance(found, list) else [found])]
