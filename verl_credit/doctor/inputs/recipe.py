"""What a recipe reads: model, data, retriever."""

from __future__ import annotations

import json
from math import prod
from pathlib import Path

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from verl_credit.doctor.inputs.data import check_data
from verl_credit.doctor.inputs.hub import cached_config
from verl_credit.doctor.inputs.model import check_model
from verl_credit.doctor.inputs.prompt_lengths import check_prompts, load_tokenizer
from verl_credit.doctor.inputs.retriever import check_server
from verl_credit.doctor.result import Result, failed, passed, skipped, warned
from verl_credit.errors import ConfigError, PreflightError
from verl_credit.machine.facts import Facts
from verl_credit.plan.model_shape import shape_of

MODEL = "actor_rollout_ref.model.path"
HEADER_LIMIT = 100_000_000  # bytes; safetensors' own limit
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")


class Unreadable(ValueError):
    """Names the file and what is wrong with it."""


def check_model_files(facts: Facts, config: DictConfig | None) -> Result:
    """config.json, the header of every weight file, the tokenizer."""
    name = "model"
    if config is None:
        return skipped(name, "no recipe was given")
    path = _value(config, MODEL)
    if unbuilt := _unbuilt_lab(config, [path]):
        return skipped(name, unbuilt)
    right = "a folder in Hugging Face format, or a name on the hub"
    try:
        check_model(path)
    except PreflightError as error:
        return failed(name, str(error), right, f"{MODEL}=FOLDER_OR_NAME")
    folder = Path(path).expanduser()
    if not folder.exists():
        return _on_the_hub(name, path)
    try:
        return passed(name, f"{folder}: {read_model(folder)}")
    except Unreadable as error:
        return failed(name, str(error), right, "fetch it again: a download may have been cut short")


def _on_the_hub(name: str, path: str) -> Result:
    """Called when the hub has it."""
    found = cached_config(path)
    try:
        if found:
            return passed(name, f"{path} in the hub's cache: {read_model(Path(found).parent)}")
        why = "not in the cache"
    except Unreadable as error:
        why = str(error)
    return warned(name, f"{path} on the hub: the run fetches it when it starts ({why})",
                  "fetched before", f"hf download {path}")  # fmt: skip


def read_model(folder: Path) -> str:
    """One line about a model that can be read. Raises Unreadable."""
    config = read_json(folder / "config.json")
    parameters = count_parameters(folder)
    tokenizer = next((folder / n for n in TOKENIZERS if (folder / n).is_file()), None)
    if tokenizer is None:
        raise Unreadable(f"{folder}: no tokenizer; expected one of {', '.join(TOKENIZERS)}")
    if tokenizer.name == "tokenizer.json":
        from tokenizers import Tokenizer

        try:
            words = Tokenizer.from_file(str(tokenizer)).get_vocab_size()
        except Exception as error:  # the library raises plain Exception
            raise Unreadable(f"{tokenizer}: not a tokenizer ({error})") from error
        vocabulary = config.get("vocab_size") or (config.get("text_config") or {}).get("vocab_size")
        if isinstance(vocabulary, int) and words > vocabulary:
            raise Unreadable(f"{tokenizer}: {words} tokens, and config.json has vocab_size={vocabulary}")
    kind = config.get("model_type", "?")
    return f"{kind}, {parameters:,} parameters"


