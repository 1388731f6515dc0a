import math

import keras
import numpy as np
import pytest
import tensorflow as tf

from pipeline.layers import dropout
from pipeline.layers.dropout import Dropout


def mask_of(layer, *shape, dtype="float32"):
    """What one call makes of ones, in float32."""
    return tf.cast(layer(tf.ones(shape, dtype), training=True), tf.float32).numpy()


def correlation(a, b):
    return np.corrcoef(a.ravel(), b.ravel())[0, 1]


@pytest.fixture
def small_window(monkeypatch):
    """The table holds 2 * 1,024 values; returns the length of a cut."""
    monkeypatch.setattr(dropout, "_WINDOW", 1024)
    dropout._table.cache_clear()
    yield 1024
    dropout._table.cache_clear()


@pytest.mark.parametrize("rate", [0.1, 0.3, 0.5])
def test_share_scale_and_mean(rate):
    mask = mask_of(Dropout(rate, seed=1), 1000, 1000)
    assert set(np.unique(mask)) == {np.float32(0), np.float32(1 / (1 - rate))}
    # Five standard deviations of a million draws.
    assert np.mean(mask == 0) == pytest.approx(rate, abs=5e-3 * math.sqrt(rate * (1 - rate)))
    assert mask.mean(dtype=np.float64) == pytest.approx(1.0, abs=5e-3 * math.sqrt(rate / (1 - rate)))


def test_every_place_is_dropped_at_the_rate_over_many_calls():
    layer = Dropout(0.3, seed=2)
    call = tf.function(lambda x: layer(x, training=True))
    dropped = np.mean([call(tf.ones((6, 7))).numpy() == 0 for _ in range(400)], axis=0)
    # Largest of 42 shares over 400 draws: within 4 standard deviations.
    np.testing.assert_allclose(dropped, 0.3, atol=4 * math.sqrt(0.3 * 0.7 / 400), rtol=0)


def test_neighbours_calls_and_seeds_are_not_correlated():
    layer = Dropout(0.3, seed=3)
    first, second, other = mask_of(layer, 512, 512), mask_of(layer, 512, 512), mask_of(Dropout(0.3, seed=4), 512, 512)
    assert abs(correlation(first, second)) < 5 / math.sqrt(first.size)
    assert abs(correlation(first, other)) < 5 / math.sqrt(first.size)
    # Values at any distance, so columns and rows too (Wiener-Khinchin); the largest of 262,143 correlations.
    spectrum = np.abs(np.fft.rfft(first.ravel() - first.mean(dtype=np.float64))) ** 2
    of_distance = np.fft.irfft(spectrum)
    of_distance /= of_distance[0]
    assert np.abs(of_distance[1:]).max() < 6 / math.sqrt(first.size)


def test_the_seed_decides_the_sequence():
    one, again, other, unseeded = (Dropout(0.5, seed=s) for s in (5, 5, 6, None))
    sequences = [[mask_of(layer, 4, 30).tobytes() for _ in range(5)] for layer in (one, again, other, unseeded)]
    assert sequences[0] == sequences[1]
    assert len({mask for sequence in sequences for mask in sequence}) == 15  # no mask of another call or seed


def test_nothing_happens_without_training():
    layer, x = Dropout(0.5, seed=1), tf.random.stateless_normal((3, 4), [1, 2])
    state = layer.seed_generator.state.numpy()
    for training in (False, None):
        np.testing.assert_array_equal(layer(x, training=training), x)
    np.testing.assert_array_equal(layer(x), x)
    np.testing.assert_array_equal(layer.seed_generator.state, state)


def test_rate_0_has_no_state_and_no_effect():
    layer, x = Dropout(0.0, seed=1), tf.random.stateless_normal((3, 4), [1, 2])
    assert layer.variables == []
    np.testing.assert_array_equal(layer(x, training=True), x)


@pytest.mark.parametrize("rate", [-0.1, 1.0, 1.5, float("nan")])
def test_rates_outside_are_refused(rate):
    with pytest.raises(ValueError, match=rf"rate must be in \[0, 1\). Received: rate={rate}"):
        Dropout(rate)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("rate", [0.1, 0.3])
