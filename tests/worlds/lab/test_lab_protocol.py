"""Tokenizer and chat template: one token per name, and text that equals the agent protocol."""

import pytest
from transformers import AutoTokenizer

from verl_credit.worlds.lab import protocol
from verl_credit.worlds.lab.encyclopedia import WorldSize, make_world
from verl_credit.worlds.lab.protocol import GRAMS, make_tokenizer, phrase

WORLD = make_world(0, WorldSize(people=20, companies=20, towns=20, works=20))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """Saved and loaded again, as every user of the lab gets it."""
    folder = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer(WORLD.names()).save_pretrained(folder)
    return AutoTokenizer.from_pretrained(folder)


def ids(tokenizer, text):
    return tokenizer.encode(text, add_special_tokens=False)


def trajectory():
    first, second = list(WORLD.articles.values())[:2]
    calls = [{"type": "function", "function": {"name": "search", "arguments": {"query": " Zet founder"}}}]
    observation = protocol.pages([first.contents, second.contents])
    messages = [
        {"role": "user", "content": "What is the founder of Zet?"},
        {"role": "assistant", "content": "<think> let me check</think>", "tool_calls": calls},
        {"role": "tool", "content": observation},
    ]
    turn = protocol.search_turn(" Zet founder", " let me check")
    return messages, turn, observation


def test_names_and_newline_are_single_tokens(tokenizer):
    for name in WORLD.names():
        assert len(ids(tokenizer, f" {name}")) == 1
        assert len(ids(tokenizer, f"of {name}?\n")) == len(ids(tokenizer, "of?\n")) + 1
    assert len(ids(tokenizer, "\n")) == 1
    assert tokenizer.convert_ids_to_tokens(tokenizer.eos_token_id) == "<|im_end|>"


def test_words_of_grams_are_single_tokens(tokenizer):
    for gram in (g for grams in GRAMS.values() for g in grams):
        assert len(ids(tokenizer, phrase(gram))) == len(phrase(gram).split())


@pytest.mark.parametrize("text", ["Größe 日本\t\n\n x", 'a "quoted" \\ {"name": 3}', " <think>  two  spaces"])
def test_any_text_survives_a_round_trip(tokenizer, text):
    assert tokenizer.decode(ids(tokenizer, text)) == text


def test_the_template_renders_the_protocol(tokenizer):
    messages, turn, observation = trajectory()
    render = lambda m: tokenizer.apply_chat_template(m, tokenize=False, add_generation_prompt=True)  # noqa: E731
    prompt = protocol.prompt_text(messages[0]["content"])
    assert render(messages[:1]) == prompt
    assert render(messages) == prompt + turn + protocol.observation_text(observation)
    assert "<|im_end|>" + protocol.observation_text(observation) == (
        "<|im_end|>\n<|im_start|>user\n<tool_response>\n"
        + observation
        + "\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )


def test_tokens_appended_equal_tokens_of_the_whole(tokenizer):
    messages, turn, observation = trajectory()
    parts = [protocol.prompt_text(messages[0]["content"]), turn, protocol.observation_text(observation)]
    assert [i for part in parts for i in ids(tokenizer, part)] == ids(tokenizer, "".join(parts))


def test_parallel_tool_results_share_one_user_turn(tokenizer):
    rendered = tokenizer.apply_chat_template(
        [{"role": "tool", "content": "a"}, {"role": "tool", "content": "b"}], tokenize=False
    )
    assert rendered == (
        "<|im_start|>user\n<tool_response>\na\n</tool_response>"
        "\n<tool_response>\nb\n</tool_response><|im_end|>\n"
    )


def test_queries_are_parsed_or_refused():
    assert protocol.parse_query(protocol.search_turn(" Zet base", " start over")) == " Zet base"
    for body in (
        '{"name": "search"',
        '{"name": "browse", "arguments": {"query": "x"}}',
        "[1]",
        '{"name": "search", "arguments": {"query": ""}}',
        '{"name": "search", "arguments": 3}',
    ):
        assert protocol.parse_query(f"<tool_call>\n{body}\n</tool_call>") is None, body
    assert protocol.parse_query(protocol.answer_turn(" Zet")) is None
