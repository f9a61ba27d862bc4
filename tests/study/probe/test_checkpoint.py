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
from verl_credit.study.probe.update import adamw_step

BLOCKS = ("model.layers.0.", "model.layers.1.")
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


def save(folder, model, weights, optimizers, version, step=7):
    """``weights``, ``optimizers``: what every rank writes."""
    actor = folder / f"global_step_{step}" / "actor"
    model.config.save_pretrained(actor / "huggingface")
    ranks = len(weights)
    (actor / "fsdp_config.json").write_text(json.dumps({"FSDP_version": version, "world_size": ranks}))
    for kind, files in (("model", weights), ("optim", optimizers)):
        for rank, content in enumerate(files):
            torch.save(content, actor / f"{kind}_world_size_{ranks}_rank_{rank}.pt")
    return actor.parent


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
        groups = saved["param_groups"]
        return save(
            folder, model, weights, [{"state": state, "param_groups": groups} for state in states], version=2
        )


def save_fsdp1(folder, model, optimizer, ranks, original=False, blocks=BLOCKS):
    """Flat parameters: the root's own and every block's, each padded to equal shares of the ranks."""
    names = [name for name, _ in model.named_parameters()]
    units = [[n for n in names if not n.startswith(blocks)]]
    units += [[n for n in names if n.startswith(block)] for block in blocks]
    states = dict(zip(names, optimizer.state.values(), strict=True))
    group = {key: value for key, value in optimizer.state_dict()["param_groups"][0].items()}
    files = [{"state": {}, "param_groups": []} for _ in range(ranks)]
    for index, unit in enumerate(units):
        size = sum(states[name]["exp_avg"].numel() for name in unit)
        share = math.ceil(size / ranks)
        for rank, file in enumerate(files):
            begin, end = rank * share, (rank + 1) * share
            if not original:
                flat = {
                    key: torch.cat([states[name][key].flatten() for name in unit] + [torch.zeros(ranks * share - size)])
                    for key in ("exp_avg", "exp_avg_sq")
                }  # fmt: skip
                file["state"][index] = {key: value[begin:end].clone() for key, value in flat.items()}
                file["state"][index]["step"] = torch.tensor(3.0)
                continue
            at = 0
            for name in unit:
                own, offset = states[name], at
                at += own["exp_avg"].numel()
                if max(begin, offset) < min(end, at):
                    held = slice(max(begin - offset, 0), end - offset)
                    entry = {key: own[key].flatten()[held].clone() for key in ("exp_avg", "exp_avg_sq")}
                    file["state"][names.index(name)] = entry | {"step": torch.tensor(3.0)}
    for file in files:
        file["param_groups"] = [group | {"params": list(range(len(names) if original else len(units)))}]
    if ranks == 1:
        return save(folder, model, [dict(model.state_dict())], files, version=1)
    with mesh_of(ranks) as mesh:
        split = {name: dtensors(tensor, mesh) for name, tensor in model.state_dict().items()}
        weights = [{name: pieces[rank] for name, pieces in split.items()} for rank in range(ranks)]
        return save(folder, model, weights, files, version=1)


def assert_same(checkpoint, model, optimizer):
    expected = dict(model.named_parameters())
    assert list(checkpoint.parameters) == list(checkpoint.optimizer.parameters) == list(expected)
    assert checkpoint.buffers == {}
    for name, state in optimizer_state(optimizer, expected.items()).parameters.items():
        read = checkpoint.optimizer.parameters[name]
        assert type(read.exp_avg) is type(checkpoint.parameters[name]) is torch.Tensor
        assert torch.equal(checkpoint.parameters[name], expected[name])
        assert torch.equal(read.exp_avg, state.exp_avg) and torch.equal(read.exp_avg_sq, state.exp_avg_sq)
        assert (read.step, read.betas, read.eps, read.weight_decay) == (3, *list(GROUP.values())[1:])


@pytest.mark.parametrize("shape", [(1,), (3,), (5,), (2, 2)], ids=str)
def test_fsdp2_shards_become_whole(live, tmp_path, shape):
    """61 rows over 3 ranks are uneven, 8 elements over 5 leave the last rank with none, (2, 2) has two replicas."""
    checkpoint = read_checkpoint(save_fsdp2(tmp_path, *live, *shape))
    assert checkpoint.step == 7 and checkpoint.stored_dtype == torch.float32
    assert_same(checkpoint, *live)


def test_weights_that_are_not_tied(tmp_path):
    model, optimizer = policy(tied=False)
    checkpoint = read_checkpoint(save_fsdp2(tmp_path, model, optimizer, 2))
    assert "lm_head.weight" in checkpoint.parameters
    assert_same(checkpoint, model, optimizer)


