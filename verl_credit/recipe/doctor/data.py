"""Checks data files: readable, the columns and fields that verl, the agent loop and the reward read, and enough rows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from omegaconf import DictConfig

from verl_credit.config.keys import AUTO
from verl_credit.errors import PreflightError, printable
from verl_credit.names import AGENT_NAME, AGENTS, ENV_AGENT, OUR_REWARD, TURN_IDS
from verl_credit.recipe.agent_loops import agents_of_rows, another_manager, may_call, tools_given
from verl_credit.recipe.world import DATA
from verl_credit.turns.rollout.reward.golds import gold_answers
from verl_credit.turns.rollout.reward.qa import answer_form, stated_form
from verl_credit.turns.rollout.search.wire import SCHEMA

TRAIN, VAL = DATA
LOOP = "actor_rollout_ref.rollout.agent.default_agent_loop"
LOOP_FILE = "actor_rollout_ref.rollout.agent.agent_loop_config_path"
TOOL = SCHEMA["function"]["name"]
COLUMNS = ["reward_model", "data_source"]
"""The columns that a run reads beside the prompt's column (data.prompt_key)."""
SELECTION, TASK = "tool_selection", "environment"
"""The fields of extra_info that a run reads of every row."""
TURN_LOOP = "verl_credit.host.rollout.agent_loop.TurnAgentLoop"
ROLES = ("system", "user", "assistant", "tool")
STEERING = {
    *("sampling", "priority", "global_steps", "sampling_params", "__do_sample__", "__rollout_n__"),
    *("uid", "session_id", "trajectory", "trace", "validate"),
    *(TURN_IDS, "prompts", "responses", "response_mask", "rollout_log_probs", "routed_experts", "rm_scores"),
    *("num_turns", "metrics", "extra_fields", "mm_processor_kwargs", "mm_processor_output"),
    *("teacher_ids", "teacher_logprobs"),
}
"""The columns that no file may have. verl hands a row's columns to the agent loop as its arguments, so that `sampling` makes
training greedy, and writes them over what the loop returns, so that `response_mask` replaces the trajectory's own."""


class Row(NamedTuple):
    where: str
    """The file and the row's number."""
    prompt: list[dict]
    truth: object
    """``reward_model.ground_truth``"""
    agent: str | None = None
    """The row's agent loop; None where the recipe's default one takes it."""
    task: dict | None = None
    """The seed and the options of the row's environment (``extra_info.environment``)."""


class Reads(NamedTuple):
    """What a run reads of its rows, and of what its policy writes."""

    searches: bool = True
    """Without a search the prompt has to name the form of an answer that our reward reads."""
    other_tools: bool = False
    """There are tools beside the search; only verl knows their names."""
    calls: bool = True
    """A rollout may call a tool."""
    our_reward: bool = True
    format: str = AUTO
    """``multi_turn.format``: the parser of calls; an unknown name is the user's parser. With ``auto`` no chat template has
    decided it yet, and a prompt may ask for any form that some parser reads."""
    agents: Sequence[str] | None = AGENTS
    """The agent loops that a row may name; None: a manager of somebody else knows its own."""
    default_loop: str = AGENT_NAME
    prompt_key: str = "prompt"
    """The column of the prompts."""

    @classmethod
    def of(cls, config: DictConfig) -> Reads:
        rollout, tools = config.actor_rollout_ref.rollout, bool(tools_given(config))
        return cls(
            searches=bool(config.search.max_searches),
            other_tools=tools,
            calls=may_call(config),
            our_reward=config.reward.custom_reward_function.path == OUR_REWARD,
            format=rollout.multi_turn.format,
            agents=None if another_manager(config) else agents_of_rows(config, tools=tools),
            default_loop=rollout.agent.default_agent_loop,
            prompt_key=config.data.prompt_key,
        )


SEARCHES = Reads()


def rows_needed(config: DictConfig, key: str) -> int:
    return config.data.train_batch_size if key == TRAIN else 1


