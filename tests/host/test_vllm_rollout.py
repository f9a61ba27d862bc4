"""Weights to vLLM, through verl's own sender, receiver and worker extension: tied tensors, and what a failure says.

vLLM itself is not here: stand-ins have the names that verl imports, and a model whose loader refuses what vLLM's does.
"""

import asyncio
import gc
import importlib.util
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from ray.exceptions import RayError

STOCK = "verl.workers.rollout.vllm_rollout"
OURS = "verl_credit.host.vllm_rollout"


def stand_in(patch, name, **content):
    module = ModuleType(name)
    module.__dict__.update(content)
    patch.setitem(sys.modules, name, module)
    return module


@pytest.fixture(scope="module")
def frozen():
    """The garbage collector walks through what these tests make, and not through all that was there before."""
    gc.freeze()


@pytest.fixture
def rollout(monkeypatch, frozen):
    """Our two modules over verl's, read with stand-ins for vLLM; ``cpu``: is vLLM's platform a CPU?"""
    monkeypatch.setenv("VERL_PLATFORM", "cpu")
    from verl.plugin.platform import platform_manager

    from verl_credit.host.registry import register_parts

    register_parts()
    monkeypatch.setattr(platform_manager, "_current_platform", None, raising=False)
    nothing = lambda *_, **__: None  # noqa: E731
    cpu = SimpleNamespace(is_cpu=lambda: True)
    ops = stand_in(monkeypatch, "vllm._custom_ops", _supports_onednn=True)
    stand_in(monkeypatch, "vllm", _custom_ops=ops)
    stand_in(monkeypatch, "vllm.platforms", current_platform=cpu)
    stand_in(monkeypatch, "vllm.outputs", RequestOutput=object)
    stand_in(monkeypatch, "vllm.model_executor.model_loader.utils", process_weights_after_loading=nothing)
    stand_in(monkeypatch, "verl.third_party.vllm", VLLM_SLEEP_LEVEL=2)
    hijack = SimpleNamespace(hijack=nothing)
    stand_in(
        monkeypatch,
        "verl.utils.vllm",
        TensorLoRARequest=object,
        VLLMHijack=hijack,
        resolve_weight_name=nothing,
    )
    stand_in(monkeypatch, "verl.utils.vllm.patch", patch_vllm_moe_model_weight_loader=nothing)
    stand_in(
        monkeypatch, "verl.utils.vllm.vllm_quant_utils",
        apply_vllm_quant_patches=nothing, is_quantized_model=lambda _: False, load_quanted_weights=nothing,
    )  # fmt: skip
    spec = importlib.util.find_spec("verl.workers.rollout")
    package = stand_in(monkeypatch, STOCK)
    package.__path__ = [str(Path(spec.submodule_search_locations[0], "vllm_rollout"))]
    names = [
        f"{STOCK}.{n}" for n in ("utils", "vllm_rollout", "bucketed_weight_transfer", "weight_update_utils")
    ]
    for name in [*names, f"{OURS}.sync", f"{OURS}.worker_extension"]:
        monkeypatch.delitem(sys.modules, name, raising=False)
    sync, extension = (importlib.import_module(f"{OURS}.{name}") for name in ("sync", "worker_extension"))
    stock = importlib.import_module(f"{STOCK}.utils").vLLMColocateWorkerExtension
    yield SimpleNamespace(sync=sync, extension=extension, stock=stock, cpu=cpu, ops=ops)
    for name in [*names, f"{OURS}.sync", f"{OURS}.worker_extension"]:
        sys.modules.pop(name, None)
    gc.collect()  # verl's receiver leaves its shared memory open after a failure, until nothing refers to it


