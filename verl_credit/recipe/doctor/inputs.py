"""Checks a recipe's model, data and retriever. `doctor.checks` lists every check of this file."""

from __future__ import annotations

from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from packaging.version import Version

from verl_credit.address import urls_of
from verl_credit.config.fit import place_of_answers
from verl_credit.errors import ConfigErrors, PreflightError
from verl_credit.policy.families import TEXT_OF, family_of
from verl_credit.recipe.decisions import decide_prefix
from verl_credit.recipe.doctor.context import Context
from verl_credit.recipe.doctor.data import TRAIN, Reads
from verl_credit.recipe.doctor.lengths import NotHere, PromptMeter, answers_fit, count_prompts
from verl_credit.recipe.doctor.rows import look_at
from verl_credit.recipe.doctor.status import Result, failed, passed, skipped, warned
from verl_credit.recipe.family import EVALUATED, family_line, policy_values, validate_family
from verl_credit.recipe.model_files import Unreadable, folders_of, read_json, read_model, require_model
from verl_credit.recipe.world import MODEL, serves_search
from verl_credit.records.run import events
from verl_credit.records.run.resume import resumes_from
from verl_credit.redact import redact
from verl_credit.turns.score.scorers import SCORERS

ADAPTER = "actor_rollout_ref.model.lora_adapter_path"
UNPATCHED = "5.23"
MODULE_OF_LOGGER = {"vemlp_wandb": "volcengine_ml_platform"}  # the others have the logger's name


def check_retriever(context: Context) -> Result:
    """Sends a real query with the token to every server and compares the indexes that they name."""
    search = context.recipe.search
    if search.max_searches == 0:
        return skipped("the recipe does not search")
    if search.url is None and serves_search(context.recipe):
        return skipped("the run starts its own")
    context.index_fingerprint, servers = ask_servers(search)
    return passed(f"index: {servers}")


def ask_servers(settings) -> tuple[str | None, str]:
    """Checks that every server of ``search.url`` answers a query of the tool's client, all from one index.

    Returns (fingerprint of the index or None, the servers' description of it).
    """
    import asyncio

    from verl_credit.turns.rollout.search.client import SearchFault, client_for, token_of
    from verl_credit.turns.rollout.search.connections import ServedIndex, agreed, served_index

    if not settings.url:
        raise PreflightError("search.url has no value: give the URL of a running retriever")

    async def ask() -> list[ServedIndex]:
        client, token = client_for(settings), token_of(settings)
        try:
            await client.check()
        finally:
            await client.aclose()
        urls = urls_of(settings)
        return [await served_index(url, token=token, timeout_s=settings.timeout_s) for url in urls]

    try:
        indexes = asyncio.run(ask())
        return agreed(indexes, settings.index_fingerprint), "; ".join(map(str, indexes))
    except SearchFault as error:
        raise PreflightError(
            f"search.url={redact(settings.url)}: the retriever is not ready ({redact(error)}). Start it with "
            "'verl-credit-retriever serve --index DIR --encoder DIR' or fix the URL"
        ) from error
    except ValueError as error:
        raise PreflightError(redact(error)) from error


def check_resume(context: Context) -> Result:
    """Checks the files of the checkpoint that the run goes on from."""
    config = context.recipe
    if None in (context.value("run_dir"), context.value("trainer.default_local_dir")):
        return skipped("run_dir has no value")
    if (place := resumes_from(config)) is not None:
        return passed(f"goes on from {place}")
    if not (done := events.steps_done(config.run_dir)):
        return passed("begins at step 1")
    why = "none of them was saved"
    if config.trainer.resume_mode == "disable":
        why = "trainer.resume_mode=disable"
    return warned(f"begins at step 1, and makes the {done} steps in {config.run_dir} again: {why}")


def check_model(context: Context) -> Result:
    path = context.value(MODEL)
    if unbuilt := context.unbuilt(path):
        return skipped(unbuilt)
    require_model(path)
    return passed(path)


def check_loggers(context: Context) -> Result:
    """Is there what verl's loggers import? verl imports it in a worker of Ray, where a missing module ends the run."""
    given = context.recipe.trainer.logger
    names = [given] if isinstance(given, str) else list(given)
    modules = [MODULE_OF_LOGGER.get(name, name) for name in names if name not in ("console", "file")]
    if absent := ", ".join(module for module in modules if find_spec(module) is None):
        found = f"trainer.logger={','.join(names)}: {absent} is not installed"
        return failed(found, "what verl imports for it", f"install {absent}, or name another logger")
    return passed(", ".join(names))


