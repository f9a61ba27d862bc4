"""The policy's GGUF as a Hugging Face folder for verl, the rollout engines and transformers."""

from __future__ import annotations

import io
from contextlib import redirect_stderr
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerFast

from verl_credit.worlds.real.packages import INSTALL, RealError

TURN_END, PAD = "<|im_end|>", "<|endoftext|>"


def write_policy(gguf: Path, folder: Path, layers: int | None = None) -> None:
    """Write the folder in float32, the dtype of the dequantised weights. ``layers``: the first ones only, for tests. Raises
    RealError.

    transformers reads ``<|im_start|>`` as the end of a sequence from this file. The file has ``<|im_end|>``, and a policy
    with the other token would write on after its turns. The file also pads with ``<|im_end|>``; we pad with another token,
    so that no mask can take the end of a turn for padding.
    """
    model, tokenizer = read_gguf(gguf)
    if layers is not None:
        model.model.layers = model.model.layers[:layers]
        model.config.num_hidden_layers = layers
    tokenizer.eos_token, tokenizer.pad_token = TURN_END, PAD
    tokenizer.clean_up_tokenization_spaces = False
    tokenizer.model_max_length = model.config.max_position_embeddings
    for config in (model.config, model.generation_config):
        config.eos_token_id, config.pad_token_id = tokenizer.eos_token_id, tokenizer.pad_token_id
    model.config._name_or_path = ""  # the name of a file on another machine
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def read_gguf(gguf: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    """(model, tokenizer). Raises RealError, with the file, without the package gguf and for a file without a model."""
    where = {"gguf_file": gguf.name, "local_files_only": True}
    try:
        with redirect_stderr(io.StringIO()):  # progress bars
            model = AutoModelForCausalLM.from_pretrained(str(gguf.parent), dtype=torch.float32, **where)
            tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), **where)
    except ImportError as error:
        raise RealError(f"{gguf} cannot be read without the package gguf: {INSTALL}") from error
    except (OSError, ValueError, KeyError, TypeError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:200]
        raise RealError(f"{gguf}: no model can be made of it ({type(error).__name__}: {reason})") from error
    for token in (TURN_END, PAD):
        if token not in tokenizer.get_vocab():
            raise RealError(
                f"{gguf}: its vocabulary has no {token}; expected a model that ends its turns with it"
            )
    return model, tokenizer
