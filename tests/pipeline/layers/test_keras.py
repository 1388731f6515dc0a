"""What Keras asks of a layer that is to be usable in someone else's model."""

import inspect
import json
import os
import subprocess
import sys
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

from pipeline.classifier import EncoderClassifier, build_classifier
from pipeline.config import ModelConfig
from pipeline.ensemble import EncoderEnsemble
from pipeline.layers import (
    ChunkedAttention,
    FirstPooling,
    LearnedPosition,
    LinearAttention,
    LocalAttention,
    MaskedMaxPooling,
    MaskedMeanPooling,
    MixtureOfExperts,
    MultiHeadAttention,
    NgramScores,
    PositionwiseFeedForward,
    PostNormEncoderLayer,
    PreNormConvolution,
    PreNormDecoderLayer,
    PreNormEncoderLayer,
    RotaryPosition,
    ScaledDotProductAttention,
    SinusoidalPosition,
)
from pipeline.layers.dense import Dense
from pipeline.layers.dropout import Dropout
from pipeline.layers.normalization import LayerNorm

ROOT = Path(__file__).parents[3]
BATCH, LENGTH, SIZE = 2, 6, 8

# How each layer is made, and the (shape of one row, dtype) of its inputs; None is left open.
CASES = {
    "attention": (
        lambda **k: ScaledDotProductAttention(0.1, seed=5, **k),
        [((2, None, 4), "float32")] * 3 + [((1, None), "bool")],
    ),
    "chunked_attention": (
        lambda **k: ChunkedAttention(0.1, seed=5, alibi=True, chunk=4, **k),
        [((2, None, 4), "float32")] * 3 + [((1, None), "bool")],
    ),
    "local_attention": (
        lambda **k: LocalAttention(2, 1, 0.1, seed=5, alibi=True, **k),
        [((2, None, 4), "float32")] * 3 + [((1, None), "bool")],
    ),
    "linear_attention": (
        lambda **k: LinearAttention(**k),
        [((2, None, 4), "float32")] * 3 + [((1, None), "bool")],
    ),
    "multi_head_core": (
        lambda **k: MultiHeadAttention(SIZE, 2, seed=5, core=LocalAttention(2, 1, 0.1, seed=5), **k),
        [((None, SIZE), "float32")],
    ),
    "multi_head": (lambda **k: MultiHeadAttention(SIZE, 2, 0.1, seed=5, **k), [((None, SIZE), "float32")]),
    "cross": (
        lambda **k: MultiHeadAttention(SIZE, 2, 0.1, seed=5, **k),
        [((None, SIZE), "float32"), ((4, 3), "float32")],
    ),
    "alibi": (
        lambda **k: ScaledDotProductAttention(0.1, seed=5, alibi=True, **k),
        [((2, None, 4), "float32")] * 3 + [((1, None), "bool")],
    ),
    "pieces": (
        lambda **k: MultiHeadAttention(
            SIZE,
            4,
            seed=5,
            num_kv_heads=2,
            core=ScaledDotProductAttention(0.1, seed=6, alibi=True),
            rotary=RotaryPosition(LENGTH),
            **k,
        ),
        [((None, SIZE), "float32")],
    ),
    "learned": (lambda **k: LearnedPosition(LENGTH, **k), [((None, SIZE), "float32")]),
    "rotary": (lambda **k: RotaryPosition(LENGTH, **k), [((2, None, 4), "float32")]),
    "swiglu": (
        lambda **k: PositionwiseFeedForward(12, 0.1, seed=5, activation="swiglu", **k),
        [((None, SIZE), "float32")],
    ),
    "post_norm": (lambda **k: PostNormEncoderLayer(2, 12, 0.1, seed=5, **k), [((None, SIZE), "float32")]),
    "encoder_of_pieces": (
        lambda **k: PreNormEncoderLayer(
            2,
            12,
            0.1,
            seed=5,
            attention=MultiHeadAttention(SIZE, 2, seed=7, num_kv_heads=1),
            feed_forward=PositionwiseFeedForward(6, seed=8, activation="relu"),
            **k,
        ),
        [((None, SIZE), "float32")],
    ),
    "max_pooling": (lambda **k: MaskedMaxPooling(**k), [((None, SIZE), "float32"), ((None,), "bool")]),
    "first_pooling": (lambda **k: FirstPooling(**k), [((None, SIZE), "float32"), ((None,), "bool")]),
    "position": (lambda **k: SinusoidalPosition(LENGTH, **k), [((None, SIZE), "float32")]),
    "feed_forward": (lambda **k: PositionwiseFeedForward(12, 0.1, seed=5, **k), [((None, SIZE), "float32")]),
    "experts": (lambda **k: MixtureOfExperts(3, 2, 12, 0.1, seed=5, **k), [((None, SIZE), "float32")]),
    "decoder": (
        lambda **k: PreNormDecoderLayer(2, 12, 0.1, seed=5, **k),
        [((None, SIZE), "float32"), ((4, 3), "float32")],
    ),
    "encoder": (lambda **k: PreNormEncoderLayer(2, 12, 0.1, seed=5, **k), [((None, SIZE), "float32")]),
    "convolution": (
        lambda **k: PreNormConvolution(3, 0.1, seed=5, **k),
        [((None, SIZE), "float32"), ((None,), "bool")],
    ),
    "norm": (lambda **k: LayerNorm(**k), [((None, SIZE), "float32")]),
    "dense": (
        lambda **k: Dense(3, kernel_initializer=keras.initializers.GlorotUniform(seed=5), **k),
        [((None, SIZE), "float32")],
    ),
    "dropout": (lambda **k: Dropout(0.1, seed=5, **k), [((None, SIZE), "float32")]),
    "pooling": (lambda **k: MaskedMeanPooling(**k), [((None, SIZE), "float32"), ((None,), "bool")]),
    "ngrams": (lambda **k: NgramScores(20, 3, 8, 4, **k), [((None,), "int32")]),
    "classifier": (
        lambda **k: EncoderClassifier(20, 3, SIZE, 2, 12, 2, 0.1, 0.2, LENGTH, seed=5, **k),
        [((None,), "int32")],
    ),
    "ensemble": (
        lambda **k: EncoderEnsemble([EncoderClassifier(20, 3, SIZE, 2, 12, 1, seed=i, **k) for i in (5, 6)], **k),
        [((None,), "int32")],
    ),
}
every_layer = pytest.mark.parametrize("name", CASES)


