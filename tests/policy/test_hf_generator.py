"""The batched generator against one-row forwards, transformers' own generate, and the laws of its sampler."""

import pytest
import torch

transformers = pytest.importorskip("transformers")

from verl_credit.policy.generation import BatchGenerator, SamplingParams  # noqa: E402
from verl_credit.policy.sampling import RowSampler, inverse_cdf  # noqa: E402

VOCAB = 97
PROMPTS = [[5, 6, 7], [8], list(range(10, 45)), [5, 6, 7], [90, 3, 3, 3, 12, 40, 41]]


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=256, initializer_range=0.3,
        tie_word_embeddings=True, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    return transformers.Qwen3ForCausalLM(config).eval()


@pytest.fixture(scope="module")
def generator(model):
    return BatchGenerator(model, pad_token_id=0)


def one_row_log_probs(model, prompt, response, temperature=1.0):
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([[*prompt, *response]])).logits[0, len(prompt) - 1 : -1]
    return torch.log_softmax(logits.float() / temperature, dim=-1).gather(1, torch.tensor(response)[:, None])[
        :, 0
    ]


def same(left, right):
    return left.token_ids == right.token_ids and left.finish_reason == right.finish_reason


@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.7])
def test_log_probs_equal_one_row_forward(model, generator, temperature):
    stop = tuple(range(0, VOCAB, 7))  # many stops at different steps, so that the batch is compacted
    params = [SamplingParams(40, temperature, seed=seed, stop_token_ids=stop) for seed in range(40)]
    prompts = [PROMPTS[i % len(PROMPTS)] for i in range(40)]
    outputs = generator.generate(prompts, params)
    assert len({len(output.token_ids) for output in outputs}) > 5
    for prompt, output in zip(prompts, outputs, strict=True):
        expected = one_row_log_probs(model, prompt, output.token_ids, temperature)
        assert torch.tensor(output.log_probs) == pytest.approx(expected, abs=2e-5)


def test_long_generations_outgrow_the_first_cache_buffer(model, generator):
    (output,) = generator.generate([[5, 6, 7]], [SamplingParams(200, seed=0)])
    expected = one_row_log_probs(model, [5, 6, 7], output.token_ids)
    assert torch.tensor(output.log_probs) == pytest.approx(expected, abs=5e-5)


def test_ended_rows_leave_the_batch(model, generator):
    sizes = []
    hook = model.register_forward_pre_hook(
        lambda module, args, kwargs: sizes.append(len(kwargs["input_ids"])), with_kwargs=True
    )
    generator.generate([[5], [6], [7], [8]], [SamplingParams(n, seed=n) for n in (2, 3, 4, 6)])
    hook.remove()
    assert sizes == [4, 4, 4, 2, 1, 1]  # prefill, then five steps


def test_greedy_equals_transformers_generate(model, generator):
    outputs = generator.generate(PROMPTS, [SamplingParams(12, temperature=0.0)] * len(PROMPTS))
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        ids = torch.tensor([prompt])
        expected = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False
        )
        assert output.token_ids == expected[0, len(prompt) :].tolist()
        assert output.finish_reason == "length"
        assert torch.tensor(output.log_probs) == pytest.approx(
            one_row_log_probs(model, prompt, output.token_ids), abs=2e-5
        )


def test_a_row_does_not_depend_on_its_batch(generator):
    params = [
        SamplingParams(15 + row, 1.0, seed=row, top_p=(1.0, 0.8)[row % 2]) for row in range(len(PROMPTS))
    ]
    together = generator.generate(PROMPTS, params)
    backwards = generator.generate(PROMPTS[::-1], params[::-1])[::-1]
    for row, prompt in enumerate(PROMPTS):
        (alone,) = generator.generate([prompt], [params[row]])
        assert same(alone, together[row]) and same(alone, backwards[row])


