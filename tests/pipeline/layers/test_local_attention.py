import numpy as np
import pytest
import tensorflow as tf

from pipeline.layers import LocalAttention, MultiHeadAttention, ScaledDotProductAttention
from tests.pipeline.layers.cores import assert_all_close, make_heads, make_mask, softmax_attention, with_gradients

# Keras warns of a softmax over one key, which is what a text of one token has.
pytestmark = pytest.mark.filterwarnings("ignore:You are using a softmax over axis")


def band(length, window, num_global=0):
    """bool [1, T, T], from the definition."""
    q, k = np.ogrid[:length, :length]
    return ((np.abs(q - k) <= window) | (q < num_global) | (k < num_global))[None]


def test_window_by_hand():
    # Equal scores: the context is the mean of the values in sight.
    value = tf.constant(np.array([1, 2, 4, 8, 16], np.float32)[None, None, :, None])
    zero = tf.zeros_like(value)
    near = LocalAttention(1)(zero, zero, value)
    np.testing.assert_allclose(near[0, 0, :, 0], [3 / 2, 7 / 3, 14 / 3, 28 / 3, 24 / 2], atol=0, rtol=1e-6)
    with_first = LocalAttention(1, 1)(zero, zero, value)
    expected = [31 / 5, 7 / 3, 15 / 4, 29 / 4, 25 / 3]  # the first key counts once
    np.testing.assert_allclose(with_first[0, 0, :, 0], expected, atol=0, rtol=1e-6)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("num_global", [0, 1, 6])
@pytest.mark.parametrize("window", [1, 4, 20])
@pytest.mark.parametrize("length", [1, 3, 8, 13])
def test_equals_numpy(length, window, num_global, masked):
    heads = make_heads(length=length)
    attend = make_mask(2, 1, length)
    attend[0, 0, 0] = False  # a masked global key too
    allowed = np.broadcast_to(band(length, window, num_global) & (attend if masked else True), (2, length, length))
    alibi = length % 2 == 1
    core = LocalAttention(window, num_global, alibi=alibi)
    context = np.asarray(core(*heads, attend=attend if masked else None))
    np.testing.assert_allclose(context, softmax_attention(*heads, allowed, alibi), atol=1e-5, rtol=1e-5)
    np.testing.assert_array_equal(context.transpose(0, 2, 1, 3)[~allowed.any(axis=-1)], 0.0)


@pytest.mark.parametrize("options", [{}, {"jit_compile": False}, {"jit_compile": True}])
@pytest.mark.parametrize("num_global", [0, 2])
def test_gradients_equal_the_dense_ones(num_global, options):
    heads, attend = make_heads(), make_mask(2, 1, 13)
    found = with_gradients(LocalAttention(3, num_global), *heads, attend=attend, **options)
    dense = with_gradients(ScaledDotProductAttention(), *heads, attend=attend & band(13, 3, num_global))
    assert_all_close(found, dense)
    assert all(np.abs(gradient).max() > 0.1 for gradient in found)


def test_every_query_sees_its_own_window():
    # One weight for each pair of positions: what changes when a key changes is what the band says.
    query, key, value = make_heads(batch=1)
    core = LocalAttention(3, 2)
    before = np.asarray(core(query, key, value))
    changed = [np.asarray(core(query, key, value + tf.one_hot(s, 13)[:, None])) != before for s in range(13)]
    seen = np.stack([c[0, 0].any(axis=-1) for c in changed], axis=1)  # [T, S]
    np.testing.assert_array_equal(seen, band(13, 3, 2)[0])


@pytest.mark.parametrize("num_global", [0, 2])
def test_padding_changes_nothing(num_global):
    heads = make_heads(length=9)
    core = LocalAttention(4, num_global)
    noise = np.random.default_rng(3).normal(0, 100, (2, 2, 8, 4)).astype(np.float32)
    attend = np.broadcast_to(np.arange(17) < 9, (2, 1, 17))
    padded = core(*(tf.concat([x, noise], axis=2) for x in heads), attend=attend)
    np.testing.assert_allclose(padded[:, :, :9], core(*heads), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("dtype", ["mixed_float16", "mixed_bfloat16"])
@pytest.mark.parametrize("largest", [4, 40])
def test_half_precision(dtype, largest):
    half = dtype.removeprefix("mixed_")
    query, key, value = make_heads()
    query = query * (largest / tf.reduce_max(tf.abs(tf.matmul(query, key, transpose_b=True) / 2)))
    heads = [tf.cast(x, half) for x in (query, key, value)]
    found = with_gradients(LocalAttention(4, 1, dtype=dtype), *heads)
    assert all(x.dtype.name == half and np.isfinite(x.astype(np.float32)).all() for x in found)
    expected = softmax_attention(*(tf.cast(x, "float32") for x in heads), band(13, 4, 1))
    unit = {"float16": 2**-11, "bfloat16": 2**-8}[half] * largest  # scores are rounded, and weights by as much
    np.testing.assert_allclose(found[0].astype(np.float32), expected, atol=4 * unit, rtol=0)


def test_dropout():
    heads = make_heads()
    layer, again = LocalAttention(3, 2, 0.5, seed=1), LocalAttention(3, 2, 0.5, seed=1)
    first, second = (np.asarray(layer(*heads, training=True)) for _ in range(2))
    assert not np.allclose(first, second, atol=1e-3)
    np.testing.assert_array_equal(again(*heads, training=True), first)
    np.testing.assert_array_equal(layer(*heads), LocalAttention(3, 2)(*heads))


def test_bad_arguments_are_refused():
    heads = make_heads()
    with pytest.raises(ValueError, match="Received: window=0, num_global=0"):
        LocalAttention(0)
    with pytest.raises(ValueError, match="Received: window=2, num_global=-1"):
        LocalAttention(2, -1)
    with pytest.raises(ValueError, match=r"same for every query: \[B, 1, S\]. Received: shape=\(2, 13, 13\)"):
        LocalAttention(2)(*heads, attend=np.ones((2, 13, 13), bool))
    with pytest.raises(ValueError, match="attend must be boolean"):
        LocalAttention(2)(*heads, attend=np.ones((2, 1, 13)))
    with pytest.raises(ValueError, match=r"self-attention.*Received: query=\(2, 2, 5, 4\), key=\(2, 2, 13, 4\)"):
        LocalAttention(2)(heads[0][:, :, :5], *heads[1:])
    with pytest.raises(ValueError, match="leave core out. Received: core=LocalAttention"):
        MultiHeadAttention(8, 2, core=LocalAttention(2))(np.ones((1, 3, 8)), return_weights=True)
