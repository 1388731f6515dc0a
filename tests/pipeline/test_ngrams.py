"""The linear model beside the encoder: what it is fitted to, and that the layer answers as it does."""

import time

import numpy as np
import pytest
import sklearn.svm

from pipeline import ngrams
from pipeline.dataset import Split
from pipeline.errors import Interrupted
from tests.options import expected_ngram_scores, make_ngram_weights

V, BUCKETS = 30, 16


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


def layer_of(weights, num_classes):
    from pipeline.layers import NgramScores

    layer = NgramScores(V, num_classes, BUCKETS)
    layer.build()
    layer.set_weights(weights)
    return layer


def test_features_by_hand():
    split = make_split([[3, 5, 3], [], [5]], [0, 0, 0])
    counts = ngrams.count_features(split, np.arange(3), V, BUCKETS)
    expected = np.zeros((3, V + BUCKETS))
    expected[0, [3, 5]] = 2, 1
    for a, b in ((3, 5), (5, 3)):
        expected[0, V + (a * 1_000_003 + b) % BUCKETS] += 1
    expected[2, 5] = 1
    np.testing.assert_array_equal(counts.toarray(), expected)
    weights = ngrams.feature_weights(counts)
    most, of_5 = np.log(4 / 1) + 1, np.log(4 / 3) + 1  # of features in no text, and in two
    assert weights[0] == 0
    assert weights[7] == 1
    assert weights[5] == pytest.approx(of_5 / most)
    norms = np.linalg.norm(np.sqrt(expected) * weights, axis=1)
    np.testing.assert_allclose(
        ngrams.normalize(counts, weights).toarray(), expected * weights / np.maximum(norms, 1e-3)[:, None], atol=1e-12
    )


@pytest.mark.parametrize("num_classes", [2, 3])
def test_the_layer_answers_as_the_machine_that_was_fitted(num_classes):
    split = random_split(num_classes)
    rows = np.arange(len(split))
    row_weights = np.linspace(0.5, 2.0, num_classes)
    layer = layer_of(ngrams.fit(split, V, num_classes, BUCKETS, row_weights), num_classes)
    counts = ngrams.count_features(split, rows, V, BUCKETS)
    features = ngrams.normalize(counts, ngrams.feature_weights(counts))
    machine = sklearn.svm.LinearSVC(C=1.0, random_state=0).fit(features, split.labels, row_weights[split.labels])
    expected = machine.decision_function(features)
    if num_classes == 2:
        expected = np.stack([-expected, expected], axis=1)
    np.testing.assert_allclose(layer(split.token_ids(rows)), expected, rtol=0, atol=1e-5)
    assert (expected.argmax(axis=1) == split.labels).mean() > 0.8


def test_the_layer_equals_numpy():
    weights = make_ngram_weights(V, 3, BUCKETS)
    layer = layer_of(weights, 3)
    texts = np.array([[4, 9, 9, 4], [7, 0, 0, 0], [0, 0, 0, 0]], np.int32)
    expected = expected_ngram_scores(weights, V, BUCKETS, texts)
    np.testing.assert_allclose(layer(texts), expected, rtol=0, atol=1e-5)
    np.testing.assert_array_equal(layer(texts)[2], weights[2])
    np.testing.assert_allclose(layer(np.pad(texts, [(0, 0), (0, 9)])), expected, rtol=0, atol=1e-5)
    np.testing.assert_allclose(layer(texts[1:2, :1]), expected[1:2], rtol=0, atol=1e-5)
    assert layer(texts[:0]).shape == (0, 3)
    # The largest ids that there may be: products beyond 32 bits.
    a, b = 999_999, 999_998
    split = make_split([[a, b]], [0])
    (bucket,) = ngrams.count_features(split, np.arange(1), 1_000_000, 1 << 20).indices[-1:] - 1_000_000
    assert bucket == (a * 1_000_003 + b) % (1 << 20)


def test_classes_without_rows_never_win():
    split = random_split(2)
    table, _, bias = ngrams.fit(split, V, 4, BUCKETS, np.ones(4))
    assert not table[:, 2:].any() and (bias[2:] == -1).all()
    np.testing.assert_array_equal(table[:, 0], -table[:, 1])
    alone = make_split([[3], [4, 5]], [1, 1])
    table, _, bias = ngrams.fit(alone, V, 3, BUCKETS, np.ones(3))
    assert not table.any()
    np.testing.assert_array_equal(bias, [-1, 1, -1])


def test_a_large_split_is_sampled_the_same_each_time(monkeypatch):
    split = random_split(3)
    whole = ngrams.fit(split, V, 3, BUCKETS, np.ones(3))
    monkeypatch.setattr(ngrams, "MAX_TOKENS", int(split.lengths.sum()) // 2)
    rows = ngrams._sample(split)
    assert 0.4 * len(split) < len(rows) < 0.6 * len(split)
    assert split.lengths[rows].sum() <= ngrams.MAX_TOKENS
    half, again = (ngrams.fit(split, V, 3, BUCKETS, np.ones(3)) for _ in range(2))
    assert all(np.array_equal(a, b) for a, b in zip(half, again, strict=True))
    assert not np.allclose(whole[0], half[0], atol=1e-3)


def test_fitting_can_be_stopped_and_its_errors_arrive(monkeypatch):
    def stop():
        raise Interrupted("now")

    fit = sklearn.svm.LinearSVC.fit
    monkeypatch.setattr(sklearn.svm.LinearSVC, "fit", lambda *args: (time.sleep(0.3), fit(*args)))
    with pytest.raises(Interrupted):
        ngrams.fit(random_split(2), V, 2, BUCKETS, np.ones(2), stop)
    with pytest.raises(ValueError, match="NaN"):
        ngrams.fit(random_split(2), V, 2, BUCKETS, np.full(2, np.nan))
