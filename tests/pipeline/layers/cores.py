"""What the tests of the attention cores share: heads, and attention by its formula in NumPy."""

import numpy as np
import tensorflow as tf

SLOPES = np.array([2**-4, 2**-8])  # ALiBi's of two heads


def make_heads(batch=2, num_heads=2, length=13, keys=None, size=4):
    rng = np.random.default_rng(0)
    lengths = (length, keys or length, keys or length)
    return tuple(tf.constant(rng.normal(size=(batch, num_heads, n, size)).astype(np.float32)) for n in lengths)


def make_mask(batch, length, keys):
    """Random, bool [B, T, S]; nothing is left to the last row, and to one query of the first."""
    attend = np.random.default_rng(1).random((batch, length, keys)) < 0.5
    attend[-1] = False
    if length > 1:
        attend[0, length // 2] = False
    return attend


def softmax_attention(query, key, value, attend, alibi=False, dropped=1.0):
    """In float64; `attend` is bool [B, T, S], `dropped` what the weights are multiplied with."""
    query, key, value = (np.asarray(x, np.float64) for x in (query, key, value))
    scores = np.einsum("bnth,bnsh->bnts", query, key) / np.sqrt(query.shape[-1])
    if alibi:
        t, s = np.ogrid[: scores.shape[2], : scores.shape[3]]
        scores = scores - SLOPES[:, None, None] * np.abs(t - s)
    powers = np.exp(scores - scores.max(axis=-1, keepdims=True)) * attend[:, None]
    return powers / np.maximum(powers.sum(axis=-1, keepdims=True), 1e-300) * dropped @ value


def with_gradients(core, *heads, attend=None, **options):
    """Returns (context, gradients of a loss with respect to query, key and value); `options` of tf.function."""
    loss_weights = tf.constant(np.random.default_rng(2).normal(size=heads[0].shape).astype(np.float32))

    def call(*heads):
        with tf.GradientTape() as tape:
            tape.watch(heads)
            context = core(*heads, attend=attend)
            loss = tf.reduce_sum(tf.cast(context, tf.float32) * loss_weights)
        return context, *tape.gradient(loss, heads)

    if options:  # length and batch left open
        signature = [tf.TensorSpec([None, h.shape[1], None, h.shape[3]], h.dtype) for h in heads]
        call = tf.function(call, input_signature=signature, **options)
    return [np.asarray(x) for x in call(*heads)]


def assert_all_close(found, expected, atol=1e-5, rtol=1e-5):
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, atol=atol, rtol=rtol)
