"""Reads sentence-transformers' files in an encoder's folder: each option is followed, refused or noted."""

import json
from dataclasses import dataclass
from pathlib import Path

POOLINGS = ("mean", "cls")
# Older versions of sentence-transformers wrote these flags instead of one key "pooling_mode".
FLAGS = {"pooling_mode_mean_tokens": "mean", "pooling_mode_cls_token": "cls"}


@dataclass(frozen=True)
class EncoderSettings:
    """`pooling` and `normalize` of the folder's files, None where they set neither; `notes` are for the user."""

    pooling: str | None = None
    normalize: bool | None = None
    notes: tuple[str, ...] = ()

    def resolve(self, path: Path, pooling: str | None, normalize: bool) -> str:
        """The pooling in force: the argument, the folder's, or the mean. Errors: ValueError when the first two differ."""
        if pooling not in (None, *POOLINGS):
            raise ValueError(f"pooling={pooling!r}; accepted: {', '.join(POOLINGS)}")
        if None not in (pooling, self.pooling) and pooling != self.pooling:
            raise ValueError(
                f"pooling={pooling!r}; the encoder in {path} was trained with {self.pooling!r}, as its Pooling "
                "module says: leave it out, or take that module's files out of the folder"
            )
        if self.normalize and not normalize:
            raise ValueError(
                f"normalize=False; {path / 'modules.json'} lists Normalize: the encoder's vectors have length 1"
            )
        return pooling or self.pooling or "mean"


def read_settings(path: Path) -> EncoderSettings:
    """The settings of the folder `path`; all None for a folder without sentence-transformers' files.

    Errors: ValueError names file and value of a module, pooling or option that would give other vectors than ours.
    """
    modules, listed = path / "modules.json", {}
    if modules.is_file():
        listed = _modules(modules)
    pooling_file = path / (listed.get("Pooling") or "1_Pooling") / "config.json"
    if "Pooling" in listed and not pooling_file.is_file():
        raise ValueError(f"{modules}: lists Pooling, but {pooling_file} does not exist")
    return EncoderSettings(
        pooling=_pooling(pooling_file) if pooling_file.is_file() else None,
        normalize="Normalize" in listed if listed else None,
        notes=tuple(_notes(path, listed)),
    )


def _modules(file: Path) -> dict[str, str]:
    """Folder by kind of module."""
    modules = {}
    for entry in _read(file, list):
        kind = str(entry.get("type")).rsplit(".", 1)[-1] if isinstance(entry, dict) else repr(entry)
        if kind not in ("Transformer", "Pooling", "Normalize") or kind in modules:
            raise ValueError(
                f"{file}: module {kind!r}; only Transformer, Pooling and Normalize, once each, are understood"
            )
        modules[kind] = str(entry.get("path") or "")
    if list(modules)[:2] != ["Transformer", "Pooling"]:
        raise ValueError(
            f"{file}: modules {', '.join(modules)}; expected Transformer, Pooling and maybe Normalize"
        )
    if modules["Transformer"]:
        raise ValueError(
            f"{file}: Transformer is in {modules['Transformer']!r}; expected it beside {file.name}"
        )
    return modules


def _pooling(file: Path) -> str:
    config = _read(file, dict)
    flags = {key: value for key, value in config.items() if key.startswith("pooling_mode_")}
    modes = [FLAGS.get(key, key) for key, value in flags.items() if value]
    if not flags:
        modes = [config.get("pooling_mode", "mean")]
    if len(modes) != 1 or modes[0] not in POOLINGS:
        raise ValueError(f"{file}: pooling {modes}; accepted: one of {', '.join(POOLINGS)}")
    if config.get("include_prompt", True) is not True:
        raise ValueError(
            f"{file}: include_prompt={config['include_prompt']!r}; here the prefix is part of what is pooled"
        )
    return modes[0]


def _notes(path: Path, listed: dict):
    if listed and "Normalize" not in listed:
        yield f"{path / 'modules.json'} lists no Normalize; use --no-normalize for inner products of unnormalised vectors"
    options = path / "sentence_bert_config.json"
    if options.is_file():
        for key, value in _read(options, dict).items():
            if key == "max_seq_length" or (key == "do_lower_case" and value):
                yield f"{options}: {key}={value!r} is not followed; --max-length and the tokenizer decide"
    prompts_file = path / "config_sentence_transformers.json"
    if prompts_file.is_file() and (prompts := _read(prompts_file, dict).get("prompts")):
        yield f"{prompts_file}: prompts={prompts!r} are not followed; --query-prefix and --passage-prefix decide"


def _read(file: Path, kind: type):
    try:
        parsed = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is not JSON ({error})") from None
    if not isinstance(parsed, kind):
        raise ValueError(f"{file}: {str(parsed)[:80]!r}; expected a JSON {kind.__name__}")
    return parsed
