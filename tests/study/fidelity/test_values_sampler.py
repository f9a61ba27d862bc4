"""The trie sampler: frequencies of texts are their exact probabilities, and a seed says everything."""

from collections import Counter
from itertools import product

import numpy as np
import pytest
import torch
from scipy.stats import chisquare

from kit.families import family_config, family_model
from kit.tiny_models import log_probs as log_probs_of
from kit.tiny_models import tiny_model
from verl_credit.worlds.rollouts import prefixes
from verl_credit.worlds.rollouts.sampler import Ask, ModelDecoder, TurnSampler, digest, uniforms

STOP, WORDS, LONGEST = 2, (2, 3, 4, 5), 3
CONTEXTS = [(1, 3, 4), (1, 5, 5, 4, 3, 1, 4), (1,)]


@pytest.fixture(scope="module")
def model():
    return tiny_model("qwen3", attention="sdpa", vocab_size=6)


def sampler(model, **options):
    return TurnSampler(ModelDecoder(model, pad_token_id=0), [STOP], **options)


def asks(n, seed=0, tokens=LONGEST):
    return [Ask(context, uniforms(seed, digest(context), particles=n, tokens=tokens)) for context in CONTEXTS]


def exact(model, context):
    """Probability of every text, by one forward of each without a cache."""
    found = {}
    for length in range(1, LONGEST + 1):
        for text in product(range(6), repeat=length):
            whole = text[-1] == STOP or length == LONGEST
            if whole and STOP not in text[:-1]:
                log_probs = log_probs_of(model, [*context, *text]).tolist()
                found[text] = float(np.exp(sum(log_probs[len(context) - 1 :])))
    return found


def p_value(texts, probabilities):
    """Of the chi-square of sampled texts. Texts of fewer than five expected samples are one cell."""
    counts, cells = Counter(texts), {}
    assert all(probabilities.get(text) for text in counts)
    for text, p in probabilities.items():
        name = text if p * len(texts) >= 5 else "rare"
        seen, expected = cells.get(name, (0, 0.0))
        cells[name] = seen + counts[text], expected + p
    observed, p = np.array([*cells.values()]).T
    assert len(cells) > 10
    return chisquare(observed, p / p.sum() * len(texts)).pvalue


@pytest.mark.slow
def test_texts_are_as_frequent_as_they_are_probable(model):
    for ask, texts in zip(asks(4000), sampler(model).sample(asks(4000)), strict=True):
        probabilities = exact(model, ask.context)
        assert sum(probabilities.values()) == pytest.approx(1, abs=1e-5)
        assert p_value(texts, probabilities) > 0.002
    other = exact(model, (*CONTEXTS[0], 3))
    assert p_value(sampler(model).sample(asks(4000))[0], other) < 1e-12


def test_a_context_alone_gives_the_same_texts_as_among_others(model):
    together = sampler(model).sample(asks(50))
    assert [sampler(model).sample([ask])[0] for ask in asks(50)] == together
    assert sampler(model, contexts_at_once=2).sample(asks(50)[::-1])[::-1] == together
    assert sampler(model).sample(asks(50, seed=1)) != together


class Counting(ModelDecoder):
    """Counts the rows that the model computes a distribution for."""

    rows = 0

    def start(self, *args):
        return self._counted(super().start(*args))

    def extend(self, *args):
        return self._counted(super().extend(*args))

    def _counted(self, log_prob_R_V):
        self.rows += len(log_prob_R_V)
        return log_prob_R_V


def test_a_distinct_text_is_computed_once(model):
    decoder = Counting(model, pad_token_id=0)
    texts = TurnSampler(decoder, [STOP]).sample(asks(500))
    prefixes = {
        (place, text[:k])
        for place, found in enumerate(texts)
        for text in found
        for k in range(len(text))  # the whole text needs no distribution behind it
    }
    assert decoder.rows == len(prefixes) < sum(len(t) for found in texts for t in found) / 10


def test_budgets_of_one_batch_differ(model):
    given = [Ask(context, uniforms(0, i, particles=40, tokens=i + 1)) for i, context in enumerate(CONTEXTS)]
    for i, found in enumerate(sampler(model).sample(given)):
        assert max(map(len, found)) == i + 1
        assert all(STOP not in text[:-1] and (text[-1] == STOP or len(text) == i + 1) for text in found)


def test_greedy_takes_the_likeliest_token(model):
    for ask, (text, *_) in zip(asks(2), sampler(model, greedy=True).sample(asks(2)), strict=True):
        ids = list(ask.context)
        for token in text:
            assert token == int(model(torch.tensor([ids])).logits[0, -1].argmax())
            ids.append(token)


def test_ids_beyond_the_tokenizer_are_never_drawn(model):
    assert {t for found in sampler(model, drawable=4).sample(asks(300)) for text in found for t in text} <= {
        0,
        1,
        2,
        3,
    }


def test_recurrent_layers_are_refused_because_padding_would_enter_their_state():
    model = family_model(family_config("lfm2"), "sdpa")
    with pytest.raises(ValueError, match="model_type=lfm2: only models without recurrent layers"):
        ModelDecoder(model, pad_token_id=0)


@pytest.mark.parametrize(
    "options", [{}, {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5}]
)
def test_a_context_that_begins_like_a_row_before_it_is_not_read_again(options):
    model = tiny_model(
        "qwen3",
        attention="sdpa",
        vocab_size=16,
        num_hidden_layers=2,
        use_sliding_window=bool(options),
        **options,
    )
    drawn, read = torch.Generator().manual_seed(0), []
    model.register_forward_pre_hook(lambda *call: read.append(call[2]["input_ids"].shape), with_kwargs=True)

    def ids(n):
        return tuple(torch.randint(16, (n,), generator=drawn).tolist())

    first = [ids(30), ids(9), ids(25)]
    on = torch.tensor([0, 0, 1, 2]), torch.tensor([5, 6, 7, 8])
    # two texts of one context, one that ended a token earlier, one that differs from its row early, and two unknown ones
    after = [
        first[0] + (5, 1) + ids(9),
        first[0] + (6,) + ids(4),
        first[1] + (7, 2) + ids(3),
        first[1] + ids(4),
        ids(40),
        ids(3),
    ]
    known, fresh = (ModelDecoder(model, pad_token_id=0) for _ in range(2))
    known.start(first, 4)
    known.extend(*on)
    known.extend(torch.tensor([0, 2, 3]), torch.tensor([1, 2, 3]))
    read.clear()
    mine, parents = known.start(after, 4), torch.tensor([0, 0, 1, 2, 3, 4, 5])
    assert read == [(2, 40), (4, 9)]
    torch.testing.assert_close(mine, fresh.start(after, 4), atol=1e-5, rtol=0)
    mine, theirs = (decoder.extend(parents, torch.arange(7)) for decoder in (known, fresh))
    torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=0)


def test_the_oldest_rows_are_forgotten(model, monkeypatch):
    shape = model.config.num_hidden_layers, 2, model.config.num_key_value_heads, model.config.head_dim
    monkeypatch.setattr(prefixes, "MOST_BYTES", 8 * 4 * np.prod(shape))  # of eight tokens in float32
    decoder = ModelDecoder(model, pad_token_id=0)
    for context in ((1, 3, 4, 5), (1, 4, 4, 4), (1, 5, 5, 5)):
        decoder.start([context], 1)
    decoder.start([(3,)], 1)
    kept = decoder._prefixes
    assert [kept.nearest((1, n, n, n, 3))[1] for n in (3, 4, 5)] == [1, 4, 4]
