import math

import keras
import numpy as np
import pytest

from pipeline.layers import PreNormDecoderLayer
from pipeline.layers.attention import padding_mask

pytestmark = pytest.mark.filterwarnings("ignore:You are using a softmax over axis")

SIZE, SOURCE_SIZE, HEADS = 8, 6, 2


def random(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def built(dropout=0.0, **kwargs):
    layer = PreNormDecoderLayer(HEADS, 12, dropout, seed=3, **kwargs)
    layer.build((None, None, SIZE), (None, None, SOURCE_SIZE))
    for i, v in enumerate(layer.trainable_variables):  # biases and LayerNorm too
        v.assign(v + 0.3 * random(*v.shape, seed=i))
    return layer


def in_numpy(layer, x, source, attend, source_attend):
    """The layer in NumPy and float64, from its weights alone; masks bool [B, T, T] and [B, T, S]."""
    weights = {v.path.partition("/")[2]: np.asarray(v, np.float64) for v in layer.trainable_variables}

    def linear(x, name):
        return x @ weights[f"{name}/kernel"] + weights[f"{name}/bias"]

    def norm(x, name):
        centred = x - x.mean(axis=-1, keepdims=True)
        scaled = centred / np.sqrt((centred**2).mean(axis=-1, keepdims=True) + 1e-5)
        return scaled * weights[f"{name}/gamma"] + weights[f"{name}/beta"]

    def attention(query, source, attend, name):
        query = linear(query, f"{name}/query")
        key, value = (linear(source, f"{name}/{part}") for part in ("key", "value"))
        context = np.zeros_like(query)
        for head in np.split(np.arange(query.shape[-1]), HEADS):
            for b, t in np.ndindex(query.shape[:2]):
                keys = np.flatnonzero(attend[b, t])
                if len(keys):
                    scores = key[b, keys][:, head] @ query[b, t, head] / math.sqrt(len(head))
                    shares = np.exp(scores - scores.max())
                    context[b, t, head] = shares / shares.sum() @ value[b, keys][:, head]
        return linear(context, f"{name}/output")

    def gelu(x):
        return np.vectorize(lambda v: v * 0.5 * (1.0 + math.erf(v / math.sqrt(2.0))))(x)

    x = x.astype(np.float64)
    own = norm(x, "self_attention_norm")
    x = x + attention(own, own, attend, "self_attention")
    x = x + attention(norm(x, "cross_attention_norm"), source, source_attend, "cross_attention")
    hidden = gelu(linear(norm(x, "feed_forward_norm"), "feed_forward/hidden"))
    return x + linear(hidden, "feed_forward/output")


def test_equals_numpy():
    layer, x, source = built(dropout=0.3), random(2, 5, SIZE), random(2, 4, SOURCE_SIZE, seed=1)
    target_valid = np.arange(5) < np.array([[3], [5]])
    source_valid = np.arange(4) < np.array([[4], [2]])
    causal = np.tril(np.ones((5, 5), bool))
    attend = causal & target_valid[:, None]
    source_attend = np.broadcast_to(source_valid[:, None], (2, 5, 4))
    expected = in_numpy(layer, x, source, attend, source_attend)
    found = layer(x, source, attend=padding_mask(target_valid), source_attend=padding_mask(source_valid))
    np.testing.assert_allclose(found, expected, atol=1e-5, rtol=1e-5)
    # A mask that is causal already makes no difference.
    again = layer(x, source, attend=attend, source_attend=padding_mask(source_valid))
    np.testing.assert_array_equal(again, found)
    # Nor do masks that hide nothing.
    everything = np.ones((2, 1, 5), bool), np.ones((2, 1, 4), bool)
    np.testing.assert_array_equal(
        layer(x, source), layer(x, source, attend=everything[0], source_attend=everything[1])
    )


@pytest.mark.parametrize("attend", [None, np.ones((1, 5, 5), bool)])
def test_a_later_target_never_influences_an_earlier_output(attend):
    layer, x, source = built(), random(1, 5, SIZE), random(1, 4, SOURCE_SIZE, seed=1)
    out = layer(x, source, attend=attend).numpy()
    for t in range(1, 5):
        changed = x.copy()
        changed[:, t:] += random(1, 5 - t, SIZE, seed=2)
        other = layer(changed, source, attend=attend).numpy()
        np.testing.assert_array_equal(other[:, :t], out[:, :t])
        assert np.abs(other[:, t:] - out[:, t:]).max(axis=-1).min() > 1e-3
        # So decoding can go on token after token.
        np.testing.assert_allclose(layer(x[:, :t], source), out[:, :t], atol=1e-5, rtol=1e-5)


def test_padding_of_the_source_has_no_effect():
    layer, x, source = built(), random(2, 5, SIZE), random(2, 4, SOURCE_SIZE, seed=1)
    out = layer(x, source)
    for fill in (0.0, 100.0):
        padded = np.pad(source, ((0, 0), (0, 3), (0, 0)), constant_values=fill)
        source_attend = np.arange(7)[None, None] < 4
        np.testing.assert_allclose(layer(x, padded, source_attend=source_attend), out, atol=1e-6, rtol=1e-6)
    assert np.abs(layer(x, source[:, :3]) - out).max() > 1e-3  # what is real has one


def test_a_source_without_tokens_is_finite():
    layer, x, source = built(), random(1, 5, SIZE), random(1, 4, SOURCE_SIZE, seed=1)
    out = layer(x, source, source_attend=np.zeros((1, 1, 4), bool)).numpy()
    np.testing.assert_array_equal(out, layer(x, 100.0 * source, source_attend=np.zeros((1, 1, 4), bool)))
    assert np.isfinite(out).all()


def test_dropout_reaches_every_branch_in_training_only():
    layer, x, source = built(dropout=0.3), random(2, 5, SIZE), random(2, 4, SOURCE_SIZE, seed=1)
    states = layer.non_trainable_variables
    before = [np.array(v) for v in states]
    np.testing.assert_array_equal(layer(x, source), layer(x, source, training=False))
    assert not np.array_equal(layer(x, source, training=True), layer(x, source, training=True))
    # Two of attention weights, one of hidden values, three of branches: each with its own seed.
    assert len(states) == 6
    assert all(not np.array_equal(v, old) for v, old in zip(states, before, strict=True))
    assert len({old.tobytes() for old in before}) == 6


@pytest.mark.parametrize("dtype", ["mixed_bfloat16", "mixed_float16"])
def test_half_precision_keeps_the_inputs_dtype(dtype):
    layer, exact, x, source = built(dtype=dtype), built(), random(2, 5, SIZE), random(2, 4, SOURCE_SIZE, seed=1)
    assert layer.cross_attention(x, source).dtype.name == dtype.removeprefix("mixed_")
    out = layer(x, source)
    assert out.dtype.name == "float32"
    np.testing.assert_allclose(out, exact(x, source), atol=0.15, rtol=0.05)
    assert layer(keras.Input((5, SIZE)), keras.Input((4, SOURCE_SIZE))).shape == (None, 5, SIZE)
