import math

import numpy as np
import pytest
import tensorflow as tf

from pipeline.layers import PositionwiseFeedForward
from pipeline.layers.feed_forward import gelu


def exact_gelu(x):
    return np.vectorize(lambda v: v * 0.5 * (1.0 + math.erf(v / math.sqrt(2.0))))(np.asarray(x, np.float64))


def test_gelu_is_exact():
    x = np.concatenate([np.linspace(-6, 6, 241), [-30.0, 30.0]]).astype(np.float32)
    # The tanh approximation is off by up to 5e-4.
    np.testing.assert_allclose(gelu(tf.constant(x)), exact_gelu(x), atol=1e-6, rtol=1e-6)


def test_gelu_by_hand():
    # Phi(1) = 0.8413447, Phi(-1) = 0.1586553.
    np.testing.assert_allclose(gelu(tf.constant([-1.0, 0.0, 1.0])), [-0.1586553, 0.0, 0.8413447], atol=1e-6, rtol=0)


@pytest.mark.parametrize("compiled", [False, True])
def test_gelus_gradient_equals_numeric_differences(compiled):
    x = np.concatenate([np.linspace(-6, 6, 241), [-30.0, 30.0]]).astype(np.float32)
    upstream = np.random.default_rng(0).normal(size=x.shape).astype(np.float32)
    variable = tf.constant(x)
    with tf.GradientTape() as tape:
        tape.watch(variable)
        out = (tf.function(gelu) if compiled else gelu)(variable)
    found = tape.gradient(out, variable, output_gradients=tf.constant(upstream))
    wide = x.astype(np.float64)
    numeric = (exact_gelu(wide + 1e-5) - exact_gelu(wide - 1e-5)) / 2e-5
    np.testing.assert_allclose(found, numeric * upstream, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize(("dtype", "epsilon"), [("float16", 2**-10), ("bfloat16", 2**-7)])
def test_gelu_of_half_precision(dtype, epsilon):
    x = tf.cast(tf.linspace(-4.0, 4.0, 161), dtype)
    with tf.GradientTape() as tape:
        tape.watch(x)
        out = gelu(x)
    gradient = tape.gradient(out, x)
    assert out.dtype == gradient.dtype == x.dtype
    wide = tf.cast(x, tf.float64).numpy()
    # Phi is rounded near 1/2: a few of its units in the last place, times x.
    np.testing.assert_allclose(tf.cast(out, tf.float64), exact_gelu(wide), atol=4 * epsilon, rtol=2 * epsilon)
    numeric = (exact_gelu(wide + 1e-5) - exact_gelu(wide - 1e-5)) / 2e-5
    np.testing.assert_allclose(tf.cast(gradient, tf.float64), numeric, atol=4 * epsilon, rtol=2 * epsilon)


def test_gelu_has_an_onnx_operator():
    graph = tf.function(gelu, input_signature=[tf.TensorSpec([None])]).get_concrete_function().graph
    kinds = {op.type for op in graph.get_operations()}
    assert "Erf" in kinds
    assert "Erfc" not in kinds


def test_equals_numpy_at_every_position():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2, 5, 6)).astype(np.float32)
    layer = PositionwiseFeedForward(10, seed=1)
    layer.build(x.shape)
    for v in layer.weights:  # biases too
        v.assign(rng.normal(size=v.shape))
    w1, b1, w2, b2 = (np.asarray(v, np.float64) for v in layer.weights)
    assert (w1.shape, b1.shape, w2.shape, b2.shape) == ((6, 10), (10,), (10, 6), (6,))
    np.testing.assert_allclose(layer(x), exact_gelu(x @ w1 + b1) @ w2 + b2, atol=1e-5, rtol=1e-5)
    for t in range(5):
        np.testing.assert_allclose(layer(x[:, t : t + 1])[:, 0], layer(x)[:, t], atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("training", [False, True])
def test_dropout_only_in_training(training):
    x = np.random.default_rng(0).normal(size=(2, 5, 6)).astype(np.float32)
    layer = PositionwiseFeedForward(10, 0.5, seed=1)
    assert np.array_equal(layer(x, training=training), layer(x, training=training)) is not training


@pytest.mark.parametrize("activation", ["relu", "swiglu"])
def test_other_activations_equal_numpy(activation):
    x = np.random.default_rng(0).normal(size=(2, 5, 6)).astype(np.float32)
    layer = PositionwiseFeedForward(10, seed=1, activation=activation)
    layer.build(x.shape)
    for i, v in enumerate(layer.weights):  # biases too
        v.assign(np.random.default_rng(i).normal(size=v.shape))

    def product(dense, x):
        return x @ np.asarray(dense.kernel, np.float64) + np.asarray(dense.bias, np.float64)

    hidden = product(layer.hidden, x)
    if activation == "relu":
        hidden = np.maximum(hidden, 0)
    else:
        gate = product(layer.gate, x)
        hidden = gate / (1 + np.exp(-gate)) * hidden
    np.testing.assert_allclose(layer(x), product(layer.output_projection, hidden), atol=1e-4, rtol=1e-5)
    assert len(layer.weights) == {"relu": 4, "swiglu": 6}[activation]


def test_swiglu_by_hand():
    # Gate 1: 1 * sigmoid(1) = 0.7310586; times hidden value 3; times output weight 2.
    layer = PositionwiseFeedForward(1, activation="swiglu")
    layer.build((None, None, 1))
    layer.gate.kernel.assign([[1.0]])
    layer.hidden.kernel.assign([[3.0]])
    layer.output_projection.kernel.assign([[2.0]])
    np.testing.assert_allclose(layer(np.ones((1, 1, 1), np.float32)), [[[4.3863516]]], atol=1e-6, rtol=0)


def test_unknown_activation_is_refused():
    with pytest.raises(ValueError, match="Received: activation='silu'"):
        PositionwiseFeedForward(4, activation="silu")
