import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from pipeline.layers import ChunkedAttention, MultiHeadAttention, ScaledDotProductAttention
from tests.pipeline.layers.cores import assert_all_close, make_heads, make_mask, softmax_attention, with_gradients

ROOT = Path(__file__).parents[3]
# Keras warns of a softmax over one key.
pytestmark = pytest.mark.filterwarnings("ignore:You are using a softmax over axis")
MASKS = {"none": np.ones((2, 11, 13), bool), "padding": make_mask(2, 1, 13), "full": make_mask(2, 11, 13)}


@pytest.mark.parametrize("alibi", [False, True])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("chunk", [1, 5, 13, 64])
def test_equals_numpy(chunk, mask, alibi):
    heads, attend = make_heads(length=11, keys=13), MASKS[mask]
    context = ChunkedAttention(chunk=chunk, alibi=alibi)(*heads, attend=None if mask == "none" else attend)
    np.testing.assert_allclose(context, softmax_attention(*heads, attend, alibi), atol=1e-5, rtol=1e-5)
    empty = np.broadcast_to(~attend.any(axis=-1), (2, 11))
    assert empty.any() == (mask != "none")
    np.testing.assert_array_equal(np.asarray(context).transpose(0, 2, 1, 3)[empty], 0.0)


@pytest.mark.parametrize("options", [{}, {"jit_compile": False}, {"jit_compile": True}])
@pytest.mark.parametrize("mask", MASKS)
def test_gradients_equal_the_plain_ones(mask, options):
    heads, attend = make_heads(length=11, keys=13), MASKS[mask]
    alibi = mask == "full"
    found = with_gradients(ChunkedAttention(chunk=5, alibi=alibi), *heads, attend=attend, **options)
    assert_all_close(found, with_gradients(ScaledDotProductAttention(alibi=alibi), *heads, attend=attend))
    assert all(np.abs(gradient).max() > 0.1 for gradient in found)


@pytest.mark.parametrize(("length", "keys"), [(1, 1), (1, 13), (11, 1), (4, 10)])
def test_lengths(length, keys):
    heads = make_heads(length=length, keys=keys)
    found = with_gradients(ChunkedAttention(chunk=5), *heads, jit_compile=False)
    assert_all_close(found[:1], [softmax_attention(*heads, np.ones((2, length, keys), bool))])
    assert_all_close(found, with_gradients(ScaledDotProductAttention(), *heads))


