"""The rollout engine `hf` without Ray: weights that arrive, sampling parameters as verl sends them, batches of requests."""

import asyncio
import threading
from types import SimpleNamespace

import pytest
import ray
import torch
from safetensors.torch import load
from verl.workers.config import RolloutConfig
from verl.workers.rollout.replica import RolloutMode

from kit.tiny_models import tiny_config
from verl_credit.host.actor.object_store import ObjectStoreEngine
from verl_credit.host.hf_rollout.batcher import RequestBatcher, RequestRejected
from verl_credit.host.hf_rollout.loaded_model import max_model_len
from verl_credit.host.hf_rollout.options import num_threads, read_sampling_params
from verl_credit.host.hf_rollout.replica import HFReplica
from verl_credit.host.hf_rollout.server import HFServer
from verl_credit.host.hf_rollout.sync import ServerAdapter, WeightError, WeightSink, checksum, weight_buckets
from verl_credit.policy.generation import Generation
from verl_credit.policy.sampling import SamplingParams

# --- weights ---


class Tied(torch.nn.Module):
    """An embedding, a head that shares its weight, a layer and a persistent buffer."""

    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.embed = torch.nn.Embedding(5, 4)
        self.layer = torch.nn.Linear(4, 4)
        self.head = torch.nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.rand(3))


def send(weights, model, *, bucket_bytes=40, dtype=torch.float32):
    digests, sink = {}, WeightSink(model)
    for bucket in buckets_of(weights, digests, dtype=dtype, bucket_bytes=bucket_bytes):
        sink.load(bucket)
    return checksum(digests), sink.finish()


def buckets_of(weights, digests, **how):
    async def collected():
        return [bucket async for bucket in weight_buckets(weights, digests, **how)]

    return asyncio.run(collected())


@pytest.mark.parametrize("bucket_bytes", [1, 100, 1 << 20])
def test_weights_arrive_in_any_order_and_bucket_size(bucket_bytes):
    old, new = Tied(0), Tied(1)
    sent, loaded = send(reversed(new.state_dict().items()), old, bucket_bytes=bucket_bytes)
    assert sent == loaded
    assert all(torch.equal(a, b) for a, b in zip(old.parameters(), new.parameters(), strict=True))
    assert old.head.weight is old.embed.weight


def test_either_name_of_a_tied_tensor_suffices():
    for name in ("head.weight", "embed.weight"):
        weights = Tied(1).state_dict()
        del weights[name]
        model = Tied(0)
        sent, loaded = send(weights.items(), model)
        assert sent == loaded
        assert torch.equal(model.embed.weight, Tied(1).embed.weight)


def test_what_counts_is_not_cast():
    how = {"dtype": torch.bfloat16, "bucket_bytes": 1 << 20}
    steps = torch.tensor([2**40 + 1])  # no bfloat16
    (document,) = buckets_of([("steps", steps), ("weight", torch.ones(2))], {}, **how)
    sent = load(document)
    assert (sent["steps"].dtype, sent["weight"].dtype) == (torch.int64, torch.bfloat16)
    assert torch.equal(sent["steps"], steps)


def test_names_shapes_and_types_are_strict():
    state = Tied(1).state_dict()
    with pytest.raises(WeightError, match="unexpected weight 'other'"):
        send({**state, "other": torch.ones(1)}.items(), Tied(0))
    with pytest.raises(WeightError, match="did not arrive.*layer.bias"):
        send([item for item in state.items() if item[0] != "layer.bias"], Tied(0))
    with pytest.raises(WeightError, match=r"'layer.bias'.*\(1,\).*needs.*\(4,\)"):
        send({**state, "layer.bias": torch.ones(1)}.items(), Tied(0))
    with pytest.raises(WeightError, match="bfloat16.*needs.*float32"):
        send(state.items(), Tied(0), dtype=torch.bfloat16)
    with pytest.raises(WeightError, match="'scale' was sent twice"):
        send([*state.items(), ("scale", state["scale"])], Tied(0))


def remote(function):
    async def called(*args):
        return function(*args)

    return SimpleNamespace(remote=called)