def check_family(context: Context) -> Result:
    """The recipe was checked when it was composed; by now a world may have been built, or a config.json fetched."""
    if unbuilt := context.unbuilt(context.value(MODEL)):
        return skipped(unbuilt)
    if refused := [*validate_family(context.recipe, context.settings)]:
        raise ConfigErrors(refused)
    _adapter_without_dropout(context.value(ADAPTER))
    _patched_by_verl(family_of(policy_values(context.recipe)).name)
    return passed(family_line(context.recipe))


def _adapter_without_dropout(path: object) -> None:
    """verl makes adapters without dropout; one that it loads trains with that of its file, which no key changes."""
    file = Path(str(path)).expanduser() / "adapter_config.json"
    dropout = read_json(file).get("lora_dropout") if path and file.is_file() else None
    if dropout:
        raise PreflightError(
            f"{ADAPTER}={path}: lora_dropout={dropout} in its adapter_config.json; {EVALUATED}; set it to 0 there"
        )


def _patched_by_verl(model_type: str) -> None:
    """verl patches these, by names of transformers' modules that later versions do not have."""
    if model_type in TEXT_OF and (found := Version(version("transformers"))) >= Version(UNPATCHED):
        raise PreflightError(
            f"transformers {found}: verl's patch of model_type={model_type} does not import from {UNPATCHED} on; "
            f"pip install 'transformers<{UNPATCHED}'"
        )


def check_weights(context: Context) -> Result:
    """Checks config.json, the header of every weight file, and the tokenizer."""
    path, why = context.value(MODEL), "not in the cache"
    folder = Path(path).expanduser()
    if folder.exists():
        return passed(f"{folder}: {read_model(folder)}")
    try:
        if cached := folders_of(path):
            return passed(f"{path} in the hub's cache: {read_model(cached[0])}")
    except Unreadable as error:
        why = str(error)
    return warned(f"{path} on the hub: the run fetches it when it starts ({why})",
                  "fetched before", f"hf download {path}")  # fmt: skip


def check_data(context: Context, key: str) -> Result | list[Result]:
    files = context.value(key)
    paths = [files] if files is None or isinstance(files, str) else list(files)
    if unbuilt := context.unbuilt(*paths):
        return skipped(unbuilt)
    try:
        rows = context.rows(key)
    except NotHere as error:
        return warned(f"{error}: prompts, gold answers, lengths and loops of {key} are not checked")
    lines = look_at(rows, key, Reads.of(context.recipe))
    return [warned(line) for line in lines] or passed(f"{len(rows)} rows in {len(paths)} files")


def check_tokenizer(context: Context) -> Result:
    try:
        return passed(type(context.tokenizer).__name__)
    except NotHere as error:
        return warned(
            f"{error}: its chat template was not tried, and neither prompts nor answers were counted. Prompts longer "
            f"than data.max_prompt_length={context.recipe.data.max_prompt_length} would lose their beginning; answers "
            "that do not fit are failed scores at their step"
        )


def check_prompts(context: Context, key: str) -> Result | list[Result]:
    lines = count_prompts(context.recipe, key, context.rows(key), context.tokenizer)
    return [warned(line) for line in lines] or passed("every prompt fits data.max_prompt_length")


def check_scored_text(context: Context) -> Result:
    """Says what precedes a scored answer, which `train` writes into the run's configuration."""
    if not context.settings.scores_gain:
        return skipped("no gold answer is scored")
    context.answer_prefix, told, odd = decide_prefix(context.tokenizer, context.settings)
    return warned(told) if odd else passed(told)


TODAY = "@today@"


def check_date(context: Context) -> Result:
    """A template that writes today's date gives other prompts to a run that is resumed on another day."""
    meter, prompt = PromptMeter(context.tokenizer, context.recipe), context.rows(TRAIN)[0].prompt
    meter.kwargs = {**meter.kwargs, "strftime_now": lambda form: TODAY}
    if TODAY not in meter.text(prompt):
        return passed("the chat template writes no date into the prompts")
    return warned(
        "the chat template writes today's date into the prompts: a run that is resumed on another day has other prompts",
        "prompts of every day", "an argument of the template that keeps a date (+data.apply_chat_template_kwargs.NAME), "
        "or a template without one (actor_rollout_ref.model.custom_chat_template)",
    )  # fmt: skip


def check_answers(context: Context) -> Result:
    config, settings = context.recipe, context.settings
    place = place_of_answers(config, settings, SCORERS[settings.algorithm.info_gain_scorer])
    if place is None:
        return skipped("no answer has to fit beside a row")
    return passed(answers_fit(config, settings, place, context.tokenizer, context.rows(TRAIN)))
