import math
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

from pipeline.layers import LearnedPosition, RotaryPosition, ScaledDotProductAttention, SinusoidalPosition
from pipeline.layers.position import alibi, alibi_slopes, sinusoidal_table

GOLDEN = Path(__file__).parents[2] / "golden" / "encoder_classifier.npz"


def test_table_by_hand():
    # D = 4: the rates are 10000^0 = 1 and 10000^(-2/4) = 0.01.
    expected = [
        [0.0, 1.0, 0.0, 1.0],
        [math.sin(1), math.cos(1), math.sin(0.01), math.cos(0.01)],
        [math.sin(2), math.cos(2), math.sin(0.02), math.cos(0.02)],
    ]
    table = sinusoidal_table(3, 4)
    assert table.dtype == np.float32
    np.testing.assert_allclose(table, expected, atol=1e-7, rtol=0)
    np.testing.assert_allclose(table[1], [0.8414710, 0.5403023, 0.0099998, 0.9999500], atol=1e-7, rtol=0)


def test_table_equals_the_golden_one():
    with np.load(GOLDEN) as golden:
        np.testing.assert_allclose(sinusoidal_table(64, 16), golden["position_table"], atol=1e-7, rtol=0)


def test_positions_are_added():
    x = np.random.default_rng(0).normal(size=(2, 5, 6)).astype(np.float32)
    expected = x + sinusoidal_table(5, 6)
    np.testing.assert_allclose(SinusoidalPosition(9)(x), expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize("dtype", ["float32", "mixed_bfloat16", "mixed_float16"])
@pytest.mark.parametrize("cast_input", [False, True])
@pytest.mark.parametrize("position", [SinusoidalPosition, LearnedPosition])
def test_table_and_sum_are_float32_whatever_the_policy(position, dtype, cast_input):
    x = tf.constant(np.random.default_rng(0).normal(size=(2, 512, 8)), tf.float32)
    layer = position(512, dtype=dtype)
    if cast_input:
        x = tf.cast(x, layer.compute_dtype)
    out = layer(x)
    assert np.dtype(layer.table.dtype) == np.float32
    assert out.dtype == tf.float32
    assert layer(keras.Input((512, 8), dtype=x.dtype.name)).dtype == "float32"
    # Never rounded; a table in bfloat16 would be off by up to 1.9 at position 511.
    np.testing.assert_array_equal(out, tf.cast(x, tf.float32) + sinusoidal_table(512, 8))


def test_longer_than_max_length_is_refused():
    layer = SinusoidalPosition(4)
    assert layer(np.zeros((1, 4, 8), np.float32)).shape == (1, 4, 8)
    with pytest.raises(ValueError, match=r"max_length=4. Received: length=5"):
        layer(np.zeros((1, 5, 8), np.float32))


def test_longer_at_run_time_is_refused():
    call = tf.function(SinusoidalPosition(4), input_signature=[tf.TensorSpec([None, None, 8])])
    assert call(np.zeros((1, 4, 8), np.float32)).shape == (1, 4, 8)
    with pytest.raises(tf.errors.InvalidArgumentError):
        call(np.zeros((1, 5, 8), np.float32))


@pytest.mark.parametrize("d_model", [1, 7])
def test_odd_size_is_refused(d_model):
    with pytest.raises(ValueError, match=rf"Received: d_model={d_model}$"):
        sinusoidal_table(3, d_model)
    with pytest.raises(ValueError, match=rf"Received: d_model={d_model}$"):
        SinusoidalPosition(3)(np.zeros((1, 2, d_model), np.float32))


def test_learned_positions_start_sinusoidal_and_are_trained():
    x = np.random.default_rng(0).normal(size=(2, 5, 6)).astype(np.float32)
    layer = LearnedPosition(9)
    np.testing.assert_array_equal(layer(x), SinusoidalPosition(9)(x))
    (table,) = layer.trainable_weights
    assert table.shape == (9, 6)
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(layer(x) * x)
    gradient = np.asarray(tape.gradient(loss, table.value))
    np.testing.assert_allclose(gradient[:5], x.sum(axis=0), atol=1e-6, rtol=1e-6)
    np.testing.assert_array_equal(gradient[5:], 0.0)  # rows that no text reached stay what they were


def test_rotation_by_hand():
    # H = 4: pair 0 is values 0 and 2 and turns by 1 a position, pair 1 is values 1 and 3 and turns by 0.01.
    x = np.zeros((1, 1, 3, 4), np.float32)
    x[..., 0], x[..., 3] = 1.0, 2.0
    found = np.asarray(RotaryPosition(8)(x))[0, 0]
    for p in range(3):
        expected = [math.cos(p), -2 * math.sin(0.01 * p), math.sin(p), 2 * math.cos(0.01 * p)]
        np.testing.assert_allclose(found[p], expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize("dtype", ["float32", "mixed_bfloat16", "mixed_float16"])
def test_rotation_keeps_lengths_and_depends_on_distance_alone(dtype):
    rng = np.random.default_rng(0)
    query, key = (np.broadcast_to(rng.normal(size=8), (1, 1, 512, 8)).astype(np.float32) for _ in range(2))
    layer = RotaryPosition(512, dtype=dtype)
    half = dtype.removeprefix("mixed_")
    turned = [layer(tf.cast(x, half)) for x in (query, key)]
    assert turned[0].dtype.name == half
    query_turned, key_turned = (np.asarray(x, np.float64)[0, 0] for x in turned)
    scores = query_turned @ key_turned.T
    # Rounded to the dtype once, at the end: an angle in bfloat16 would be off by whole turns at position 511.
    atol = {"float32": 1e-4, "mixed_float16": 2e-2, "mixed_bfloat16": 2e-1}[dtype]
    np.testing.assert_allclose(np.linalg.norm(query_turned, axis=1), np.linalg.norm(query[0, 0], axis=1), atol=atol)
    for distance in (0, 1, 7, 300):
        np.testing.assert_allclose(np.diagonal(scores, distance), scores[0, distance], atol=atol, rtol=0)
    assert abs(scores[0, 7] - scores[0, 1]) > 0.1


def test_alibi_by_hand():
    # 4 heads: 2^-2, 2^-4, 2^-6, 2^-8.
    np.testing.assert_array_equal(alibi_slopes(4), [0.25, 0.0625, 0.015625, 0.00390625])
    np.testing.assert_array_equal(alibi_slopes(8), 2.0 ** -np.arange(1.0, 9.0))
    # 6 heads: those of 4, then the first and third of 8.
    np.testing.assert_array_equal(alibi_slopes(6), [0.25, 0.0625, 0.015625, 0.00390625, 0.5, 0.125])
    np.testing.assert_array_equal(alibi_slopes(1), [2.0**-8])
    found = alibi(tf.range(3), tf.range(4), 4)
    expected = -0.25 * np.array([[0, 1, 2, 3], [1, 0, 1, 2], [2, 1, 0, 1]])
    np.testing.assert_array_equal(found[0], expected)
    np.testing.assert_array_equal(found[1], expected / 4)


def test_alibi_is_added_to_the_scores():
    # Equal queries and keys: the weights of head 0 fall by e^(-1/4) with each step of distance.
    same = np.ones((1, 4, 5, 2), np.float32)
    _, weights = ScaledDotProductAttention(alibi=True)(same, same, same, return_weights=True)
    powers = np.exp(-0.25 * np.abs(np.arange(5)[:, None] - np.arange(5)))
    np.testing.assert_allclose(weights[0, 0], powers / powers.sum(axis=1, keepdims=True), atol=1e-6, rtol=0)
    attend = (np.arange(5) != 2)[None, None]
    _, weights = ScaledDotProductAttention(alibi=True)(same, same, same, attend=attend, return_weights=True)
    powers[:, 2] = 0.0
    np.testing.assert_allclose(weights[0, 0], powers / powers.sum(axis=1, keepdims=True), atol=1e-6, rtol=0)