@pytest.mark.parametrize("flipped", [False, True])
def test_the_sender_raises_on_a_difference(flipped):
    weights, model = dict(Tied(1).state_dict()), Tied(0)
    sink, sent = WeightSink(model), []

    def loaded(bucket):
        sent.append(len(bucket))
        sink.load(bucket[:-1] + bytes([bucket[-1] ^ flipped]))

    server = SimpleNamespace(
        begin_weight_update=remote(lambda: None),
        load_weight_bucket=remote(loaded),
        finish_weight_update=remote(lambda step: sink.finish()),
    )
    engine = SimpleNamespace(update_weights_bucket_megabytes=1)
    config = SimpleNamespace(checkpoint_engine=engine, dtype="float32")
    adapter = SimpleNamespace(is_leader_rank=True, _server=server, config=config)
    update = ServerAdapter.update_weights(adapter, weights.items(), 3)
    if not flipped:
        asyncio.run(update)
        assert len(sent) == 1 and all(
            torch.equal(model.state_dict()[name], weights[name]) for name in weights
        )
        return
    with pytest.raises(
        WeightError, match="sent checksum [0-9a-f]{64}, the rollout server holds [0-9a-f]{64}"
    ):
        asyncio.run(update)


# --- sampling parameters as verl sends them ---

LIMITS = SimpleNamespace(prompt_length=20, response_length=10), 32, (2, 3)
VERL = {"temperature": 0.5, "top_p": 0.9, "top_k": 7, "repetition_penalty": 1.0, "logprobs": True}


def test_verls_parameters_are_read():
    params = read_sampling_params({**VERL, "seed": 5, "stop_token_ids": [9]}, 15, *LIMITS)
    assert params == SamplingParams(10, 0.5, 0.9, 7, seed=5, stop_token_ids=(2, 3, 9))
    assert read_sampling_params({"ignore_eos": True}, 1, *LIMITS).stop_token_ids == ()


@pytest.mark.parametrize(
    ("given", "prompt_tokens", "expected"),
    [
        ({}, 15, 10),  # the response budget
        ({}, 26, 4),  # what prompt and response budget leave
        ({}, 31, 1),  # at least one, as verl's vLLM server does
        ({"max_tokens": 5}, 15, 5),
        ({"max_new_tokens": 6}, 15, 6),
        ({"max_tokens": 100}, 30, 2),  # the model's context
    ],
)
def test_token_budget(given, prompt_tokens, expected):
    assert read_sampling_params(given, prompt_tokens, *LIMITS).max_new_tokens == expected


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"beam_width": 2}, "'beam_width' is not known: accepted are temperature"),
        ({"repetition_penalty": 1.1}, "repetition_penalty=1.1: only 1.0"),
        ({"temperature": -1}, "temperature=-1"),
        ({"max_tokens": 0}, "max_new_tokens=0"),
        ({"max_tokens": "5"}, "max_new_tokens='5'"),
        ({"seed": 1.5}, "seed=1.5"),
    ],
)
def test_a_bad_parameter_names_itself(given, message):
    with pytest.raises(ValueError, match=message):
        read_sampling_params(given, 4, *LIMITS)


def test_the_engine_has_all_positions_of_the_model_unless_fewer_are_asked_for():
    config = tiny_config("qwen3")
    positions = config.max_position_embeddings
    assert max_model_len(config, None) == positions and max_model_len(config, positions - 1) == positions - 1
    with pytest.raises(ValueError, match=f"max_model_len={positions + 1}: .* {positions}"):
        max_model_len(config, positions + 1)


def test_engine_options():
    assert num_threads({}) == 1 and num_threads({"hf": {"num_threads": 2, "threads": None}}) == 2
    for name, value in (("threads", 2), ("num_threads", 0)):
        with pytest.raises(ValueError, match=f"engine_kwargs.hf.{name}"):
            num_threads({"hf": {name: value}})


def test_weights_reach_every_server_through_the_object_store(monkeypatch):
    """Actors are objects here, and the store is what is put into it."""
    monkeypatch.setattr(ray, "put", lambda bucket: bucket)
    monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(current_actor=actors.pop(0)))

    def actor(engine):
        async def call(method, *given):
            getattr(engine, method)(*given)

        return SimpleNamespace(execute_checkpoint_engine=SimpleNamespace(remote=call))

    rank0, rank1, *servers = engines = [ObjectStoreEngine(16, is_master=number == 0) for number in range(4)]
    actors = [actor(engine) for engine in engines]
    trainers, receiving = ObjectStoreEngine.build_topology(2, 2, [engine.prepare() for engine in engines])
    assert receiving == {"receivers": [[], []]}
    weights = {name: torch.full((4,), float(number)) for number, name in enumerate("abc")}

    async def update():
        for engine, receivers in zip((rank0, rank1), trainers["receivers"], strict=True):
            engine.init_process_group(receivers)
            taken = iter(weights.items())
            await engine.send_weights(taken)
            assert next(taken, None) is None  # a step may be a collective of all ranks
        return [[one async for one in server.receive_weights()] for server in servers]

    for arrived in asyncio.run(asyncio.wait_for(update(), 60)):
        assert [name for name, _ in arrived] == ["a", "b", "c"]
        assert all(torch.equal(tensor, weights[name]) for name, tensor in arrived)