@pytest.mark.parametrize(
    "ends", [[[1], [2, 3, 4], [9] * 30], [[1], [1, 2], [1, 2, 3]], [[1, 2], [2, 2], [3, 2]]]
)
def test_a_common_start_is_computed_once(model, generator, ends):
    start = [17] * 3 + list(range(20, 60))
    prompts, shapes = [[*start, *end] for end in ends], []
    hook = model.register_forward_pre_hook(
        lambda module, args, kwargs: shapes.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    outputs = generator.generate(prompts, [SamplingParams(12, seed=row) for row in range(3)])
    hook.remove()
    # The shortest prompt keeps its last token, also where the others begin with it.
    assert shapes[:2] == [(1, len(start)), (3, max(map(len, ends)))]
    for prompt, output in zip(prompts, outputs, strict=True):
        expected = one_row_log_probs(model, prompt, output.token_ids)
        assert torch.tensor(output.log_probs) == pytest.approx(expected, abs=2e-5)


def test_equal_prompts_differ_by_seed_alone(generator):
    first, again, other = generator.generate([[5, 6]] * 3, [SamplingParams(20, seed=s) for s in (1, 1, 2)])
    assert same(first, again)
    assert first.token_ids != other.token_ids


def test_without_seed_calls_differ(generator):
    first, second = generator.generate([[5, 6]] * 2, [SamplingParams(30)] * 2)
    assert first.token_ids != second.token_ids


def test_stop_token_is_kept_and_ends_the_row(generator):
    free = generator.generate([[5, 6]], [SamplingParams(20, seed=3)])[0]
    stop = free.token_ids[4]
    (stopped,) = generator.generate([[5, 6]], [SamplingParams(20, seed=3, stop_token_ids=(stop,))])
    end = free.token_ids.index(stop) + 1
    assert stopped.token_ids == free.token_ids[:end] and stopped.finish_reason == "stop"
    # A stop token drawn as the very last allowed token is a stop, not a cut.
    (last,) = generator.generate([[5, 6]], [SamplingParams(end, seed=3, stop_token_ids=(stop,))])
    assert last.finish_reason == "stop"


def test_each_row_has_its_own_budget_and_stops(generator):
    params = [SamplingParams(n, seed=9) for n in (1, 7, 3)]
    outputs = generator.generate([[5, 6]] * 3, params)
    assert [len(output.token_ids) for output in outputs] == [1, 7, 3]
    assert outputs[1].token_ids[:3] == outputs[2].token_ids


def draws(logits_V, count, **params):
    sampler = RowSampler(
        [SamplingParams(1, seed=seed, **params) for seed in range(count)], torch.device("cpu")
    )
    tokens, log_probs = sampler.sample(logits_V.expand(count, -1), 0)
    return tokens, log_probs


def test_sampling_follows_the_distribution():
    probs = torch.tensor([0.5, 0.0, 0.25, 0.15, 0.1])
    tokens, _ = draws(probs.log(), 20_000)
    frequency = torch.bincount(tokens, minlength=5) / 20_000
    assert frequency[1] == 0
    assert frequency == pytest.approx(probs, abs=0.015)  # more than four standard errors


def test_no_uniform_number_draws_a_token_of_probability_zero():
    weight = torch.tensor([[0.0, 0.3, 0.0, 0.7, 0.0]])
    assert inverse_cdf(weight, torch.tensor([[0.0, 1 - 2.0**-53]]).double()).tolist() == [[1, 3]]


@pytest.mark.parametrize(
    ("params", "support"),
    [
        ({"top_k": 2}, {0, 2}),
        ({"top_k": 1}, {0}),
        ({"top_p": 0.7}, {0, 2}),
        ({"top_p": 0.76}, {0, 2, 3}),
        ({"top_p": 1e-9}, {0}),
        ({"top_k": 2, "top_p": 0.6}, {0}),  # of the two kept, the first holds 2/3 of the mass
        ({"top_k": 99}, {0, 1, 2, 3}),
    ],
)
def test_top_k_and_top_p_restrict_the_support_but_not_the_log_probs(params, support):
    probs = torch.tensor([0.5, 0.1, 0.25, 0.15])
    tokens, log_probs = draws(probs.log(), 4_000, **params)
    assert set(tokens.tolist()) == support
    assert log_probs == pytest.approx(probs.log()[tokens], abs=1e-6)


def test_restricted_draws_keep_their_proportions():
    tokens, _ = draws(torch.tensor([0.5, 0.1, 0.25, 0.15]).log(), 20_000, top_k=2)
    assert (tokens == 0).float().mean() == pytest.approx(2 / 3, abs=0.015)


def test_a_batch_may_mix_greedy_restricted_and_free_rows(generator):
    mix = [SamplingParams(8, 0.0), SamplingParams(8, top_k=3, seed=1), SamplingParams(8, 1.3, seed=2)]
    mixed = generator.generate([[5, 6]] * 3, mix)
    for params, output in zip(mix, mixed, strict=True):
        assert same(output, generator.generate([[5, 6]], [params])[0])


def test_mode_and_attention_of_the_model_are_restored(model, generator):
    model.train()
    generator.generate([[5]], [SamplingParams(2)])
    assert model.training
    assert model.config._attn_implementation == "sdpa"
    model.eval()


def test_another_attention_implementation_is_refused(model):
    config = transformers.Qwen3Config(**model.config.to_dict())
    flex = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="flex_attention")
    with pytest.raises(ValueError, match="'flex_attention': only 'sdpa'"):
        BatchGenerator(flex, pad_token_id=0)