def test_half_precision_keeps_its_dtype(dtype, rate):
    layer = Dropout(rate, seed=1, dtype=f"mixed_{dtype}")
    assert layer(tf.ones((2, 3), dtype), training=True).dtype.name == dtype
    mask = mask_of(layer, 20, 50, dtype=dtype)
    scale = float(tf.cast(1 / (1 - rate), dtype))
    assert set(np.unique(mask)) == {0.0, np.float32(scale)}
    # The rounding of 1 / (1 - rate): half a unit in the last place.
    assert scale == pytest.approx(1 / (1 - rate), rel={"float16": 2**-11, "bfloat16": 2**-8}[dtype])


def test_float32_stays_float32_inside_of_a_half_precision_model():
    x = tf.constant([[1.0 + 2**-20] * 8])
    out = Dropout(0.5, seed=1, dtype="float32")(x, training=True).numpy()
    assert out.dtype == np.float32
    assert set(np.unique(out)) == {np.float32(0), np.float32(2 + 2**-19)}


def test_the_gradient_is_the_mask():
    layer, x = Dropout(0.3, seed=1), tf.ones((5, 8))
    with tf.GradientTape() as tape:
        tape.watch(x)
        out = layer(x, training=True)
    assert 0 < np.count_nonzero(out) < 40
    np.testing.assert_array_equal(tape.gradient(out, x), out)


def test_one_graph_for_every_shape():
    layer = Dropout(0.5, seed=1)
    call = tf.function(lambda x: layer(x, training=True), input_signature=[tf.TensorSpec([None, None, 6])])
    for shape in ((2, 3, 6), (1, 1, 6), (40, 9, 6), (0, 3, 6)):
        out = call(tf.ones(shape)).numpy()
        assert out.shape == shape
        assert set(np.unique(out)) <= {0.0, 2.0}
    assert call.experimental_get_tracing_count() == 1


def test_compiles_with_xla():
    layer = Dropout(0.5, seed=1)
    call = tf.function(lambda x: layer(x, training=True), jit_compile=True)
    first, second = (call(tf.ones((50, 40))).numpy() for _ in range(2))
    assert set(np.unique(first)) == {0.0, 2.0}
    assert np.mean(first == 0) == pytest.approx(0.5, abs=5 * 0.5 / math.sqrt(2000))
    assert not np.array_equal(first, second)


@pytest.mark.parametrize("length", [1023, 1024, 1025, 2048, 5000])
def test_a_mask_longer_than_a_window_is_put_together_from_cuts(small_window, length):
    mask = dropout._mask(tf.constant([length]), 0.5, tf.constant([1, 2])).numpy()
    assert mask.shape == (length,)
    table = dropout._table(0.5).numpy().ravel()
    parts = [mask[start : start + small_window] for start in range(0, length, small_window)]
    for part in parts:
        cuts = [table[start : start + len(part)] for start in range(0, small_window, 16)]
        assert any(np.array_equal(part, cut) for cut in cuts)
    whole = [part.tobytes() for part in parts if len(part) == small_window]
    assert len(set(whole)) == len(whole)


def test_two_passes_in_one_batch_get_two_masks(small_window):
    mask = mask_of(Dropout(0.5, seed=1), 2, 4, 16, 16)  # each pass is one window
    assert not np.array_equal(mask[0], mask[1])


def test_in_a_model_that_is_fitted_saved_and_loaded(tmp_path):
    keras.utils.set_random_seed(1)  # `fit` shuffles
    inputs = keras.Input((4,))
    model = keras.Model(inputs, keras.layers.Dense(1)(Dropout(0.5, seed=1, name="dropout")(inputs)))
    x = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)
    model.compile("sgd", "mse")
    model.fit(x, x[:, :1], epochs=1, verbose=0)
    assert not np.array_equal(model(x, training=True), model(x, training=True))
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(loaded(x), model(x))
    assert not np.array_equal(loaded(x, training=True), loaded(x, training=True))
    assert loaded.get_layer("dropout").get_config() == model.get_layer("dropout").get_config()
