"""A recipe's model, data and retriever as doctor looks at them."""

import json

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from kit.machine import FAIL, MACHINE, PASS, SKIP, WARN, says
from kit.preflight import GOOD
from kit.recipes import load_config
from verl_credit.errors import PreflightError
from verl_credit.recipe import model_files as files
from verl_credit.recipe.doctor import checks, inputs
from verl_credit.recipe.doctor.context import Context

LAB = load_config("lab", [])
INPUTS = [check for check in checks.CHECKS if check.stage is checks.Stage.INPUTS]
QWEN = "Qwen/Qwen3-4B-Instruct-9999"


def looked_at(config, *names):
    """{check: result}; what needs verl is left out."""
    with_verl = ("template", "stream", "verl", "tools")
    made = [c for c in INPUTS if c.name not in with_verl and (not names or c.name in names)]
    return {result.name: result for result in checks.examine(Context(MACHINE, config), made)}


@pytest.fixture
def config():
    return LAB.copy()


@pytest.fixture
def model(tmp_path, config):
    """A folder in Hugging Face format: two shards of 6 and 4 parameters."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "qwen3", "vocab_size": 2}')
    save_file({"a": torch.zeros(2, 3)}, folder / "1.safetensors")
    save_file({"b": torch.zeros(4)}, folder / "2.safetensors", metadata={"format": "pt"})
    index = {"weight_map": {"a": "1.safetensors", "b": "2.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    Tokenizer(WordLevel({"x": 0, "y": 1}, unk_token="x")).save(str(folder / "tokenizer.json"))
    config.actor_rollout_ref.model.path = str(folder)
    return folder


def cut(path):
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize(
    "harm, text",
    [
        (lambda f: (f / "config.json").write_text("{"), "config.json is not JSON"),
        (lambda f: (f / "2.safetensors").unlink(), "2.safetensors: No such file"),
        (lambda f: cut(f / "2.safetensors"), "2.safetensors: not a whole"),
        (lambda f: [p.unlink() for p in f.glob("*.safetensors*")], "no *.safetensors"),
    ],
)
def test_weights_that_cannot_be_read(config, model, harm, text):
    assert says(looked_at(config, "weights")["weights"], PASS, "qwen3, 10 parameters")
    assert Context(MACHINE, config).parameters == 10
    harm(model)
    assert says(looked_at(config, "weights")["weights"], FAIL, text, "cut short")


def test_a_model_that_is_none_is_told_once(config, model):
    (model / "config.json").unlink()
    found = looked_at(config, "model", "weights", "positions", "tokenizer", "answers")
    assert says(found["model"], FAIL, "no config.json there", "a folder in Hugging Face format")
    others = [found[name] for name in ("weights", "positions", "tokenizer", "answers")]
    assert all(says(result, SKIP, "see model") for result in others)


def test_a_model_on_the_hub(config, model, hub):
    config.actor_rollout_ref.model.path = QWEN
    assert says(looked_at(config, "model")["model"], FAIL, "HF_HUB_OFFLINE", "hf download")
    folder = hub(QWEN, model)
    found = looked_at(config, "model", "weights")
    assert says(found["model"], PASS) and says(found["weights"], PASS, "in the hub's cache")
    assert Context(MACHINE, config).parameters == files.count_parameters(model)
    (folder / "1.safetensors").unlink()
    assert says(looked_at(config, "weights")["weights"], WARN, "1.safetensors", "hf download")


@pytest.mark.parametrize(
    "path, parameters", [("Qwen/Qwen3-4B", 4_022_468_096), ("someone/something", None), (None, None)]
)
def test_the_size_of_a_model_that_is_not_here_is_known_by_its_name(hub, path, parameters):
    assert files.parameters_of(path) == parameters


def test_a_lab_that_is_not_built_is_no_fault(config, tmp_path):
    config.lab.dir = str(tmp_path / "lab")
    found = looked_at(config)
    for name in ("model", "data.train_files", "data.val_files"):
        assert says(found.pop(name), SKIP, "not built yet")
    assert says(found.pop("retriever"), SKIP, "the run starts its own")
    assert {result.found for result in found.values()} == {"see model", "see data.train_files"}


def test_a_file_of_rows_is_read_once(config, tmp_path, monkeypatch):
    path = str(tmp_path / "train.parquet")
    parquet.write_table(pa.Table.from_pylist([GOOD] * 16), path)
    config.data.train_files = config.data.val_files = path
    opened, dataset = [], parquet.ParquetDataset
    monkeypatch.setattr(parquet, "ParquetDataset", lambda file: opened.append(file) or dataset(file))
    context = Context(MACHINE, config)
    for _ in range(2):
        assert len(context.rows("data.train_files")) == len(context.rows("data.val_files")) == 16
    assert len(opened) == 2  # one for each key


def test_the_retriever_and_its_index(config, monkeypatch):
    config.search.url = ["http://a", "http://b"]
    servers = "http://a 0123; http://b 0123"
    monkeypatch.setattr(inputs, "ask_servers", lambda settings: ("0123", servers))
    context = Context(MACHINE, config)
    assert says(inputs.check_retriever(context), PASS, f"index: {servers}")
    assert context.index_fingerprint == "0123"

    def refuse(settings):
        raise PreflightError("search.url=http://b: the retriever is not ready")

    monkeypatch.setattr(inputs, "ask_servers", refuse)
    assert says(looked_at(config, "retriever")["retriever"], FAIL, "not ready", "all from one index")
    config.search.max_searches = 0
    assert says(inputs.check_retriever(Context(MACHINE, config)), SKIP, "does not search")


@pytest.mark.parametrize(("given", "status", "texts"), [
    (["console", "file"], PASS, ["console, file"]), ("wandb", PASS, ["wandb"]),
    (["console", "mlflow", "vemlp_wandb"], FAIL,
     ["trainer.logger=console,mlflow,vemlp_wandb: mlflow, volcengine_ml_platform is not installed"]),
    ("mlflow", FAIL, ["trainer.logger=mlflow", "install mlflow, or name another logger"]),
])  # fmt: skip
def test_a_logger_whose_module_is_missing_is_refused(given, status, texts, config, monkeypatch):
    monkeypatch.setattr(inputs, "find_spec", {"wandb": "installed"}.get)
    config.trainer.logger = given
    assert says(inputs.check_loggers(Context(MACHINE, config)), status, *texts)
