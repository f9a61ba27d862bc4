"""Demonstrations: which searches they make, what is kept, and which tokens the policy learns to write."""

from pathlib import Path

import pytest
import yaml
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from verl_credit.turns.rollout.search.wire import Page
from verl_credit.worlds.real.multihop import Supported, demonstrations, encode
from verl_credit.worlds.real.packages import RealError

RECIPE = Path(__file__).parents[3] / "recipes" / "real_cpu.yaml"
PROMPT = [{"role": "user", "content": "Who mayors the town of the mill?"}]
MILL, TOWN, BOOK = Page("1", "Mill (old)", "It grinds in Nork.", 1.0), Page("2", "Nork", "Its mayor is Ada Bell.", 0.9), \
    Page("3", "Book", "Read me.", 0.8)  # fmt: skip


def asked(answer="Ada Bell", question="Who is mayor of the town of the Mill?"):
    return Supported(PROMPT, question, answer, ("Mill (old)", "Nork"))


def queries(messages):
    return [call["function"]["arguments"]["query"] for m in messages for call in m.get("tool_calls", ())]


def test_first_the_question_or_the_title_in_it_then_what_no_page_brought():
    found = {"Mill": [MILL, BOOK], "Nork": [TOWN]}
    told = demonstrations(asked(), lambda query: found.get(query, [MILL]), 400)
    assert [queries(messages) for messages in told] == [
        ["Who is mayor of the town of the Mill?", "Nork"],
        ["Mill", "Nork"],
    ]
    for messages in told:
        assert messages[0] == PROMPT[0] and messages[-1]["content"] == "<answer>Ada Bell</answer>"
        assert [m["role"] for m in messages[1:]] == ["assistant", "tool", "assistant", "tool", "assistant"]
    assert told[1][2]["content"] == "Page 1: Mill (old)\nIt grinds in Nork.\nPage 2: Book\nRead me."


def test_a_search_that_brings_both_articles_is_the_only_one():
    (first, second) = demonstrations(asked(), lambda query: [MILL, TOWN], 400)
    assert queries(first) == ["Who is mayor of the town of the Mill?"] and queries(second) == ["Mill"]


def test_an_answer_that_no_page_shows_is_not_taught():
    cut = demonstrations(asked(), lambda query: [MILL, TOWN], 8)  # "Its mayor" is cut to 8 characters
    assert cut == []
    assert demonstrations(asked("Ada Gill"), lambda query: [MILL, TOWN], 400) == []


def test_a_title_that_nothing_named_is_not_searched_for():
    silent = Page("1", "Mill (old)", "It grinds.", 1.0)
    found = {"Mill": [silent], "Nork": [TOWN]}
    assert demonstrations(asked(), lambda query: found.get(query, [silent]), 400) == []


def test_yes_and_no_are_kept_when_every_article_was_found():
    assert len(demonstrations(asked("yes"), lambda query: [MILL, TOWN], 400)) == 2
    assert demonstrations(asked("yes"), lambda query: [BOOK], 400) == []


def the_recipes_template() -> str:
    return yaml.safe_load(RECIPE.read_text())["actor_rollout_ref"]["model"]["custom_chat_template"]


@pytest.fixture(scope="module")
def tokenizer():
    """A byte is a token, and so is each of ChatML's marks."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer, core.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    core.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    return PreTrainedTokenizerFast(tokenizer_object=core)


def test_the_policy_learns_its_calls_and_its_answer_with_the_ends_of_its_turns_and_nothing_else(tokenizer):
    template = the_recipes_template()
    (messages,) = demonstrations(
        asked(), lambda query: {"Mill": [MILL], "Nork": [TOWN]}.get(query, [BOOK]), 400
    )
    ids, mask = encode(messages, tokenizer, template)
    text = tokenizer.decode(ids)
    assert "<tools>\n{" in text and text.startswith("<|im_start|>system\nYou are a helpful AI assistant.")
    turns, now = [], []
    for token, by_policy in zip(ids, mask, strict=True):
        if by_policy:
            now.append(token)
        elif now:
            turns, now = [*turns, tokenizer.decode(now)], []
    assert [*turns, tokenizer.decode(now)] == [
        '<tool_call>\n{"name": "search", "arguments": {"query": "Mill"}}\n</tool_call><|im_end|>',
        '<tool_call>\n{"name": "search", "arguments": {"query": "Nork"}}\n</tool_call><|im_end|>',
        "<answer>Ada Bell</answer><|im_end|>",
    ]
    shown = "\n<|im_start|>user\n<tool_response>\nPage 1: Nork\nIts mayor is Ada Bell.\n</tool_response><|im_end|>\n"
    assert shown + "<|im_start|>assistant\n<answer>" in text


def test_a_template_without_tools_is_refused(tokenizer):
    (first, _) = demonstrations(asked(), lambda query: [MILL, TOWN], 400)
    plain = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}" \
            "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"  # fmt: skip
    with pytest.raises(RealError, match="the chat template leaves out the search for 'Who is mayor"):
        encode(first, tokenizer, plain)


def test_a_template_that_writes_earlier_turns_in_another_way_is_refused(tokenizer):
    """As templates do that drop earlier thoughts: the masks would stand beside their tokens."""
    (first, _) = demonstrations(asked(), lambda query: [MILL, TOWN], 400)
    counted = "{{ messages | length }}" + the_recipes_template()
    with pytest.raises(RealError, match="in another way when a turn follows"):
        encode(first, tokenizer, counted)