@pytest.mark.parametrize("original", [False, True], ids=["flat", "use_orig_params"])
@pytest.mark.parametrize("ranks", [1, 3])
def test_fsdp1_is_mapped_back_to_parameters(live, tmp_path, ranks, original):
    assert_same(read_checkpoint(save_fsdp1(tmp_path, *live, ranks, original)), *live)


def test_one_flat_parameter_of_the_whole_model(live, tmp_path):
    assert_same(read_checkpoint(save_fsdp1(tmp_path, *live, 2, blocks=())), *live)


@pytest.mark.parametrize(
    "save_as", [save_fsdp2, lambda *given: save_fsdp1(*given, 1)], ids=["fsdp2", "fsdp1"]
)
def test_what_was_read_does_not_depend_on_the_files(live, tmp_path, save_as):
    folder = save_as(tmp_path, *live)
    checkpoint = read_checkpoint(folder)
    for file in (folder / "actor").glob("*.pt"):
        with file.open("r+b") as opened:
            opened.write(bytes(file.stat().st_size))
    assert_same(checkpoint, *live)


def test_the_next_step_is_the_one_that_training_would_have_made(tmp_path):
    model, optimizer = policy()
    checkpoint = read_checkpoint(save_fsdp2(tmp_path, model, optimizer, 2))
    backward(model, seed=9)
    gradient = {name: parameter.grad.double() for name, parameter in model.named_parameters()}
    step = adamw_step(checkpoint.parameters, gradient, checkpoint.optimizer, max_grad_norm=0.5)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    for name, parameter in model.named_parameters():
        moved = parameter.double() - checkpoint.parameters[name].double()
        torch.testing.assert_close(GROUP["lr"] * step[name], moved.detach(), rtol=1e-4, atol=3e-7)


def test_a_parameter_that_never_had_a_gradient_starts_at_zero(live, tmp_path):
    folder = save_fsdp2(tmp_path, *live)
    edit(folder, "optim", lambda saved: saved["state"].pop(5))
    state = read_checkpoint(folder).optimizer.parameters["model.layers.0.self_attn.q_norm.weight"]
    assert state.step == 0 and state.exp_avg.shape == (8,) and not state.exp_avg_sq.any()


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

    def logits(weights):
        return torch.func.functional_call(
            built, weights, kwargs={"input_ids": ids, "use_cache": False}
        ).logits

    weights = {name: weight.detach() for name, weight in built.named_parameters()}
    along = {name: torch.ones_like(weight) for name, weight in weights.items()}
    _, slope = torch.func.jvp(logits, (weights,), (along,))
    ahead, behind = ({n: weight + by for n, weight in weights.items()} for by in (1e-4, -1e-4))
    difference = (logits(ahead) - logits(behind)) / 2e-4  # norms and softmax compute in float32
    torch.testing.assert_close(slope, difference, rtol=0, atol=1e-3 * difference.abs().max().item())
    del parameters["model.norm.weight"]
    with pytest.raises(ConfigError) as error:
        build_model(folder, parameters, torch.float64, "cpu")
    assert (error.value.key, error.value.value) == ("checkpoint", folder / "actor")
    assert error.value.accepted == "weights missing: ['model.norm.weight']; not the model's: none"


def test_bfloat16_weights_are_read_and_named(tmp_path):
    model, optimizer = policy(dtype=torch.bfloat16)
    checkpoint = read_checkpoint(save_fsdp2(tmp_path, model, optimizer, 2))
    assert checkpoint.stored_dtype == torch.bfloat16
    assert_same(checkpoint, model, optimizer)


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


