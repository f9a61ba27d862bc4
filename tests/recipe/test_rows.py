"""All rows of a file together: repeated ones, doubtful answers, prompts that ask for what the run does not read."""

import pytest

from verl_credit.errors import PreflightError
from verl_credit.recipe.doctor.asked import asked
from verl_credit.recipe.doctor.data import Reads, Row
from verl_credit.recipe.doctor.rows import look_at

ASKS = "Write it between <answer> and </answer>. "
HERMES = 'Call it with <tool_call>\n{"name": "search"}\n</tool_call>. '
LLAMA = (
    'Respond in the format {"name": function name, "parameters": dictionary of argument name and its value}. '
)
CODER = "Call it with <tool_call>\n<function=search>\n<parameter=query>x</parameter></function></tool_call>. "
SEARCH = "Search with <search> query </search>. "


def rows(*texts, truth=None, agent=None):
    prompts = [[{"role": "user", "content": text}] for text in texts]
    return [Row(f"f row {i}", prompt, truth or {"target": ["a"]}, agent) for i, prompt in enumerate(prompts)]


def questions(n, before=ASKS):
    return [f"{before}q{i}?" for i in range(n)]


def test_rows_that_stand_again_are_counted_with_an_example_and_their_share():
    texts = questions(4) * 16
    (line,) = look_at(rows(*texts), "k", Reads())
    assert line.startswith("k: 60 of 64 rows (94%), first f row 4: the prompt of f row 0 stands here again")
    assert look_at(rows(*questions(64)), "k", Reads()) == []


def test_a_system_message_counts_the_order_of_keys_does_not_and_other_answers_are_said():
    user = {"role": "user", "content": f"{ASKS}q?"}
    prompts = [
        [user],
        [{"role": "system", "content": "x"}, user],
        [{"content": f"{ASKS}q?", "role": "user"}],
        [user],
    ]
    same = [Row(f"f row {i}", prompt, "ab"[i == 3]) for i, prompt in enumerate(prompts)]
    (line,) = look_at(same, "k", Reads())
    assert "2 of 4 rows (50%), first f row 2" in line and line.endswith("(1 of them have other gold answers)")


def test_a_doubtful_answer_is_said_and_mathematics_is_not_doubted():
    boxed = {"target": ["|x|"], "form": "boxed"}
    found = look_at(
        [*rows("Write it in \\boxed{}. q?", truth=boxed), *rows(*questions(1), truth="Paris; Rome")],
        "k",
        Reads(),
    )
    assert (
        len(found) == 1
        and "1 of 2 rows (50%), first f row 0: the gold answer 'Paris; Rome' looks like" in found[0]
    )


@pytest.mark.parametrize(
    "text, reads, said",
    [
        (SEARCH, Reads(), "'<search> query </search>', and no parser reads those: every call would be lost; .*prepare qa"),
        (SEARCH, Reads(format="hermes"), "'<search> query </search>', and the run's loop .*format=hermes.*prepare qa"),
        (CODER, Reads(format="hermes"), "'<function=', .*format=hermes.*: every call would be lost; .*format=qwen3_coder"),
        (HERMES, Reads(format="qwen3_coder"), "'<tool_call>', .*set .*multi_turn.format=hermes"),
        (LLAMA, Reads(format="mistral"), "'{\"name\": function name, \"parameters\":', .*set .*multi_turn.format=llama3"),
        ("Write Action: Search[query]. ", Reads(), "'Action: Search'"),
        ("Write <|begin_of_query|> query <|end_of_query|>. ", Reads(), r"'<\|begin_of_query\|>'"),
    ],
)  # fmt: skip
def test_prompts_that_ask_for_calls_which_the_loop_does_not_read_are_refused(text, reads, said):
    texts = questions(3, ASKS + text)
    with pytest.raises(
        PreflightError, match=f"^k: 3 of 3 rows .100%., first f row 0: the prompt asks for calls as {said}"
    ):
        look_at(rows(*texts), "k", reads)
    few = look_at(rows(texts[0], *questions(3, ASKS + "Now. ")), "k", reads)
    assert len(few) == 1 and "1 of 4 rows (25%)" in few[0]  # said, not refused


@pytest.mark.parametrize(
    "text, reads",
    [
        (HERMES, Reads()),
        (CODER, Reads(format="qwen3_coder")),
        (CODER, Reads()),  # auto: the chat template decides
        (LLAMA, Reads(format="llama3")),
        (HERMES + SEARCH, Reads()),  # it names what is read, too
        (SEARCH, Reads(format="a_parser_of_ones_own")),
        (SEARCH, Reads(default_loop="my_loop")),
        ("What does <search> mean in HTML? ", Reads()),
        ("", Reads()),
    ],
)
def test_calls_that_the_loop_reads_pass(text, reads):
    assert look_at(rows(*questions(3, ASKS + text)), "k", reads) == []


def test_rows_of_a_loop_of_ones_own_are_not_judged():
    texts = questions(2, ASKS + SEARCH)
    assert look_at(rows(*texts, agent="my_loop"), "k", Reads()) == []
    with pytest.raises(PreflightError, match="asks for calls"):
        look_at(rows(*texts, agent="search_agent"), "k", Reads(default_loop="my_loop"))
    (line,) = look_at(rows(*texts), "k", Reads(calls=False))
    assert "'<search> query </search>', and the run has no tool (search.max_searches=0)" in line


BOXED = {"target": ["4"], "form": "boxed"}


@pytest.mark.parametrize(
    "text, truth, said",
    [
        ("Put it in \\boxed{}. ", None, r"'\\\\boxed', and the reward reads <answer>..</answer>"),
        (
            "Put it in \\boxed{}. ",
            {"target": ["4"], "form": "tag"},
            r"'\\\\boxed', and the reward reads <answer>",
        ),
        (ASKS, BOXED, r"'<answer>', and the reward reads \\boxed{..}"),
        ('Output the final answer after "####". ', BOXED, "'####\"', and the reward reads"),
        ("The last line is Answer: $Answer (without quotes). ", BOXED, "'Answer: .', and the reward reads"),
        ("End with Final answer: YOUR ANSWER. ", None, "'Final answer:', and the reward reads"),
    ],
)
def test_prompts_that_ask_for_another_form_of_answer_are_refused(text, truth, said):
    texts = questions(2, text)
    with pytest.raises(PreflightError, match=f"first f row 0: the prompt asks for an answer as {said}"):
        look_at(rows(*texts, truth=truth), "k", Reads())
    assert look_at(rows(*texts, truth=truth), "k", Reads(our_reward=False)) == []


@pytest.mark.parametrize(
    "text, truth",
    [
        (ASKS, None),
        ("Put it in \\boxed{}. ", BOXED),
        ("Write <answer> \\boxed{} </answer>. ", BOXED),
        ("", {"target": ["a"], "form": "tag"}),  # for a policy that writes the tag unasked
        ("#### Task\n" + ASKS, None),
    ],
)
def test_answers_that_the_reward_reads_pass(text, truth):
    assert look_at(rows(*questions(2, text), truth=truth), "k", Reads()) == []
    (line,) = look_at(rows(*questions(2, "")), "k", Reads())
    assert "2 of 2 rows (100%)" in line and "does not say how an answer is written" in line


def test_text_in_parts_is_read_and_an_earlier_answer_is_not():
    parts = [{"type": "image"}, {"type": "text", "text": SEARCH}]
    earlier = {"role": "assistant", "content": HERMES}
    assert list(asked([{"role": "user", "content": parts}, earlier]).calls) == ["tags"]
