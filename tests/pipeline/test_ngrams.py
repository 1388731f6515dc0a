"""The linear model beside the encoder: what it is fitted to, and that the layer answers as it does."""

import time

import numpy as np
import pytest
import sklearn.svm

from pipeline import ngrams
from pipeline.dataset import Split
from pipeline.errors import Interrupted
from tests.options import expected_ngram_scores, make_ngram_weights

V, PAIRS = 30, 200
NO_PIECES = [None] * V
PIECES = [None, None, *(chr(ord("a") + i) + "xy" for i in range(2, V))]


def make_split(texts, labels):
    lengths = [len(text) for text in texts]
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    tokens = np.concatenate([np.asarray(text, np.int32) for text in texts])
    return Split(tokens, offsets, np.array(labels, np.int32), np.arange(len(texts)))


def random_split(num_classes, rows=120, seed=0):
    """Texts of 0 to 7 tokens; a token of the label's own is in most of them."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, num_classes, rows)
    texts = [[*rng.integers(6, V, rng.integers(0, 7)), label + 1][rng.random() < 0.1 :] for label in labels]
    return make_split(texts, labels)


def test_features_by_hand():
    split = make_split([[3, 5, 3, 5], [], [5], [3, 5]], [0, 0, 0, 0])
    rows = np.arange(4)
    features = ngrams.Features.learn(split, rows, V, PAIRS)
    slots = [(a * 1_000_003 + b) % 16 for a, b in ((3, 5), (5, 3))]
    assert len(features.pair_rows) == 16  # 8 for each pair
    known = np.unique([slot for slot in slots if slot not in {a * 1_000_003 % 16 for a in range(V)}])
    np.testing.assert_array_equal(np.flatnonzero(features.pair_rows), known)

    features = ngrams.Features(V, np.zeros(1 << 12, np.int32))
    slots = [(a * 1_000_003 + b) % (1 << 12) for a, b in ((3, 5), (5, 3))]
    features.pair_rows[slots] = V, V + 1
    found = features.of(split, rows)
    expected = np.zeros((4, V + 2))  # a set: how often a feature occurs in a text does not count
    expected[0, [3, 5, V, V + 1]] = 1
    expected[2, 5] = 1
    expected[3, [3, 5, V]] = 1
    np.testing.assert_array_equal(found.toarray(), expected)
    weights = ngrams.feature_weights(found)
    most, of_5 = np.log(5 / 1) + 1, np.log(5 / 4) + 1  # of features in no text, and in three
    assert weights[0] == 0
    assert weights[7] == 1
    assert weights[5] == pytest.approx(of_5 / most)
    norms = np.linalg.norm(expected * weights, axis=1)
    np.testing.assert_allclose(
        ngrams.normalize(found, weights).toarray(), expected * weights / np.maximum(norms, 1e-3)[:, None], atol=1e-12
    )


def test_the_pairs_of_most_texts_are_known():
    split = make_split([[3, 5, 9], [3, 5, 9], [3, 5], [7, 8, 7, 8, 7, 8]], [0, 0, 1, 1])
    kept = ngrams.Features.learn(split, np.arange(4), V, 2)
    slots = {pair: (pair[0] * 1_000_003 + pair[1]) % len(kept.pair_rows) for pair in ((3, 5), (5, 9), (7, 8), (8, 7))}
    free = {pair for pair, slot in slots.items() if slot not in np.arange(V) * 1_000_003 % len(kept.pair_rows)}
    assert {pair for pair in slots if kept.pair_rows[slots[pair]]} <= free & {(3, 5), (5, 9)}
    # With so few slots a pair may have that of a token before PAD; with many all are known.
    split = random_split(3)
    rows = np.arange(len(split))
    features = ngrams.Features.learn(split, rows, V, PAIRS)
    tokens = [split.tokens[a:b].tolist() for a, b in zip(split.offsets[:-1], split.offsets[1:], strict=True)]
    pairs = {pair for text in tokens for pair in zip(text[:-1], text[1:], strict=True)}
    assert PAIRS >= (features.pair_rows > 0).sum() > 0.8 * min(len(pairs), PAIRS)
    with_pad = np.arange(V) * 1_000_003 % len(features.pair_rows)
    assert not features.pair_rows[with_pad].any()


@pytest.mark.parametrize("num_classes", [2, 3])
def test_the_layer_answers_as_the_machines_that_were_fitted(num_classes):
    from pipeline.layers import NgramScores

    split = random_split(num_classes)
    rows = np.arange(len(split))
    row_weights = np.linspace(0.5, 2.0, num_classes)
    weights, (machine,) = ngrams.fit(split, NO_PIECES, num_classes, PAIRS, row_weights)
    layer = NgramScores.of({**weights, **machine})
    found = ngrams.Features(V, layer.pair_rows.numpy()).of(split, rows)
    plain = ngrams.normalize(found, ngrams.feature_weights(found)).toarray()
    found = found.toarray()
    expected = np.empty((len(split), num_classes))
    for one in range(num_classes):
        is_one = split.labels == one
        share, other = (found[mask].sum(axis=0) + 1 for mask in (is_one, ~is_one))
        ratios = np.log(share / share.sum()) - np.log(other / other.sum())  # of naive Bayes
        scores = []
        for features in (plain, plain * ratios):
            machine = sklearn.svm.LinearSVC(C=1.0, random_state=0)
            scores.append(machine.fit(features, is_one, row_weights[split.labels]).decision_function(features))
        expected[:, one] = np.mean(scores, axis=0)
    # LIBLINEAR ends near its optimum, at another point for the other side of the same question.
    np.testing.assert_allclose(layer(split.token_ids(rows)), expected, rtol=0, atol=1e-5 if num_classes > 2 else 1e-2)
    np.testing.assert_allclose(layer(split.token_ids(rows))[:, 1], expected[:, 1], rtol=0, atol=1e-5)
    assert (expected.argmax(axis=1) == split.labels).mean() > 0.8


def test_characters_of_rows_by_hand():
    pieces = [None, None, "\u2581", "\u2581ab", "b", "cdefghij", None]
    pairs = np.array([[3, 4], [4, 5], [5, 5], [2, 6]])
    features = ngrams.Features(len(pieces), np.array([7, 8, 9, 10, 0, 0, 0, 0], np.int32), pairs)
    found = ngrams.characters_of_rows(features, pieces)
    counts = [sorted(found[[row]].data.tolist()) for row in range(11)]
    assert [len(c) for c in counts[:3]] == [0, 0, 1]
    assert counts[3] == [1] * 6  # 3 of one, 2 of two, 1 of three characters
    assert sum(counts[5]) == 8 + 7 + 6 + 5 + 4 + 3
    assert counts[7] == [1] * 3  # bb, abb, _abb
    assert sum(counts[8]) == 5  # bc to bcdefg
    assert sum(counts[9]) == 1 + 2 + 3 + 4 + 5  # none is longer than six
    assert counts[10] == []  # a byte has no characters
    shared = found[[3]].multiply(found[[4]])
    assert shared.sum() == 1  # "b" is one column in both


def test_characters_are_those_of_the_texts():
    """In texts of two tokens every n-gram of characters is found, as often as it is there."""
    split = make_split([[a, b] for a in range(2, 8) for b in range(2, 8)], [0] * 36)
    rows = np.arange(36)
    features = ngrams.Features.learn(split, rows, V, PAIRS)
    in_texts = features.of(split, rows) @ ngrams.characters_of_rows(features, PIECES)
    for text in rows:
        (a, b) = split.tokens[2 * text : 2 * text + 2]
        slot = (int(a) * 1_000_003 + int(b)) % len(features.pair_rows)
        row = features.pair_rows[slot]
        if a == b or not row or tuple(features.pairs[row - V]) != (a, b):
            continue  # a set has its tokens once; another pair may have its slot
        length = len(PIECES[a] + PIECES[b])
        assert in_texts[[text]].sum() == sum(length - n + 1 for n in range(1, 7))


def test_characters_know_words_that_were_not_seen():
    """Odd rows of the vocabulary are forms of a word of class 0, even ones of class 1; half of them are in no text."""
    pieces = [None, None, *(f"{'good' if i % 2 else 'evil'}{i}" for i in range(2, V))]
    train = make_split([[i] for i in range(2, 16)], [1 - i % 2 for i in range(2, 16)])
    unseen = make_split([[i] for i in range(16, V)], [1 - i % 2 for i in range(16, V)])
    tokens, characters = ngrams.scores(*ngrams.fit(train, pieces, 2, PAIRS, np.ones(2)), unseen)
    assert (characters.argmax(axis=1) == unseen.labels).all()
    assert len(np.unique(tokens.argmax(axis=1))) == 1


def test_a_mixture_is_one_machine():
    split = random_split(3)
    weights, machines = ngrams.fit(split, PIECES, 3, PAIRS, np.ones(3))
    mixed = ngrams.mix(machines, [0.25, 0.75])
    tokens, characters, mixture = ngrams.scores(weights, [*machines, mixed], split)
    np.testing.assert_allclose(mixture, 0.25 * tokens + 0.75 * characters, atol=1e-5)
    from pipeline.layers import NgramScores

    layer = NgramScores.of({**weights, **machines[1]})
    np.testing.assert_allclose(layer(split.token_ids(np.arange(len(split)))), characters, atol=1e-5)


def test_the_layer_equals_numpy():
    from pipeline.layers import NgramScores

    weights = make_ngram_weights(V, 3, PAIRS)
    layer = NgramScores.of(weights)
    texts = np.array([[4, 9, 9, 4, 9, 9, 4], [7, 0, 0, 0, 0, 0, 0], [0] * 7, [*range(20, 27)]], np.int32)
    expected = expected_ngram_scores(weights, texts)
    np.testing.assert_allclose(layer(texts), expected, rtol=0, atol=1e-5)
    np.testing.assert_array_equal(layer(texts)[2], weights["bias"])
    np.testing.assert_allclose(layer(np.pad(texts, [(0, 0), (0, 9)])), expected, rtol=0, atol=1e-5)
    np.testing.assert_allclose(layer(texts[1:2, :1]), expected[1:2], rtol=0, atol=1e-5)
    assert layer(texts[:0]).shape == (0, 3)
    # The largest ids that there may be: products beyond 32 bits.
    a, b = 999_999, 999_998
    features = ngrams.Features(1_000_000, np.zeros(1 << 20, np.int32))
    features.pair_rows[(a * 1_000_003 + b) % (1 << 20)] = 1_000_000
    assert 1_000_000 in features.of(make_split([[a, b]], [0]), np.arange(1)).indices


def test_classes_without_rows_never_win():
    split = random_split(2)
    _, machines = ngrams.fit(split, PIECES, 4, PAIRS, np.ones(4))
    assert len(machines) == 2
    for table, bias in (machine.values() for machine in machines):
        assert not table[:, 2:].any() and (bias[2:] == -1).all()
        np.testing.assert_array_equal(table[:, 0], -table[:, 1])
    alone = make_split([[3], [4, 5]], [1, 1])
    for machine in ngrams.fit(alone, PIECES, 3, PAIRS, np.ones(3))[1]:
        assert not machine["table"].any()
        np.testing.assert_array_equal(machine["bias"], [-1, 1, -1])


def test_a_large_split_is_sampled_the_same_each_time(monkeypatch):
    split = random_split(3)
    most = int(split.lengths.sum()) // 2
    rows = ngrams._sample(split, most)
    assert 0.4 * len(split) < len(rows) < 0.6 * len(split)
    assert split.lengths[rows].sum() <= most
    _, whole = ngrams.fit(split, PIECES, 3, PAIRS, np.ones(3))
    for i, limit in enumerate(("MAX_TOKENS", "MAX_TOKENS_OF_CHARACTERS")):
        with monkeypatch.context() as patch:
            patch.setattr(ngrams, limit, most)
            (_, half), (_, again) = (ngrams.fit(split, PIECES, 3, PAIRS, np.ones(3)) for _ in range(2))
        assert all(np.array_equal(half[i][name], again[i][name]) for name in half[i])
        assert not np.allclose(whole[i]["table"][:V], half[i]["table"][:V], atol=1e-3)


def test_fitting_can_be_stopped_and_its_errors_arrive(monkeypatch):
    def stop():
        raise Interrupted("now")

    fit = sklearn.svm.LinearSVC.fit
    monkeypatch.setattr(sklearn.svm.LinearSVC, "fit", lambda *args: (time.sleep(0.3), fit(*args)))
    with pytest.raises(Interrupted):
        ngrams.fit(random_split(2), NO_PIECES, 2, PAIRS, np.ones(2), stop)
    with pytest.raises(ValueError, match="NaN"):
        ngrams.fit(random_split(2), NO_PIECES, 2, PAIRS, np.full(2, np.nan))
