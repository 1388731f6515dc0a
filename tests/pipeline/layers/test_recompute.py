import numpy as np
import pytest
import tensorflow as tf

from pipeline.classifier import build_classifier, compile_predict
from pipeline.config import ModelConfig, TrainingConfig
from pipeline.layers import MixtureOfExperts, PreNormEncoderLayer
from pipeline.layers.recompute import Recomputed
from pipeline.train_step import TrainStep

pytestmark = pytest.mark.usefixtures("deterministic")

SIZES = ModelConfig(d_model=16, num_heads=2, d_ff=24, num_layers=2, dropout=0.1, head_dropout=0.1, max_length=16)


def batch(size, length, seed):
    rng = np.random.default_rng(seed)
    token_ids = rng.integers(2, 40, (size, length)).astype(np.int32)
    for row in token_ids:
        row[rng.integers(1, length + 1) :] = 0
    return token_ids, token_ids[:, 0] % 3


BATCHES = [batch(6, 9, 0), batch(3, 5, 1), batch(8, 16, 2)]


def trained(recompute, sizes, **training):
    """Returns what two steps gave, and the whole state afterwards."""
    dtype = training.get("precision", "float32")
    model = build_classifier(ModelConfig(**{**SIZES.model_dump(), **sizes}), 40, 3, 1, dtype, recompute)
    step = TrainStep(model, TrainingConfig(accumulate_batches=2, **training), np.ones(3))
    results = [step(BATCHES[:2], 1e-3), step(BATCHES[1:], 1e-3)]
    return results, [v.numpy() for v in step.variables]


@pytest.mark.parametrize(
    ("sizes", "training"),
    [
        ({}, {}),
        ({"num_experts": 3, "top_k": 1, "norm": "post", "pooling": "cls"}, {"r_drop": 1.0, "load_balancing": 0.5}),
    ],
)
def test_training_gives_the_same_bit_for_bit(sizes, training):
    results, state = trained(False, sizes, **training)
    again, state_again = trained(True, sizes, **training)
    assert again == results
    for a, b in zip(state_again, state, strict=True):  # the states of dropout too
        np.testing.assert_array_equal(a, b)


def losses_and_gradients(call, losses, weights, x, attend):
    with tf.GradientTape() as tape:
        tape.watch(x)
        out = call(x, attend=attend, training=True)
        total = tf.reduce_sum(tf.square(out)) + tf.add_n(losses() or [0.0])
    return out, losses(), [tf.convert_to_tensor(g) for g in tape.gradient(total, [x, *weights])]


def encoder_layer():
    experts = MixtureOfExperts(3, 2, 12, 0.3, seed=2, load_balancing=1.0)
    layer = PreNormEncoderLayer(2, 12, 0.3, seed=1, feed_forward=experts)
    layer.build((None, None, 8))
    return layer


@pytest.mark.parametrize("compiled", [False, True])
def test_masks_losses_and_states_are_those_of_the_layer(compiled):
    x = tf.constant(np.random.default_rng(0).normal(size=(2, 5, 8)), tf.float32)
    attend = tf.constant(np.arange(5) < np.array([[2], [5]]))[:, None]
    layer = encoder_layer()
    states = [v.numpy() for v in layer.non_trainable_variables]
    found, after = [], []
    weights, added = [v.value for v in layer.trainable_variables], []
    for call, losses in ((layer, lambda: layer.losses), (Recomputed(layer, added.append), lambda: added)):
        for variable, state in zip(layer.non_trainable_variables, states, strict=True):
            variable.assign(state)

        def run(x, attend, call=call, losses=losses):
            added.clear()
            out, found, gradients = losses_and_gradients(call, losses, weights, x, attend)
            return out, list(found), gradients

        run = tf.function(run) if compiled else run
        found.append([run(x, attend) for _ in range(2)])
        after.append([v.numpy() for v in layer.non_trainable_variables])
    for plain, again in zip(*found, strict=True):
        assert float(plain[1][0]) > 0.5
        for a, b in zip(tf.nest.flatten(again), tf.nest.flatten(plain), strict=True):
            np.testing.assert_allclose(a, b, atol=1e-5, rtol=1e-5)
    assert not np.allclose(found[0][0][0], found[0][1][0], atol=1e-3)  # each call draws other masks
    np.testing.assert_array_equal(after[0], after[1])
    assert not np.array_equal(after[0], states)


@pytest.mark.parametrize("precision", ["mixed_bfloat16", "mixed_float16"])
def test_half_precision_stays_near(precision):
    results, _ = trained(False, {}, precision=precision)
    again, _ = trained(True, {}, precision=precision)
    np.testing.assert_allclose(again, results, atol=0, rtol=5e-3)


def test_only_training_recomputes():
    model = build_classifier(SIZES, 40, 3, seed=1, recompute=True)
    plain = build_classifier(SIZES, 40, 3, seed=1)

    def operations(model):
        return [op.type for op in compile_predict(model).get_concrete_function().graph.get_operations()]

    assert operations(model) == operations(plain)
    assert [v.path for v in model.weights] == [v.path for v in plain.weights]


def test_takes_less_memory():
    # Counted by TensorFlow's allocator: what the process has of the system is a pool that only grows.
    token_ids, labels = np.full((16, 128), 3, np.int32), np.zeros(16, np.int32)
    sizes = SIZES.model_copy(update={"num_layers": 4, "max_length": 128})
    grown = []
    for recompute in (False, True):
        model = build_classifier(sizes, 40, 3, seed=1, recompute=recompute)
        step = TrainStep(model, TrainingConfig(), np.ones(3))
        step([BATCHES[0]], 1e-3)
        tf.config.experimental.reset_memory_stats("CPU:0")
        before = tf.config.experimental.get_memory_info("CPU:0")["current"]
        step([(token_ids, labels)], 1e-3)
        grown.append((tf.config.experimental.get_memory_info("CPU:0")["peak"] - before) / 2**20)
    assert grown[1] < 0.5 * grown[0], grown
