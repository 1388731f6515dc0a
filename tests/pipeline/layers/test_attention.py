import math

import keras
import numpy as np
import pytest
from keras import ops

from pipeline.layers import MultiHeadAttention, ScaledDotProductAttention
from pipeline.layers.attention import attention_scores, causal_mask, padding_mask

ATOL = 1e-6


def softmax(x):
    powers = np.exp(x - x.max(axis=-1, keepdims=True))
    return powers / powers.sum(axis=-1, keepdims=True)


def random(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def heads(seed=0, batch=2, num_heads=3, length=4, keys=5, size=8):
    query = random(batch, num_heads, length, size, seed=seed)
    key, value = (random(batch, num_heads, keys, size, seed=seed + i) for i in (1, 2))
    return query, key, value


def test_three_tokens_by_hand():
    # H = 4, so scores are halved. First row: 2 * (0, ln 2, ln 5) / 2 = (0, ln 2, ln 5); its exponentials are 1, 2, 5,
    # their sum is 8, so the weights are 1/8, 2/8, 5/8 and the context is (8 * 1/8, 8 * 2/8, 8 * 5/8, 0).
    # Second row: all scores 0. Third row: (0, -ln 2, -ln 5) -> 1, 1/2, 1/5, sum 17/10 -> 10/17, 5/17, 2/17.
    query = np.array([[2, 0, 0, 0], [0, 3, 0, 0], [-2, 0, 0, 0]], np.float32)[None, None]
    key = np.array([[0, 0, 1, 0], [math.log(2), 0, 4, 0], [math.log(5), 0, 0, 9]], np.float32)[None, None]
    value = np.array([[8, 0, 0, 0], [0, 8, 0, 0], [0, 0, 8, 0]], np.float32)[None, None]
    np.testing.assert_allclose(
        attention_scores(ops.convert_to_tensor(query), ops.convert_to_tensor(key))[0, 0, 0],
        [0.0, 0.6931472, 1.6094379],
        atol=ATOL,
        rtol=0,
    )
    context, weights = ScaledDotProductAttention()(query, key, value, return_weights=True)
    expected = [[1 / 8, 2 / 8, 5 / 8], [1 / 3, 1 / 3, 1 / 3], [10 / 17, 5 / 17, 2 / 17]]
    np.testing.assert_allclose(weights[0, 0], expected, atol=ATOL, rtol=0)
    np.testing.assert_allclose(context[0, 0, 0], [1, 2, 5, 0], atol=ATOL, rtol=0)


def test_causal_mask_of_four_tokens():
    query, key, value = heads(keys=4)
    context, weights = ScaledDotProductAttention()(query, key, value, attend=causal_mask(4), return_weights=True)
    weights = np.asarray(weights)
    np.testing.assert_array_equal(weights[:, :, 0], np.broadcast_to([1.0, 0.0, 0.0, 0.0], (2, 3, 4)))
    np.testing.assert_array_equal(np.triu(weights, 1), 0.0)
    assert (weights[..., np.tril(np.ones((4, 4), bool))] > 0).all()
    np.testing.assert_array_equal(context[:, :, 0], value[:, :, 0])


def test_masks():
    np.testing.assert_array_equal(causal_mask(3), [[[True, False, False], [True, True, False], [True, True, True]]])
    valid = np.array([[True, False], [False, False]])
    np.testing.assert_array_equal(padding_mask(valid), valid[:, None, :])


@pytest.mark.parametrize("shape", [None, (2, 1, 5), (2, 4, 5), (1, 4, 5)])
def test_attention_equals_numpy_and_weights_sum_to_one(shape):
    query, key, value = heads()
    attend = None if shape is None else np.random.default_rng(3).random(shape) < 0.6
    if attend is not None:
        attend[..., 2] = True
    context, weights = ScaledDotProductAttention()(query, key, value, attend=attend, return_weights=True)
    scores = np.einsum("bnth,bnsh->bnts", query.astype(np.float64), key) / math.sqrt(8)
    if attend is not None:
        scores = np.where(attend[:, None], scores, -np.inf)
    expected = softmax(scores)
    np.testing.assert_allclose(weights, expected, atol=ATOL, rtol=1e-5)
    np.testing.assert_allclose(context, expected @ value, atol=ATOL, rtol=1e-5)
    np.testing.assert_allclose(np.sum(weights, axis=-1), 1.0, atol=ATOL, rtol=0)
    assert attend is None or not np.asarray(weights)[np.broadcast_to(~attend[:, None], weights.shape)].any()


@pytest.mark.parametrize("return_weights", [False, True])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("training", [False, True])
def test_query_without_a_key_gets_exactly_zero(dropout, training, return_weights):
    query, key, value = heads()
    attend = np.ones((2, 4, 5), bool)
    attend[1] = False  # no query of the second row
    attend[0, 2] = False  # one query of the first
    out = ScaledDotProductAttention(dropout, seed=1)(
        query, key, value, attend=attend, training=training, return_weights=return_weights
    )
    results = out if return_weights else [out]
    assert len(results) == 1 + return_weights
    for result in map(np.asarray, results):
        np.testing.assert_array_equal(result[1], 0.0)
        np.testing.assert_array_equal(result[0, :, 2], 0.0)
        assert result[0, :, [0, 1, 3]].any(axis=-1).all()


@pytest.mark.parametrize("masked", [False, True])
def test_returned_weights_are_the_ones_used(masked):
    query, key, value = heads(length=6, keys=7)
    attend = np.tril(np.ones((1, 6, 7), bool), -1) if masked else None  # the first query has no key
    context, weights = ScaledDotProductAttention(0.5, seed=2)(
        query, key, value, attend=attend, training=True, return_weights=True
    )
    np.testing.assert_allclose(context, np.asarray(weights) @ value, atol=1e-5, rtol=1e-5)
    assert not np.allclose(np.sum(weights, axis=-1)[:, :, 1:], 1.0, atol=1e-3)  # something was dropped


def test_masked_values_never_matter():
    query, key, value = heads()
    attend = np.array([[True, True, False, True, False]] * 2)[:, None]
    before = ScaledDotProductAttention()(query, key, value, attend=attend)
    key[:, :, [2, 4]], value[:, :, [2, 4]] = 1e15, -1e30
    np.testing.assert_array_equal(ScaledDotProductAttention()(query, key, value, attend=attend), before)


@pytest.mark.parametrize(("dtype", "epsilon"), [("mixed_float16", 2**-11), ("mixed_bfloat16", 2**-8)])
def test_softmax_is_float32_under_a_mixed_policy(dtype, epsilon):
    query, key, value = (ops.cast(x, dtype.removeprefix("mixed_")) for x in heads(keys=64))
    _, weights = ScaledDotProductAttention(dtype=dtype)(query, key, value, return_weights=True)
    assert weights.dtype == query.dtype
    scores = attention_scores(query, key)
    assert scores.dtype.name == "float32"
    # Rounded once, at the end: half a unit in the last place (and half the smallest number of float16).
    expected = softmax(np.asarray(scores, np.float64))
    np.testing.assert_allclose(np.asarray(weights, np.float64), expected, atol=2**-25, rtol=epsilon * 1.01)


@pytest.mark.parametrize(
    ("shapes", "received"),
    [
        (((2, 4, 8), (2, 3, 5, 8), (2, 3, 5, 8)), r"Received: query=\(2, 4, 8\), key=\(2, 3, 5, 8\)"),
        (((2, 3, 4, 8), (2, 5, 8), (2, 3, 5, 8)), r"Received: .*key=\(2, 5, 8\)"),
        (((2, 3, 4, 8), (2, 3, 5, 8), (5, 8)), r"Received: .*value=\(5, 8\)"),
        (((2, 3, 4, 8), (2, 3, 5, 6), (2, 3, 5, 8)), r"one head size. Received: .*key=\(2, 3, 5, 6\)"),
    ],
)
def test_bad_ranks_are_refused(shapes, received):
    with pytest.raises(ValueError, match=received):
        ScaledDotProductAttention()(*(np.zeros(shape, np.float32) for shape in shapes))


@pytest.mark.parametrize(
    ("attend", "received"),
    [
        (np.ones((2, 4, 5), np.float32), r"Received: shape=\(2, 4, 5\), dtype=.*float32"),
        (np.ones((2, 4, 5), np.int32), r"Received: shape=\(2, 4, 5\), dtype=.*int32"),
        (np.ones((2, 5), bool), r"Received: shape=\(2, 5\), dtype=.*bool"),
        (np.ones((2, 1, 4, 5), bool), r"Received: shape=\(2, 1, 4, 5\)"),
    ],
)
def test_attend_must_be_boolean_of_rank_3(attend, received):
    with pytest.raises(ValueError, match=r"attend must be boolean \[B, 1 | T, S\].*" + received):
        ScaledDotProductAttention()(*heads(), attend=attend)


@pytest.mark.parametrize(("d_model", "num_heads"), [(16, 3), (10, 4), (8, 0), (4, 8)])
def test_d_model_must_be_a_multiple_of_num_heads(d_model, num_heads):
    with pytest.raises(ValueError, match=rf"Received: d_model={d_model}, num_heads={num_heads}$"):
        MultiHeadAttention(d_model, num_heads)


def multi_head_oracle(layer, query, source, attend):
    """The formula in float64, one head at a time, from the layer's weights."""

    def project(x, dense):
        return x.astype(np.float64) @ np.asarray(dense.kernel, np.float64) + np.asarray(dense.bias, np.float64)

    q, k, v = project(query, layer.query), project(source, layer.key), project(source, layer.value)
    size = layer.d_model // layer.num_heads
    weights, contexts = [], []
    for n in range(layer.num_heads):
        of_head = slice(n * size, (n + 1) * size)
        scores = q[..., of_head] @ k[..., of_head].swapaxes(1, 2) / math.sqrt(size)
        weight = softmax(np.where(attend, scores, -1e300)) * attend.any(axis=-1, keepdims=True)
        weights.append(weight)
        contexts.append(weight @ v[..., of_head])
    return project(np.concatenate(contexts, axis=-1), layer.output_projection), np.stack(weights, axis=1)


@pytest.mark.parametrize("cross", [False, True])
@pytest.mark.parametrize("mask", ["none", "padding", "full", "with empty rows"])
def test_multi_head_attention_equals_numpy(cross, mask):
    query = random(3, 4, 12)
    source = random(3, 6, 9 if cross else 12, seed=1) if cross else query
    layer = MultiHeadAttention(12, 3, seed=4)
    layer.build(query.shape, source.shape)
    for i, v in enumerate(layer.weights):  # biases too
        v.assign(0.5 * random(*v.shape, seed=10 + i))
    rng = np.random.default_rng(5)
    attend = {
        "none": None,
        "padding": np.arange(source.shape[1]) < np.array([[1], [3], [source.shape[1]]])[:, None],
        "full": (rng.random((3, 4, source.shape[1])) < 0.5) | (np.arange(source.shape[1]) == 1),
        "with empty rows": np.arange(source.shape[1]) < np.array([[0], [3], [0]])[:, None],
    }[mask]
    output, weights = layer(query, source if cross else None, attend=attend, return_weights=True)
    whole = np.ones((3, 4, source.shape[1]), bool)
    expected, expected_weights = multi_head_oracle(layer, query, source, whole if attend is None else attend & whole)
    np.testing.assert_allclose(weights, expected_weights, atol=ATOL, rtol=1e-5)
    np.testing.assert_allclose(output, expected, atol=1e-5, rtol=1e-5)
    without = layer(query, source if cross else None, attend=attend)
    np.testing.assert_array_equal(without, output)


@pytest.mark.parametrize("source", [False, True])
def test_weights_come_out_of_a_functional_model(source):
    inputs = keras.Input((None, 8)), keras.Input((5, 8))
    outputs = MultiHeadAttention(8, 2, seed=1)(inputs[0], inputs[1] if source else None, return_weights=True)
    assert [o.shape for o in outputs] == [(None, None, 8), (None, 2, None, 5 if source else None)]
    output, weights = keras.Model(inputs, outputs)([random(2, 3, 8), random(2, 5, 8)])
    assert output.shape == (2, 3, 8)
    assert weights.shape == (2, 2, 3, 5 if source else 3)

    query, key, value = (keras.Input((2, length, 4)) for length in (3, 5, 5))
    context, weights = ScaledDotProductAttention()(query, key, value, return_weights=True)
    assert (context.shape, weights.shape) == ((None, 2, 3, 4), (None, 2, 3, 5))


@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
def test_grouped_heads_equal_full_ones_with_repeated_weights(num_kv_heads):
    """Head n of the queries takes head n // (N / num_kv_heads) of keys and values (Ainslie et al. 2023, figure 2)."""
    x, size = random(2, 5, 12), 3
    grouped = MultiHeadAttention(12, 4, seed=4, num_kv_heads=num_kv_heads)
    grouped.build(x.shape)
    for i, v in enumerate(grouped.weights):
        v.assign(0.5 * random(*v.shape, seed=10 + i))
    full = MultiHeadAttention(12, 4, seed=4)
    full.build(x.shape)
    of_head = np.arange(4) // (4 // num_kv_heads)
    columns = (of_head[:, None] * size + np.arange(size)).ravel()
    for name in ("query", "output_projection"):
        getattr(full, name).kernel.assign(getattr(grouped, name).kernel)
        getattr(full, name).bias.assign(getattr(grouped, name).bias)
    for name in ("key", "value"):
        kernel, bias = getattr(grouped, name).kernel.numpy(), getattr(grouped, name).bias.numpy()
        assert kernel.shape == (12, num_kv_heads * size)
        getattr(full, name).kernel.assign(kernel[:, columns])
        getattr(full, name).bias.assign(bias[columns])
    attend = np.array([[True] * 5, [True, False, True, False, False]])[:, None]
    for found, expected in zip(
        grouped(x, attend=attend, return_weights=True), full(x, attend=attend, return_weights=True), strict=True
    ):
        np.testing.assert_allclose(found, expected, atol=1e-6, rtol=1e-6)
