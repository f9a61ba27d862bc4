"""The checks before the start, in one list: `doctor` makes all, `train` makes the required checks, `explain` names them.

A check is a function of the `Context`. It returns a result, or several named results, or raises
PreflightError or ConfigError with a whole sentence. To add one, write the function and its entry in ``CHECKS``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial

from omegaconf import DictConfig

from verl_credit.errors import ConfigError, PreflightError, TooLargeError
from verl_credit.recipe.doctor import cluster, device, environments, inputs, machine, software
from verl_credit.recipe.doctor.context import Context
from verl_credit.recipe.doctor.data import TRAIN, VAL
from verl_credit.recipe.doctor.lengths import NotHere
from verl_credit.recipe.doctor.status import Result, Status, failed, passed, skipped
from verl_credit.recipe.model_files import require_positions


class Stage(StrEnum):
    MACHINE = "machine"
    """This machine: quick, and without the recipe's inputs."""
    CLUSTER = "cluster"
    """The Ray cluster that the run would join or start."""
    INPUTS = "inputs"
    """The files and servers that the recipe reads; checked when the lab is built."""


class Train(StrEnum):
    """The moment at which `train` makes a check. A failure ends `train` before Ray starts, with exit code 4."""

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
    """The condition that has to hold."""
    needs: tuple[str, ...] = ()
    """Earlier checks that must pass before this check can run. ``recipe``: a recipe was given."""
    event: str = "idle"
    """The event kind under which `train` records the check's warnings."""
    shown: bool = False
    """`train` prints the result."""


RECIPE = ("recipe",)
LACKING = (Status.FAIL, Status.SKIP)
MACHINE, CLUSTER, INPUTS = Stage
ALWAYS, ON_CUDA, NEVER = Train


def with_verl(name: str) -> Callable[[Context], Result]:
    return lambda context: context.with_verl(name, context)


# Quick checks come first, checks that start processes last.
CHECKS: tuple[Check, ...] = (
    Check("torch", MACHINE, ON_CUDA, software.check_torch, "it imports, built for the recipe's device"),
    Check("versions", MACHINE, ALWAYS, software.check_versions, "every package is in the range that we accept"),
    Check("environment", MACHINE, ALWAYS, software.check_environment, "verl loads the plugin, for the recipe's device"),
    Check("engine", MACHINE, ALWAYS, software.check_engine, "a version of the rollout engine that verl can start", RECIPE),
    Check("attention", MACHINE, ON_CUDA, software.check_attention, "flash-attn, where the recipe takes it", RECIPE),
    Check("loggers", MACHINE, ALWAYS, inputs.check_loggers, "what verl imports for trainer.logger is installed", RECIPE),
    Check("cuda", MACHINE, ON_CUDA, device.check_cuda, "driver and devices, as many as the recipe takes on a node"),
    Check("memory", MACHINE, ALWAYS, machine.check_memory, "free memory, of the host and of every device"),
    Check("room", MACHINE, ON_CUDA, device.check_plan, "weights, gradients and optimiser fit a device", RECIPE),
    Check("disk", MACHINE, ALWAYS, machine.check_disk, "room for a checkpoint and those that are kept", RECIPE),
    Check("resume", MACHINE, ALWAYS, inputs.check_resume, "the files of the step it goes on from are whole", RECIPE,
          event="resume"),
    Check("ray", CLUSTER, ALWAYS, cluster.check_cluster, "a cluster that answers, or what a local one needs"),
    Check("nodes", CLUSTER, ALWAYS, cluster.check_nodes, "every node has the plugin, and sees the run's folders and servers",
          ("recipe", "ray")),
    Check("retriever", INPUTS, ALWAYS, inputs.check_retriever, "every search server answers a query, all from one index",
          RECIPE, shown=True),
    Check("model", INPUTS, ALWAYS, inputs.check_model, "a folder in Hugging Face format, or a name on the hub", RECIPE),
    Check("weights", INPUTS, NEVER, inputs.check_weights, "its files can be read; a download may have been cut short",
          ("model",)),
    Check("positions", INPUTS, ALWAYS, lambda context: passed(require_positions(context.recipe)),
          "the model has a position for every token of the longest row", ("model",)),
    Check("family", INPUTS, ALWAYS, inputs.check_family, "its numbers are exact with the recipe's attention and padding",
          ("model",), shown=True),
    Check("tokenizer", INPUTS, ALWAYS, inputs.check_tokenizer, "the model's tokenizer loads", ("model",), event="data"),
    Check("template", INPUTS, ALWAYS, with_verl("template"),
          "the chat template writes the tools and what a call returns, and the loop reads its calls", ("tokenizer",),
          shown=True),
    Check("stream", INPUTS, ALWAYS, with_verl("stream"),
          "the agent loop's tokens of two calls are the chat template's text", ("template",), event="data"),
    *(
        Check(key, INPUTS, ALWAYS, partial(inputs.check_data, key=key),
              "parquet files with a prompt and a gold answer in every row, and rows enough", RECIPE, event="data")
        for key in (TRAIN, VAL)
    ),
    Check("reset", INPUTS, ALWAYS, environments.check_reset, "equal seeds and actions give equal steps of the environment",
          (TRAIN,), shown=True),
    Check("date", INPUTS, ALWAYS, inputs.check_date, "the chat template writes no date of today into the prompts",
          ("tokenizer", TRAIN), event="data"),
    Check("scored text", INPUTS, ALWAYS, inputs.check_scored_text, "the chat template's text is before a scored answer",
          ("tokenizer",), event="data", shown=True),
    *(
        Check(f"prompts of {key}", INPUTS, ALWAYS, partial(inputs.check_prompts, key=key),
              "every prompt fits data.max_prompt_length", ("tokenizer", key), event="data")
        for key in (TRAIN, VAL)
    ),
    Check("verl", INPUTS, ALWAYS, with_verl("verl"), "verl starts here and accepts the configuration", RECIPE),
    Check("tools", INPUTS, ALWAYS, with_verl("tools"), "verl loads the tools beside the search", RECIPE, event="tools"),
    Check("answers", INPUTS, ALWAYS, inputs.check_answers, "the longest row and its scored answers fit a micro-batch",
          ("tokenizer", TRAIN), shown=True),
)  # fmt: skip


