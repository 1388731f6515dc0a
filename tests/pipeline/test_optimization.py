import math

import keras
import numpy as np
import pytest
import tensorflow as tf

from pipeline.classifier import build_classifier
from pipeline.config import ModelConfig, TrainingConfig
from pipeline.optimization import build_optimizer, compile_predict, compile_train_step, learning_rate

SIZES = ModelConfig(d_model=8, num_heads=2, d_ff=12, num_layers=1, dropout=0.0, head_dropout=0.0, max_length=8)
TOKEN_IDS = np.array([[5, 3, 9, 2], [7, 1, 0, 0], [4, 0, 0, 0]], np.int32)
LABELS = np.array([0, 2, 1], np.int32)


@pytest.mark.parametrize(
    ("step", "steps", "warmup_ratio", "share"),
    [
        # 2 of 10 steps warm up; then cos(pi * (step - 2) / 8).
        (0, 10, 0.2, 0.5),
        (1, 10, 0.2, 1.0),
        (2, 10, 0.2, 1.0),
        (4, 10, 0.2, 0.8535534),  # (1 + cos(pi / 4)) / 2
        (6, 10, 0.2, 0.5),
        (8, 10, 0.2, 0.1464466),
        (9, 10, 0.2, 0.0380602),  # (1 + cos(7 pi / 8)) / 2
        # No warm-up, only warm-up, a part of a step is a step, a single step.
        (0, 4, 0.0, 1.0),
        (2, 4, 0.0, 0.5),
        (0, 4, 1.0, 0.25),
        (3, 4, 1.0, 1.0),
        (0, 10, 0.11, 0.5),
        (0, 1, 0.0, 1.0),
        (0, 1, 1.0, 1.0),
        (9999, 10000, 0.1, 0.0),
    ],
)
def test_learning_rate_by_hand(step, steps, warmup_ratio, share):
    assert learning_rate(step, steps, 3e-4, warmup_ratio) == pytest.approx(3e-4 * share, rel=1e-6, abs=1e-11)


@pytest.mark.parametrize("warmup_ratio", [0.0, 0.1, 0.5, 1.0])
def test_learning_rate_rises_then_falls_and_is_never_zero(warmup_ratio):
    rates = [learning_rate(step, 100, 1.0, warmup_ratio) for step in range(100)]
    top = int(np.argmax(rates))
    assert max(rates) == 1.0
    assert min(rates) > 0
    assert (np.diff(rates[: top + 1]) > 0).all()
    assert (np.diff(rates[top + 1 :]) < 0).all()


def test_only_kernels_decay():
    model = build_classifier(SIZES, 20, 3, seed=1)
    optimizer = build_optimizer(model, TrainingConfig(learning_rate=0.1, weight_decay=0.5))
    for i, v in enumerate(model.trainable_variables):
        v.assign(np.random.default_rng(i).normal(size=v.shape))
    before = [v.numpy() for v in model.trainable_variables]
    optimizer.apply([tf.zeros_like(v) for v in before], model.trainable_variables)
    kernels = 0
    for v, old in zip(model.trainable_variables, before, strict=True):
        if v.ndim == 2 and "embedding" not in v.path:
            kernels += 1
            np.testing.assert_allclose(v, old * (1 - 0.1 * 0.5), atol=1e-6, rtol=1e-6)
        else:
            np.testing.assert_array_equal(v, old)
    assert kernels == 7  # query, key, value, output; two of the feed-forward; the head
    assert len(before) == 7 + 7 + 2 * 3 + 1  # their biases, three LayerNorms, the embedding


def gradients_of(model, token_ids=TOKEN_IDS, labels=LABELS):
    with tf.GradientTape() as tape:
        logits = model(token_ids, training=True)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)(labels, logits)
    return float(loss), [tf.convert_to_tensor(g).numpy() for g in tape.gradient(loss, model.trainable_variables)]


def global_norm(arrays):
    return math.sqrt(sum(float(np.square(np.asarray(a, np.float64)).sum()) for a in arrays))


@pytest.mark.parametrize("share", [0.01, 100.0])
def test_gradients_are_clipped_by_their_global_norm(share):
    model = build_classifier(SIZES, 20, 3, seed=1)
    loss, gradients = gradients_of(model)
    norm = global_norm(gradients)
    optimizer = build_optimizer(model, TrainingConfig())
    step = compile_train_step(model, optimizer, clip_norm=share * norm)
    found_loss, found_norm = step(TOKEN_IDS, LABELS, np.float32(1e-3))
    assert float(found_loss) == pytest.approx(loss, rel=1e-5)
    assert float(found_norm) == pytest.approx(norm, rel=1e-5)  # the norm before clipping
    # After one step Adam's first moment is a tenth of the gradient it was given.
    momentum = [10 * v.numpy() for v in optimizer.variables if "momentum" in v.path]
    assert len(momentum) == len(gradients)
    assert global_norm(momentum) == pytest.approx(min(share, 1.0) * norm, rel=1e-4)
    for found, gradient in zip(momentum, gradients, strict=True):
        np.testing.assert_allclose(found, gradient * min(share, 1.0), atol=1e-6 * norm, rtol=1e-4)


