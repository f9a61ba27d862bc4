"""``env_agent``: every turn of the policy is a step of the row's environment, in one dialogue that only grows, or with a
prompt of its own (``environment.window``)."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

from verl.experimental.agent_loop.agent_loop import AgentLoopOutput, register
from verl.experimental.agent_loop.tool_agent_loop import AgentState

from verl_credit.config.keys import Environment
from verl_credit.credit.plugins.load import load
from verl_credit.host.compat import MERGE_MESSAGES
from verl_credit.host.rollout.agent_loop import TurnAgentLoop, TurnAgentLoopOutput, valid_text
from verl_credit.host.rollout.windows import PARTS, apart, together, windowed, written
from verl_credit.names import ENV_AGENT
from verl_credit.turns.rollout.reward.env_record import outcome_record
from verl_credit.turns.rollout.search.wire import without_markup
from verl_credit.worlds.environments.interface import NO_ACTION, Step, shown_step
from verl_credit.worlds.environments.pool import Fault, Pool

TAG = re.compile(r"<action>(.*?)</action>", re.DOTALL)


class NoCalls:
    """Stands in for verl's parser of calls: nothing that the policy writes is one."""

    stop_token_ids = ()

    def __init__(self, plain: Callable[[list[int]], str]):
        self.plain = plain

    async def extract_tool_calls(self, responses_ids, tools=None) -> tuple[str, list]:
        return self.plain(responses_ids), []