def make_arrays(name):
    rng = np.random.default_rng(0)
    arrays = []
    for shape, dtype in CASES[name][1]:
        values = 4 * rng.normal(size=(BATCH, *(LENGTH if n is None else n for n in shape)))
        arrays.append(values > 0 if dtype == "bool" else np.abs(values).astype(dtype))
    return arrays


def make_model(name):
    """The layer between stock Keras layers."""
    make, specs = CASES[name]
    inputs = [keras.Input(shape, dtype=dtype) for shape, dtype in specs]
    outputs = keras.layers.Rescaling(2.0)(make(name="tested")(*inputs))
    return keras.Model(inputs, outputs)


@every_layer
def test_get_config_round_trip(name):
    layer = CASES[name][0](dtype="mixed_bfloat16", name="tested")
    config = layer.get_config()
    json.dumps(config)
    again = type(layer).from_config(config)
    assert again.get_config() == config
    policy = "float32" if name in ("norm", "ensemble") else "mixed_bfloat16"  # whatever is asked for
    assert (again.name, again.dtype_policy.name) == ("tested", policy)
    if "__init__" in vars(type(layer)):  # not Keras's own
        arguments = set(inspect.signature(type(layer).__init__).parameters) - {"self", "kwargs", "args"}
        assert arguments <= set(config)
    arrays = make_arrays(name)
    np.testing.assert_array_equal(layer(*arrays), again(*arrays))  # seeded: equal weights too


@every_layer
def test_compute_output_shape(name):
    make, specs = CASES[name]
    layer, arrays = make(), make_arrays(name)
    assert layer(*arrays).shape == tuple(layer.compute_output_shape(*(a.shape for a in arrays)))
    symbolic = layer.compute_output_shape(*((None, *shape) for shape, _ in specs))
    assert tuple(symbolic)[0] is None
    assert tuple(symbolic) == make_model(name).output_shape


@every_layer
def test_inside_a_stock_functional_model(name):
    arrays = make_arrays(name)
    model = make_model(name)
    layer = model.get_layer("tested")
    np.testing.assert_allclose(model(arrays), 2.0 * np.asarray(layer(*arrays)), atol=1e-5, rtol=1e-5)
    np.testing.assert_allclose(model.predict(arrays, verbose=0), model(arrays), atol=1e-5, rtol=1e-5)