@pytest.mark.parametrize("first", [True, False])
def test_masked_content_never_matters(first):
    # A chunk of masked keys alone, before or after the others: what it holds must leave no rounding behind.
    heads = make_heads(length=12)
    attend = (np.arange(12) >= 7 if first else np.arange(12) < 7)[None, None]
    core = ChunkedAttention(chunk=4)
    before = with_gradients(core, *heads, attend=attend)
    noise = np.where(attend[..., None], 0, np.random.default_rng(3).normal(0, 100, heads[1].shape))
    query, key, value = heads
    after = with_gradients(core, query, key + noise, value + noise, attend=attend)
    for a, b in zip(after, before, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("dtype", ["mixed_float16", "mixed_bfloat16"])
@pytest.mark.parametrize("largest", [4, 40])
def test_half_precision(dtype, largest):
    half = dtype.removeprefix("mixed_")
    query, key, value = make_heads(length=40)
    scores = tf.matmul(query, key, transpose_b=True) / 2
    query = query * (largest / tf.reduce_max(tf.abs(scores)))
    heads = [tf.cast(x, half) for x in (query, key, value)]
    found = with_gradients(ChunkedAttention(chunk=16, dtype=dtype), *heads)
    assert all(x.dtype.name == half and np.isfinite(x.astype(np.float32)).all() for x in found)
    # float32 from the same rounded heads; scores are rounded too, and a weight by as much as its score.
    expected = with_gradients(ScaledDotProductAttention(), *(tf.cast(x, "float32") for x in heads))
    unit = {"float16": 2**-11, "bfloat16": 2**-8}[half] * largest
    assert_all_close([x.astype(np.float32) for x in found[:1]], expected[:1], atol=4 * unit, rtol=0)
    plain = with_gradients(ScaledDotProductAttention(dtype=dtype), *heads)
    for a, p, e in zip(found, plain, expected, strict=True):  # no worse than the plain form, beside a rounding
        assert np.abs(a.astype(np.float32) - e).max() <= 2 * np.abs(p.astype(np.float32) - e).max() + unit / largest


def test_dropout_of_the_gradient_is_that_of_the_context():
    query, key, value = make_heads(length=6, keys=8, size=8)
    attend = MASKS["full"][:, :6, :8] | (np.arange(8) == 3)

    def core(*heads, attend):
        # Made anew, it draws the same masks.
        return ChunkedAttention(0.4, seed=3, chunk=3)(*heads, attend=attend, training=True)

    def plain(query, key, value, attend):
        scores = tf.matmul(query, key, transpose_b=True) / np.sqrt(8) + tf.where(attend, 0.0, -1e30)[:, None]
        return tf.matmul(tf.nn.softmax(scores) * dropped, value)

    unit = tf.eye(8, batch_shape=(2, 2))  # a context that is the weights
    weights = softmax_attention(query, key, unit, attend)
    dropped = core(query, key, unit, attend=attend) / np.where(weights > 0, weights, 1.0)
    drawn = np.asarray(dropped)[weights > 0]
    np.testing.assert_allclose(np.unique(drawn.round(4)), [0, 1 / 0.6], atol=1e-4, rtol=0)
    assert 0.25 < (drawn < 0.5).mean() < 0.55
    found = with_gradients(core, query, key, value, attend=attend)
    assert_all_close(found, with_gradients(plain, query, key, value, attend=attend))
    layer = ChunkedAttention(0.4, seed=3, chunk=3)
    draws = [np.asarray(layer(query, key, value, training=True)) for _ in range(2)]
    assert not np.allclose(*draws, atol=1e-3)
    np.testing.assert_array_equal(layer(query, key, value), ChunkedAttention(chunk=3)(query, key, value))


def test_bad_arguments_are_refused():
    with pytest.raises(ValueError, match=r"chunk must be >= 1. Received: chunk=0"):
        ChunkedAttention(chunk=0)
    with pytest.raises(ValueError, match="attend must be boolean"):
        ChunkedAttention()(*make_heads(), attend=np.ones((2, 1, 13)))
    with pytest.raises(ValueError, match="leave core out. Received: core=ChunkedAttention"):
        MultiHeadAttention(8, 2, core=ChunkedAttention())(np.ones((1, 3, 8)), return_weights=True)


# Growth of the peak, in bytes, of each core in turn; the plain one comes last.
_MEMORY = """
import json
import tensorflow as tf
from pipeline.layers import ChunkedAttention, LinearAttention, LocalAttention, ScaledDotProductAttention
from tests.memory import peak

cores = [LinearAttention(), LocalAttention(64, 1, 0.1, seed=1), ChunkedAttention(0.1, seed=1, chunk=128),
         ScaledDotProductAttention(0.1, seed=1)]
grown = []
for core in cores:
    @tf.function(input_signature=[tf.TensorSpec([1, 2, None, 8])] * 3)
    def gradients(*heads):
        with tf.GradientTape() as tape:
            tape.watch(heads)
            loss = tf.reduce_sum(core(*heads, training=True) ** 2)
        return tape.gradient(loss, heads)

    gradients(*[tf.ones((1, 2, 200, 8))] * 3)
    before = peak()
    gradients(*[tf.ones((1, 2, 4096, 8))] * 3)
    grown.append(peak() - before)
print(json.dumps(grown))
"""

# Eight of them, one after the other, as in a model: [2, T, 512] scores are 17 MB.
_MEMORY_OF_LAYERS = """
import json
import tensorflow as tf
from pipeline.layers import ChunkedAttention
from tests.memory import peak

cores = [ChunkedAttention(chunk=512) for _ in range(8)]

@tf.function(input_signature=[tf.TensorSpec([1, 2, None, 8])])
def gradient(x):
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = x
        for core in cores:
            y = y + core(y, y, y)
    return tape.gradient(y, x)

gradient(tf.ones((1, 2, 200, 8)))
before = peak()
gradient(tf.ones((1, 2, 4096, 8)))
print(json.dumps(peak() - before))
"""


def run(script):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "KERAS_BACKEND": "tensorflow", "TF_CPP_MIN_LOG_LEVEL": "3"}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_layers_do_not_begin_their_gradients_ahead_of_time():
    """Each would keep the matrices of its first chunk until the gradient of the next layer is there."""
    assert run(_MEMORY_OF_LAYERS) < 8 * 2 * 4096 * 512 * 4


def test_memory_grows_with_the_length_alone():
    *grown, plain = run(_MEMORY)
    matrix = 2 * 4096 * 4096 * 4  # one float32 [N, T, T]: 134 MB
    assert max(grown) < matrix / 2
    assert plain > 2 * matrix  # so it is something that the measure sees
