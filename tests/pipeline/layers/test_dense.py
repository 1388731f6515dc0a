import keras
import numpy as np
import pytest
import tensorflow as tf

from pipeline.layers.dense import Dense


def pair(size, **kwargs):
    """Our layer and Keras's, with the same weights."""
    layers = Dense(4, **kwargs), keras.layers.Dense(4, **kwargs)
    rng = np.random.default_rng(0)
    for layer in layers:
        layer.build((None, size))
    for ours, theirs in zip(*(layer.weights for layer in layers), strict=True):
        values = rng.normal(size=ours.shape)
        ours.assign(values)
        theirs.assign(values)
    return layers


@pytest.mark.parametrize("kwargs", [{}, {"use_bias": False}, {"activation": "relu"}], ids=str)
@pytest.mark.parametrize("shape", [(5, 3), (2, 5, 3), (2, 3, 5, 3), (0, 5, 3)], ids=str)
def test_equals_keras_with_unknown_dimensions(shape, kwargs):
    ours, theirs = pair(3, **kwargs)
    x = np.random.default_rng(1).normal(size=shape).astype(np.float32)
    call = tf.function(ours, input_signature=[tf.TensorSpec([None] * (len(shape) - 1) + [3])])
    assert call.get_concrete_function().structured_outputs.shape.as_list() == [None] * (len(shape) - 1) + [4]
    for found in (ours(x), call(x)):
        assert found.shape == (*shape[:-1], 4)
        np.testing.assert_allclose(found, theirs(x), atol=1e-6, rtol=1e-5)


def test_gradients_equal_keras():
    ours, theirs = pair(3)
    rng = np.random.default_rng(1)
    x, upstream = (tf.constant(rng.normal(size=(2, 5, size)), tf.float32) for size in (3, 4))
    found = []
    for layer in (ours, theirs):
        with tf.GradientTape() as tape:
            tape.watch(x)
            out = layer(x)
        sources = [x, layer.kernel.value, layer.bias.value]
        found.append(tape.gradient(out, sources, output_gradients=upstream))
    for a, b in zip(*found, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5, rtol=1e-5)


def test_the_product_is_in_the_policys_dtype():
    ours, theirs = pair(3, dtype="mixed_bfloat16")
    x = np.random.default_rng(1).normal(size=(2, 5, 3)).astype(np.float32)
    assert ours(x).dtype == tf.bfloat16
    assert ours.kernel.dtype == "float32"
    # Products rounded to bfloat16 before or after the bias: a unit in the last place of values up to 4.
    np.testing.assert_allclose(tf.cast(ours(x), tf.float32), tf.cast(theirs(x), tf.float32), atol=2**-6, rtol=0)