# --- batching ---

ONE = SamplingParams(1)


class Recorder:
    """Stands in for the model: answers every prompt with itself and records the batches."""

    def __init__(self, *, hold=False):
        self.batches, self.hold, self.release = [], hold, threading.Event()

    def __call__(self, prompts, params):
        self.batches.append([list(prompt) for prompt in prompts])
        if self.hold:
            assert self.release.wait(10)
        if any(prompt == [666] for prompt in prompts):
            raise FloatingPointError("engine broke")
        return [Generation(list(prompt), [0.0], "length") for prompt in prompts]


def batcher_of(recorder, max_batch_size=100, **bounds):
    return RequestBatcher(recorder, max_batch_size=max_batch_size, quiet_seconds=0.001, **bounds)


def test_concurrent_requests_share_a_batch_and_keep_their_answers():
    recorder = Recorder()

    async def scenario():
        batcher = batcher_of(recorder)
        return await asyncio.gather(*[batcher.submit([i], ONE) for i in range(20)])

    outputs = asyncio.run(scenario())
    assert [output.token_ids for output in outputs] == [[i] for i in range(20)]
    assert len(recorder.batches) == 1


@pytest.mark.parametrize(
    ("lengths", "sizes"),
    [
        ([9] * 7, [3, 3, 1]),  # with the new token 10 each, of 30
        ([2] * 20, [8, 8, 4]),
        ([2, 2, 14, 2, 2], [2, 2, 1]),  # with the long one a third would count 15, too
        ([40, 2, 2], [1, 2]),  # nothing is left out
        ([2, 2, 40, 2], [2, 1, 1]),
    ],
)
def test_batches_are_bounded_by_tokens(lengths, sizes):
    recorder, prompts = Recorder(), [[i] * n for i, n in enumerate(lengths)]

    async def scenario():
        batcher = batcher_of(recorder, max_batch_size=8, max_batch_tokens=30)
        return await asyncio.gather(*[batcher.submit(prompt, ONE) for prompt in prompts])

    assert [output.token_ids for output in asyncio.run(scenario())] == prompts
    assert [len(batch) for batch in recorder.batches] == sizes


def test_an_engine_error_reaches_its_callers_and_the_next_batch_runs():
    async def scenario():
        batcher = batcher_of(Recorder())
        failed = await asyncio.gather(*[batcher.submit([i], ONE) for i in (1, 666)], return_exceptions=True)
        return failed, await batcher.submit([2], ONE)

    failed, after = asyncio.run(scenario())
    assert all(isinstance(error, FloatingPointError) for error in failed)
    assert after.token_ids == [2]


def test_an_engine_that_loses_an_answer_is_an_error_and_no_hang():
    batcher = batcher_of(lambda prompts, params: [])
    with pytest.raises(ValueError, match="shorter"):
        asyncio.run(asyncio.wait_for(batcher.submit([1], ONE), 5))


async def until(condition):
    while not condition():
        await asyncio.sleep(0.001)


def test_requests_during_a_batch_form_the_next_and_exclusive_jobs_wait():
    recorder = Recorder(hold=True)

    async def scenario():
        batcher = batcher_of(recorder)
        first = asyncio.create_task(batcher.submit([1], ONE))
        await until(lambda: recorder.batches)
        later = [asyncio.create_task(batcher.submit([i], ONE)) for i in (2, 3)]
        job = asyncio.create_task(batcher.exclusive(lambda: len(recorder.batches)))
        await asyncio.sleep(0.01)
        assert not job.done() and len(recorder.batches) == 1
        recorder.release.set()
        await asyncio.gather(first, job, *later)
        await batcher.drain()

    asyncio.run(scenario())
    assert recorder.batches[0] == [[1]] and sorted(recorder.batches[1]) == [[2], [3]]


@pytest.mark.parametrize("paused_first", [True, False])
def test_a_paused_server_is_drained_when_its_batch_has_ended(paused_first):
    """As verl's asynchronous trainers do: pause, drain, new weights, resume; what waits goes on behind them."""
    recorder = Recorder()

    async def scenario():
        batcher = batcher_of(recorder)
        await batcher.submit([1], ONE)
        if paused_first:
            await batcher.pause(reject=False)
            waiting = asyncio.create_task(batcher.submit([2], ONE))
            await asyncio.sleep(0)
            await batcher.drain()
        else:
            waiting = asyncio.create_task(batcher.submit([2], ONE))
            draining = asyncio.create_task(batcher.drain())
            await asyncio.sleep(0)
            await batcher.pause(reject=False)
            await draining
        assert not waiting.done()
        batcher.resume()
        await waiting
        await batcher.drain()

    asyncio.run(asyncio.wait_for(scenario(), 60))
    assert recorder.batches == [[[1]], [[2]]]


