import keras
import numpy as np
import pytest
import tensorflow as tf

from pipeline.classifier import build_classifier
from pipeline.config import ModelConfig
from pipeline.optimization import AdamW, LossScale, WeightAverage, learning_rate


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


def make_variables(seed=0):
    """A kernel, a bias and an embedding, as Keras names them."""
    rng = np.random.default_rng(seed)
    shapes = {"kernel": (3, 4), "bias": (4,), "embeddings": (5, 3)}
    return [keras.Variable(rng.normal(size=shape), dtype="float32", name=name) for name, shape in shapes.items()]


def make_gradients(seed, variables):
    rng = np.random.default_rng(seed)
    return [rng.normal(size=v.shape).astype(np.float32) for v in variables]


def arrays(variables):
    return [np.array(v) for v in variables]


def assert_same_bits(found, expected):
    assert [a.tobytes() for a in arrays(found)] == [np.asarray(a).tobytes() for a in expected]


def test_only_kernels_decay():
    sizes = ModelConfig(d_model=8, num_heads=2, d_ff=12, num_layers=1)
    weights = build_classifier(sizes, 20, 3, seed=1).trainable_variables
    optimizer = AdamW(weights, weight_decay=0.5)
    for i, v in enumerate(weights):
        v.assign(np.random.default_rng(i).normal(size=v.shape))
    before = arrays(weights)
    optimizer.apply([tf.zeros(v.shape) for v in weights], tf.constant(0.1))
    kernels = 0
    for v, old in zip(weights, before, strict=True):
        if v.ndim == 2 and "embedding" not in v.path:
            kernels += 1
            np.testing.assert_allclose(v, old * (1 - 0.1 * 0.5), atol=1e-6, rtol=1e-6)
        else:
            np.testing.assert_array_equal(v, old)
    assert kernels == 7  # query, key, value, output; two of the feed-forward; the head
    assert len(before) == 7 + 7 + 2 * 3 + 1  # their biases, three LayerNorms, the embedding


def test_adamw_equals_numpy():
    """Loshchilov and Hutter 2019, algorithm 2, in float64."""
    variables = make_variables()
    expected = [a.astype(np.float64) for a in arrays(variables)]
    optimizer = AdamW(variables, weight_decay=0.3)
    apply = tf.function(optimizer.apply)
    m, v = ([np.zeros_like(p) for p in expected] for _ in range(2))
    for t, rate in enumerate((0.05, 0.1, 0.02, 0.07), start=1):
        gradients = make_gradients(t, variables)
        apply([tf.constant(g) for g in gradients], tf.constant(rate))
        for i, g in enumerate(gradients):
            if i == 0:  # the kernel
                expected[i] *= 1 - rate * 0.3
            m[i] = 0.9 * m[i] + 0.1 * g
            v[i] = 0.999 * v[i] + 0.001 * g.astype(np.float64) ** 2
            expected[i] -= rate * (m[i] / (1 - 0.9**t)) / (np.sqrt(v[i] / (1 - 0.999**t)) + 1e-8)
        # 1 - 0.999 has 4 digits left in float32, its square root 5.
        for found, values in zip(variables, expected, strict=True):
            np.testing.assert_allclose(found, values, atol=2e-5, rtol=0)
    steps, *moments = optimizer.variables
    assert float(steps) == 4
    for found, values in zip(moments, m + v, strict=True):
        np.testing.assert_allclose(found, values, atol=1e-6, rtol=1e-5)


def test_adamw_goes_on_from_its_saved_variables():
    def steps(variables, optimizer, numbers):
        for t in numbers:
            optimizer.apply([tf.constant(g) for g in make_gradients(t, variables)], tf.constant(0.05))

    whole = make_variables()
    optimizer = AdamW(whole, weight_decay=0.1)
    steps(whole, optimizer, range(5))
    stopped = make_variables()
    before = AdamW(stopped, weight_decay=0.1)
    steps(stopped, before, range(2))
    resumed = make_variables(seed=9)
    after = AdamW(resumed, weight_decay=0.1)
    for target, source in zip([*resumed, *after.variables], [*stopped, *before.variables], strict=True):
        target.assign(np.array(source))
    steps(resumed, after, range(2, 5))
    assert_same_bits([*resumed, *after.variables], arrays([*whole, *optimizer.variables]))


def test_a_step_that_overflows_halves_the_loss_scale_until_1_has_failed():
    scale = LossScale()
    assert float(scale.value) == 2.0**15
    scale.update(True)
    assert (float(scale.value), int(scale.good_steps)) == (2.0**15, 1)
    scale.update(False)
    assert (float(scale.value), int(scale.good_steps)) == (2.0**14, 0)
    for _ in range(20):
        scale.update(False)
    assert float(scale.value) == 0.5


def test_2000_good_steps_in_a_row_double_the_loss_scale():
    scale = LossScale()
    update = tf.function(scale.update, input_signature=[tf.TensorSpec([], tf.bool)])
    found = []
    for step in range(1, 6002):
        update(tf.constant(step != 1500))  # the row starts anew after it
        found.append(float(scale.value))
    changes = {step: value for step, (value, old) in enumerate(zip(found[1:], found, strict=False), 2) if value != old}
    assert changes == {1500: 2.0**14, 3500: 2.0**15, 5500: 2.0**16}
    assert int(scale.good_steps) == 501


def test_weight_average_equals_numpy():
    variables = make_variables()
    average = WeightAverage(variables, decay=0.5)
    expected = [a.astype(np.float64) for a in arrays(variables)]
    assert_same_bits(average.variables, arrays(variables))
    # (1 + t) / (10 + t) is 2/11, 3/12, ... and passes 1/2 after step 8.
    for t in range(1, 12):
        for v, gradient in zip(variables, make_gradients(t, variables), strict=True):
            v.assign_add(gradient)
        average.update(tf.constant(float(t)))
        decay = min(0.5, (1 + t) / (10 + t))
        expected = [decay * e + (1 - decay) * v for e, v in zip(expected, arrays(variables), strict=True)]
        for found, values in zip(average.variables, expected, strict=True):
            np.testing.assert_allclose(found, values, atol=1e-5, rtol=0)


def test_averages_are_in_place_only_inside_of_the_block():
    variables = make_variables()
    average = WeightAverage(variables, decay=0.9)
    for v in variables:
        v.assign(v * 3.0 + 1e-3)
    average.update(tf.constant(1.0))
    weights, averages = arrays(variables), arrays(average.variables)
    with average.in_place():
        assert_same_bits(variables, averages)
        assert not np.array_equal(variables[0], weights[0])
    assert_same_bits(variables, weights)
    with pytest.raises(ZeroDivisionError), average.in_place():
        raise ZeroDivisionError
    assert_same_bits(variables, weights)
    assert_same_bits(average.variables, averages)
