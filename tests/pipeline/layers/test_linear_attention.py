import keras
import numpy as np
import pytest
import tensorflow as tf

from pipeline.layers import LinearAttention, MultiHeadAttention
from tests.pipeline.layers.cores import assert_all_close, make_heads, make_mask, with_gradients


def oracle(query, key, value, attend):
    """The T x S weights, which the layer never forms, in float64."""
    query, key, value = (np.asarray(x, np.float64) for x in (query, key, value))

    def phi(x):
        return np.where(x > 0, x + 1, np.exp(np.minimum(x, 0)))

    weights = np.einsum("bnth,bnsh->bnts", phi(query), phi(key)) * attend[:, None]
    return weights / np.maximum(weights.sum(axis=-1, keepdims=True), 1e-300) @ value


def dense(query, key, value, attend):
    def phi(x):
        return tf.nn.elu(x) + 1

    weights = tf.matmul(phi(query), phi(key), transpose_b=True) * tf.cast(attend, tf.float32)[:, None]
    return tf.matmul(weights / tf.maximum(tf.reduce_sum(weights, axis=-1, keepdims=True), 1e-30), value)


def test_two_keys_by_hand():
    # H = 1: phi(q) cancels; phi(0) = 1, phi(2) = 3: weights 1/4 and 3/4.
    key = tf.constant([0.0, 2.0])[None, None, :, None]
    value = tf.constant([8.0, 4.0])[None, None, :, None]
    context = LinearAttention()(tf.constant([[[[-1.0], [5.0]]]]), key, value)
    np.testing.assert_allclose(context[0, 0, :, 0], [5.0, 5.0], atol=0, rtol=1e-6)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("length", "keys"), [(1, 1), (13, 13), (5, 9)])
def test_equals_numpy(length, keys, masked):
    heads, attend = make_heads(length=length, keys=keys), make_mask(2, 1, keys)
    attend[0, 0, 0] = True
    context = np.asarray(LinearAttention()(*heads, attend=attend if masked else None))
    expected = oracle(*heads, attend if masked else np.ones_like(attend))
    np.testing.assert_allclose(context, expected, atol=1e-6, rtol=1e-5)
    if masked:
        np.testing.assert_array_equal(context[1], 0.0)


@pytest.mark.parametrize("options", [{}, {"jit_compile": False}, {"jit_compile": True}])
def test_gradients_equal_the_dense_ones(options):
    heads, attend = make_heads(), make_mask(2, 1, 13)
    found = with_gradients(LinearAttention(), *heads, attend=attend, **options)
    assert_all_close(found, with_gradients(dense, *heads, attend=attend))
    assert all(np.abs(gradient).max() > 0.05 for gradient in found)


def test_padding_changes_nothing():
    heads = make_heads(length=9)
    noise = np.random.default_rng(3).normal(0, 100, (2, 2, 8, 4)).astype(np.float32)
    attend = np.broadcast_to(np.arange(17) < 9, (2, 1, 17))
    padded = LinearAttention()(*(tf.concat([x, noise], axis=2) for x in heads), attend=attend)
    np.testing.assert_allclose(padded[:, :, :9], LinearAttention()(*heads), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("sign", [-1, 1])
def test_far_from_zero_it_is_still_a_mean_of_the_values(sign):
    query, key, value = make_heads()
    heads = (query + 30 * sign, key + 30 * sign, value)  # elu(-30) + 1 would be 0 in float32
    found = with_gradients(LinearAttention(), *heads)
    np.testing.assert_allclose(found[0], oracle(*heads, np.ones((2, 1, 13), bool)), atol=1e-5, rtol=1e-4)
    assert all(np.isfinite(x).all() for x in found)


@pytest.mark.parametrize("dtype", ["mixed_float16", "mixed_bfloat16"])
def test_sums_over_a_long_text_are_float32(dtype):
    half = dtype.removeprefix("mixed_")
    query, key, value = make_heads(length=600)
    heads = [tf.cast(x, half) for x in (query, 40 * key, 40 * value)]  # phi(K)^T V passes 65,504
    found = with_gradients(LinearAttention(dtype=dtype), *heads)
    assert all(x.dtype.name == half and np.isfinite(x.astype(np.float32)).all() for x in found)
    expected = oracle(*(tf.cast(x, "float32") for x in heads), np.ones((2, 1, 600), bool))
    unit = {"float16": 2**-11, "bfloat16": 2**-8}[half]  # rounded once, at the end
    np.testing.assert_allclose(found[0].astype(np.float32), expected, atol=1e-4, rtol=1.01 * unit)


def test_what_it_does_not_have_is_refused():
    with pytest.raises(ValueError, match=r"same for every query: \[B, 1, S\]. Received: shape=\(2, 13, 13\)"):
        LinearAttention()(*make_heads(), attend=np.ones((2, 13, 13), bool))
    layer = MultiHeadAttention(8, 2, core=LinearAttention())
    message = "return_weights needs a core that forms them, ScaledDotProductAttention: .*Received: core=LinearAttention"
    for x in (np.ones((1, 3, 8)), keras.Input((None, 8))):
        with pytest.raises(ValueError, match=message):
            layer(x, return_weights=True)
