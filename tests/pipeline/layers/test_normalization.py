import numpy as np
import pytest
import tensorflow as tf

from pipeline.layers.normalization import EPSILON, LayerNorm


def random(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def built(size=6, **kwargs):
    layer = LayerNorm(**kwargs)
    layer.build((None, size))
    layer.gamma.assign(1.0 + 0.5 * random(size, seed=1))
    layer.beta.assign(random(size, seed=2))
    return layer


def plain(x, gamma, beta):
    """The formula, for NumPy and for TensorFlow's own derivatives."""
    library = tf if tf.is_tensor(x) else np
    mean = tf.reduce_mean if library is tf else np.mean
    centred = x - mean(x, -1, keepdims=True)
    return centred / library.sqrt(mean(centred * centred, -1, keepdims=True) + EPSILON) * gamma + beta


def gradients(call, layer, x, upstream):
    x, variables = tf.constant(x), [layer.gamma.value, layer.beta.value]
    with tf.GradientTape() as tape:
        tape.watch(x)
        out = call(x)
    return [np.array(g) for g in tape.gradient(out, [x, *variables], output_gradients=tf.constant(upstream))]


def test_by_hand():
    # Mean 2, variance 2/3: (x - 2) / sqrt(2/3 + 1e-5).
    assert EPSILON == 1e-5
    expected = [-1.2247357, 0.0, 1.2247357]
    np.testing.assert_allclose(LayerNorm()(np.array([[1.0, 2.0, 3.0]])), [expected], atol=1e-6, rtol=0)
    # Variance 1e-6 shows the epsilon: 1e-3 / sqrt(1e-6 + 1e-5) = 0.3015113.
    tiny = LayerNorm()(np.array([[-1e-3, 1e-3]]))
    np.testing.assert_allclose(tiny, [[-0.3015113, 0.3015113]], atol=1e-5, rtol=0)
    np.testing.assert_array_equal(LayerNorm()(np.full((2, 3), 7.0)), 0.0)


def test_gamma_and_beta():
    layer, x = built(), random(2, 3, 6)
    expected = plain(x.astype(np.float64), np.array(layer.gamma), np.array(layer.beta))
    np.testing.assert_allclose(layer(x), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("shape", [(6,), (4, 6), (2, 3, 6), (2, 2, 3, 6)])
def test_gradient_equals_the_plain_formulas(shape):
    layer, x, upstream = built(), 3.0 + 2.0 * random(*shape, seed=3), random(*shape, seed=4)
    if len(shape) == 1:
        x, upstream = x[None], upstream[None]
    found = gradients(layer, layer, x, upstream)
    expected = gradients(lambda x: plain(x, layer.gamma.value, layer.beta.value), layer, x, upstream)
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5, rtol=1e-5)


def test_gradient_equals_numeric_differences():
    layer, x, upstream = built(), random(2, 6, seed=3), random(2, 6, seed=4)
    found = gradients(tf.function(layer), layer, x, upstream)
    points = [x.astype(np.float64), *(np.array(v, np.float64) for v in (layer.gamma, layer.beta))]
    for which, gradient in enumerate(found):
        for i in np.ndindex(gradient.shape):
            values = []
            for step in (1e-4, -1e-4):
                moved = [p.copy() for p in points]
                moved[which][i] += step
                values.append(np.sum(plain(*moved) * upstream))
            assert gradient[i] == pytest.approx((values[0] - values[1]) / 2e-4, abs=1e-4)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_float32_whatever_the_policy(dtype):
    layer, x = built(dtype=f"mixed_{dtype}"), tf.cast(100.0 * random(4, 6), dtype)
    out = layer(x)
    assert out.dtype == layer.gamma.value.dtype == tf.float32
    # The squares of 100 would leave float16, sums of six hundreds would be rounded in bfloat16.
    np.testing.assert_array_equal(out, layer(tf.cast(x, tf.float32)))
    gradient = gradients(layer, layer, x, random(4, 6, seed=1))[0]
    assert gradient.dtype == x.dtype.as_numpy_dtype
