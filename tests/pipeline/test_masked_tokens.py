import math

import numpy as np
import pytest
import tensorflow as tf

from pipeline.classifier import build_classifier
from pipeline.config import ModelConfig, TrainingConfig
from pipeline.masked_tokens import MaskedTokenModel, MaskedTokenStep, compile_measure
from tests.pipeline.test_train_step import assert_all_close, gradients_of

SIZES = ModelConfig(d_model=8, num_heads=2, d_ff=12, num_layers=1, dropout=0.0, head_dropout=0.0, max_length=8)
VOCAB = 20
TARGETS = np.array([[5, 3, 9, 2], [7, 1, 0, 0], [4, 0, 0, 0], [8, 6, 2, 0]], np.int32)
TOKEN_IDS = np.array([[5, 2, 9, 2], [2, 1, 0, 0], [4, 0, 0, 0], [8, 6, 11, 0]], np.int32)
COUNTS = np.array([[0, 1, 1, 0], [1, 0, 0, 0], [0, 0, 0, 0], [0, 0, 1, 0]], bool)
BATCH = (TOKEN_IDS, TARGETS, COUNTS)


def make(sizes=SIZES, **training):
    encoder = build_classifier(sizes, VOCAB, 3, seed=1, dtype=training.get("precision", "float32"))
    model = MaskedTokenModel(encoder)
    model.bias.assign(np.linspace(-1, 1, VOCAB))  # of zeros nothing would be seen
    return MaskedTokenStep(model, TrainingConfig(**training))


def expected_losses(model, token_ids=TOKEN_IDS, counts=COUNTS):
    """In NumPy, over all positions: LayerNorm, the transposed embedding table, the bias, softmax."""
    hidden = np.asarray(model.encoder.encode(token_ids), np.float64)
    hidden = hidden - hidden.mean(axis=-1, keepdims=True)
    hidden = hidden / np.sqrt((hidden**2).mean(axis=-1, keepdims=True) + 1e-5)
    logits = hidden @ model.encoder.embedding.embeddings.numpy().T.astype(np.float64) + model.bias.numpy()
    log_p = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    losses = -np.take_along_axis(log_p, TARGETS[..., None], axis=-1)[..., 0]
    return logits[counts], losses[counts], (logits.argmax(axis=-1) == TARGETS)[counts]


@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_logits_loss_and_hits_equal_numpy(pooling):
    step = make(SIZES.model_copy(update={"pooling": pooling}))
    logits, losses, right = expected_losses(step.model)
    found = step.model(TOKEN_IDS, COUNTS)
    assert found.dtype == tf.float32 and found.shape == (4, VOCAB)
    np.testing.assert_allclose(found, logits, atol=1e-5, rtol=0)
    loss, hits = compile_measure(step.model)(*BATCH)
    assert float(loss) == pytest.approx(losses.sum(), rel=1e-5)
    assert int(hits) == right.sum()
    assert step([BATCH], 1e-3)[0] == pytest.approx(losses.mean(), rel=1e-5)


def test_an_untrained_model_knows_nothing():
    sizes = SIZES.model_copy(update={"d_model": 64})
    model = MaskedTokenModel(build_classifier(sizes, 500, 2, seed=1))
    rng = np.random.default_rng(0)
    token_ids = rng.integers(2, 500, (64, 8)).astype(np.int32)
    targets = rng.permutation(token_ids.ravel()).reshape(64, 8)
    loss, _ = compile_measure(model)(token_ids, targets, np.ones((64, 8), bool))
    # Half a nat for logits of unit variance, and a little for that of the token that stands there, which is high.
    assert math.log(500) + 0.4 < float(loss) / 512 < math.log(500) + 1.2


def test_output_weights_are_tied_and_the_classifiers_head_is_left_alone():
    step = make(SIZES.model_copy(update={"pooling": "cls", "position": "learned"}), weight_decay=0.5)
    model, encoder = step.model, step.model.encoder
    extra = {v.path for v in model.trainable_variables} - {v.path for v in encoder.encoder_weights}
    assert sorted(path.rpartition("/")[2] for path in extra) == ["beta", "bias", "gamma"]
    before = {v.path: v.numpy() for v in encoder.weights}
    step([BATCH], 1e-2)
    moved = {v.path for v in encoder.weights if not np.array_equal(v.numpy(), before[v.path])}
    head = {v.path for layer in (encoder.head, encoder.head_norm) for v in layer.weights}
    # The true gradient of a key's bias is 0, the rounded one is not always.
    assert {p for p in moved if not p.endswith("key/bias")} == {
        v.path for v in encoder.weights if v.path not in head and not v.path.endswith("key/bias")
    }
    assert all(np.any(g) for g in gradients_of(step)[:1])


def test_positions_that_do_not_count_have_no_part():
    """Neither their targets, nor what stands in padded columns, nor rows without a masked token."""
    found, others = make(), make()
    expected = found([BATCH], 1e-3)
    targets = np.where(COUNTS, TARGETS, 13)
    wide = [np.pad(array, ((0, 0), (0, 3))) for array in (TOKEN_IDS, targets, COUNTS)]
    assert others([[array[[0, 1, 3]] for array in wide]], 1e-3) == pytest.approx(expected, rel=1e-5)
    assert_all_close(gradients_of(others), gradients_of(found), atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("precision", ["float32", "mixed_float16"])
def test_without_a_masked_position_the_loss_is_zero(precision):
    step = make(precision=precision)
    before = [v.numpy() for v in step.model.weights]
    loss, norm = step([(TOKEN_IDS, TARGETS, np.zeros_like(COUNTS))], 1e-3)
    assert (loss, norm) == (0.0, 0.0)
    assert all(np.isfinite(v.numpy()).all() for v in step.model.weights)
    assert all(not g.any() for g in gradients_of(step))
    assert_all_close([v.numpy() for v in step.model.weights], before, atol=1e-4, rtol=0)  # decay alone


@pytest.mark.parametrize("precision", ["mixed_bfloat16", "mixed_float16"])
def test_half_precision_is_near_float32(precision):
    sizes = SIZES.model_copy(update={"pooling": "cls", "position": "learned"})
    half = make(sizes, precision=precision)
    assert half.model(TOKEN_IDS, COUNTS).dtype == tf.float32
    assert half([BATCH], 1e-3)[0] == pytest.approx(make(sizes)([BATCH], 1e-3)[0], rel=2e-2)


def test_accumulated_batches_weigh_by_their_masked_positions():
    several, one = make(accumulate_batches=3), make()
    parts = [tuple(array[rows] for array in BATCH) for rows in ([0], [2], [1, 3])]
    assert several(parts, 1e-3) == pytest.approx(one([BATCH], 1e-3), rel=1e-5)
    assert_all_close(gradients_of(several), gradients_of(one), atol=1e-6, rtol=1e-4)


def test_one_batch_is_learned_by_heart():
    step = make(clip_norm=10.0)
    losses = [step([BATCH], 2e-2)[0] for _ in range(120)]
    assert losses[0] > 2.0 and losses[-1] < 0.1
