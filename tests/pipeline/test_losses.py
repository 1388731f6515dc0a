import math

import numpy as np
import pytest
import tensorflow as tf

from pipeline.errors import JobError
from pipeline.losses import class_weights, smoothed_cross_entropy, symmetric_divergence

# Softmax of these is (1/8, 2/8, 5/8).
LOGITS = np.log(np.array([[1.0, 2.0, 5.0], [1.0, 2.0, 5.0]], np.float32))
LABELS = np.array([0, 2], np.int32)


def test_cross_entropy_by_hand():
    losses = smoothed_cross_entropy(tf.constant(LOGITS), LABELS, 0.0)
    np.testing.assert_allclose(losses, [math.log(8), math.log(8 / 5)], atol=1e-6, rtol=0)


def test_smoothing_by_hand():
    # The target of label 0 is (0.8, 0.1, 0.1), that of label 2 (0.1, 0.1, 0.8).
    losses = smoothed_cross_entropy(tf.constant(LOGITS), LABELS, 0.3)
    expected = [
        0.8 * math.log(8) + 0.1 * math.log(8 / 2) + 0.1 * math.log(8 / 5),
        0.1 * math.log(8) + 0.1 * math.log(8 / 2) + 0.8 * math.log(8 / 5),
    ]
    np.testing.assert_allclose(losses, expected, atol=1e-6, rtol=0)


def test_smoothing_stays_finite_for_sure_answers():
    logits = tf.constant([[1e4, 0.0]])
    np.testing.assert_allclose(smoothed_cross_entropy(logits, [0], 0.1), [0.05 * 1e4], rtol=1e-6)


def test_divergence_by_hand():
    # p = (1/4, 3/4), q = (1/2, 1/2): (p - q) . log(p / q) = (ln 2 + ln 3/2) / 4 = ln 3 / 4.
    p, q = tf.constant([[0.0, math.log(3)]]), tf.constant([[5.0, 5.0]])
    np.testing.assert_allclose(symmetric_divergence(p, q), [math.log(3) / 4], atol=1e-6, rtol=0)
    np.testing.assert_allclose(symmetric_divergence(q, p), [math.log(3) / 4], atol=1e-6, rtol=0)
    np.testing.assert_array_equal(symmetric_divergence(p, p), [0.0])


def test_class_weights():
    counts = np.array([6, 3, 1])
    np.testing.assert_array_equal(class_weights("none", ["a", "b", "c"], counts), [1, 1, 1])
    balanced = class_weights("balanced", ["a", "b", "c"], counts)
    np.testing.assert_allclose(balanced, [10 / 18, 10 / 9, 10 / 3], rtol=1e-6)
    assert (counts * balanced).sum() == pytest.approx(10)  # the mean row counts as 1
    without = class_weights("balanced", ["a", "b", "c"], np.array([6, 0, 2]))  # b has no rows
    np.testing.assert_allclose(without[[0, 2]], [8 / 12, 8 / 4], rtol=1e-6)
    assert np.isfinite(without).all()
    some = class_weights({"c": 2.5, "a": 0.5}, ["a", "b", "c"], counts)
    np.testing.assert_array_equal(some, [0.5, 1.0, 2.5])
    assert {w.dtype for w in (balanced, some)} == {np.dtype(np.float32)}
    np.testing.assert_array_equal(class_weights({}, ["a", "b"], [1, 1]), [1, 1])
    np.testing.assert_array_equal(class_weights({"b": 2.0}, ["a", "b"], [3, 0]), [1, 2])


def test_weights_of_unknown_labels_are_refused():
    with pytest.raises(JobError, match=r"training.class_weights names labels that are neither in .*: 'x', 'y'. Known"):
        class_weights({"y": 1.0, "a": 2.0, "x": 1.0}, ["a", "b"], [1, 1])
