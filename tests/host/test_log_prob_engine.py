"""The engine's log-probs and entropies: against verl's own way through the same engine, in the forward and in training."""

import inspect
import re
from contextlib import contextmanager

import pytest
import torch

from kit.tiny_engine import TRUNKS, Trajectories, batch, build_engine, gloo_rank, infer, on_ranks
from kit.tiny_models import tiny_model
from verl_credit.config.log_prob_path import FLASH, FUSED, LOOP, OURS, describe, log_prob_path

GPU_RECIPE = {
    "use_torch_compile": True,
    "entropy_from_logits_with_chunking": True,
    "entropy_checkpointing": False,
}
PER_ROW = torch.tensor([0.5, 0.7, 0.9, 1.1, 1.3])
CASES = {  # case: (family, attention, settings of the batch)
    "temperature 1": ("qwen3", "auto", {"temperature": 1.0}),
    "one temperature": ("qwen3", "auto", {"temperature": 0.7}),
    "a temperature a row": ("qwen3", "auto", {"temperature": PER_ROW}),
    "capped logits": ("gemma2", "auto", {"temperature": 0.7}),
    "padded rows": ("qwen3", "eager", {"temperature": 0.7, "use_remove_padding": False}),
    "padded rows, a temperature each": (
        "qwen3", "eager", {"temperature": PER_ROW, "use_remove_padding": False},
    ),
}  # fmt: skip


def test_no_other_option_of_verl_reads_the_logits():
    """Our path overwrites the logits with their gradient, so an option that reads them has to go verl's way. A new option
    of verl's fails here before it can be wrong in the backward."""
    from verl.workers.engine.fsdp import FSDPEngineWithLMHead

    from verl_credit.host.engine.log_prob_engine import WANT_LOGITS

    source = inspect.getsource(FSDPEngineWithLMHead.prepare_model_outputs)
    read = set(re.findall(r'get_non_tensor_data\([^)]*key="(\w+)"', source))
    assert read - set(WANT_LOGITS) == {
        "use_remove_padding", "pad_mode", "use_fused_kernels", "calculate_entropy",
    }  # fmt: skip
    for name in WANT_LOGITS:
        assert name in read


@contextmanager
def verls_way():
    """The engine takes verl's own, as where somebody needs the logits."""
    from verl_credit.host.engine import log_prob_engine

    ours = log_prob_engine.log_prob_path
    log_prob_engine.log_prob_path = lambda **_: LOOP
    try:
        yield
    finally:
        log_prob_engine.log_prob_path = ours


def loss_of(model_output, data, dp_group=None):
    """Something that a wrong gradient of either would change, token by token."""
    total = 0.0
    for name, sign in (("log_probs", -1.0), ("entropy", 0.3)):
        for row in model_output[name].unbind() if name in model_output else ():
            total = total + sign * (row * torch.linspace(0.5, 1.5, len(row))).sum()
    return total, {}


def given(settings, **more):
    """Temperatures of single rows are a tensor of the batch."""
    settings, temperature = settings | more, settings["temperature"]
    if not isinstance(temperature, torch.Tensor):
        return batch(Trajectories(TRUNKS), **settings)
    data = batch(Trajectories(TRUNKS), **{k: v for k, v in settings.items() if k != "temperature"})
    data.pop("temperature")
    data["temperature"] = temperature
    return data


def gradients(engine, data) -> dict:
    engine.optimizer_zero_grad()
    with engine.train_mode():
        engine.forward_backward_batch(data, loss_of)
        return {name: weight.grad.full_tensor().clone() for name, weight in engine.module.named_parameters()}


def rank_main(rank, ranks, folder, store, results):
    with gloo_rank(rank, ranks, store):
        for case, (family, attention, settings) in CASES.items():
            engine = build_engine(
                f"{folder}/{family}", attention, training=True, enable_gradient_checkpointing=False,
                use_remove_padding=settings.get("use_remove_padding", True),
            )  # fmt: skip
            found = {}
            for way, context in (("ours", _as_it_is), ("verl's", verls_way)):
                with context():
                    found[way] = {
                        "forward": {n: list(v.unbind()) for n, v in infer(engine, given(settings)).items()},
                        "with entropy": gradients(engine, given(settings)),
                        "without": gradients(engine, given(settings, calculate_entropy=False)),
                    }
            results[case] = found
        results["said"] = engine.describe_log_probs(), engine.describe_log_probs(distills=True)
        results["flash"] = _beside_flash_attn(f"{folder}/qwen3")


@contextmanager
def _as_it_is():
    yield


@contextmanager
def _graphs():
    """[number of frames that Dynamo was asked to compile]"""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    made = []
    yield made
    made.append(counters["frames"]["total"])


