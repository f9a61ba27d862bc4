"""Checks the fields of a data row that verl, the agent loop and the reward read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from verl_credit.errors import PreflightError
from verl_credit.names import AGENT_NAME, TURN_AGENT, TURN_IDS
from verl_credit.turns.reward.qa import answer_form, gold_answers, stated_form

SELECTION = "tool_selection"
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


def checked_row(
    where: str,
    columns: dict,
    *,
    searches: bool,
    names_agent: bool,
    agents: Sequence[str],
    tools: list[str] | None,
    prompt_key: str = "prompt",
) -> Row:
    """Checks a row. Raises PreflightError with the row and the value. ``names_agent``: some file has the column
    ``agent_name``, whose values are ``agents``; ``tools``: the tools that a row can choose, where they are known."""
    prompt = columns[prompt_key]
    try:
        _check_prompt(prompt_key, prompt)
        if not isinstance(source := columns["data_source"], str) or not source.strip():
            raise ValueError(f"data_source={source!r}: expected the name of the row's data set, as text")
        if names_agent and (name := columns.get("agent_name")) not in agents:
            raise ValueError(_wrong_agent(name, agents))
        _check_selection(columns.get(SELECTION), tools)
        reward = columns["reward_model"]
        if not isinstance(reward, dict):
            raise ValueError(
                f"reward_model={reward!r:.80}: expected {{'ground_truth': {{'target': [gold, ...]}}}}"
            )
        truth = reward.get("ground_truth")
        gold_answers(truth)
        answer_form(truth)
        if not searches:
            _check_form(truth, prompt)
    except ValueError as error:
        raise PreflightError(f"{where}: {error}") from error
    return Row(where, prompt, truth)


def _wrong_agent(name: object, agents: Sequence[str]) -> str:
    text = f"agent_name={name!r:.80}: expected {' or '.join(map(repr, agents))}"
    if name == AGENT_NAME:
        return f"{text}; with search.max_searches=0 {AGENT_NAME} has one turn and offers no tool"
    if name == TURN_AGENT:
        return f"{text}; the recipe names no tool that {TURN_AGENT} could call"
    return (
        f"{text}, which say to which turn a token belongs; or leave the column out of every file. An agent loop of your own "
        "is named in actor_rollout_ref.rollout.agent.agent_loop_config_path and puts extra_fields['turn_ids'] into its "
        "output (docs/agent-loops.md)"
    )


def _check_prompt(key: str, prompt: object) -> None:
    if prompt is not None and not isinstance(prompt, list):
        raise ValueError(f"{key}={prompt!r:.80}: expected a list of messages with role and content")
    if not prompt:
        raise ValueError(f"empty {key}")
    for number, message in enumerate(prompt):
        role, content = (
            (message.get("role"), message.get("content")) if isinstance(message, dict) else (None, None)
        )
        if role == "developer":
            raise ValueError(
                f"{key}[{number}].role='developer': Qwen2.5's and Qwen3's templates leave such a message out without a "
                "word; use system"
            )
        if role not in ROLES:
            raise ValueError(f"{key}[{number}].role={role!r:.80}: expected one of {', '.join(ROLES)}")
        if not isinstance(content, str | list) and not (content is None and message.get("tool_calls")):
            raise ValueError(f"{key}[{number}].content={content!r:.80}: expected text")
    if not any(message["role"] == "user" and _has_text(message["content"]) for message in prompt):
        roles = ", ".join(message["role"] for message in prompt)
        raise ValueError(f"{key}: no message of the role user asks anything (the roles are {roles})")


def _has_text(content: str | list) -> bool:
    return bool(content.strip() if isinstance(content, str) else content)


def _check_selection(selection: object, tools: list[str] | None) -> None:
    """Refuses unknown tool names, which verl would drop silently and so leave the row without tools."""
    if selection is not None and not isinstance(selection, list):
        raise ValueError(f"extra_info.{SELECTION}={selection!r:.80}: expected a list of names of tools")
    if tools and (unknown := [name for name in selection or () if name not in tools]):
        raise ValueError(
            f"extra_info.{SELECTION}={selection}: no tool is called {', '.join(map(repr, unknown))}; "
            f"expected some of {', '.join(tools)}"
        )


def _check_form(truth: object, prompt: list[dict]) -> None:
    """Checks that the prompt names the form of an answer, because without the tool nothing else does."""
    if stated_form(truth) is None and "<answer>" not in str(prompt):
        raise ValueError(
            f"reward_model.ground_truth={truth!r} has no form, so that the answer is read from "
            "<answer>...</answer>, and the prompt asks for no such tag (search.max_searches=0): every reward would be 0. "
            "`verl-credit prepare` writes {'target': [...], 'form': 'boxed'} with a prompt that asks for \\boxed{}; "
            "'form': 'tag' is for a policy that writes the tag unasked"
        )