def test_ids_beyond_the_tokenizer_are_never_drawn(model):
    generator = BatchGenerator(model, pad_token_id=0, sampled_vocab_size=5)
    kinds = [SamplingParams(30, seed=1), SamplingParams(30, top_p=0.9, seed=2), SamplingParams(30, 0.0)]
    for params, output in zip(kinds, generator.generate([[5, 6]] * 3, kinds), strict=True):
        assert max(output.token_ids) < 5, params
        assert torch.tensor(output.log_probs) == pytest.approx(
            one_row_log_probs(model, [5, 6], output.token_ids), abs=2e-5
        )


def test_bad_prompts_are_named(generator):
    one = [SamplingParams(4)]
    assert generator.generate([], []) == []
    with pytest.raises(ValueError, match=r"prompts\[1\] is empty"):
        generator.generate([[1], []], one * 2)
    with pytest.raises(ValueError, match=r"prompts\[0\].*outside \[0, 97\)"):
        generator.generate([[97]], one)
    with pytest.raises(ValueError, match="256 positions"):
        generator.generate([[1] * 253], one)
    with pytest.raises(ValueError, match="shorter"):
        generator.generate([[1], [2]], one)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_new_tokens", 0), ("max_new_tokens", 2.0), ("temperature", -0.1), ("temperature", float("nan")),
        ("top_p", 0.0), ("top_p", 1.5), ("top_k", 0), ("top_k", -2), ("seed", -1), ("stop_token_ids", (-1,)),
    ],
)  # fmt: skip
def test_bad_sampling_parameters_name_themselves(field, value):
    with pytest.raises(ValueError, match=field):
        SamplingParams(**{"max_new_tokens": 4, field: value})


@pytest.mark.parametrize("vocabulary", [7, 128, 129, 5000, 151_936])
def test_a_draw_in_two_steps_is_the_draw_in_one(vocabulary):
    torch.manual_seed(vocabulary)
    rows = min(20_000, 2_000_000 // vocabulary)
    weight = torch.log_softmax(3 * torch.randn(rows, vocabulary), dim=-1).exp()
    weight[:, 1::3] = 0.0
    ends = torch.zeros(rows).double(), torch.full((rows,), 1 - 2.0**-53).double()
    for uniform in (torch.rand(rows).double(), *ends):
        drawn = inverse_cdf(weight, uniform[:, None])
        cdf = weight.cumsum(dim=-1, dtype=torch.float64)
        below = torch.nextafter(cdf[:, -1:], torch.zeros(1).double())
        target = torch.minimum(uniform[:, None] * cdf[:, -1:], below)
        assert torch.equal(drawn, torch.searchsorted(cdf, target, right=True))
        assert (weight.gather(1, drawn) > 0).all()