def _beside_flash_attn(folder) -> dict:
    """With flash-attn's loss verl's way is taken, and its entropy is ours: neither verl's nor compiled."""
    import verl.utils.torch_functional as verl_F

    from verl_credit.host.engine import log_prob_engine

    engine = build_engine(folder, engine=GPU_RECIPE)
    turns, called = Trajectories(TRUNKS), []
    expected = infer(engine, batch(turns))
    why, loop = log_prob_engine.no_flash_loss, verl_F.logprobs_from_logits_v2
    log_prob_engine.no_flash_loss = lambda: ""
    verl_F.logprobs_from_logits_v2 = lambda *given: (called.append(1), loop(*given))[1]
    try:
        with _graphs() as made:
            found = infer(engine, batch(turns))
        line = engine.describe_log_probs()
    finally:
        log_prob_engine.no_flash_loss, verl_F.logprobs_from_logits_v2 = why, loop
    apart = max(
        float((a - b).abs().max())
        for name in expected
        for a, b in zip(expected[name].unbind(), found[name].unbind(), strict=True)
    )
    return {"called": len(called), "graphs": made[0], "said": line, "apart": apart}


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    for family in {family for family, _, _ in CASES.values()}:
        tiny_model(family, attention="eager").save_pretrained(folder / family)
    return on_ranks(1, rank_main, folder)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_what_the_engine_gives_is_what_verl_gives(case, measured):
    ours, theirs = measured[case]["ours"], measured[case]["verl's"]
    assert ours["forward"].keys() == theirs["forward"].keys() == {"log_probs", "entropy"}
    for name, rows in theirs["forward"].items():
        assert [len(row) for row in rows] == [p + r for p, r in TRUNKS]
        torch.testing.assert_close(ours["forward"][name], rows, rtol=0, atol=1e-6)
    for kind in ("with entropy", "without"):
        largest = max(float(g.abs().max()) for g in theirs[kind].values())
        assert largest > 1
        for name, gradient in theirs[kind].items():
            torch.testing.assert_close(ours[kind][name], gradient, rtol=0, atol=1e-6 * largest, msg=name)
    assert any(not torch.equal(g, theirs["without"][name]) for name, g in theirs["with entropy"].items())


@pytest.mark.slow
def test_beside_flash_attns_loss(measured):
    found = measured["flash"]
    assert found["called"] > 0 and found["graphs"] == 0 and found["apart"] < 1e-6
    assert found["said"].startswith("log-probs: flash-attn's loss")
    assert found["said"].endswith("entropies: the project's own, 2048 tokens at a time")


@pytest.mark.slow
def test_the_start_says_which_and_what_it_holds(measured):
    plain, distilled = measured["said"]
    assert plain.startswith("log-probs and entropies: the project's own (device cpu), 17189 tokens at a time")
    assert "at most 8 MiB beside the logits" in plain
    assert distilled.startswith("log-probs: verl's loop over tokens, about 0.1 ms each (device cpu")
    assert distilled.endswith("entropies: verl's, over all tokens at once")


@pytest.mark.parametrize(
    ("facts", "path"),
    [
        ({"flash": False}, OURS),
        ({"flash": True}, FLASH),
        ({"flash": False, "fused": True}, FUSED),
        ({"flash": True, "fused": True}, FUSED),
        ({"flash": False, "distills": True}, LOOP),
        ({"flash": True, "distills": True}, FLASH),
    ],
)
def test_which_path(facts, path):
    assert log_prob_path(**facts) == path
    assert describe(path, 151936, "cuda", "no flash-attn").startswith("log-probs")


@pytest.mark.parametrize(
    ("device", "available", "switch", "why"),
    [
        ("cpu", True, "0", "device cpu"),
        ("cuda", False, "0", "no flash-attn"),
        ("cuda", True, "1", "VERL_DISABLE_FLASH_ATTN_CE=1"),
        ("cuda", True, "0", ""),
    ],
)
def test_when_flash_attns_loss_runs(monkeypatch, device, available, switch, why):
    """As verl decides it, but never for tensors that are not on a GPU."""
    import verl.utils.torch_functional as verl_F

    from verl_credit.host.engine import log_prob_engine

    monkeypatch.setattr(log_prob_engine, "get_device_name", lambda: device)
    monkeypatch.setattr(verl_F, "FLAH_ATTN_CROSS_ENTROPY_LOSS_AVAILABLE", available)
    monkeypatch.setenv("VERL_DISABLE_FLASH_ATTN_CE", switch)
    assert log_prob_engine.no_flash_loss() == why
