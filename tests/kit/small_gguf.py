"""A GGUF like the package's, small: llama architecture, two layers of random weights, a byte-level vocabulary with ChatML's
tokens. Written with the format's own library."""

from pathlib import Path

import gguf
import numpy as np
from tokenizers import pre_tokenizers

HIDDEN, HEADS, KV_HEADS, INNER, LAYERS = 32, 4, 2, 48, 2
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
)


def write_gguf(path: Path, *, special: list[str] = SPECIAL, seed: int = 0) -> None:
    tokens = [*special, *sorted(pre_tokenizers.ByteLevel.alphabet()), "ab", "cd"]
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_name("small")
    writer.add_context_length(64)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    kinds = [gguf.TokenType.CONTROL] * len(special) + [gguf.TokenType.NORMAL] * (len(tokens) - len(special))
    writer.add_token_types(kinds)
    writer.add_token_merges(["a b", "c d"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template(TEMPLATE)
    random = np.random.default_rng(seed)

    def add(name: str, *shape: int) -> None:
        writer.add_tensor(name, random.normal(0, 0.1, shape).astype(np.float32))

    add("token_embd.weight", len(tokens), HIDDEN)
    add("output_norm.weight", HIDDEN)
    head = HIDDEN // HEADS
    for n in range(LAYERS):
        add(f"blk.{n}.attn_norm.weight", HIDDEN)
        add(f"blk.{n}.ffn_norm.weight", HIDDEN)
        add(f"blk.{n}.attn_q.weight", HIDDEN, HIDDEN)
        add(f"blk.{n}.attn_k.weight", KV_HEADS * head, HIDDEN)
        add(f"blk.{n}.attn_v.weight", KV_HEADS * head, HIDDEN)
        add(f"blk.{n}.attn_output.weight", HIDDEN, HIDDEN)
        add(f"blk.{n}.ffn_gate.weight", INNER, HIDDEN)
        add(f"blk.{n}.ffn_up.weight", INNER, HIDDEN)
        add(f"blk.{n}.ffn_down.weight", HIDDEN, INNER)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