def read_rows(files, key: str, reads: Reads = SEARCHES, at_least: int = 1) -> list[Row]:
    """Reads all rows of the files. Raises PreflightError for a row that cannot train, and for too few rows."""
    paths = [files] if isinstance(files, str) else files
    if not files or isinstance(files, int | float) or not all(isinstance(path, str) for path in paths):
        raise PreflightError(f"{key}={files}: give a parquet file or a list of them")
    numbered = [
        (f"{path} row {number}", columns)
        for path in paths
        for number, columns in enumerate(_read(path, key, reads.prompt_key))
    ]
    # verl joins the files: a column of one is null in the rows of the others
    named = any("agent_name" in columns for _, columns in numbered)
    if numbered and not named and reads.agents is not None and reads.default_loop not in reads.agents:
        raise PreflightError(
            f"{LOOP}={reads.default_loop}: {', '.join(paths)} has no column agent_name, so that every row would take that "
            f"loop; expected {' or '.join(reads.agents)}, which say to which turn a token belongs"
        )
    rows = [checked_row(where, columns, reads, named=named) for where, columns in numbered]
    if len(rows) < at_least:
        raise PreflightError(
            f"{key}: {', '.join(paths)} holds {len(rows) or 'no'} rows; at least {at_least} are needed"
        )
    return rows


def _read(path: str, key: str, prompt_key: str) -> list[dict]:
    """Reads the columns that a run reads, by name, and of extra_info one field by the field's name."""
    import pyarrow
    import pyarrow.dataset as arrow_dataset
    import pyarrow.parquet as parquet
    from pyarrow import compute

    file = Path(path).expanduser()
    if not file.exists():
        raise PreflightError(f"{key}: {path} does not exist")
    try:
        files = parquet.ParquetDataset(file).files
        for one in files:
            parquet.read_schema(one)
        dataset = arrow_dataset.dataset(files, format="parquet")
        names, read = _columns(dataset.schema, f"{key}: {path}", prompt_key)
        rows = []
        # The trainer reads all columns, so a damaged column that no key names would end it, too.
        for batch in dataset.to_batches():
            columns = {name: batch.column(name) for name in names}
            for field in read:
                columns[field] = compute.struct_field(batch.column("extra_info"), field)
            rows += pyarrow.RecordBatch.from_pydict(columns).to_pylist()
        return rows
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError, KeyError) as error:
        # pyarrow raises KeyError where two columns have one name.
        reason = printable((str(error).splitlines() or [type(error).__name__])[0])
        raise PreflightError(f"{key}: {path} is not a parquet file, or is damaged: {reason}") from error


def _columns(schema, where: str, prompt_key: str) -> tuple[list[str], list[str]]:
    """Returns (columns that are read from every row, fields of extra_info that are).

    Raises PreflightError for missing and for forbidden columns.
    """
    from pyarrow import types

    names = schema.names
    if missing := {prompt_key, *COLUMNS} - set(names):
        of = f" (data.prompt_key={prompt_key})" if prompt_key in missing - {"prompt"} else ""
        raise PreflightError(f"{where} lacks the columns {sorted(missing)}{of}; it has {names}")
    if steering := sorted(STEERING & set(names)):
        raise PreflightError(
            f"{where} has the columns {steering}, which verl would hand to the agent loop or write over its "
            "trajectories: rename them, or leave them out"
        )
    extra = schema.field("extra_info").type if "extra_info" in names else None
    if extra is not None and not types.is_null(extra) and not types.is_struct(extra):
        raise PreflightError(
            f"{where}: extra_info is of the type {extra}: expected a mapping, or no such column"
        )
    fields = {f.name for f in extra} if extra is not None and types.is_struct(extra) else set()
    read = [field for field in (SELECTION, TASK) if field in fields]
    return [prompt_key, *COLUMNS, *({"agent_name"} & set(names))], read