def before_training(config: DictConfig) -> list[Check]:
    """The checks that must hold before `train` starts anything heavy."""
    wanted = (ALWAYS, ON_CUDA) if software.wants_cuda(config) else (ALWAYS,)
    return [check for check in CHECKS if check.train in wanted]


def require(context: Context, *stages: Stage) -> list[tuple[Check, Result]]:
    """Returns the results of these stages' checks. Raises PreflightError or ConfigError for the first that fails."""
    passing = []
    for check in before_training(context.recipe):
        for result in _results(check, context) if check.stage in stages else []:
            if result.status is Status.FAIL:
                kind = TooLargeError if check.function is device.check_plan else PreflightError
                raise kind(f"{result.name}: {result.line()}")
            passing.append((check, result))
    return passing


def examine(context: Context, checks: Iterable[Check] = CHECKS, first: Iterable[Result] = ()) -> list[Result]:
    """Returns the ``first`` results and one for every check. A check is skipped when a check that it needs did not pass."""
    results = list(first)
    lacking = {r.name: r.name for r in results if r.status in LACKING}
    for check in checks:
        if roots := [lacking[name] for name in check.needs if name in lacking]:
            new, lacking[check.name] = [skipped(f"see {roots[0]}", check.name)], roots[0]
        else:
            try:
                new = _results(check, context)
            except (ConfigError, PreflightError) as error:
                new = [failed(str(error), check.right, name=check.name)]
            if any(r.status in LACKING for r in new):
                lacking[check.name] = check.name
        results += new
    return results


def _results(check: Check, context: Context) -> list[Result]:
    """Runs a check. Raises PreflightError and ConfigError; any other error becomes a failed result, so others still run."""
    try:
        outcome = check.function(context)
    except (ConfigError, PreflightError):
        raise
    except NotHere as error:
        outcome = skipped(str(error))
    except Exception as error:
        outcome = failed(f"the check itself broke: {type(error).__name__}: {error}", "a check that answers")
    results = outcome if isinstance(outcome, list) else [outcome]
    return [replace(result, name=result.name or check.name) for result in results]
