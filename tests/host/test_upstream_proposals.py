"""What docs/upstream.md proposes to verl is still to be changed there: each test fails with a verl that did it."""

import asyncio
from unittest import mock

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput
from verl.experimental.reward_loop.reward_manager.naive import NaiveRewardManager
from verl.protocol import DataProto
from verl.trainer.ppo import core_algos
from verl.trainer.ppo.v1 import agent_loop_tq
from verl.trainer.ppo.v1.utils import compute_advantage_for_multi_trajectories

RESPONSE = 9  # the token of the responses


def session_of(lengths) -> DataProto:
    """The outputs of a session as verl's agent loops hand them to the reward manager."""
    rows = [([7] * prompt, [RESPONSE] * response) for prompt, response in lengths]

    def padded(lists):
        return torch.nn.utils.rnn.pad_sequence([torch.tensor(one) for one in lists], batch_first=True)

    fields = {
        "prompts": padded([prompt for prompt, _ in rows]),
        "responses": padded([response for _, response in rows]),
        "attention_mask": padded([[1] * len(prompt + response) for prompt, response in rows]),
    }
    others = {"data_source": "x", "reward_model": {"ground_truth": "-"}}
    arrays = {name: np.array([value] * len(rows), dtype=object) for name, value in others.items()}
    arrays["response_len"] = np.array([response for _, response in lengths])
    return DataProto(TensorDict(fields, batch_size=len(rows)), arrays)


@pytest.mark.parametrize(
    ("lengths", "decoded", "of_the_response"),
    [([(10, 30)], 30, 30), ([(50, 20), (10, 30)], 0, 0), ([(10, 100), (50, 20)], 60, 20)],
)
def test_the_reward_manager_decodes_the_last_output_by_the_padded_mask(lengths, decoded, of_the_response):
    async def texts():
        tokenizer = mock.Mock()
        tokenizer.decode.return_value = ""
        await NaiveRewardManager(None, tokenizer, lambda **_: 0.0).run_single(session_of(lengths))
        return tokenizer.decode.call_args.args[0].tolist()

    read = asyncio.run(texts())
    assert (len(read), read.count(RESPONSE)) == (decoded, of_the_response)


def advantages(estimator):
    """Four sessions with outcomes 1, 0, 0, 1; those that failed have two outputs each."""
    keys = ["q_0_0", "q_1_0", "q_1_1", "q_2_0", "q_2_1", "q_3_0"]
    rewards = torch.tensor([1.0, 0, 0, 0, 0, 1]).unsqueeze(1)
    tensors = {"token_level_rewards": rewards, "response_mask": torch.ones(6, 1)}
    data = DataProto.from_dict(tensors, {"uid": np.array(["q"] * 6, dtype=object)})
    return compute_advantage_for_multi_trajectories(data, keys, estimator).batch["advantages"][:, 0]


def test_an_estimator_of_others_counts_a_sessions_outputs():
    name = "grpo_of_others"
    with mock.patch.dict(core_algos.ADV_ESTIMATOR_REGISTRY):
        core_algos.register_adv_est(name)(core_algos.compute_grpo_outcome_advantage)
        by_rows = advantages(name)
    assert advantages("grpo") == pytest.approx([0.866, *[-0.866] * 4, 0.866], abs=1e-3)
    assert by_rows == pytest.approx([1.291, *[-0.645] * 4, 1.291], abs=1e-3)


def test_a_loop_that_leaves_the_versions_out_ends_the_step_with_a_type_error():
    put = mock.AsyncMock()
    worker = object.__new__(agent_loop_tq.AgentLoopWorkerTQ.__ray_metadata__.modified_class)
    output = AgentLoopOutput(prompt_ids=[1], response_ids=[2], response_mask=[1], metrics=AgentLoopMetrics())
    with (
        mock.patch.object(agent_loop_tq.tq, "async_kv_batch_put", put),
        mock.patch.multiple(
            worker,
            _compute_score=mock.AsyncMock(),
            _compute_teacher_logprobs=mock.AsyncMock(),
            _compute_multi_modal_inputs=mock.Mock(return_value={}),
            _compute_position_ids=mock.Mock(return_value=torch.zeros(1, 2, dtype=torch.long)),
            create=True,
        ),
    ):
        asyncio.run(worker._agent_loop_postprocess(output, False, uid="q", session_id=0, global_steps=1))
    (tag,) = put.call_args.kwargs["tags"]
    with pytest.raises(TypeError, match="NoneType"):  # as PPOTrainer._compute_metrics reads it
        np.array([tag["min_global_steps"]], dtype=int)
