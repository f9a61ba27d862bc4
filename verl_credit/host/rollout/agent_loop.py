"""``turn_agent``: verl's tool agent loop, which also reports the turn of every token and the reward of every call.

Departures from verl's ``ToolAgentLoop``: turn ids and turn rewards are returned with the tokens; a fault of the environment
masks the row out and is no observation; every generation has a token budget (search.max_new_tokens) and, where the engine
takes one, a seed of its own; what the chat template writes between a turn's end and the next message is inserted for every
model. ``multi_turn.max_assistant_turns`` limits the turns; null: a row ends without a call or when it is full.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from verl.experimental.agent_loop.agent_loop import AgentLoopOutput, register
from verl.experimental.agent_loop.tool_agent_loop import AgentState, ToolAgentLoop
from verl.experimental.agent_loop.tool_parser import ToolParser
from verl.tools.function_tool import FunctionTool, normalize_function_tool_return
from verl.tools.schemas import ToolResponse

from verl_credit.config.settings import CreditSettings
from verl_credit.host.compat import BAD_JSON, FAILED
from verl_credit.host.rollout import tool_parsers  # noqa: F401  (the import registers ours)
from verl_credit.host.rollout.engine_client import (
    REPLAY,
    NoToken,
    RowClient,
    apply_sampling_mode,
    seed_parts,
    stable_seed,
)
from verl_credit.host.rollout.stream_builder import shared_builder
from verl_credit.names import ROLLOUT_NAME, ROW_RECORD, TOOL_FAULT, TURN_AGENT, TURN_IDS, TURN_REWARDS
from verl_credit.turns.rollout.book import NO_TOKEN, RowRecord, TurnBook, known_reward, rewards_of_turns
from verl_credit.turns.rollout.reward.qa import final_answer
from verl_credit.turns.rollout.search.wire import control_tokens, without_markup
from verl_credit.turns.rollout.thoughts import TurnReader
from verl_credit.turns.rollout.tool_calls import shown_calls
from verl_credit.turns.step.signals.built_in import signals_of
from verl_credit.turns.step.signals.own import TrajectorySignal, ask_signals
from verl_credit.turns.step.signals.signal import make_trajectory, turn_texts


class TurnAgentLoopOutput(AgentLoopOutput):
    """verl's output with one more per-token field."""

    turn_ids: list[int]

    def as_dict(self) -> dict[str, Any]:
        output = super().as_dict()
        output[TURN_IDS] = torch.tensor(output.pop("turn_ids"), dtype=torch.int16)  # an overflow raises
        return output


_control_tokens_of = lru_cache(maxsize=4)(control_tokens)  # a worker has one tokenizer and many loops


class RowFault(Exception):
    """The environment failed: the trajectory ends here and is not trained on."""


