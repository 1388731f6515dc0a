"""Every option of the model against NumPy, and what must hold whatever the option."""

import json
import os
import subprocess
import sys
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

from pipeline.classifier import build_classifier, compile_predict
from tests.options import OPTIONS, SIZES, build, config_of, expected_logits, make_ids

ROOT = Path(__file__).parents[2]
VOCABULARY, CLASSES = 40, 3
POLICIES = {"float32": 1e-5, "mixed_float16": 0.02, "mixed_bfloat16": 0.15}

pytestmark = pytest.mark.filterwarnings("ignore:You are using a softmax over axis")
# What differs in how it computes with padding.
IN_HALF_PRECISION = ["reference", "max", "post", "local_alibi", "linear", "together"]
every_option = pytest.mark.parametrize("name", OPTIONS)


@pytest.fixture(scope="module")
def models():
    return {name: build(name, VOCABULARY, CLASSES) for name in OPTIONS}


@every_option
def test_equals_numpy(models, name):
    model = models[name]
    for token_ids in make_ids(VOCABULARY):
        expected = expected_logits(config_of(name), model, token_ids)
        np.testing.assert_allclose(model(token_ids), expected, atol=2e-5, rtol=1e-5)


def test_every_option_makes_a_difference(models):
    answers = {name: np.asarray(model(make_ids(VOCABULARY)[2]))[0] for name, model in models.items()}
    for name in OPTIONS.keys() - {"reference"}:
        assert not np.allclose(answers[name], answers["reference"], atol=1e-3), name


@pytest.mark.parametrize(
    ("name", "policy"),
    [(name, "float32") for name in OPTIONS]
    + [(name, policy) for name in IN_HALF_PRECISION for policy in POLICIES if policy != "float32"],
)
def test_padding_changes_nothing(name, policy):
    """0, 5 or 60 columns of it, and whatever PAD's embedding is; the batch mates neither."""
    config = config_of(name).model_copy(update={"max_length": 80, "dropout": 0.1})
    model = build_classifier(config, VOCABULARY, CLASSES, seed=5, dtype=policy)
    token_ids = make_ids(VOCABULARY)[2]
    before = np.asarray(model(token_ids))
    atol = 1e-5 if policy == "float32" else POLICIES[policy]
    for member in model.members():
        table = member.embedding.embeddings.numpy()
        table[0] = np.random.default_rng(2).normal(0.0, 100.0, size=table[0].shape)
        member.embedding.embeddings.assign(table)
    predict = compile_predict(model)
    for added in (0, 5, 60):
        padded = np.pad(token_ids, [(0, 0), (0, added)])
        np.testing.assert_allclose(predict(padded), before, atol=atol, rtol=0)
    for size in (1, 2, config.num_heads, config.num_heads + 1, 2 * config.num_heads):
        rows = np.resize(token_ids, (size, token_ids.shape[1]))
        np.testing.assert_allclose(predict(rows), np.resize(before, (size, CLASSES)), atol=atol, rtol=0)


@every_option
def test_dropout_is_not_there_at_inference(models, name):
    """Whatever its rate: empty rows included."""
    config = config_of(name)
    answers = []
    for rate in (0.0, 0.1):
        sizes = config.model_copy(update={"dropout": rate, "head_dropout": rate})
        model = build_classifier(sizes, VOCABULARY, CLASSES, seed=5)
        for ours, theirs in zip(model.trainable_weights, models[name].trainable_weights, strict=True):
            ours.assign(theirs)
        answers.append([np.asarray(model(token_ids)) for token_ids in make_ids(VOCABULARY)])
    for without, with_dropout in zip(*answers, strict=True):
        np.testing.assert_array_equal(without, with_dropout)
        assert np.isfinite(without).all()


@every_option
@pytest.mark.parametrize("policy", POLICIES)
def test_gradients_are_finite_and_reach_every_weight(name, policy):
    model = build(name, VOCABULARY, CLASSES, dtype=policy)
    token_ids = np.concatenate([make_ids(VOCABULARY, ((8, 12),))[0], np.arange(1, 37).reshape(3, 12)])
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(model(token_ids, training=True) ** 2)
    for weight, gradient in zip(
        model.trainable_weights, tape.gradient(loss, [w.value for w in model.trainable_weights]), strict=True
    ):
        gradient = tf.convert_to_tensor(gradient).numpy()
        assert np.isfinite(gradient).all(), weight.path
        # An expert may get none of so few tokens.
        may_be_zero = weight.path.endswith("key/bias") or name == "together" and "/expert_" in weight.path
        assert gradient.any() or may_be_zero, weight.path


@every_option
def test_compiled(models, name):
    token_ids = make_ids(VOCABULARY)[2]
    np.testing.assert_allclose(compile_predict(models[name])(token_ids), models[name](token_ids), atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", ["reference", "cls", "local_alibi", "linear", "experts", "together"])
def test_compiled_by_xla(models, name):
    """The layers alone are in layers/test_keras.py."""
    token_ids = make_ids(VOCABULARY)[2]
    by_xla = tf.function(models[name], jit_compile=True)
    np.testing.assert_allclose(by_xla(token_ids), models[name](token_ids), atol=1e-5, rtol=0)


_LOAD = """
import sys
import keras, numpy as np
import pipeline.classifier  # registers the layers
folder = sys.argv[1]
token_ids = np.load(f"{folder}/token_ids.npy")
answers = {name: np.asarray(keras.models.load_model(f"{folder}/{name}.keras")(token_ids)) for name in sys.argv[2:]}
np.savez(f"{folder}/answers.npz", **answers)
"""


def test_saved_and_loaded_in_a_fresh_process(models, tmp_path):
    token_ids = make_ids(VOCABULARY)[2]
    np.save(tmp_path / "token_ids.npy", token_ids)
    for name, model in models.items():
        json.dumps(model.get_config())
        model.save(tmp_path / f"{name}.keras")
    done = subprocess.run(
        [sys.executable, "-c", _LOAD, str(tmp_path), *OPTIONS],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    with np.load(tmp_path / "answers.npz") as answers:
        for name, model in models.items():
            np.testing.assert_allclose(answers[name], model(token_ids), atol=1e-6, rtol=1e-6, err_msg=name)


@every_option
def test_longer_than_max_length_is_refused(models, name):
    longest = SIZES["max_length"]
    models[name](np.ones((1, longest), np.int32))  # the class vector does not count
    with pytest.raises(ValueError, match=f"max_length={longest}. Received: length={longest + 1}"):
        models[name](np.ones((1, longest + 1), np.int32))


def test_inside_a_stock_functional_model(models):
    for name, model in models.items():
        token_ids = keras.Input([None], dtype="int32")
        outer = keras.Model(token_ids, keras.layers.Rescaling(2.0)(model(token_ids)))
        batch = make_ids(VOCABULARY)[2]
        np.testing.assert_allclose(outer(batch), 2.0 * np.asarray(model(batch)), atol=1e-5, rtol=0, err_msg=name)
