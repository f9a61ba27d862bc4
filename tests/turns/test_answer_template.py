"""The gold span is exact, whatever the tokenizer merges."""

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from kit.settings import settings
from verl_credit.config.keys import AUTO
from verl_credit.turns.score.requests import (
    ANSWER_TAG,
    AnswerWriter,
    RowPlanner,
    assistant_header,
    pseudo_answer,
)


def writer_of(tokenizer, template, header=False):
    """``header``: contexts end at a call."""
    context = "call" if header else "observation"
    return AnswerWriter(tokenizer, settings(info_gain_template=template, info_gain_context=context))


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
    with pytest.raises(ValueError, match="has no token in"):
        pseudo_answer(tokenizer, "")


def test_header_is_what_the_template_puts_before_the_policys_turn():
    tokenizer = byte_level([])
    tokenizer.chat_template = (
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    assert tokenizer.decode(assistant_header(tokenizer)) == "\n<|assistant|>"
    tokenizer.chat_template = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>\n{% endfor %}"
    assert assistant_header(tokenizer) == []  # Mistral: no text marks the policy's turn
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    with pytest.raises(ValueError, match="no generation prompt"):
        assistant_header(tokenizer)


# --- behind a context ---

START = "<|im_start|>"


def with_specials(tokenizer):
    tokenizer.add_special_tokens({"additional_special_tokens": [START]})
    tokenizer.chat_template = (
        "{% for m in messages %}" + START + "{{ m.role }}\n{{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}" + START + "assistant\n{% endif %}"
    )
    return tokenizer


def written(tokenizer, context, gold, *, template=ANSWER_TAG, header=False):
    """(the whole text, the gold part of it, context tokens replaced)."""
    writer = writer_of(tokenizer, template, header)
    ids = tokenizer(context, add_special_tokens=False)["input_ids"]
    dropped, answer = writer.write(writer.tail(ids), gold, writer.template_of(tuple(ids)), True)
    whole = ids[: len(ids) - dropped] + list(answer.token_ids)
    return whole, gold_text(tokenizer, answer), dropped


def test_an_answer_follows_the_header_where_nothing_merges():
    tokenizer = with_specials(byte_level([]))
    context = f"{START}user\nWho?\n{START}assistant\n"
    whole, gold, dropped = written(tokenizer, context, "Paris")
    assert dropped == 0 and gold == "Paris"
    assert tokenizer.decode(whole) == context + "<answer>Paris</answer>"
    assert written(tokenizer, context, "Paris", template="{answer}")[1:] == ("Paris", 0)


def test_header_and_answer_are_tokenised_as_one_where_they_merge():
    """The line break and the tag are one token for this policy: that is how it would have written them."""
    tokenizer = with_specials(byte_level(["assistant\n<answer>"] * 20))
    context = f"{START}user\nWho?\n{START}assistant\n"
    whole, gold, dropped = written(tokenizer, context, "Paris")
    assert dropped > 0 and gold == "Paris"
    assert whole == tokenizer(context + "<answer>Paris</answer>", add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize("merges", [[], ["assistant\n<answer>"] * 20])
def test_a_context_that_ends_at_a_call_is_given_its_header(merges):
    tokenizer = with_specials(byte_level(merges))
    context = f"{START}user\nWho?\n{START}assistant\ncall"
    whole, gold, dropped = written(tokenizer, context, "Paris", header=True)
    assert dropped == 0 and gold == "Paris"
    expected = f"{context}\n{START}assistant\n<answer>Paris</answer>"
    assert tokenizer.decode(whole) == expected


def test_the_bare_prompt_has_its_header_already():
    tokenizer = with_specials(byte_level([]))
    writer = writer_of(tokenizer, ANSWER_TAG, True)
    dropped, answer = writer.write((), "Paris", ANSWER_TAG, False)
    assert (dropped, tokenizer.decode(list(answer.token_ids))) == (0, "<answer>Paris</answer>")


def test_a_header_is_written_with_the_arguments_of_the_rollouts_chat_template():
    """Qwen3 told not to think: the policy's turn begins behind an empty thought, after a call as at the bare prompt."""
    tokenizer = with_specials(byte_level([]))
    tokenizer.chat_template = tokenizer.chat_template.replace(
        "assistant\n{% endif %}",
        "assistant\n{% if enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}",
    )
    quiet = {"enable_thinking": False}
    bare = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Who?"}], tokenize=False, add_generation_prompt=True, **quiet
    )
    assert bare.endswith(THOUGHT)
    changes = {"info_gain_context": "call", "chat_template_kwargs": quiet}
    requests = planned(tokenizer, bare, ["call", f"\npage\n{START}assistant\n{THOUGHT}", "x"], **changes)
    assert [text.rpartition(START)[2] for text in requests] == [
        f"assistant\n{THOUGHT}<answer>Paris</answer>"
    ] * 2


THOUGHT = "<think>\n\n</think>\n\n"


def planned(tokenizer, prompt, parts, *, truth=("Paris",), **changes):
    """The text of every context with its answer: ``parts`` are turn, observation, turn, ..."""
    ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in (prompt, *parts)]
    turns = [place // 2 if place % 2 == 0 else -1 for place, part in enumerate(ids[1:]) for _ in part]
    response = [token for part in ids[1:] for token in part]
    found = RowPlanner(tokenizer, settings(**changes)).requests(0, ids[0], response, turns, truth)
    return [tokenizer.decode([*ids[0], *response][: r.base] + list(r.answer.token_ids)) for r in found]


ASKS = f"{START}user\nPut it in \\boxed{{}}.\n{START}assistant\n"
PLAIN = f"{START}user\nWho?\n{START}assistant\n"


@pytest.mark.parametrize(
    "prompt, form, end",
    [
        (PLAIN, None, "<answer>7</answer>"),
        (ASKS, None, "\\boxed{7}"),
        (PLAIN, "boxed", "\\boxed{7}"),
        (ASKS, "tag", "<answer>7</answer>"),
    ],
)
def test_auto_writes_what_the_row_states_and_else_what_its_prompt_asks_for(prompt, form, end):
    tokenizer = with_specials(byte_level([]))
    truth = {"target": ["7"], **({"form": form} if form else {})}
    found = planned(tokenizer, prompt, ["x"], truth=truth, info_gain_template=AUTO, info_gain_prefix=THOUGHT)
    assert found == [prompt + THOUGHT + end]


@pytest.mark.parametrize("context", ["observation", "call"])
def test_a_prefix_is_written_once_even_where_the_chat_template_wrote_it(context):
    tokenizer = with_specials(byte_level([]))
    observed = f"\npage\n{START}assistant\n"
    changes = {"info_gain_prefix": THOUGHT, "info_gain_context": context}
    found = planned(tokenizer, PLAIN, ["call", observed, "x"], **changes)
    assert [text.count(THOUGHT) for text in found] == [1, 1]
    found = planned(tokenizer, PLAIN + THOUGHT, ["call", observed + THOUGHT, "x"], **changes)
    assert [text.rpartition(START)[2] for text in found] == [
        f"assistant\n{THOUGHT}<answer>Paris</answer>"
    ] * 2


def test_every_context_of_a_row_is_joined_at_its_own_end():
    """The row's own end is another text: there the policy has written its answer."""
    tokenizer = with_specials(byte_level(["assistant\n<answer>"] * 20))
    planner = RowPlanner(tokenizer, settings())

    def ids(text):
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    prompt = ids(f"{START}user\nWho?\n{START}assistant\n")
    turns = ids("call it"), ids(f"\n{START}tool\npage\n{START}assistant\n"), ids("the end")
    response = [token for part in turns for token in part]
    turn_ids = [0] * len(turns[0]) + [-1] * len(turns[1]) + [1] * len(turns[2])
    found = planner.requests(0, prompt, response, turn_ids, "Paris")
    trunk = [*prompt, *response]
    texts = [tokenizer.decode(trunk[: request.base] + list(request.answer.token_ids)) for request in found]
    prior = f"{START}user\nWho?\n{START}assistant\n"
    later = f"{prior}call it\n{START}tool\npage\n{START}assistant\n"
    assert texts == [f"{context}<answer>Paris</answer>" for context in (prior, later)]
    assert all(
        request.base < end
        for request, end in zip(found, (len(prompt), len(trunk) - len(turns[2])), strict=True)
    )


@pytest.mark.parametrize("prefix", [THOUGHT, "…\n", "é", f"{START}a"])
def test_whether_a_context_ends_with_the_prefix_is_what_its_whole_text_says(prefix):
    """Also where the last two tokens are a part of a character, longer than the prefix, or a part of it."""
    tokenizer = with_specials(byte_level([THOUGHT, "…\n"] * 20))
    writer = AnswerWriter(tokenizer, settings(info_gain_prefix=prefix))
    texts = [head + prefix[cut:] for head in ("", "x", "\n", START, "…") for cut in range(len(prefix) + 1)]
    ids = [
        tokenizer(text, add_special_tokens=False)["input_ids"] for text in (*texts, *(t + "x" for t in texts))
    ]
    ids += [context[:-1] for context in ids if len(context) > 1]  # some end within a character
    ends = [tokenizer.decode(context).endswith(prefix) for context in ids if context]
    assert [writer.prefix_at(context, False) == "" for context in ids if context] == ends
    assert True in ends and False in ends


def test_a_long_row_is_planned_as_if_all_of_every_context_were_read():
    tokenizer = with_specials(byte_level([]))
    parts = ["call", f"\n{'page ' * 40}\n{START}assistant\n", "call", f"\n{'page ' * 9}", "x"]
    ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in (PLAIN * 3, *parts)]
    turns = [place // 2 if place % 2 == 0 else -1 for place, part in enumerate(ids[1:]) for _ in part]
    row = 0, ids[0], [token for part in ids[1:] for token in part], turns, ("Paris", "Rome")
    planner = RowPlanner(tokenizer, settings(info_gain_prefix=THOUGHT, info_gain_aliases="max"))
    found = planner.requests(*row)
    planner.writer.reads = len(ids[0]) + len(turns)
    assert found == planner.requests(*row) and len(found) == 6