class Tied(torch.nn.Module):
    """A tied policy, as vLLM holds it. Its loader refuses a bucket with the head and without the embedding, as vLLM's does
    since 0.29.0."""

    prefix, hf_to_vllm_mapper = "", None

    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(1000, 160)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(160, 1500, bias=False) for _ in range(2))
        self.head = torch.nn.Linear(160, 1000, bias=False)
        self.head.weight = self.embed.weight
        self.buckets = []

    def load_weights(self, weights):
        arrived = dict(weights)
        self.buckets.append(list(arrived))
        head, embed = (f"{self.prefix}{name}.weight" for name in ("head", "embed"))
        if head in arrived and embed not in arrived:
            raise ValueError(f"{head!r} was skipped because it is tied to {embed!r}")
        own = self.state_dict()
        for name, tensor in arrived.items():
            own[name.removeprefix(self.prefix)].copy_(tensor)


class Ref:
    """What Ray returns for a call: it can be awaited, and has a future."""

    def __init__(self, call):
        self._call = call

    def future(self):
        return self._call

    def __await__(self):
        return asyncio.wrap_future(self._call).__await__()


class Failed(RayError):
    def __init__(self, cause):
        super().__init__(f"a long traceback of {cause}")
        self.cause = cause


def sync_weights(rollout, model, weights, tmp_path):
    """One sync in buckets of a megabyte: verl's adapter in this thread, vLLM's worker in another."""
    worker = object.__new__(rollout.extension.WorkerExtension)
    worker.device, worker.local_rank = torch.device("cpu"), 0
    worker._is_qat_model = worker._is_modelopt_qat = False
    config = SimpleNamespace(speculative_config=None, model_config=None)
    worker.model_runner = SimpleNamespace(model=model, vllm_config=config)
    handle = f"ipc://{tmp_path}/s"
    worker._get_zmq_handle = lambda: handle
    adapter = object.__new__(rollout.sync.ServerAdapter)
    adapter._has_server, adapter.use_shm, adapter.zmq_handle = True, True, handle
    adapter.replica_rank = adapter.rollout_rank = 1
    adapter.config = SimpleNamespace(checkpoint_engine=SimpleNamespace(update_weights_bucket_megabytes=1))

    def receive(kwargs):
        try:
            worker.update_weights_from_ipc(**kwargs)
        except Exception as error:  # vLLM's executor hands on the words, and Ray wraps its exception
            raise Failed(RuntimeError(f"Worker failed with error '{error}'")) from None

    async def ended():
        return None

    with ThreadPoolExecutor(1) as vllm:

        def call(method, timeout, args, kwargs):
            assert method == "update_weights_from_ipc"
            return Ref(vllm.submit(receive, kwargs))

        clear = SimpleNamespace(remote=ended)
        adapter.server_handle = SimpleNamespace(
            collective_rpc=SimpleNamespace(remote=call), clear_kv_cache=clear
        )
        asyncio.run(adapter.update_weights(weights, peft_config=None, base_sync_done=True))


def new_weights(prefix=""):
    torch.manual_seed(1)
    source = Tied()
    return source, [(f"{prefix}{name}", tensor.clone()) for name, tensor in source.state_dict().items()]


def test_a_tied_model_in_three_buckets_gets_every_weight(rollout, tmp_path):
    source, weights = new_weights()
    model = Tied()
    assert not torch.equal(model.head.weight, source.head.weight)
    sync_weights(rollout, model, weights, tmp_path)
    assert model.buckets == [["embed.weight"], ["layers.0.weight"], ["layers.1.weight"]]
    for name, tensor in source.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor), name


def test_an_exception_of_the_loader_ends_the_sync_with_its_words(rollout, tmp_path):
    """verl's sender would wait for ever, and the words that vLLM hands on would be those of verl's clean-up."""
    model, (_, weights) = Tied(), new_weights()
    model.load_weights = lambda given: {}["no such parameter"]
    with pytest.raises(rollout.sync.WeightsNotTaken) as caught:
        sync_weights(rollout, model, weights, tmp_path)
    assert str(caught.value) == (
        "vLLM did not take the weights: Worker failed with error 'KeyError: 'no such parameter'; "
        "then BufferError: cannot close exported pointers exist'"
    )


def test_a_head_without_the_embedding_that_it_is_tied_to_is_refused(rollout, tmp_path):
    _, weights = new_weights()
    with pytest.raises(rollout.sync.WeightsNotTaken, match="head.weight arrived without embed.weight"):
        sync_weights(rollout, Tied(), weights[1:], tmp_path)


