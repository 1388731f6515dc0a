import numpy as np
import pytest

from pipeline.layers import PreNormEncoderLayer
from pipeline.layers.encoder import LAYER_NORM_EPSILON, layer_norm


def random(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def built(dropout=0.0, **kwargs):
    layer = PreNormEncoderLayer(2, 12, dropout, seed=3, **kwargs)
    layer.build((None, None, 8))
    for i, v in enumerate(layer.weights):  # biases and LayerNorm too
        if "seed" not in v.path:
            v.assign(v + 0.3 * random(*v.shape, seed=i))
    return layer


@pytest.mark.parametrize("masked", [False, True])
def test_equals_the_formula_from_its_own_sublayers(masked):
    layer, x = built(dropout=0.3), random(2, 5, 8)
    attend = np.arange(5) < np.array([[2], [5]])[:, None] if masked else None  # [B, 1, T]
    attended = x + layer.attention(layer.attention_norm(x), attend=attend)
    expected = attended + layer.feed_forward(layer.feed_forward_norm(attended))
    np.testing.assert_allclose(layer(x, attend=attend), expected, atol=1e-6, rtol=1e-6)


def test_training_drops_and_inference_does_not():
    layer, x = built(dropout=0.3), random(2, 5, 8)
    np.testing.assert_array_equal(layer(x), layer(x, training=False))
    assert not np.allclose(layer(x, training=True), layer(x), atol=1e-3)
    assert not np.array_equal(layer(x, training=True), layer(x, training=True))
    without = built(dropout=0.0)
    np.testing.assert_array_equal(without(x, training=True), without(x))


def test_dropout_reaches_attention_weights_hidden_values_and_both_branches():
    # Each place has its own seed: the state of exactly four generators moves on.
    layer = built(dropout=0.3)
    states = [v for v in layer.variables if "seed" in v.path]
    before = [np.array(v) for v in states]
    layer(random(2, 5, 8), training=True)
    assert len(states) == 4
    assert all(not np.array_equal(v, old) for v, old in zip(states, before, strict=True))
    assert len({old[-1].item() for old in before} | {old[0].item() for old in before}) > 4


@pytest.mark.parametrize("dtype", ["mixed_bfloat16", "mixed_float16"])
def test_layer_norm_is_float32_whatever_the_policy(dtype):
    layer, x = built(dtype=dtype), random(2, 5, 8)
    assert layer.attention_norm(x).dtype.name == layer.feed_forward_norm(x).dtype.name == "float32"
    out = layer(x)
    assert out.dtype.name == dtype.removeprefix("mixed_")
    np.testing.assert_allclose(np.asarray(out, np.float32), built()(x), atol=0.15, rtol=0.05)


def test_layer_norm_by_hand():
    # Mean 2, variance 2/3: (x - 2) / sqrt(2/3 + 1e-5).
    assert LAYER_NORM_EPSILON == 1e-5
    expected = [-1.2247357, 0.0, 1.2247357]
    np.testing.assert_allclose(layer_norm("n")(np.array([[1.0, 2.0, 3.0]])), [expected], atol=1e-6, rtol=0)
    # Variance 1e-6 shows the epsilon: 1e-3 / sqrt(1e-6 + 1e-5) = 0.3015113.
    tiny = layer_norm("n")(np.array([[-1e-3, 1e-3]]))
    np.testing.assert_allclose(tiny, [[-0.3015113, 0.3015113]], atol=1e-5, rtol=0)


def test_size_must_be_a_multiple_of_num_heads():
    with pytest.raises(ValueError, match="Received: d_model=9, num_heads=2"):
        PreNormEncoderLayer(2, 4)(np.zeros((1, 2, 9), np.float32))
