"""What the encoder layers must keep to in every precision: masked positions, empty rows, extreme scores, bad input."""

import numpy as np
import pytest
import tensorflow as tf

from pipeline.classifier import EncoderClassifier, build_classifier
from pipeline.config import ModelConfig, TrainingConfig
from pipeline.layers import (
    ChunkedAttention,
    ClassVector,
    FirstPooling,
    LearnedPosition,
    LinearAttention,
    LocalAttention,
    MaskedMaxPooling,
    MaskedMeanPooling,
    MixtureOfExperts,
    MultiHeadAttention,
    PositionwiseFeedForward,
    PostNormEncoderLayer,
    PreNormConvolution,
    PreNormEncoderLayer,
    RotaryPosition,
    ScaledDotProductAttention,
    SinusoidalPosition,
)
from pipeline.layers.attention import MASKED, causal_mask, padding_mask
from pipeline.layers.normalization import LayerNorm
from pipeline.train_step import TrainStep

SIZE, HEADS, LENGTH = 8, 2, 6
POLICIES = ["float32", "mixed_float16", "mixed_bfloat16"]

pytestmark = pytest.mark.filterwarnings("ignore:You are using a softmax over axis")
every_policy = pytest.mark.parametrize("policy", POLICIES)
every_encoder = pytest.mark.parametrize("layer_class", [PreNormEncoderLayer, PostNormEncoderLayer])


def random(*shape, seed=0, scale=1.0):
    return (scale * np.random.default_rng(seed).normal(size=shape)).astype(np.float32)


def at_precision(x, policy):
    """As the layer's inputs come: in half precision under a mixed policy."""
    return tf.cast(x, policy.removeprefix("mixed_"))


@every_policy
@pytest.mark.parametrize("training", [False, True])
def test_weights_of_a_row_with_a_key_sum_to_one_before_dropout(policy, training):
    query, key, value = (at_precision(random(2, HEADS, LENGTH, 4, seed=i), policy) for i in range(3))
    attend = np.random.default_rng(3).random((2, LENGTH, LENGTH)) < 0.5
    attend[0, 1] = False
    attend[0, 2] = np.arange(LENGTH) == 4  # a single key
    layer = ScaledDotProductAttention(dtype=policy)
    context, weights = layer(query, key, value, attend=attend, training=training, return_weights=True)
    sums = np.sum(np.asarray(weights, np.float64), axis=-1)
    expected = np.broadcast_to(attend.any(axis=-1)[:, None], sums.shape).astype(float)
    atol = {"float32": 1e-6, "mixed_float16": 2e-3, "mixed_bfloat16": 1e-2}[policy]
    np.testing.assert_allclose(sums, expected, atol=atol, rtol=0)
    assert not np.asarray(weights)[np.broadcast_to(~attend[:, None], weights.shape)].any()
    np.testing.assert_array_equal(np.asarray(context)[0, :, 1], 0.0)


@every_policy
def test_the_fill_value_fits_and_two_masks_stay_finite(policy):
    """Padding and the future at once, beside scores at the edge of float16."""
    assert np.isfinite(2 * np.float32(MASKED))
    token_valid = np.array([[True] * 4 + [False] * 2, [False] * LENGTH])
    attend = padding_mask(token_valid) & causal_mask(LENGTH)  # twice masked: PAD in the future
    query, key, value = (at_precision(random(2, HEADS, LENGTH, 4, seed=i, scale=60.0), policy) for i in range(3))
    layer = ScaledDotProductAttention(dtype=policy)
    with tf.GradientTape() as tape:
        tape.watch([query, key, value])
        context, weights = layer(query, key, value, attend=attend, return_weights=True)
        loss = tf.reduce_sum(tf.cast(context, tf.float32) ** 2)
    for x in (context, weights, *tape.gradient(loss, [query, key, value])):
        assert np.isfinite(np.asarray(x, np.float32)).all()
    np.testing.assert_array_equal(np.asarray(context)[1], 0.0)
    np.testing.assert_array_equal(np.triu(np.asarray(weights, np.float32), 1), 0.0)


@every_encoder
@every_policy
def test_what_stands_at_padded_positions_never_matters(layer_class, policy):
    """Permuted, overwritten with N(0, 100), or not there at all."""
    token_valid = np.arange(LENGTH) < np.array([[4], [0], [6], [1]])
    x = random(4, LENGTH, SIZE)
    layer = layer_class(HEADS, 12, seed=3, dtype=policy)
    atol = {"float32": 1e-5, "mixed_float16": 1e-2, "mixed_bfloat16": 6e-2}[policy]
    before = np.asarray(layer(x, attend=padding_mask(token_valid)))[token_valid]

    permuted = x.copy()
    permuted[0, 4:] = x[0, [5, 4]]
    permuted[3, 1:] = x[3, [5, 1, 4, 2, 3]]
    overwritten = np.where(token_valid[..., None], x, random(*x.shape, seed=9, scale=100.0))
    for other in (permuted, overwritten):
        found = np.asarray(layer(other, attend=padding_mask(token_valid)))[token_valid]
        np.testing.assert_allclose(found, before, atol=atol, rtol=0)
    for added in (5, 60):
        padded = np.pad(overwritten, [(0, 0), (0, added), (0, 0)], constant_values=7.0)
        valid = np.pad(token_valid, [(0, 0), (0, added)])
        found = np.asarray(layer(padded, attend=padding_mask(valid)))[valid]
        np.testing.assert_allclose(found, before, atol=atol, rtol=0)