def count_parameters(folder: Path) -> int:
    """From the headers of the safetensors files, which are checked against the files' sizes. Raises Unreadable."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        names = sorted(set(read_json(index).get("weight_map", {}).values()))
    else:
        names = [path.name for path in sorted(folder.glob("*.safetensors"))]
    if not names:
        raise Unreadable(f"{folder}: no *.safetensors; expected the model's weights")
    return sum(_tensor_elements(folder / name) for name in names)


def _tensor_elements(path: Path) -> int:
    try:
        total = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 2 <= length <= min(HEADER_LIMIT, total - 8):
                raise Unreadable(f"{path}: its header would have {length} bytes, the file has {total}")
            header = json.loads(file.read(length))
        tensors = [entry for key, entry in header.items() if key != "__metadata__"]
        needed = 8 + length + max((entry["data_offsets"][1] for entry in tensors), default=0)
    except OSError as error:
        raise Unreadable(f"{path}: {error.strerror or error}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, Unreadable):
            raise
        raise Unreadable(f"{path}: not a safetensors file ({error!r})") from error
    if total != needed:
        raise Unreadable(f"{path}: {total} bytes, and its header describes {needed}")
    return sum(prod(entry["shape"]) for entry in tensors)


def read_json(path: Path) -> dict:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise Unreadable(f"{path}: {error.strerror or error}") from error
    except ValueError as error:
        raise Unreadable(f"{path} is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise Unreadable(f"{path} holds {type(found).__name__}; expected an object")
    return found


def parameters_of(config: DictConfig | None) -> int | None:
    """Of the recipe's model: counted in its files, else by its name or its config.json in the hub's cache; None: unknown."""
    path = None if config is None else _value(config, MODEL)
    if not path or not isinstance(path, str):
        return None
    for folder in (Path(path).expanduser(), _cached_folder(path)):
        try:
            if folder is not None and folder.is_dir():
                return count_parameters(folder)
        except Unreadable:
            continue
    for model in (path, _cached_folder(path)):
        try:
            return shape_of(model).parameters if model else None
        except ConfigError:
            continue
    return None


def _cached_folder(path: str) -> Path | None:
    found = cached_config(path)
    return Path(found).parent if found else None


def check_data_files(facts: Facts, config: DictConfig | None) -> list[Result]:
    if config is None:
        return [skipped("data", "no recipe was given")]
    return [
        _data(config, "data.train_files", config.data.train_batch_size),
        _data(config, "data.val_files", 1),
    ]


def _data(config: DictConfig, key: str, at_least: int) -> Result:
    files = _value(config, key)
    paths = [files] if files is None or isinstance(files, str) else list(files)
    if unbuilt := _unbuilt_lab(config, paths):
        return skipped(key, unbuilt)
    try:
        rows = check_data(
            paths if files is not None else None,
            key,
            at_least=at_least,
            searches=bool(config.search.max_searches),
        )
        said = _prompts(config, key, at_least)
    except PreflightError as error:
        return failed(key, str(error), "parquet files with a prompt that fits and a gold answer in every row",
                      f"{key}=FILE.parquet (`verl-credit prepare` writes such files)")  # fmt: skip
    return passed(key, "; ".join([f"{rows} rows in {len(paths)} files", *said]))


def _prompts(config: DictConfig, key: str, at_least: int) -> list[str]:
    """The prompts' lengths, where the tokenizer is on this machine: the doctor fetches nothing."""
    path = _value(config, MODEL)
    if not isinstance(path, str) or not Path(path).expanduser().is_dir():
        return ["prompt lengths not looked at: the tokenizer is not in a folder here (train counts them)"]
    try:
        tokenizer = load_tokenizer(config.actor_rollout_ref.model)
    except PreflightError as error:
        return [f"prompt lengths not looked at: {error}"]
    return check_prompts(config, key, tokenizer, at_least=at_least)


def check_retriever(facts: Facts, config: DictConfig | None) -> Result:
    """A real query on every server, and what they say that they serve: both as `train` asks, with the token."""
    name = "retriever"
    if config is None:
        return skipped(name, "no recipe was given")
    if config.search.max_searches == 0:
        return skipped(name, "the recipe does not search")
    if config.search.url is None and "lab" in config:
        return skipped(name, "the lab starts its own")
    try:
        _, said = check_server(config.search)
    except PreflightError as error:
        return failed(name, str(error), "every server of search.url answers POST /retrieve, all from one index",
                      "verl-credit-retriever serve --index DIR --encoder DIR, then search.url=http://HOST:PORT")  # fmt: skip
    return passed(name, f"index: {said}")


def _unbuilt_lab(config: DictConfig, paths: list[str | None]) -> str:
    """The lab's own files are made by the run; that they are absent is no fault."""
    if "lab" not in config:
        return ""
    folder = Path(str(config.lab.dir)).expanduser()
    absent = [p for p in paths if p and Path(p).is_relative_to(folder) and not Path(p).exists()]
    if not absent:
        return ""
    return f"the lab is not built yet: `verl-credit train` or `verl-credit lab --dir {folder}` builds it"


def _value(config: DictConfig, key: str):
    """None for a value that the user has yet to give."""
    try:
        return OmegaConf.select(config, key)
    except OmegaConfBaseException:
        return None