@every_layer
def test_compiled_by_xla(name):
    layer, arrays = CASES[name][0](), [tf.constant(a) for a in make_arrays(name)]
    expected = layer(*arrays)
    compiled = tf.function(lambda *inputs: layer(*inputs), jit_compile=True)
    for found, wanted in zip(tf.nest.flatten(compiled(*arrays)), tf.nest.flatten(expected), strict=True):
        np.testing.assert_allclose(found, wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    "name",
    ["attention", "chunked_attention", "local_attention", "feed_forward", "encoder", "post_norm", "decoder", "dropout",
     "classifier"],
)
def test_trained_by_xla(name):
    """Dropout drops there as well, the same from the same state; XLA draws other numbers than TensorFlow does."""
    layer, arrays = CASES[name][0](), [tf.constant(a) for a in make_arrays(name)]
    without = layer(*arrays)
    states = [v for v in layer.variables if "seed" in v.path]
    before = [v.numpy() for v in states]
    compiled = tf.function(lambda *inputs: layer(*inputs, training=True), jit_compile=True)
    found = []
    for _ in range(2):
        for state, value in zip(states, before, strict=True):
            state.assign(value)
        found.append(compiled(*arrays).numpy())
    np.testing.assert_array_equal(*found)
    assert np.isfinite(found[0]).all()
    assert not np.allclose(found[0], without, atol=1e-3)
    assert not np.allclose(compiled(*arrays), found[0], atol=1e-3)  # the state has moved on


_LOAD = """
import sys
import keras, numpy as np
import pipeline.classifier  # registers the layers
folder = sys.argv[1]
outputs = {}
for name in sys.argv[2:]:
    with np.load(f"{folder}/{name}.npz") as inputs:
        arrays = [inputs[key] for key in inputs.files]
    outputs[name] = np.asarray(keras.models.load_model(f"{folder}/{name}.keras")(arrays))
np.savez(f"{folder}/outputs.npz", **outputs)

from pipeline.classifier import build_classifier
from pipeline.config import ModelConfig
model = build_classifier(ModelConfig(d_model=8, num_heads=2, d_ff=12, num_layers=2), 20, 3, seed=17)
np.savez(f"{folder}/seed17.npz", *[v.numpy() for v in model.variables])
token_ids = np.ones((4, 6), np.int32)
np.savez(f"{folder}/dropped.npz", *[model(token_ids, training=True).numpy() for _ in range(3)])
"""


@pytest.fixture(scope="module")
def fresh_process(tmp_path_factory):
    """Every model, saved, loaded and called in one new process; another PYTHONHASHSEED than ours."""
    folder = tmp_path_factory.mktemp("saved")
    expected = {}
    for name in CASES:
        model, arrays = make_model(name), make_arrays(name)
        for i, v in enumerate(model.weights):
            if v.dtype == "float32":
                v.assign(v + 0.1 * np.random.default_rng(i).normal(size=v.shape))
        model.save(folder / f"{name}.keras")
        np.savez(folder / f"{name}.npz", *arrays)
        expected[name] = np.asarray(model(arrays))
    done = subprocess.run(
        [sys.executable, "-c", _LOAD, str(folder), *CASES],
        cwd=ROOT,
        env={**os.environ, "PYTHONHASHSEED": "4711", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return folder, expected


@every_layer
def test_saved_and_loaded_in_a_fresh_process(fresh_process, name):
    folder, expected = fresh_process
    with np.load(folder / "outputs.npz") as outputs:
        np.testing.assert_allclose(outputs[name], expected[name], atol=1e-6, rtol=1e-6)


def test_initial_weights_and_dropout_seeds_are_those_of_any_other_process(fresh_process):
    # This process has built other models before, and has another PYTHONHASHSEED.
    model = build_classifier(ModelConfig(d_model=8, num_heads=2, d_ff=12, num_layers=2), 20, 3, seed=17)
    with np.load(fresh_process[0] / "seed17.npz") as there:
        assert len(there.files) == len(model.variables)
        for key, variable in zip(there.files, model.variables, strict=True):
            np.testing.assert_array_equal(there[key], variable.numpy())


def test_dropout_masks_are_those_of_any_other_process(fresh_process):
    model = build_classifier(ModelConfig(d_model=8, num_heads=2, d_ff=12, num_layers=2), 20, 3, seed=17)
    found = [model(np.ones((4, 6), np.int32), training=True).numpy() for _ in range(3)]
    assert not np.allclose(found[0], found[1], atol=1e-3)
    with np.load(fresh_process[0] / "dropped.npz") as there:
        for key, logits in zip(there.files, found, strict=True):
            np.testing.assert_allclose(there[key], logits, atol=1e-6, rtol=0)


@pytest.mark.parametrize("name", ["multi_head", "feed_forward", "experts", "decoder", "encoder"])
def test_without_a_seed_every_layer_is_another(name):
    layer = CASES[name][0]()
    config = {**layer.get_config(), "seed": None}
    arrays = make_arrays(name)
    first, second = (type(layer).from_config(config)(*arrays) for _ in range(2))
    assert not np.allclose(first, second, atol=1e-3)