def test_steps_equal_adamw_in_numpy():
    """Loshchilov and Hutter 2019, algorithm 2, on a model whose gradient is taken by hand."""
    rng = np.random.default_rng(0)
    vocabulary, size, classes = 6, 4, 3
    inputs = keras.Input((None,), dtype="int32")
    embedded = keras.layers.Embedding(vocabulary, size, trainable=False)(inputs)
    model = keras.Model(inputs, keras.layers.Dense(classes)(keras.layers.GlobalAveragePooling1D()(embedded)))
    token_ids = rng.integers(0, vocabulary, (5, 4)).astype(np.int32)
    labels = np.array([0, 1, 2, 1, 0], np.int32)
    table, kernel, bias = (rng.normal(size=v.shape) for v in model.weights)
    model.weights[0].assign(table)
    for v, value in zip(model.trainable_variables, (kernel, bias), strict=True):
        v.assign(value)
    optimizer = build_optimizer(model, TrainingConfig(weight_decay=0.3))
    train_step = compile_train_step(model, optimizer, clip_norm=0.2)

    m, v = ([np.zeros_like(p) for p in (kernel, bias)] for _ in range(2))
    x = table[token_ids].mean(axis=1)
    for t, rate in enumerate((0.05, 0.1, 0.02), start=1):
        powers = np.exp(x @ kernel + bias)
        error = powers / powers.sum(axis=1, keepdims=True) - np.eye(classes)[labels]
        gradients = [x.T @ error / 5, error.mean(axis=0)]
        norm = global_norm(gradients)
        assert norm > 0.2
        _, found = train_step(token_ids, labels, np.float32(rate))
        assert float(found) == pytest.approx(norm, rel=1e-4)
        kernel = kernel * (1 - rate * 0.3)  # the bias does not decay
        updates = []
        for i, gradient in enumerate(gradients):
            gradient = gradient * 0.2 / norm
            m[i] = 0.9 * m[i] + 0.1 * gradient
            v[i] = 0.999 * v[i] + 0.001 * gradient**2
            updates.append(rate * (m[i] / (1 - 0.9**t)) / (np.sqrt(v[i] / (1 - 0.999**t)) + 1e-8))
        kernel, bias = kernel - updates[0], bias - updates[1]
        np.testing.assert_allclose(model.trainable_variables[0], kernel, atol=2e-5, rtol=0)
        np.testing.assert_allclose(model.trainable_variables[1], bias, atol=2e-5, rtol=0)


@pytest.mark.parametrize("precision", ["mixed_bfloat16", "mixed_float16"])
def test_mixed_precision_steps(precision):
    model = build_classifier(SIZES, 20, 3, seed=1, dtype=precision)
    loss, gradients = gradients_of(build_classifier(SIZES, 20, 3, seed=1))
    optimizer = build_optimizer(model, TrainingConfig(precision=precision))
    assert isinstance(optimizer, keras.optimizers.LossScaleOptimizer) is (precision == "mixed_float16")
    step = compile_train_step(model, optimizer, clip_norm=1e-2)
    found, norm = step(TOKEN_IDS, LABELS, np.float32(1e-2))
    assert (found.dtype, norm.dtype) == (tf.float32, tf.float32)
    assert float(found) == pytest.approx(loss, rel=0.02)
    assert float(norm) == pytest.approx(global_norm(gradients), rel=0.05)  # without the loss scale
    momentum = [10 * v.numpy() for v in optimizer.variables if "momentum" in v.path]
    assert global_norm(momentum) == pytest.approx(1e-2, rel=1e-3)  # clipped to the same norm
    before = float(found)
    for _ in range(10):
        found, norm = step(TOKEN_IDS, LABELS, np.float32(1e-2))
    assert float(found) < before
    assert math.isfinite(float(norm))
    assert all(v.dtype == "float32" and np.isfinite(v).all() for v in model.trainable_variables)
    logits = compile_predict(model)(TOKEN_IDS)
    assert logits.dtype == tf.float32
    assert np.isfinite(logits).all()


def test_a_float16_overflow_skips_the_step_and_halves_the_scale():
    model = build_classifier(SIZES, 20, 3, seed=1, dtype="mixed_float16")
    optimizer = build_optimizer(model, TrainingConfig(precision="mixed_float16"))
    optimizer.dynamic_scale.assign(2.0**40)
    before = [v.numpy() for v in model.trainable_variables]
    loss, norm = compile_train_step(model, optimizer, 1.0)(TOKEN_IDS, LABELS, np.float32(1e-2))
    assert math.isfinite(float(loss))
    assert not math.isfinite(float(norm))
    assert float(optimizer.dynamic_scale) == 2.0**39
    for v, old in zip(model.trainable_variables, before, strict=True):
        np.testing.assert_array_equal(v, old)


def test_predict_does_not_drop():
    model = build_classifier(SIZES.model_copy(update={"dropout": 0.5, "head_dropout": 0.5}), 20, 3, seed=1)
    predict = compile_predict(model)
    np.testing.assert_array_equal(predict(TOKEN_IDS), predict(TOKEN_IDS))
    np.testing.assert_allclose(predict(TOKEN_IDS), model(TOKEN_IDS), atol=1e-5, rtol=1e-5)