@every_encoder
def test_rows_are_computed_alone(layer_class):
    """A batch of as many rows as heads broadcasts where a mask has lost an axis."""
    layer = layer_class(HEADS, 12, seed=3)
    x = random(2 * HEADS, LENGTH, SIZE)
    token_valid = np.arange(LENGTH) < np.array([[4], [0], [6], [1]])
    together = np.asarray(layer(x, attend=padding_mask(token_valid)))
    for size in (1, 2, HEADS, HEADS + 1, 2 * HEADS):
        found = layer(x[:size], attend=padding_mask(token_valid[:size]))
        np.testing.assert_allclose(found, together[:size], atol=1e-5, rtol=0)


def test_fifty_steps_in_float16_with_scores_of_40_stay_finite():
    """Scores that softmax turns into ones and zeros, long before they would leave float16."""
    sizes = ModelConfig(d_model=16, num_heads=2, d_ff=24, num_layers=2, dropout=0.1, head_dropout=0.1, max_length=12)
    model = build_classifier(sizes, 30, 3, seed=1, dtype="mixed_float16")
    rng = np.random.default_rng(0)
    token_ids = rng.integers(1, 30, (16, 12)).astype(np.int32)
    token_ids[3, 5:] = token_ids[4] = 0
    for layer in model.encoder_layers:
        for projection in (layer.attention.query, layer.attention.key):
            kernel = np.zeros(projection.kernel.shape, np.float32)  # one value of each head, of either sign
            kernel[:, ::8] = rng.normal(size=(16, 2))
            projection.kernel.assign(kernel)
    for i, layer in enumerate(model.encoder_layers):  # in order: what one layer makes is the next one's input
        layer.attention.query.kernel.assign(layer.attention.query.kernel * (40.0 / _scores(model, token_ids)[i]))
    np.testing.assert_allclose(_scores(model, token_ids), 40.0, rtol=0.02)

    step = TrainStep(model, TrainingConfig(precision="mixed_float16"), np.ones(3, np.float32))
    labels = rng.integers(0, 3, 16).astype(np.int32)
    skipped = 0
    for _ in range(50):
        loss, norm = step([(token_ids, labels)], 1e-3)
        assert np.isfinite(loss)
        skipped += not np.isfinite(norm)  # the loss scale is looked for by halving it
        assert np.isfinite(norm) or step.is_skipped(norm)
    assert skipped <= 15
    assert np.isfinite(norm)
    for variable in step.variables:
        assert np.isfinite(np.asarray(variable, np.float64)).all()


def _scores(model, token_ids):
    """Returns the largest score of each layer, as an absolute value."""
    x = model.position(model.embedding(token_ids) * 4.0)
    attend, largest = padding_mask(token_ids != 0), []
    for layer in model.encoder_layers:
        normalized = layer.attention_norm(x)
        query, key = (np.asarray(p(normalized), np.float64) for p in (layer.attention.query, layer.attention.key))
        heads = [np.einsum("bth,bsh->bts", query[..., i : i + 8], key[..., i : i + 8]) / np.sqrt(8) for i in (0, 8)]
        largest.append(float(np.max(np.abs(heads))))
        x = layer(x, attend=attend)
    return largest


X, VALID = np.ones((3, 4, SIZE), np.float32), np.ones((3, 4), bool)
HEAD = np.ones((3, HEADS, 4, 4), np.float32)


