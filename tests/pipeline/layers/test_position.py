import math
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

from pipeline.layers import LearnedPosition, SinusoidalPosition
from pipeline.layers.position import sinusoidal_table

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