def test_names_are_compared_as_vllms_model_has_them(rollout, tmp_path):
    """A checkpoint of a model with images has its text model below another name."""
    source, weights = new_weights("language_model.")
    model = Tied()
    model.prefix = "language_model."
    model.hf_to_vllm_mapper = SimpleNamespace(
        apply_list=lambda names: [n.removeprefix("language_model.") for n in names]
    )
    sync_weights(rollout, model, weights, tmp_path)
    assert torch.equal(model.head.weight, source.head.weight)
    assert "language_model.head.weight" not in chain(*model.buckets)


def test_names_under_a_wrapper_for_lora_are_the_same_names(rollout):
    class Wrapped(torch.nn.Module):
        def __init__(self, base_layer):
            super().__init__()
            self.base_layer = base_layer

    model = Tied()
    model.embed, model.head = Wrapped(model.embed), Wrapped(model.head)
    assert rollout.extension.tied_names(model) == {"head.weight": "embed.weight"}
    assert rollout.extension.own_name(model, "head.base_layer.weight") == "head.weight"


def test_an_adapters_weights_are_handed_on_as_they_are(rollout, monkeypatch):
    seen = []
    monkeypatch.setattr(rollout.stock, "_update_weights", lambda self, *given: seen.append(given))
    worker = object.__new__(rollout.extension.WorkerExtension)
    worker.model_runner = SimpleNamespace(model=Tied())
    worker._tied_arrived, worker._tied_left_out = set(), {}
    weights = [("base_model.model.layers.0.lora_A.weight", torch.zeros(1))]
    worker._update_weights(weights, {"r": 8}, True)
    assert seen == [(weights, {"r": 8}, True)]


def test_a_rank_without_a_call_of_its_own_waits_for_the_answer(rollout):
    """Its engine's failure is reported by the rank that made the call."""
    polled = []
    socket = SimpleNamespace(
        poll=lambda *given: polled.append(given) or len(polled) > 2, recv=lambda: b"done", closed=False
    )
    watched = rollout.sync.WatchedSocket(socket, None)
    assert watched.recv() == b"done" and len(polled) == 3
    assert watched.closed is False


@pytest.mark.parametrize("arrives", [True, False])
def test_the_last_answer_may_arrive_after_the_call_returned(rollout, arrives):
    """A busy machine delivers it later than Ray delivers the call's result."""
    returned, polled = Future(), []
    returned.set_result(None)

    def poll(wait_ms, event):
        polled.append(wait_ms)
        return arrives and wait_ms > 0 and len(polled) > 1

    watched = rollout.sync.WatchedSocket(SimpleNamespace(poll=poll, recv=lambda: b"done"), returned)
    if arrives:
        assert watched.recv() == b"done"
    else:
        with pytest.raises(rollout.sync.WeightsNotTaken, match="returned before all weights were sent"):
            watched.recv()


@pytest.mark.parametrize("is_cpu", [True, False])
def test_onednn_is_off_on_a_cpu_before_verls_extension_and_any_model(rollout, monkeypatch, is_cpu):
    """vLLM adds the extension behind its worker class's own bases, and then makes a worker."""
    seen = []
    stock = lambda cls, **kwargs: seen.append((rollout.ops._supports_onednn, kwargs)) or object.__new__(cls)  # noqa: E731
    monkeypatch.setattr(rollout.stock, "__new__", stock)
    rollout.cpu.is_cpu = lambda: is_cpu

    class Base:
        def __init__(self, vllm_config=None):
            pass

    class Worker(Base):
        pass

    assert rollout.ops._supports_onednn  # importing changes nothing
    Worker.__bases__ = (*Worker.__bases__, rollout.extension.WorkerExtension)
    Worker(vllm_config="config")
    assert seen == [(not is_cpu, {"vllm_config": "config"})]


def test_a_vllm_without_the_switch_is_refused(rollout):
    with pytest.raises(RuntimeError, match=r"no vllm\._custom_ops\._supports_onednn"):
        rollout.extension.keep_plain_weights(ModuleType("other"))
