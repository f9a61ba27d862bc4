"""verl's checkpoints: sharded tensors made whole, AdamW's state by name, and what is refused."""

import json
import math
import re
import shutil
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from kit.live_optimizer import optimizer_state
from kit.tiny_engine import gloo_rank, on_ranks
from kit.tiny_models import VOCABULARY, tiny_model
from verl_credit.errors import ConfigError
from verl_credit.study.probe.checkpoint import build_model, read_checkpoint

GROUP = {"lr": 1e-2, "betas": (0.8, 0.95), "eps": 1e-4, "weight_decay": 0.1}


def backward(model, seed):
    ids = torch.randint(3, VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(seed))
    model.zero_grad()
    model(input_ids=ids).logits.logsumexp(-1).square().mean().backward()


def trained(model):
    optimizer = torch.optim.AdamW(model.parameters(), **GROUP)
    for seed in range(3):
        backward(model, seed)
        optimizer.step()
    return optimizer


def policy(tied=True, dtype=torch.float32):
    model = tiny_model("qwen3", attention="eager", tie_word_embeddings=tied, dtype=dtype)
    return model, trained(model)


@pytest.fixture(scope="module")
def live():
    return policy()


@contextmanager
def mesh_of(*shape):
    """A mesh of ranks that this process stands for alone."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=math.prod(shape))
    try:
        yield init_device_mesh("cpu", shape, mesh_dim_names=("ddp", "fsdp")[-len(shape) :])
    finally:
        dist.destroy_process_group()


def dtensors(tensor, mesh):
    """Every rank's shard over dimension 0, as FSDP2 divides it: first ranks one more, last ranks perhaps nothing."""
    placements = [Replicate(), Shard(0)][-mesh.ndim :]
    chunks = list(tensor.detach().chunk(mesh.shape[-1]))
    chunks += [tensor.detach()[:0]] * (mesh.shape[-1] - len(chunks))
    shape = {"shape": tensor.shape, "stride": tensor.stride(), "run_check": False}
    return [DTensor.from_local(piece.clone(), mesh, placements, **shape) for piece in chunks] * (
        mesh.size() // len(chunks)
    )


def save_fsdp2(folder, model, optimizer, *shape):
    saved = optimizer.state_dict()
    with mesh_of(*(shape or (1,))) as mesh:
        ranks = range(mesh.size())
        split = {name: dtensors(tensor, mesh) for name, tensor in model.state_dict().items()}
        moments = {
            index: {key: [value] * len(ranks) if key == "step" else dtensors(value, mesh) for key, value in own.items()}
            for index, own in saved["state"].items()
        }  # fmt: skip
        weights = [{name: pieces[rank] for name, pieces in split.items()} for rank in ranks]
        states = [
            {index: {key: pieces[rank] for key, pieces in own.items()} for index, own in moments.items()}
            for rank in ranks
        ]
        optimizers = [{"state": state, "param_groups": saved["param_groups"]} for state in states]
        actor = folder / "global_step_7" / "actor"
        model.config.save_pretrained(actor / "huggingface")
        (actor / "fsdp_config.json").write_text(json.dumps({"FSDP_version": 2, "world_size": len(ranks)}))
        for kind, files in (("model", weights), ("optim", optimizers)):
            for rank, content in enumerate(files):
                torch.save(content, actor / f"{kind}_world_size_{len(ranks)}_rank_{rank}.pt")
        return actor.parent


def assert_same(checkpoint, model, optimizer, off=0.0):
    expected = dict(model.named_parameters())
    assert list(checkpoint.parameters) == list(checkpoint.optimizer.parameters) == list(expected)
    assert checkpoint.buffers == {}
    for name, state in optimizer_state(optimizer, expected.items()).parameters.items():
        read = checkpoint.optimizer.parameters[name]
        assert type(read.exp_avg) is type(checkpoint.parameters[name]) is torch.Tensor
        pairs = {checkpoint.parameters[name]: expected[name].detach(), read.exp_avg: state.exp_avg}
        for found, wanted in (pairs | {read.exp_avg_sq: state.exp_avg_sq}).items():
            torch.testing.assert_close(found, wanted, rtol=off, atol=off)
        assert (read.step, read.betas, read.eps, read.weight_decay) == (3, *list(GROUP.values())[1:])


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(1,), (3,), (5,), (2, 2)], ids=str)
def test_fsdp2_shards_become_whole(live, tmp_path, shape):
    """61 rows over 3 ranks are uneven, 8 elements over 5 leave the last rank with none, (2, 2) has two replicas."""
    checkpoint = read_checkpoint(save_fsdp2(tmp_path, *live, *shape))
    assert checkpoint.step == 7 and checkpoint.stored_dtype == torch.float32
    assert_same(checkpoint, *live)


