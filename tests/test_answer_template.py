"""The gold span is exact, whatever the tokenizer merges."""

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from verl_credit.host.answer_template import assistant_header, pseudo_answer


def byte_level(merges_from: list[str]) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(merges_from, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


@pytest.fixture(scope="module")
def merging():
    return byte_level(["<answer>Paris</answer>", "<answer>Rome</answer>"] * 20)


def gold_text(tokenizer, answer):
    return tokenizer.decode(list(answer.token_ids[answer.gold_start : answer.gold_end]))


def test_span_of_single_bytes_is_the_gold_answer():
    tokenizer = byte_level([])
    answer = pseudo_answer(tokenizer, "Zürich 1")
    assert gold_text(tokenizer, answer) == "Zürich 1"
    assert tokenizer.decode(list(answer.token_ids)) == "<answer>Zürich 1</answer>"


def test_merged_border_tokens_count_as_gold(merging):
    answer = pseudo_answer(merging, "Paris")
    text = gold_text(merging, answer)
    assert "Paris" in text
    before = merging.decode(list(answer.token_ids[: answer.gold_start]))
    assert "<answer>".startswith(before)


def test_gold_that_also_stands_in_the_template_is_found_in_its_place():
    tokenizer = byte_level([])
    answer = pseudo_answer(tokenizer, "answer", "<answer>{answer}</answer>")
    assert answer.gold_start == len("<answer>") and gold_text(tokenizer, answer) == "answer"


def test_refusals():
    tokenizer = byte_level([])
    with pytest.raises(ValueError, match=r"must contain \{answer\}"):
        pseudo_answer(tokenizer, "x", "<answer></answer>")
    with pytest.raises(ValueError, match="no token of its own"):
        pseudo_answer(tokenizer, "")


def test_header_is_what_the_template_puts_before_the_policys_turn():
    tokenizer = byte_level([])
    tokenizer.chat_template = (
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    assert tokenizer.decode(assistant_header(tokenizer)) == "\n<|assistant|>"
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    with pytest.raises(ValueError, match="no generation prompt"):
        assistant_header(tokenizer)