@register(TURN_AGENT)
class TurnAgentLoop(ToolAgentLoop):
    """verl makes one instance per trajectory, therefore its state is the trajectory's."""

    _known: tuple = (None, None, None)  # configuration, its settings, its signals that are coroutines

    def __init__(self, *args, tools=None, **kwargs):
        super().__init__(*args, tools=tools, **kwargs)
        self.tools = {
            name: _RewardKept(**vars(tool)) if isinstance(tool, FunctionTool) else tool
            for name, tool in self.tools.items()
        }
        self.continuous_token_builder = shared_builder(self.continuous_token_builder)
        self.max_new_tokens = self.config.search.max_new_tokens
        self.reader = TurnReader(self.tokenizer, self.config.search.include_reasoning)
        self.tool_parser = ToolParser.get_tool_parser(self.tool_parser_name, self.reader)
        self.control_tokens = _control_tokens_of(self.tokenizer)
        self.book, self.record = TurnBook(), RowRecord()

    async def run(self, sampling_params: dict[str, Any], **kwargs) -> TurnAgentLoopOutput:
        mode = kwargs.get("sampling")
        sampling_params = apply_sampling_mode(sampling_params, mode)  # a manager of somebody else does not
        self._engine = self.server_manager
        self.server_manager = RowClient(self._engine, self.record, kwargs.get(REPLAY))
        self._seed_parts = seed_parts(self.config, kwargs)
        self._truth = (kwargs.get("reward_model") or {}).get("ground_truth")
        # A parquet file has nulls where a row gives a tool no arguments.
        tools_kwargs = {
            name: {key: value for key, value in given.items() if value is not None}
            for name, given in (kwargs.get("tools_kwargs") or {}).items()
            if given is not None
        }
        output = self._finish(await super().run(sampling_params, **kwargs | {"tools_kwargs": tools_kwargs}))
        if mode is None and not self.record.tool_fault:
            credit, signals = self._credit_of(self.config)
            if signals:
                n_turns, record = 1 + max(output.turn_ids, default=-1), self.record.as_dict()
                texts = turn_texts(output.response_ids, output.turn_ids, n_turns, self.tokenizer.decode)
                rewards = rewards_of_turns(record["calls"], n_turns)
                extra_info = dict(kwargs.get("extra_info") or {})
                trajectory = make_trajectory(texts, record, rewards, self._truth, extra_info=extra_info)
                await ask_signals(signals, trajectory, credit.algorithm.turn_judge, self.record)
        output.extra_fields[ROW_RECORD] = self.record.as_dict()
        return output

    @classmethod
    def _credit_of(cls, config) -> tuple[CreditSettings, list[TrajectorySignal]]:
        """The settings and signals of a configuration, read once per worker, because loops are made per trajectory."""
        if cls._known[0] is not config:
            credit = CreditSettings.from_config(config)
            signals = [signal for signal in signals_of(credit) if isinstance(signal, TrajectorySignal)]
            TurnAgentLoop._known = (config, credit, signals)
        return cls._known[1:]

    async def _handle_generating_state(self, agent_data, sampling_params, ignore_termination=False):
        # verl cuts off what does not fit the row afterwards, but an answer there must not be rewarded.
        left = self.response_length - len(agent_data.response_mask)
        params = {**sampling_params, "max_tokens": min(self.max_new_tokens, left)}
        if self.rollout_config.name == ROLLOUT_NAME:  # vLLM dies of per-request seeds with chunked prefill
            params["seed"] = stable_seed(*self._seed_parts, self.book.n_turns)
        self.reader.after(agent_data.prompt_ids)
        try:
            state = await super()._handle_generating_state(agent_data, params, ignore_termination)
        except NoToken as fault:
            return self._without_token(fault)
        self.book.wrote_turn(agent_data.response_mask)
        written = agent_data.response_ids
        cut = len(written) >= self.max_new_tokens and written[-1] not in self.tokenizer.all_special_ids
        text = self.reader.plain(written)
        self.record.final_text = text
        shown = shown_calls(self.reader.decode(written), self.tool_parser_name)
        self.record.stop_reason = self._stop_reason(text, shown, agent_data, state, cut)
        return state

    def _without_token(self, fault: NoToken) -> AgentState:
        """Ends the row. Its last search must not become its answer turn, and verl takes no row without a token."""
        if not self.book.n_turns:
            row = f"row {self._seed_parts[1:-1]!r:.300}, rollout {self._seed_parts[-1]}"
            raise RuntimeError(
                f"{row}: the engine (actor_rollout_ref.rollout.name={self.rollout_config.name}) "
                f"returned no token for the first turn (stop reason {str(fault)!r}); expected at least one. Its log has "
                "the cause; faults.max_failed_rollouts tolerates a share of such rows"
            )
        self.record.tool_fault, self.record.stop_reason = NO_TOKEN, "tool_fault"
        return AgentState.TERMINATED

    def _stop_reason(self, text: str, shown: tuple[int, int], agent_data, state, cut: bool) -> str:
        """The reason why the row would end here; also counts calls that verl drops (broken JSON, too many at once).

        ``shown``: the calls that the turn begins, and those that it ends. ``cut``: the turn used its whole token budget
        and did not end itself; a call that it left open is no mistake.
        """
        most, most_user = self.max_assistant_turns, self.max_user_turns  # verl: None and 0 are no limit
        last_turn = bool(most and agent_data.assistant_turns >= most)
        last_turn |= bool(most_user and agent_data.user_turns >= most_user)
        executed = (
            agent_data.tool_calls[: self.max_parallel_calls] if state == AgentState.PROCESSING_TOOLS else []
        )
        opened, closed = shown
        called = opened - (cut and opened > closed)
        dropped = 0 if last_turn else max(called - len(executed), 0)
        self.record.bad_calls += dropped
        if state == AgentState.PROCESSING_TOOLS:
            return "length"  # stays if the observation does not fit
        if final_answer(text, self._truth) is not None:
            return "answer"
        if len(agent_data.response_mask) >= self.response_length:
            return "length"
        if cut and not closed:
            return "turn_length"
        if opened:
            return "max_turns" if last_turn else "bad_call"
        return "no_answer"

    async def _handle_processing_tools_state(self, agent_data):
        try:
            state = await super()._handle_processing_tools_state(agent_data)
        except RowFault as fault:
            self.record.tool_fault = str(fault)
            self.record.fault_detail = getattr(fault.__cause__, "detail", "")[:300]
            self.record.stop_reason = "tool_fault"
            return AgentState.TERMINATED
        self.book.observed(agent_data.response_mask)
        return state

    async def _call_tool(self, tool_call, tools_kwargs, agent_data):
        # verl offers a selection of the tools where the row has extra_info.tool_selection.
        offered = getattr(agent_data, "_active_tools", self.tools)
        call = {
            "turn": self.book.n_turns - 1,  # the turn that calls; parallel calls share it
            "name": valid_text(tool_call.name),
            "arguments": valid_text(tool_call.arguments),
            "reward": None,
        }
        self.record.calls.append(call)  # before anything is awaited: parallel calls keep their order
        if tool_call.name not in offered:
            self.record.bad_calls += 1
            # The name is the policy's text: it may hold control tokens or no valid Unicode.
            printed = without_markup(call["name"], self.control_tokens)
            text = f"Error: there is no tool {printed!r}; available: {', '.join(offered)}."
            return ToolResponse(text=text), None, {}
        return await self._execute(call, tool_call, tools_kwargs, agent_data)

    async def _execute(self, call: dict, tool_call, tools_kwargs, agent_data):
        """Counts the errors of tools, which verl turns into observations. ValueError: a reward that is no number. RowFault:
        the tool's server failed."""
        response, reward, metrics = await super()._call_tool(tool_call, tools_kwargs, agent_data)
        text = response.text or ""
        self.record.n_other_calls += 1
        if (fault := (metrics or {}).get(TOOL_FAULT)) is not None:
            raise RowFault(fault.code) from fault
        self.record.other_errors += text.startswith(FAILED)
        name = f"'{call['name']}'"  # quoted as verl does
        # Only the observation shows that verl could not run the tool, or that the tool raised: the reward is then verl's 0.
        if not text.startswith((f"{FAILED} {name}", f"{BAD_JSON} {name}")):
            where = f"turn {call['turn']}: the reward that tool {name} returned"
            call["reward"] = known_reward((metrics or {}).get(GIVEN, reward), where)
        observation = response.model_copy(update={"text": without_markup(text, self.control_tokens)})
        return observation, call["reward"], metrics

    def _finish(self, output: AgentLoopOutput) -> TurnAgentLoopOutput:
        turn_ids = self.book.close(len(output.response_ids))
        if self.record.tool_fault:
            output.response_mask = [0] * len(output.response_mask)
            turn_ids = [-1] * len(turn_ids)
        # The last turn is the answer. Its calls, whose observations did not fit, have their rewards in the record alone.
        output.extra_fields[TURN_REWARDS] = rewards_of_turns(self.record.calls, max(turn_ids, default=0))
        return TurnAgentLoopOutput(
            **{name: getattr(output, name) for name in output.model_fields_set}, turn_ids=turn_ids
        )


def valid_text(text: str) -> str:
    """The policy's text without lone surrogates, which no queue can send."""
    return text.encode("utf-8", "replace").decode("utf-8")


GIVEN = "verl_credit_reward"
"""Key among the metrics of a call. verl writes the reward 0 for tools without one and for calls that failed."""


class _RewardKept(FunctionTool):
    """A function tool whose metrics also say whether the function returned a reward."""

    async def call(self, parameters):
        raw, given = await super().call(parameters), None
        if isinstance(raw, tuple) and len(raw) > 1:
            # verl would count a reward that is no number as a fault of the call.
            given, raw = raw[1], (raw[0], 0.0, *raw[2:])
        response, reward, metrics = normalize_function_tool_return(raw)
        return response, reward, {**metrics, GIVEN: given}