def checked_row(where: str, columns: dict, reads: Reads, *, named: bool) -> Row:
    """Raises PreflightError with the row and the value. ``named``: some file has the column ``agent_name``."""
    prompt, reward, agent = columns[reads.prompt_key], columns["reward_model"], columns.get("agent_name")
    try:
        _check_prompt(reads.prompt_key, prompt)
        if not isinstance(source := columns["data_source"], str) or not source.strip():
            raise ValueError(f"data_source={source!r}: expected the name of the row's data set, as text")
        if named and reads.agents is not None and agent not in reads.agents:
            raise ValueError(_wrong_agent(agent, reads.agents))
        if (agent if named else reads.default_loop) == ENV_AGENT:
            return Row(where, prompt, None, agent, checked_task(columns.get(TASK)))
        _check_selection(columns.get(SELECTION), [TOOL] if reads.searches and not reads.other_tools else None)
        if not isinstance(reward, dict):
            raise ValueError(
                f"reward_model={reward!r:.80}: expected {{'ground_truth': {{'target': [gold, ...]}}}}"
            )
        truth = reward.get("ground_truth")
        gold_answers(truth)
        answer_form(truth)
        # Without the tool nothing but the prompt names the form of an answer. Another's loop may give the outcome itself.
        of_ours = (agent if named else reads.default_loop) in AGENTS
        needs_form = of_ours and reads.our_reward and not reads.searches
        if needs_form and stated_form(truth) is None and "<answer>" not in str(prompt):
            raise ValueError(
                f"reward_model.ground_truth={truth!r} has no form, and the prompt asks for no <answer> tag: every reward "
                "would be 0. `verl-credit prepare` writes {'target': [...], 'form': 'boxed'} with a prompt for it"
            )
    except ValueError as error:
        raise PreflightError(f"{where}: {error}") from error
    return Row(where, prompt, truth, agent)


def checked_task(task: object) -> dict:
    """The row's task. Raises ValueError."""
    task = task if isinstance(task, dict) else {TASK: task}
    seed, options = task.get("seed"), task.get("options") or {}
    if not isinstance(seed, int) or isinstance(seed, bool) or seed < 0:
        given = (
            f"extra_info.{TASK}.seed={seed!r:.80}"
            if TASK not in task
            else f"extra_info.{TASK}={task[TASK]!r:.80}"
        )
        raise ValueError(f"{given}: expected a mapping with a seed, a whole number of at least 0")
    if not isinstance(options, dict):
        raise ValueError(f"extra_info.{TASK}.options={options!r:.80}: expected a mapping")
    return task


def _wrong_agent(name: object, agents: Sequence[str]) -> str:
    text = (
        f"agent_name={name!r:.80}: expected {' or '.join(map(repr, agents))}, or no such column in any file"
    )
    if name == ENV_AGENT:
        return f"{text}; rows of an environment need {LOOP}={ENV_AGENT} and environment.path"
    if name in AGENTS:
        return f"{text}; the recipe has no tool that {name} could call"
    return (
        f"{text}; these say to which turn a token belongs (docs/agent-loops.md). {LOOP_FILE} lists loops of other names: "
        f"- {{name: {name}, _target_: {TURN_LOOP}}}"
    )


def _check_prompt(key: str, prompt: object) -> None:
    if prompt is not None and not isinstance(prompt, list):
        raise ValueError(f"{key}={prompt!r:.80}: expected a list of messages with role and content")
    if not prompt:
        raise ValueError(f"empty {key}")
    asks = False
    for number, message in enumerate(prompt):
        message = message if isinstance(message, dict) else {}
        role, content = message.get("role"), message.get("content")
        if role == "developer":
            raise ValueError(f"{key}[{number}].role='developer': Qwen's templates leave it out; use system")
        if role not in ROLES:
            raise ValueError(f"{key}[{number}].role={role!r:.80}: expected one of {', '.join(ROLES)}")
        if not isinstance(content, str | list) and not (content is None and message.get("tool_calls")):
            raise ValueError(f"{key}[{number}].content={content!r:.80}: expected text")
        asks |= role == "user" and bool(content.strip() if isinstance(content, str) else content)
    if not asks:
        roles = ", ".join(message["role"] for message in prompt)
        raise ValueError(f"{key}: no message of the role user asks anything (the roles are {roles})")


def _check_selection(selection: object, tools: list[str] | None) -> None:
    """Refuses unknown tool names, which verl would drop silently and so leave the row without tools."""
    if selection is not None and not isinstance(selection, list):
        raise ValueError(f"extra_info.{SELECTION}={selection!r:.80}: expected a list of names of tools")
    if tools and (unknown := [name for name in selection or () if name not in tools]):
        raise ValueError(
            f"extra_info.{SELECTION}={selection}: no tool is called {', '.join(map(repr, unknown))}; "
            f"expected some of {', '.join(tools)}"
        )
