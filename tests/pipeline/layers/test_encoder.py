import keras
import numpy as np
import pytest
import tensorflow as tf

from pipeline.layers import (
    MixtureOfExperts,
    MultiHeadAttention,
    PositionwiseFeedForward,
    PostNormEncoderLayer,
    PreNormEncoderLayer,
    RotaryPosition,
)


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
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("input_dtype", ["float32", "float16", "bfloat16"])
def test_the_sum_of_the_branches_keeps_the_inputs_dtype(dtype, input_dtype, training):
    layer, x = built(dropout=0.1 if training else 0.0, dtype=dtype), tf.cast(random(2, 5, 8), input_dtype)
    assert layer.attention_norm(x).dtype.name == layer.feed_forward_norm(x).dtype.name == "float32"
    half = dtype.removeprefix("mixed_")
    assert layer.attention(x).dtype.name == layer.feed_forward(x).dtype.name == half  # matrix products
    out = layer(x, training=training)
    assert out.dtype.name == input_dtype
    assert layer(keras.Input((5, 8), dtype=input_dtype)).dtype == input_dtype
    if not training:
        expected = built()(tf.cast(x, tf.float32))
        np.testing.assert_allclose(np.asarray(out, np.float32), expected, atol=0.15, rtol=0.05)


def test_the_sum_of_the_branches_is_not_rounded():
    # What float32 adds to a large value, bfloat16 would swallow: half a unit in the last place of 256 is 1.
    layer, x = built(dtype="mixed_bfloat16"), 256.0 + random(2, 5, 8)
    attended = layer.attention(layer.attention_norm(x))
    transformed = layer.feed_forward(layer.feed_forward_norm(x + tf.cast(attended, tf.float32)))
    expected = x + tf.cast(attended, tf.float32) + tf.cast(transformed, tf.float32)
    np.testing.assert_allclose(layer(x), expected, atol=1e-4, rtol=0)


def test_size_must_be_a_multiple_of_num_heads():
    with pytest.raises(ValueError, match="Received: d_model=9, num_heads=2"):
        PreNormEncoderLayer(2, 4)(np.zeros((1, 2, 9), np.float32))


@pytest.mark.parametrize("masked", [False, True])
def test_post_norm_equals_the_formula_from_its_own_sublayers(masked):
    layer, x = PostNormEncoderLayer(2, 12, 0.3, seed=3), random(2, 5, 8)
    attend = np.arange(5) < np.array([[2], [5]])[:, None] if masked else None  # [B, 1, T]
    found = layer(x, attend=attend)
    attended = layer.attention_norm(x + layer.attention(x, attend=attend))
    expected = layer.feed_forward_norm(attended + layer.feed_forward(attended))
    np.testing.assert_allclose(found, expected, atol=1e-6, rtol=1e-6)
    np.testing.assert_allclose(np.mean(found, axis=-1), 0.0, atol=1e-6)  # what a LayerNorm makes


def test_given_pieces_take_the_place_of_the_plain_ones():
    attention = MultiHeadAttention(8, 2, num_kv_heads=1, rotary=RotaryPosition(9), seed=1)
    feed_forward = PositionwiseFeedForward(5, activation="relu", seed=2)
    layer, x = PreNormEncoderLayer(2, 12, seed=3, attention=attention, feed_forward=feed_forward), random(2, 5, 8)
    layer.build(x.shape)
    attended = x + attention(layer.attention_norm(x))
    np.testing.assert_allclose(layer(x), attended + feed_forward(layer.feed_forward_norm(attended)), atol=1e-6)
    again = PreNormEncoderLayer.from_config(layer.get_config())
    np.testing.assert_array_equal(again(x), layer(x))  # seeded: equal weights
    plain = PreNormEncoderLayer(2, 12, seed=3)
    same = MultiHeadAttention(8, 2, seed=plain_seed(plain, x))
    np.testing.assert_array_equal(PreNormEncoderLayer(2, 12, seed=3, attention=same)(x), plain(x))


def plain_seed(layer, x):
    layer(x)
    return layer.attention.seed


@pytest.mark.parametrize("layer_class", [PreNormEncoderLayer, PostNormEncoderLayer])
def test_padding_has_no_part_in_the_balance_of_experts(layer_class):
    experts = MixtureOfExperts(3, 1, 12, seed=2, load_balancing=1.0)
    layer, x = layer_class(2, 12, seed=3, feed_forward=experts), random(2, 4, 8)

    def balance(x, attend):
        layer(x, attend=attend, training=True)
        return float(layer.losses[0])

    expected = balance(x, np.ones((2, 1, 4), bool))
    padded = np.concatenate([x, random(2, 3, 8, seed=1)], axis=1)
    found = balance(padded, np.broadcast_to(np.arange(7) < 4, (2, 1, 7)))
    assert found == pytest.approx(expected, abs=1e-6)
    assert balance(padded, np.ones((2, 1, 7), bool)) != pytest.approx(expected, abs=1e-4)
    causal = np.tril(np.ones((1, 4, 4), bool))  # one mask for all texts
    layer(x, attend=causal, training=True)