def test_a_paused_server_does_nothing_until_it_resumes():
    """Its processors are the update's meanwhile."""

    class Counting(asyncio.Lock):
        taken = 0

        async def acquire(self):
            Counting.taken += 1
            return await super().acquire()

    async def scenario():
        batcher = RequestBatcher(Recorder(), max_batch_size=8, quiet_seconds=0)
        batcher._model_lock = Counting()
        await batcher.pause(reject=False)
        kept = asyncio.create_task(batcher.submit([1], ONE))
        for _ in range(100):
            await asyncio.sleep(0)
        assert Counting.taken == 1
        batcher.resume()
        await kept

    asyncio.run(asyncio.wait_for(scenario(), 60))


def test_a_server_stands_on_the_node_of_its_ranks(monkeypatch):
    """Weights go from the rank to the server without a network between, and the two take turns on the device."""
    made = []

    class Actor:
        def __init__(self, **given):
            made.append(given)
            self.launch_server = SimpleNamespace(remote=answer("address"))

    def answer(value):
        async def remote(*_):
            return value

        return remote

    def options(**where):
        made.append(where)
        return SimpleNamespace(remote=Actor)

    node = "0a" * 28
    here = SimpleNamespace(get_node_id=lambda: node, get_accelerator_ids=lambda: {"GPU": ["5", "7"]})
    monkeypatch.setattr(ray, "get_runtime_context", lambda: here)
    monkeypatch.setattr(ray, "remote", lambda actor: SimpleNamespace(options=options))

    async def in_worker(function):
        return function(None)

    config = RolloutConfig(name="hf", tensor_model_parallel_size=1)
    replica = HFReplica(0, config, model_config=None)
    monkeypatch.setattr("verl_credit.host.hf_rollout.replica.get_device_name", lambda: "cuda")
    replica.rollout_mode = RolloutMode.HYBRID
    with pytest.raises(ValueError, match="replica 0 got 0 workers"):
        asyncio.run(replica.launch_servers())
    replica.workers = [SimpleNamespace(__ray_call__=SimpleNamespace(remote=in_worker))]
    asyncio.run(replica.launch_servers())
    where, given = made
    assert (where["scheduling_strategy"].node_id, where["scheduling_strategy"].soft) == (node, False)
    assert where["name"] == "hf_server_0" and given["replica_rank"] == 0
    assert (given["device"], given["mode"]) == ("cuda", RolloutMode.HYBRID)
    assert where["runtime_env"]["env_vars"] == {
        "CUDA_VISIBLE_DEVICES": "5", "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1",
    }  # fmt: skip
    assert "num_gpus" not in where  # the rank has it
    assert replica.server_address == "address"


def test_a_cancelled_request_does_not_disturb_the_others():
    recorder = Recorder()

    async def scenario():
        batcher = batcher_of(recorder)
        gone = asyncio.create_task(batcher.submit([1], ONE))
        kept = asyncio.create_task(batcher.submit([2], ONE))
        await asyncio.sleep(0)
        gone.cancel()
        return await kept

    assert asyncio.run(scenario()).token_ids == [2]
    assert recorder.batches == [[[2]]]


def test_an_abort_keeps_or_rejects_what_waits_and_says_what_verls_servers_say():
    """As servers do in verl, whose vLLM replica adds it up. A batch that runs ends, so that nothing is aborted half-way."""
    server = object.__new__(HFServer)  # without a model

    async def scenario(reject):
        server._batcher = batcher_of(Recorder())
        waiting = asyncio.create_task(server._batcher.submit([1], ONE))
        await asyncio.sleep(0)
        said = await server.abort_all_requests(reject_request=reject)
        assert said == {"aborted_count": 0, "request_ids": []}
        if reject:
            with pytest.raises(RequestRejected):
                await server._batcher.submit([2], ONE)
        await server.resume_generation()
        assert (await server._batcher.submit([3], ONE)).token_ids == [3]
        return (await asyncio.gather(waiting, return_exceptions=True))[0]

    assert isinstance(asyncio.run(scenario(True)), RequestRejected)
    assert asyncio.run(scenario(False)).token_ids == [1]