@pytest.mark.slow
@pytest.mark.parametrize("tied, dtype", [(False, torch.float32), (True, torch.bfloat16)])
def test_weights_that_are_not_tied_or_in_half_precision(tmp_path, tied, dtype):
    model, optimizer = policy(tied, dtype)
    checkpoint = read_checkpoint(save_fsdp2(tmp_path, model, optimizer, 2))
    assert checkpoint.stored_dtype == dtype and ("lm_head.weight" in checkpoint.parameters) is not tied
    assert_same(checkpoint, model, optimizer)


def test_a_parameter_that_never_had_a_gradient_starts_at_zero(live, tmp_path):
    folder = save_fsdp2(tmp_path, *live)
    edit(folder, "optim", lambda saved: saved["state"].pop(5))
    state = read_checkpoint(folder).optimizer.parameters["model.layers.0.self_attn.q_norm.weight"]
    assert state.step == 0 and state.exp_avg.shape == (8,) and not state.exp_avg_sq.any()


@pytest.mark.slow
def test_the_model_is_the_one_that_was_saved(live, tmp_path):
    model, _ = live
    folder = save_fsdp2(tmp_path, *live, 2)
    set_config(folder, attn_implementation="auto")  # as a run with verl_credit's attention saves it
    parameters = read_checkpoint(folder).parameters
    built = build_model(folder, parameters, torch.float64, "cpu")
    assert built.lm_head.weight is built.model.embed_tokens.weight
    assert not built.training and built.config._attn_implementation == "eager"
    assert {weight.dtype for weight in built.parameters()} == {torch.float64}
    ids = torch.arange(3, 20)[None]
    torch.testing.assert_close(
        built(input_ids=ids).logits.float(), model(input_ids=ids).logits, rtol=1e-4, atol=1e-4
    )
    del parameters["model.norm.weight"]
    with pytest.raises(ConfigError) as error:
        build_model(folder, parameters, torch.float64, "cpu")
    assert (error.value.key, error.value.value) == ("checkpoint", folder / "actor")
    assert error.value.accepted == "weights missing: ['model.norm.weight']; not the model's: none"


def edit(folder, kind, change, rank="*"):
    """``change`` what every rank wrote."""
    for path in (folder / "actor").glob(f"{kind}_*_rank_{rank}.pt"):
        content = torch.load(path, weights_only=True)
        change(content)
        torch.save(content, path)


def remove(folder, pattern):
    for path in (folder / "actor").glob(pattern):
        path.unlink()


def set_config(folder, **changes):
    path = folder / "actor" / "huggingface" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def other_optimizer(saved):
    for own in saved["state"].values():
        own["momentum_buffer"] = own.pop("exp_avg")


REFUSED = [
    (lambda f: remove(f, "optim*"), "without its optimiser: .*save_contents of the run must list optimizer"),
    (lambda f: remove(f, "optim*rank_1.pt"), "optim_world_size_2_rank_1.pt is missing"),
    (lambda f: remove(f, "model*"), "model_world_size_2_rank_0.pt is missing"),
    (lambda f: remove(f, "fsdp_config.json"), "only checkpoints of verl's FSDP engines"),
    (lambda f: remove(f, "huggingface/config.json"), "huggingface/config.json is missing"),
    (lambda f: set_config(f, vocab_size=62), r"embed_tokens.weight has shape \(61, 32\), .* says \(62, 32\)"),
    (
        lambda f: set_config(f, num_hidden_layers=1, layer_types=["full_attention"]),
        "layers.1.* is no weight of",
    ),
    (lambda f: edit(f, "model", lambda s: s.pop("model.norm.weight")), "model.norm.weight is missing"),
    (
        lambda f: edit(f, "model", lambda s: s.update({"q.lora_A.weight": torch.ones(1)})),
        "q.lora_A.weight: .*LoRA",
    ),
    (
        lambda f: edit(f, "model", lambda s: s["lm_head.weight"].to_local().add_(1)),
        "lm_head.weight differs from",
    ),
    (
        lambda f: edit(f, "optim", other_optimizer),
        "embed_tokens.weight: .*not torch's AdamW: it has no exp_avg",
    ),
    (
        lambda f: edit(f, "optim", lambda s: s["state"].pop(0), rank=1),
        "disagree on .* model.embed_tokens.weight",
    ),
    (
        lambda f: edit(f, "optim", lambda s: s["param_groups"].append(s["param_groups"][0])),
        "2 parameter groups",
    ),
    (
        lambda f: edit(f, "optim", lambda s: s["param_groups"][0]["params"].pop()),
        "23 entries; .* 24 parameters",
    ),
    (
        lambda f: edit(f, "optim", lambda s: s.update(made_by=f)),
        "not a file of tensors that loads with weights_only",
    ),
]


