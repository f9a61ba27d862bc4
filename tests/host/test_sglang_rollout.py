"""`rollout.name=sglang`: our agent loop over verl's own SGLang server, whose engine is scripted."""

from itertools import pairwise

import pytest

from kit.byte_world import make_tokenizer
from kit.recipes import load_config
from kit.sglang_server import SGLangClient, verls_sglang
from kit.trajectories import REQUIRED, policy_text, record, run
from verl_credit.worlds.lab.protocol import answer_turn, search_turn

SGLANG = "actor_rollout_ref.rollout.name=sglang"
SAMPLING = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "repetition_penalty": 1.0, "logprobs": True}
"""What verl's agent-loop worker sends."""
GPU = (SGLANG, "trainer.device=cuda")


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


@pytest.fixture
def played(tokenizer, monkeypatch):
    """(output, engine) of one trajectory whose turns SGLang writes."""

    def play(turns, *overrides, **attributes):
        config = load_config("search_cpu", [*REQUIRED, *GPU, *overrides])
        ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in turns]
        client = SGLangClient(monkeypatch, config, ids)
        vars(client.engine).update(attributes)
        output, _ = run(tokenizer, [], *GPU, *overrides, policy=client, params=SAMPLING)
        return output, client.engine

    return play


def test_tokens_turns_and_log_probs_are_those_of_the_engine(tokenizer, played):
    turns = [search_turn("a"), search_turn("b"), answer_turn("c")]
    output, engine = played(turns)
    assert [policy_text(tokenizer, output, k) for k in range(3)] == turns  # with the token that ended each
    assert [k >= 0 for k in output.turn_ids] == [bool(mask) for mask in output.response_mask]
    for k in range(3):
        log_probs = [
            value for value, turn in zip(output.response_logprobs, output.turn_ids, strict=True) if turn == k
        ]
        assert log_probs == [engine.log_prob_of(place) for place in range(len(log_probs))]
    assert (record(output)["stop_reason"], record(output)["n_searches"]) == ("answer", 2)
    assert record(output)["versions"] == [[7, 7]] * 3  # of the weights, for asynchronous trainers
    assert output.routed_experts is None
    prompts = [list(request.input_ids) for request in engine.requests]
    assert all(longer[: len(prompt)] == prompt for prompt, longer in pairwise(prompts))


@pytest.mark.slow
def test_every_turn_has_its_budget_and_parameters_that_sglang_knows(played):
    _, engine = played([search_turn("a"), answer_turn("c")], "search.max_new_tokens=150")
    assert [request.sampling_params["max_new_tokens"] for request in engine.requests] == [150, 150]
    assert all(request.return_logprob for request in engine.requests)
    assert {request.sampling_params["temperature"] for request in engine.requests} == {1.0}


def test_a_turn_without_a_token_ends_the_row_and_masks_it(played):
    output, _ = played([search_turn("a"), ""])
    assert record(output)["stop_reason"] == "tool_fault" and not any(output.response_mask)


def test_verls_registries_find_its_parts_and_it_can_abort(monkeypatch):
    from verl.workers.rollout.base import get_rollout_class
    from verl.workers.rollout.replica import get_rollout_replica_class

    verls_sglang(monkeypatch)
    replica = get_rollout_replica_class("sglang")
    assert replica.__name__ == "SGLangReplica"
    assert get_rollout_class("sglang").__module__ == "verl.workers.rollout.sglang_rollout.sglang_rollout"
    assert {"abort_all_requests", "resume_generation"} <= vars(replica).keys()
