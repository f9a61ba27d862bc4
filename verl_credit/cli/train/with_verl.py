"""Makes the checks that need verl, and sets the variables that Ray and verl read."""

import os

from omegaconf import DictConfig

from verl_credit.config.keys import AUTO
from verl_credit.errors import ConfigError, PreflightError
from verl_credit.host.process.call_format import settle
from verl_credit.host.process.template_check import check_template
from verl_credit.host.process.verl_checks import check_other_tools
from verl_credit.recipe.agent_loops import FORMAT, may_call
from verl_credit.recipe.doctor.context import Context
from verl_credit.recipe.doctor.lengths import NotHere, PromptMeter
from verl_credit.recipe.doctor.status import Result, passed, skipped, warned

# Read by Ray and verl in this process and handed on to every worker.
ENVIRONMENT = {
    "RAY_worker_niceness": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_raylet_start_wait_time_s": "120",  # Ray's limit of 30 s is too short on a busy machine
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "TOKENIZERS_PARALLELISM": "false",
    "VERL_USE_EXTERNAL_PLUGINS": "auto",
}


def set_environment(config: DictConfig) -> None:
    """Sets the variables of Ray and verl. With small models, several threads wait for each other longer than they compute.

    A run on the CPU gives verl's ranks logical GPUs, which Ray refuses where CUDA_VISIBLE_DEVICES hides the real ones. Such
    a run uses none of them, so the variable is removed.
    """
    cpu = config.trainer.device == "cpu"
    if cpu:
        os.environ.pop("CUDA_VISIBLE_DEVICES", None)
    extra = {"VERL_PLATFORM": "cpu", "OMP_NUM_THREADS": str(config.cpu_threads)} if cpu else {}
    for key, value in {**ENVIRONMENT, **extra}.items():
        os.environ.setdefault(key, value)


def _template(context: Context) -> Result:
    """Also decides ``auto`` of the keys below; `train` goes on with these values."""
    if not may_call(context.config):
        settle(context.config)
        return skipped("the recipe does not search")
    try:
        tokenizer = context.tokenizer
    except NotHere as error:
        if context.may_fetch:  # `train`
            if context.value(FORMAT) == AUTO:
                use = f"{error}, so that no chat template says how the policy calls; expected a parser's name"
                raise ConfigError(key=FORMAT, value=AUTO, accepted=use) from error
            settle(context.config)
        raise
    written = check_template(context.config, PromptMeter(tokenizer, context.config))
    return passed(f"the chat template writes {written}") if written else skipped("the recipe names no tool")


def _stream(context: Context) -> Result:
    from verl_credit.host.process.stream_check import check_stream

    if not may_call(context.config):
        return skipped("the recipe does not search")
    lines = check_stream(context.config, PromptMeter(context.tokenizer, context.config))
    if lines:
        return warned("; ".join(lines))
    return passed("the loop's tokens of two calls are the chat template's")


def _verl(context: Context) -> Result:
    """Imports all of verl for the first time in this process; a failed import is refused with its reason."""
    try:
        from verl_credit.host.process.launch import check_with_verl
    except (ImportError, ValueError) as error:
        read = sorted(n for n in os.environ if n.startswith("VERL_USE_") or n == "VERL_PLATFORM")
        where = f" (in the environment: {', '.join(f'{n}={os.environ[n]}' for n in read)})" if read else ""
        reason = " ".join(str(error).split())
        raise PreflightError(f"verl does not start here: {type(error).__name__}: {reason}{where}") from error
    check_with_verl(context.config)
    return passed("the plugin is registered, every name is known, and verl accepts the configuration")


def _tools(context: Context) -> Result:
    lines = check_other_tools(context.config)
    return warned("; ".join(lines)) if lines else skipped("no tool beside the search")


WITH_VERL = {"template": _template, "stream": _stream, "verl": _verl, "tools": _tools}


def check_with_verl(name: str, context: Context) -> Result:
    return WITH_VERL[name](context)