def refused_with(accepted, folder):
    with pytest.raises(ConfigError) as error:
        read_checkpoint(folder)
    assert error.value.key == "checkpoint"
    assert folder in (error.value.value, *error.value.value.parents)
    assert re.search(accepted, error.value.accepted)


@pytest.fixture(scope="module")
def whole(live, tmp_path_factory):
    folder = save_fsdp2(tmp_path_factory.mktemp("whole"), *live, 2)
    read_checkpoint(folder)
    return folder


@pytest.mark.parametrize("damage, message", REFUSED)
def test_what_is_missing_or_does_not_fit_is_refused(whole, tmp_path, damage, message):
    folder = shutil.copytree(whole, tmp_path / whole.name)
    damage(folder)
    refused_with(message, folder)


@pytest.mark.slow
def test_weights_alone_need_no_optimiser(live, tmp_path):
    folder = save_fsdp2(tmp_path, *live, 2)
    whole = read_checkpoint(folder)
    remove(folder, "optim_world_size_*")
    alone = read_checkpoint(folder, optimizer=False)
    assert alone.optimizer is None and alone.parameters.keys() == whole.parameters.keys()
    assert all(torch.equal(tensor, whole.parameters[name]) for name, tensor in alone.parameters.items())


def test_a_step_that_is_not_there_names_those_that_are(live, tmp_path):
    place = tmp_path / "checkpoints"
    for step in (10, 9):
        (place / f"global_step_{step}" / "actor").mkdir(parents=True)
    (place / "global_step_5").mkdir()  # verl has removed its actor
    for given in (place / "global_step_11", place / "global_step_5", place, tmp_path / "global_step_9"):
        with pytest.raises(ConfigError) as error:
            read_checkpoint(given)
        assert (error.value.key, error.value.value) == ("checkpoint", given)
        assert error.value.accepted.endswith(f"steps with one in {place}: 9, 10")
    with pytest.raises(ConfigError) as error:
        read_checkpoint(tmp_path / "elsewhere" / "global_step_9")
    assert error.value.accepted.endswith(f"there is none in {tmp_path / 'elsewhere'} either")


def save_by_verl(rank, ranks, folder, store, results):
    """The model of `policy`, trained under each kind of FSDP and saved by verl's own manager."""
    with gloo_rank(rank, ranks, store):
        from verl_credit.host.process.verl_checks import register_all

        register_all()
        from torch.distributed.fsdp import FullyShardedDataParallel
        from torch.distributed.fsdp.wrap import ModuleWrapPolicy
        from verl.utils.checkpoint.fsdp_checkpoint_manager import FSDPCheckpointManager
        from verl.utils.fsdp_utils import apply_fsdp2, get_fsdp_wrap_policy

        mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("fsdp",))
        for kind in ("fsdp2", "flat", "original", "whole", "other"):
            model = tiny_model("qwen3", attention="eager", tie_word_embeddings=True)
            if kind == "fsdp2":
                apply_fsdp2(model, {"mesh": mesh}, {})
            else:
                others = {"whole": None, "other": ModuleWrapPolicy({type(model.model.layers[0].mlp)})}
                model = FullyShardedDataParallel(
                    model, auto_wrap_policy=others.get(kind, get_fsdp_wrap_policy(model)), device_mesh=mesh,
                    device_id=torch.device("cpu"), use_orig_params=kind == "original",
                )  # fmt: skip
            FSDPCheckpointManager(model, trained(model)).save_checkpoint(
                f"{folder}/{kind}/global_step_3/actor"
            )


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 3])
def test_checkpoints_that_verl_wrote(live, tmp_path, ranks):
    """FSDP2; FSDP1 with verl's units, with its parameters, and with one unit; other units are refused."""
    on_ranks(ranks, save_by_verl, tmp_path)
    for kind in ("fsdp2", "flat", "original", "whole"):
        assert_same(read_checkpoint(tmp_path / kind / "global_step_3"), *live, off=1e-5)  # thirds round
    message = r"exp_avg of model.embed_tokens.weight, .* has \d+ elements, expected \d+\. .*strategy=fsdp2"
    refused_with(message, tmp_path / "other" / "global_step_3")
