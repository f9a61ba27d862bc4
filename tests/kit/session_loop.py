"""An agent loop that sums its context up and begins again, and sometimes asks a sub-agent: outputs of one rollout."""

from uuid import uuid4

from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopMetrics, AgentLoopOutput

from verl_credit.names import LINK, TURN_IDS, TURN_REWARDS
from verl_credit.turns.rollout.book import TurnBook

NAME = "forgetful"


class ForgetfulLoop(AgentLoopBase):
    """What it does follows from the tokens: two rollouts of three reset their context, half of these ask a sub-agent."""

    async def run(self, sampling_params, **kwargs):
        self.params = {**sampling_params, "max_tokens": 6}
        asked = list(kwargs["raw_prompt"])
        first = await self._output(asked, ["Go on."])
        drawn, outputs = sum(first.response_ids) % 6, [first]
        if drawn % 3:
            so_far = self.tokenizer.decode(first.response_ids[-4:])
            if drawn % 2:
                helper = await self._output([{"role": "user", "content": f"Help: {so_far}"}], [])
                helper.extra_fields[LINK] = {"chain": 1, "parent": [0, 0]}
                outputs.append(helper)
            outputs.append(
                await self._output([*asked[:-1], {"role": "user", "content": f"So far: {so_far}"}], [])
            )
        outputs[-1].reward_score = float(sum(outputs[-1].response_ids) % 2)
        return outputs

    async def _output(self, messages, said):
        """A turn, and one more after each text that is ``said``."""
        prompt = await self.ct_build_initial_tokens(messages)
        ids, mask, book, rewards = prompt, [], TurnBook(), []
        logprobs = [] if self.params.get("logprobs") else None
        for text in [*said, None]:
            found = await self.server_manager.generate(
                uuid4().hex, prompt_ids=ids, sampling_params=self.params
            )
            written = found.log_probs if logprobs is not None else None
            merged, mask, logprobs = await self.ct_merge_assistant_token(
                ids, found.token_ids, mask, logprobs, written
            )
            ids = merged.token_ids
            book.wrote_turn(mask)
            rewards.append(sum(found.token_ids) % 3 / 2)
            if text is not None:
                messages = [
                    *messages,
                    {"role": "assistant", "content": self.tokenizer.decode(found.token_ids)},
                ]
                longer = [*messages, {"role": "user", "content": text}]
                merged, mask, logprobs = await self.ct_merge_context_msg(
                    messages, longer, ids, mask, logprobs
                )
                messages, ids = longer, merged.token_ids
                book.observed(mask)
        return AgentLoopOutput(
            prompt_ids=prompt,
            response_ids=ids[len(prompt) :],
            response_mask=mask,
            response_logprobs=logprobs,
            num_turns=2 * book.n_turns,
            metrics=AgentLoopMetrics(),
            extra_fields={TURN_IDS: book.turn_ids, TURN_REWARDS: rewards},
        )