@register(ENV_AGENT)
class EnvAgentLoop(TurnAgentLoop):
    """verl makes one instance per trajectory; the processes of environments are the worker's."""

    _pools: dict[str, Pool] = {}

    def __init__(self, *args, tools=None, **kwargs):
        super().__init__(*args, tools=None, **kwargs)
        self.settings: Environment = self._credit_of(self.config)[0].environment
        self.tool_parser = NoCalls(self.reader.plain)
        self.max_assistant_turns = self.max_user_turns = (
            None  # environment.max_steps ends a rollout, after its step
        )
        self.progress: list[float | None] = []
        self.differs, self.cut_turn, self.cut_texts = "", False, 0
        self.windows: list[dict] = []

    async def run(self, sampling_params, **kwargs) -> TurnAgentLoopOutput | list[TurnAgentLoopOutput]:
        task = (kwargs.get("extra_info") or {}).get("environment") or {}
        if task.get("seed") is None:
            raise ValueError(
                f"extra_info.environment={task!r:.80}: expected a mapping with a seed, as `prepare env` writes it"
            )
        # A parquet file has nulls where a row gives an option no value.
        options = {name: value for name, value in (task.get("options") or {}).items() if value is not None}
        self.pool = self._pool_of(self.settings)
        try:
            self.rollout, self.now = await self.pool.reset(int(task["seed"]), options)
        except Fault as fault:
            where = f"environment.path={self.settings.path}, seed {task['seed']}, options {options}"
            raise RuntimeError(f"{where}: the reset failed twice: {fault}") from fault
        try:
            messages, first = list(kwargs["raw_prompt"]), shown_step(self.now, self.settings.list_actions)
            if (written := task.get("observation")) is None:
                messages.append({"role": "user", "content": without_markup(first, self.control_tokens)})
            else:  # prepared without the policy's tokenizer
                text = without_markup(messages[-1]["content"], self.control_tokens)
                messages[-1] = {**messages[-1], "content": text}
            if written not in (None, first):
                self.differs = (
                    f"the environment begins with {first!r:.120}, and the row says {written!r:.120}"
                )
            self._see()
            self.begun = len(messages)
            output = await super().run(sampling_params, **kwargs | {"raw_prompt": messages})
            return apart(output, self.windows) if len(self.windows) > 1 else output
        finally:
            await self.pool.close(self.rollout)

    @classmethod
    def _pool_of(cls, settings: Environment) -> Pool:
        key = settings.model_dump_json()
        if key not in cls._pools:
            names = ("processes", "deadline_s", "start_s", "max_chars")
            limits = {name: getattr(settings, name) for name in names}
            cls._pools[key] = Pool(settings.path, settings.kwargs, **limits)
        return cls._pools[key]

    def _cap_text_prompt_length(self, prompt_ids: list[int]) -> list[int]:
        """verl cuts the beginning off, which has the rules of the task. A later prompt that is too long ends its rollout."""
        if len(prompt_ids) > self.prompt_length and not self.book.n_turns:
            use = f"the prompt has {len(prompt_ids)} tokens; allow as many, or lower environment.max_chars"
            raise ValueError(f"data.max_prompt_length={self.prompt_length}: {use}")
        return prompt_ids

    async def _handle_generating_state(self, agent_data, sampling_params, ignore_termination=False):
        await super()._handle_generating_state(agent_data, sampling_params, ignore_termination=True)
        if self.record.tool_fault:  # the engine's
            return AgentState.TERMINATED
        if self.differs:
            return self._fault(Fault("env_differs", self.differs))
        turn, action = self.book.n_turns - 1, self._action(self.record.final_text)
        call = {
            "turn": turn,
            "name": "step",
            "arguments": action or "",
            "reward": self.settings.invalid_reward,
        }
        self.record.calls.append(call)
        try:
            step = None if action is None else await self.pool.step(self.rollout, action)
        except Fault as fault:
            return self._fault(fault)
        if step is None:
            step = Step(NO_ACTION, valid=False)
        self.record.bad_calls += not step.valid
        if step.valid or step.reward is not None:
            call["reward"] = step.reward
        # After an invalid action, what the step does not give stays as it was.
        given = {name: value for name, value in vars(step).items() if value not in (None, (), [])}
        self.now = step if step.valid else replace(self.now, **given)
        text = shown_step(self.now, self.settings.list_actions)
        if ended := self._ended(turn, step.valid or step.done, len(agent_data.response_mask)):
            self.record.stop_reason = ended
            return AgentState.TERMINATED
        return await self._observe(agent_data, without_markup(text, self.control_tokens))

    def _action(self, text: str) -> str | None:
        """The action that the turn asks for; None where it is none."""
        form = self.settings.action
        if form == "text":
            action = None if self.cut_turn else text
        elif form == "tag":
            action = next(iter(TAG.findall(text)[-1:]), None)
        else:
            action = load(form, "environment.action")(text)
        action = valid_text(action.strip()) if action is not None else ""
        listed = self.now.actions if self.settings.list_actions else ()
        return action if action and (not listed or action in listed) else None

    def _ended(self, turn: int, valid: bool, tokens: int) -> str:
        """The reason why the rollout ends after this step; "" where it goes on."""
        if self.now.terminated:
            return "done"
        if not valid and self.settings.invalid == "end":
            return "bad_call"
        if self.now.truncated or turn + 1 >= self.settings.max_steps:
            return "truncated"
        return "length" if tokens >= self.response_length and self.settings.window is None else ""

    async def _observe(self, agent_data, text: str) -> AgentState:
        before = list(agent_data.messages)
        agent_data.messages.append({"role": "user", "content": text})
        fits = await (
            self._grow(agent_data, before) if self.settings.window is None else self._begin(agent_data)
        )
        if not fits:
            self.record.stop_reason = "length"
            return AgentState.TERMINATED
        agent_data.user_turns += 1
        self.progress.append(self.now.progress)
        self._see()
        return AgentState.GENERATING

    async def _begin(self, agent_data) -> bool:
        """Begins the next window, where its prompt fits."""
        messages = windowed(agent_data.messages, self.begun, self.settings.window)
        prompt = await self.ct_build_initial_tokens(messages, tools=self.tool_schemas)
        if len(prompt) > self.prompt_length:
            return False
        self.windows.append(written(agent_data))
        agent_data.prompt_ids, agent_data.response_mask, agent_data.response_logprobs = prompt, [], []
        self.book.turn_ids = []
        return True

    async def _grow(self, agent_data, before: list[dict]) -> bool:
        """Appends the observation to the dialogue, where it fits."""
        merged, mask, log_probs = await getattr(self, MERGE_MESSAGES)(
            before,
            agent_data.messages,
            agent_data.prompt_ids,
            agent_data.response_mask,
            agent_data.response_logprobs or None,
        )
        if len(mask) >= self.response_length:
            return False
        agent_data.prompt_ids, agent_data.response_mask = merged.token_ids, mask
        agent_data.response_logprobs = log_probs or []
        self.book.observed(mask)
        return True

    def _see(self) -> None:
        self.record.states.append(self.now.state)
        self.cut_texts += self.now.cut

    def _stop_reason(self, text, shown, agent_data, state, cut) -> str:
        ends = agent_data.response_ids[-1] in self.tokenizer.all_special_ids
        self.cut_turn = not ends and (cut or len(agent_data.response_mask) >= self.response_length)
        return "length"

    def _fault(self, fault: Fault) -> AgentState:
        self.record.tool_fault, self.record.fault_detail = fault.code, fault.detail[:300]
        self.record.stop_reason = "tool_fault"
        return AgentState.TERMINATED

    def _finish(self, output: AgentLoopOutput) -> TurnAgentLoopOutput:
        rewards = [call["reward"] for call in self.record.calls]
        self.record.environment = outcome_record(
            rewards,
            said=self.now.success,
            ended=self.record.stop_reason == "done",
            outcome=self.settings.outcome,
            success_at=self.settings.success_at,
        ) | {"steps": float(len(rewards)), "cut": self.cut_texts}
        if not any(state is not None for state in self.record.states):
            self.record.states = []
        if any(done is not None for done in self.progress):
            self.record.signals["progress"] = self.progress
        if self.windows:
            self.windows.append({name: getattr(output, name) for name in PARTS})
            if self.record.tool_fault:  # one output tells that the rollout is out of the step
                del self.windows[1:]
            output, self.book.turn_ids = together(output, self.windows)
        return super()._finish(output)