REFUSED = {
    "no optimiser": (
        lambda f: remove(f, "optim*"),
        "the checkpoint was saved without its optimiser: .*save_contents of the run must list optimizer",
    ),
    "a rank": (
        lambda f: remove(f, "optim*rank_1.pt"),
        "optim_world_size_2_rank_1.pt is missing: copy the files of all 2 ranks here",
    ),
    "the weights": (
        lambda f: remove(f, "model*"), "model_world_size_2_rank_0.pt is missing: copy the files of all 2 ranks here",
    ),
    "fsdp_config": (lambda f: remove(f, "fsdp_config.json"), "only checkpoints of verl's FSDP engines are read"),
    "config": (lambda f: remove(f, "huggingface/config.json"), "huggingface/config.json is missing"),
    "shape": (
        lambda f: set_config(f, vocab_size=62),
        r"model.embed_tokens.weight has shape \(61, 32\), huggingface/config.json says \(62, 32\)",
    ),
    "layers": (
        lambda f: set_config(f, num_hidden_layers=1, layer_types=["full_attention"]),
        "model.layers.1.* is no weight of the model in huggingface",
    ),
    "a weight": (lambda f: edit(f, "model", lambda s: s.pop("model.norm.weight")), "model.norm.weight is missing"),
    "adapter": (
        lambda f: edit(f, "model", lambda s: s.update({"base_model.q.lora_A.weight": torch.ones(1)})),
        "base_model.q.lora_A.weight: the run trained a LoRA adapter, expected one that trained all weights",
    ),
    "not tied": (
        lambda f: edit(f, "model", lambda s: s["lm_head.weight"].to_local().add_(1)),
        "lm_head.weight differs from model.embed_tokens.weight, to which huggingface/config.json ties it",
    ),
    "not AdamW": (
        lambda f: edit(f, "optim", other_optimizer),
        "model.embed_tokens.weight: the optimiser is not torch's AdamW: it has no exp_avg",
    ),
    "one rank's state": (
        lambda f: edit(f, "optim", lambda s: s["state"].pop(0), rank=1),
        "the ranks' files disagree on what the optimiser holds for model.embed_tokens.weight",
    ),
    "groups": (
        lambda f: edit(f, "optim", lambda s: s["param_groups"].append(s["param_groups"][0])),
        "the optimiser has 2 parameter groups, expected verl's one",
    ),
    "an index": (
        lambda f: edit(f, "optim", lambda s: s["param_groups"][0]["params"].pop()),
        "the optimiser has 23 entries; the model has 24 parameters in 3 wrapped units",
    ),
    "an object": (
        lambda f: edit(f, "optim", lambda s: s.update(made_by=f)), "not a file of tensors that loads with weights_only=True",
    ),
}  # fmt: skip


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


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_missing_or_does_not_fit_is_refused(whole, tmp_path, what):
    folder = shutil.copytree(whole, tmp_path / whole.name)
    damage, message = REFUSED[what]
    damage(folder)
    refused_with(message, folder)


def test_weights_alone_need_no_optimiser(live, tmp_path):
    folder = save_fsdp2(tmp_path, *live, 2)
    whole = read_checkpoint(folder)
    remove(folder, "optim_world_size_*")
    alone = read_checkpoint(folder, optimizer=False)
    assert alone.optimizer is None and alone.parameters.keys() == whole.parameters.keys()
    assert all(torch.equal(tensor, whole.parameters[name]) for name, tensor in alone.parameters.items())


def test_other_wrapped_units_are_refused(live, tmp_path):
    """Three units as verl's, but cut elsewhere."""
    folder = save_fsdp1(tmp_path, *live, 2, blocks=(BLOCKS[0], f"{BLOCKS[1]}mlp."))
    message = r"exp_avg of model.embed_tokens.weight, model.norm.weight has \d+ elements, expected 1984\. .*strategy=fsdp2"
    refused_with(message, folder)


def test_a_step_that_is_not_there_names_those_that_are(live, tmp_path):
    place = tmp_path / "checkpoints"
    for step in (10, 9):
        (place / f"global_step_{step}" / "actor").mkdir(parents=True)
    (place / "global_step_5").mkdir()  # verl has removed its actor
    for given in (
        place / "global_step_11",
        place / "global_step_5",
        place,
        tmp_path,
        tmp_path / "global_step_9",
    ):
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
        from verl.utils.checkpoint.fsdp_checkpoint_manager import FSDPCheckpointManager
        from verl.utils.fsdp_utils import apply_fsdp2, get_fsdp_wrap_policy

        mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("fsdp",))
        for kind in ("fsdp2", "flat", "original"):
            model = tiny_model("qwen3", attention="eager", tie_word_embeddings=True)
            if kind == "fsdp2":
                apply_fsdp2(model, {"mesh": mesh}, {})
            else:
                model = FullyShardedDataParallel(
                    model, auto_wrap_policy=get_fsdp_wrap_policy(model), device_id=torch.device("cpu"),
                    device_mesh=mesh, use_orig_params=kind == "original",
                )  # fmt: skip
            FSDPCheckpointManager(model, trained(model)).save_checkpoint(
                f"{folder}/{kind}/global_step_3/actor"
            )


@pytest.mark.slow
def test_checkpoints_that_verl_wrote(live, tmp_path):
    on_ranks(2, save_by_verl, tmp_path)
    for kind in ("fsdp2", "flat", "original"):
        checkpoint = read_checkpoint(tmp_path / kind / "global_step_3")
        assert_same(checkpoint, *live)
