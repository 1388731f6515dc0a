import numpy as np
import pytest
import tensorflow as tf

from pipeline.layers import ClassVector, FirstPooling, MaskedMaxPooling, MaskedMeanPooling


def test_mean_by_hand():
    x = np.array([[[1, 10], [3, 20], [8, 60]], [[5, 7], [1, 1], [2, 2]]], np.float32)
    valid = np.array([[True, True, True], [True, False, False]])
    np.testing.assert_allclose(MaskedMeanPooling()(x, valid), [[4, 30], [5, 7]], atol=1e-6, rtol=0)
    two = np.array([[True, True, False], [True, False, True]])
    np.testing.assert_allclose(MaskedMeanPooling()(x, two), [[2, 15], [3.5, 4.5]], atol=1e-6, rtol=0)


def test_a_text_without_tokens_gives_exactly_zero():
    x = np.random.default_rng(0).normal(size=(2, 4, 3)).astype(np.float32)
    np.testing.assert_array_equal(MaskedMeanPooling()(x, np.zeros((2, 4), bool)), np.zeros((2, 3)))


@pytest.mark.parametrize("content", [0.0, -7.5, 1e30, -1e30])
def test_padding_content_never_matters(content):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(3, 5, 4)).astype(np.float32)
    valid = np.arange(5) < np.array([[0], [2], [5]])
    before = np.asarray(MaskedMeanPooling()(x, valid))
    x[~valid] = content
    np.testing.assert_array_equal(MaskedMeanPooling()(x, valid), before)


@pytest.mark.parametrize("added", [1, 60])
def test_padding_length_never_matters(added):
    x = np.random.default_rng(0).normal(size=(2, 5, 4)).astype(np.float32)
    valid = np.arange(5) < np.array([[2], [5]])
    padded = np.pad(x, ((0, 0), (0, added), (0, 0)), constant_values=3.0)
    np.testing.assert_allclose(
        MaskedMeanPooling()(padded, np.pad(valid, ((0, 0), (0, added)))),
        MaskedMeanPooling()(x, valid),
        atol=1e-6,
        rtol=1e-6,
    )


@pytest.mark.parametrize("dtype", [tf.float16, tf.bfloat16])
def test_sums_are_float32(dtype):
    # 4096 ones: a float16 sum stops at 2048, a bfloat16 one at 256.
    x, valid = tf.ones((1, 4096, 2), dtype), np.ones((1, 4096), bool)
    pooled = MaskedMeanPooling(dtype="float32")(x, valid)
    assert pooled.dtype == tf.float32
    np.testing.assert_array_equal(pooled, np.ones((1, 2)))


def test_max_by_hand():
    x = np.array([[[1, -10], [3, -20], [8, -60]], [[-5, 7], [9, 9], [2, 2]], [[1, 1], [2, 2], [3, 3]]], np.float32)
    valid = np.array([[True, True, False], [True, False, False], [False, False, False]])
    found = MaskedMaxPooling()(x, valid)
    np.testing.assert_array_equal(found, [[3, -10], [-5, 7], [0, 0]])
    assert found.dtype == tf.float32
    half = MaskedMaxPooling(dtype="mixed_float16")(tf.cast(x, tf.float16), valid)
    assert half.dtype == tf.float32
    np.testing.assert_array_equal(half, found)


@pytest.mark.parametrize("content", [0.0, -7.5, 1e20, -1e20])
def test_padding_content_never_matters_to_the_maximum(content):
    x = np.random.default_rng(0).normal(size=(3, 5, 4)).astype(np.float32)
    valid = np.arange(5) < np.array([[0], [2], [5]])
    before = np.asarray(MaskedMaxPooling()(x, valid))
    np.testing.assert_allclose(before[1:], [x[1, :2].max(axis=0), x[2].max(axis=0)], atol=0, rtol=0)
    x[~valid] = content
    np.testing.assert_array_equal(MaskedMaxPooling()(x, valid), before)


@pytest.mark.parametrize("dtype", ["float32", "mixed_bfloat16"])
def test_the_class_vector_stands_in_front_of_every_text(dtype):
    layer = ClassVector(seed=1, dtype=dtype)
    x = np.random.default_rng(0).normal(size=(2, 3, 4)).astype(np.float32)
    valid = np.array([[True, True, False], [False, False, False]])
    out, out_valid = layer(x, valid)
    (vector,) = layer.trainable_weights
    assert (out.dtype, out_valid.dtype) == (tf.float32, tf.bool)
    np.testing.assert_array_equal(out[:, 1:], x)
    np.testing.assert_array_equal(out[:, 0], np.broadcast_to(vector, (2, 4)))
    np.testing.assert_array_equal(out_valid, np.pad(valid, [(0, 0), (1, 0)], constant_values=True))
    np.testing.assert_array_equal(FirstPooling()(out, out_valid), np.broadcast_to(vector, (2, 4)))