@pytest.mark.parametrize(
    ("call", "received"),
    [
        (lambda: MultiHeadAttention(SIZE, HEADS)(X[0]), r"query must be float .*shape=\(4, 8\), dtype=float32"),
        (lambda: MultiHeadAttention(SIZE, HEADS)(X[None]), r"query must be float .*shape=\(1, 3, 4, 8\)"),
        (lambda: MultiHeadAttention(SIZE, HEADS)(X.astype(np.int32)), r"query must be float .*dtype=int32"),
        (lambda: MultiHeadAttention(SIZE, HEADS)(X, X[0]), r"source must be float .*shape=\(4, 8\)"),
        (lambda: MultiHeadAttention(SIZE, HEADS)(X, attend=VALID), r"attend must be .*T=4, S=4.*shape=\(3, 4\)"),
        (lambda: MultiHeadAttention(SIZE, HEADS)(X, attend=VALID[:, None, :3]), r"attend must be .*shape=\(3, 1, 3\)"),
        (lambda: MultiHeadAttention(SIZE, HEADS)(X, attend=np.ones((3, 2, 4), bool)), r"shape=\(3, 2, 4\)"),
        (lambda: MultiHeadAttention(SIZE, HEADS)(X, attend=np.ones((3, 1, 4))), r"attend must be .*dtype=float"),
        (lambda: MultiHeadAttention(SIZE, 3), "num_heads. Received: d_model=8, num_heads=3"),
        (lambda: MultiHeadAttention(SIZE, 4, num_kv_heads=3), "Received: num_heads=4, num_kv_heads=3"),
        (lambda: MultiHeadAttention(SIZE, 4, num_kv_heads=-1), "Received: num_heads=4, num_kv_heads=-1"),
        (lambda: PreNormEncoderLayer(2, 4, attention=MultiHeadAttention(6, 2))(X), "size of x, 8. Received: size=6"),
        (lambda: PreNormEncoderLayer(2, 4)(X[0]), r"x must be float .*shape=\(4, 8\)"),
        (lambda: PostNormEncoderLayer(2, 4)(X[None]), r"x must be float .*shape=\(1, 3, 4, 8\)"),
        (lambda: SinusoidalPosition(4)(X[0]), r"x must be float .*shape=\(4, 8\)"),
        (lambda: SinusoidalPosition(3)(X), "max_length=3. Received: length=4"),
        (lambda: LearnedPosition(3)(X), "max_length=3. Received: length=4"),
        (lambda: RotaryPosition(3)(HEAD), "max_length=3. Received: length=4"),
        (lambda: RotaryPosition(9)(HEAD[..., :3]), "Received: head size=3"),
        (lambda: ScaledDotProductAttention()(HEAD, HEAD, HEAD[:, :, :3]), r"value=\(3, 2, 3, 4\)"),
        (lambda: ScaledDotProductAttention()(HEAD, HEAD[:, :1], HEAD[:, :1]), r"of heads.*key=\(3, 1, 4, 4\)"),
        (lambda: ScaledDotProductAttention()(*[HEAD.astype(np.int32)] * 3), "must be float.*dtypes=int32"),
        (lambda: LocalAttention(3)(HEAD, HEAD, HEAD[:, :, :3]), r"value=\(3, 2, 3, 4\)"),
        (lambda: ChunkedAttention()(HEAD, HEAD, HEAD[:, :, :3]), r"value=\(3, 2, 3, 4\)"),
        (lambda: LinearAttention()(HEAD, HEAD, HEAD[:, :, :3]), r"value=\(3, 2, 3, 4\)"),
        (lambda: MultiHeadAttention(SIZE, HEADS)(X, attend=VALID[:2, None]), r"for B=3.*shape=\(2, 1, 4\)"),
        (lambda: PositionwiseFeedForward(4)(X.astype(np.int32)), "x must be float. Received: .*dtype=int32"),
        (lambda: LayerNorm()(X.astype(np.int32)), "x must be float. Received: .*dtype=int32"),
        (lambda: MixtureOfExperts(2, 1, 4)(X, VALID[:, :2]), r"token_valid must be boolean.*shape=\(3, 2\)"),
        (lambda: PreNormConvolution(3)(X, VALID[:, :2]), r"token_valid must be boolean.*shape=\(3, 2\)"),
        (lambda: PreNormConvolution(4), "width must be odd.*Received: width=4"),
        (lambda: MixtureOfExperts(2, 1, 4, load_balancing=-1), "Received: load_balancing=-1"),
        (lambda: RotaryPosition(9)(X), r"of rank 4.*query=\(3, 4, 8\)"),
        (lambda: MaskedMeanPooling()(X, VALID.astype(np.float32)), r"token_valid must be boolean.*dtype=float32"),
        (lambda: MaskedMaxPooling()(X, VALID.astype(np.int32)), r"token_valid must be boolean.*dtype=int32"),
        (lambda: FirstPooling()(X, VALID[..., None]), r"token_valid must be boolean.*shape=\(3, 4, 1\)"),
        (lambda: ClassVector()(X, VALID[:, :3]), r"for x of shape \(3, 4, 8\). Received: shape=\(3, 3\)"),
        (lambda: MaskedMeanPooling()(X[0], VALID), r"x must be float .*shape=\(4, 8\)"),
        (lambda: EncoderClassifier(9, 2, 8, 2)(np.ones(3, np.int32)), r"token_ids must be int32 .*shape=\(3,\)"),
        (lambda: EncoderClassifier(9, 2, 8, 2)(np.ones((2, 3, 1), np.int32)), r"token_ids must be .*shape=\(2, 3, 1\)"),
        (lambda: EncoderClassifier(9, 2, 8, 2)(np.ones((2, 3), np.float32)), "token_ids must be .*dtype=float32"),
    ],
)
def test_bad_ranks_dtypes_and_lengths_are_refused(call, received):
    with pytest.raises(ValueError, match=received):
        call()
