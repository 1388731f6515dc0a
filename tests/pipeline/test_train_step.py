import math

import numpy as np
import pytest
import tensorflow as tf

from pipeline.classifier import build_classifier
from pipeline.config import ModelConfig, TrainingConfig
from pipeline.train_step import TrainStep

pytestmark = pytest.mark.filterwarnings("ignore:You are using a softmax over axis")

SIZES = ModelConfig(d_model=8, num_heads=2, d_ff=12, num_layers=1, dropout=0.0, head_dropout=0.0, max_length=8)
DROPPING = SIZES.model_copy(update={"dropout": 0.3, "head_dropout": 0.3})
CLASS_WEIGHTS = np.array([1.0, 2.0, 0.5], np.float32)
BATCH = (
    np.array([[5, 3, 9, 2], [7, 1, 0, 0], [4, 0, 0, 0], [8, 6, 2, 0]], np.int32),
    np.array([0, 2, 1, 1], np.int32),
)
RATE = 1e-2


def make(sizes=SIZES, class_weights=(1.0, 1.0, 1.0), **training):
    """A step and its model; models of equal sizes start with equal weights."""
    model = build_classifier(sizes, 20, 3, seed=1, dtype=training.get("precision", "float32"))
    return TrainStep(model, TrainingConfig(**training), class_weights)


def gradients_of(train_step):
    """What AdamW was given in its only step so far: its first moment is a tenth of it."""
    count = len(train_step.model.trainable_variables)
    steps, *moments = train_step.optimizer.variables
    assert float(steps) == 1
    return [10 * v.numpy() for v in moments[:count]]


def assert_all_close(found, expected, **tolerance):
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, **tolerance)


def global_norm(arrays):
    return math.sqrt(sum(float(np.square(np.asarray(a, np.float64)).sum()) for a in arrays))


def log_softmax(logits):
    wide = np.asarray(logits, np.float64)
    return wide - np.log(np.exp(wide).sum(axis=-1, keepdims=True))


def cross_entropies(logits, labels):
    return -log_softmax(logits)[np.arange(len(labels)), labels]


def reference(labels=BATCH[1], token_ids=BATCH[0], weights=(1.0, 1.0, 1.0)):
    """(loss, gradients) of the first step without dropout, from TensorFlow's own loss."""
    model = build_classifier(SIZES, 20, 3, seed=1)
    with tf.GradientTape() as tape:
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, model(token_ids, training=True))
        rows = np.asarray(weights, np.float32)[labels]
        loss = tf.reduce_sum(losses * rows) / rows.sum()
    return float(loss), [tf.convert_to_tensor(g).numpy() for g in tape.gradient(loss, model.trainable_variables)]


@pytest.mark.parametrize("share", [0.01, 100.0])
def test_gradients_are_clipped_by_their_global_norm(share):
    expected, gradients = reference()
    norm = global_norm(gradients)
    train_step = make(clip_norm=share * norm)
    loss, found = train_step([BATCH], RATE)
    assert (type(loss), type(found)) == (float, float)
    assert loss == pytest.approx(expected, rel=1e-5)
    assert loss == pytest.approx(math.log(3), abs=0.1)  # nothing is known yet
    assert found == pytest.approx(norm, rel=1e-5)  # before clipping
    assert global_norm(gradients_of(train_step)) == pytest.approx(min(share, 1.0) * norm, rel=1e-4)
    scaled = [gradient * min(share, 1.0) for gradient in gradients]
    assert_all_close(gradients_of(train_step), scaled, atol=1e-6 * norm, rtol=1e-4)


def test_beta_2_is_the_optimizers():
    train_step = make(beta_2=0.9, clip_norm=1e6)
    train_step([BATCH], RATE)
    _, *moments = train_step.optimizer.variables
    squares = [v.numpy() for v in moments[len(moments) // 2 :]]
    assert_all_close(squares, [0.1 * g**2 for g in gradients_of(train_step)], atol=1e-9, rtol=1e-4)


def test_rows_count_by_their_class_weights():
    train_step = make(class_weights=CLASS_WEIGHTS, clip_norm=1e6)
    token_ids, labels = BATCH
    losses = cross_entropies(train_step.model(token_ids), labels)
    # Rows of the classes 0, 2, 1, 1 count 1, 1/2, 2, 2.
    by_hand = (losses[0] + losses[1] / 2 + 2 * losses[2] + 2 * losses[3]) / 5.5
    loss, _ = train_step([BATCH], RATE)
    assert loss == pytest.approx(by_hand, rel=1e-5)
    expected, gradients = reference(weights=CLASS_WEIGHTS)
    assert loss == pytest.approx(expected, rel=1e-5)
    assert_all_close(gradients_of(train_step), gradients, atol=1e-6, rtol=1e-4)


def test_smoothing_reaches_the_loss():
    train_step = make(label_smoothing=0.3)
    log_p = log_softmax(train_step.model(BATCH[0]))
    targets = 0.7 * np.eye(3)[BATCH[1]] + 0.1
    assert train_step([BATCH], RATE)[0] == pytest.approx(-(targets * log_p).sum(axis=1).mean(), rel=1e-5)


def test_accumulated_batches_equal_one():
    token_ids, labels = BATCH
    batches = [(token_ids[:1], labels[:1]), (token_ids[1:3, :2], labels[1:3]), (token_ids[3:, :3], labels[3:])]
    several = make(class_weights=CLASS_WEIGHTS, accumulate_batches=3, clip_norm=0.1)
    one = make(class_weights=CLASS_WEIGHTS, clip_norm=0.1)
    for step in range(2):
        assert several(batches, 1e-3) == pytest.approx(one([BATCH], 1e-3), rel=1e-5)
        if step == 0:
            assert_all_close(gradients_of(several), gradients_of(one), atol=1e-6, rtol=1e-4)
    assert float(several.optimizer.steps) == 2
    # A key's bias never matters: its gradient is rounding, and Adam makes a whole step of it.
    pairs = list(zip(*(s.model.trainable_variables for s in (several, one)), strict=True))
    compared = [pair for pair in pairs if not pair[0].path.endswith("attention/key/bias")]
    assert len(compared) == len(pairs) - 1
    assert_all_close(*zip(*compared, strict=True), atol=1e-6, rtol=0)
    # The last step of an epoch may have fewer batches.
    assert several([BATCH], 1e-3) == pytest.approx(one([BATCH], 1e-3), rel=1e-5)


SOFT_LABELS = np.array([[0.7, 0.2, 0.1], [0, 0, 1], [0.25, 0.5, 0.25], [0.1, 0.6, 0.3]], np.float32)


@pytest.mark.parametrize("r_drop", [0.0, 5.0])
def test_a_teacher_counts_beside_the_labels(r_drop):
    """In one batch and in parts of it; by hand, from Hinton et al. 2015 at temperature 1."""
    settings = {"teacher": "t", "teacher_weight": 0.3, "label_smoothing": 0.1, "clip_norm": 1e6, "r_drop": r_drop}
    train_step = make(class_weights=CLASS_WEIGHTS, **settings)
    token_ids, labels = BATCH
    log_p = log_softmax(train_step.model(token_ids))
    targets = 0.7 * (0.9 * np.eye(3)[labels] + 0.1 / 3) + 0.3 * SOFT_LABELS
    rows = CLASS_WEIGHTS[labels]
    expected = -((targets * log_p).sum(axis=1) * rows).sum() / rows.sum()  # without dropout R-Drop adds nothing
    assert train_step([(*BATCH, SOFT_LABELS)], RATE)[0] == pytest.approx(expected, rel=1e-5)

    several = make(class_weights=CLASS_WEIGHTS, accumulate_batches=2, **settings)
    parts = [(token_ids[i], labels[i], SOFT_LABELS[i]) for i in (slice(1), slice(1, 4))]
    assert several(parts, RATE)[0] == pytest.approx(expected, rel=1e-5)
    assert_all_close(gradients_of(several), gradients_of(train_step), atol=1e-6, rtol=1e-4)
    # The cross-entropy with these targets has the gradient softmax - targets at the logits, so at the head's bias.
    bias = next(i for i, v in enumerate(train_step.model.trainable_variables) if v.path.endswith("head/bias"))
    by_hand = ((np.exp(log_p) - targets) * rows[:, None]).sum(axis=0) / rows.sum()
    np.testing.assert_allclose(gradients_of(train_step)[bias], by_hand, atol=1e-6, rtol=1e-4)


def test_r_drop_without_dropout_is_the_plain_loss():
    expected, gradients = reference(weights=CLASS_WEIGHTS)
    train_step = make(class_weights=CLASS_WEIGHTS, r_drop=5.0, clip_norm=1e6)
    assert train_step([BATCH], RATE)[0] == pytest.approx(expected, rel=1e-5)
    assert_all_close(gradients_of(train_step), gradients, atol=1e-6, rtol=1e-4)


def test_r_drop_adds_the_divergence_of_two_passes():
    smoothing = 0.3
    train_step = make(DROPPING, class_weights=CLASS_WEIGHTS, r_drop=4.0, label_smoothing=smoothing)
    token_ids, labels = BATCH
    twin = build_classifier(DROPPING, 20, 3, seed=1)  # the same masks
    logits = np.asarray(twin(np.concatenate([token_ids, token_ids]), training=True))
    log_p, log_q = log_softmax(logits[:4]), log_softmax(logits[4:])
    divergence = ((np.exp(log_p) - np.exp(log_q)) * (log_p - log_q)).sum(axis=1)
    assert (divergence > 1e-6).all()  # the passes are two
    targets = (1 - smoothing) * np.eye(3)[labels] + smoothing / 3
    losses = -(targets * (log_p + log_q) / 2).sum(axis=1) + 4.0 / 4 * divergence
    rows = CLASS_WEIGHTS[labels]
    assert train_step([BATCH], RATE)[0] == pytest.approx((losses * rows).sum() / rows.sum(), rel=1e-4)


@pytest.mark.parametrize("precision", ["mixed_bfloat16", "mixed_float16"])
def test_half_precision_stays_near_float32(precision):
    expected, gradients = reference()
    norm = global_norm(gradients)
    train_step = make(precision=precision, clip_norm=1e-2)
    loss, found = train_step([BATCH], RATE)
    assert loss == pytest.approx(expected, rel=5e-3)
    assert found == pytest.approx(norm, rel=0.02)  # without the loss scale
    clipped = gradients_of(train_step)
    assert global_norm(clipped) == pytest.approx(1e-2, rel=1e-3)
    difference = global_norm([a * 100 - b / norm for a, b in zip(clipped, gradients, strict=True)])
    assert difference < {"mixed_bfloat16": 0.05, "mixed_float16": 0.01}[precision]  # of a norm of 1
    for _ in range(10):
        last, _ = train_step([BATCH], RATE)
    assert last < loss - 0.1
    assert all(v.dtype == "float32" and np.isfinite(v).all() for v in train_step.model.trainable_variables)
    assert (train_step.loss_scale is not None) is (precision == "mixed_float16")


def test_a_float16_overflow_skips_the_step_and_halves_the_scale():
    train_step = make(precision="mixed_float16", ema_decay=0.9, accumulate_batches=2)
    train_step([BATCH, BATCH], RATE)
    before = [v.numpy() for v in train_step.variables]
    train_step.loss_scale.value.assign(2.0**40)
    loss, norm = train_step([BATCH, BATCH], RATE)
    assert math.isfinite(loss)
    assert not math.isfinite(norm)
    changed = [not np.array_equal(v, old) for v, old in zip(train_step.variables, before, strict=True)]
    assert sum(changed) == 2  # the scale, and its count of good steps
    assert float(train_step.loss_scale.value) == 2.0**39
    assert int(train_step.loss_scale.good_steps) == 0
    # Nothing of it is left in the sums.
    train_step.loss_scale.value.assign(2.0**15)
    assert all(map(math.isfinite, train_step([BATCH, BATCH], RATE)))
    assert float(train_step.optimizer.steps) == 2


def test_averages_are_what_is_evaluated():
    train_step = make(ema_decay=0.9)
    weights = train_step.model.trainable_variables
    expected = [v.numpy().astype(np.float64) for v in weights]
    for t in range(1, 4):
        train_step([BATCH], RATE)
        decay = (1 + t) / (10 + t)
        expected = [decay * e + (1 - decay) * v.numpy() for e, v in zip(expected, weights, strict=True)]
    last = [v.numpy() for v in weights]
    with train_step.evaluated_weights():
        assert_all_close(weights, expected, atol=1e-6, rtol=0)
        assert not np.allclose(weights[0], last[0], atol=1e-4)
    assert_all_close(weights, last, atol=0, rtol=0)


def test_one_graph_for_every_shape():
    train_step = make(DROPPING, accumulate_batches=2, r_drop=1.0)
    for rows, length in ((1, 1), (3, 5), (2, 8), (7, 2)):
        batch = np.full((rows, length), 3, np.int32), np.zeros(rows, np.int32)
        train_step([batch, BATCH], RATE)
        train_step([batch], RATE * rows)
    assert train_step._add.experimental_get_tracing_count() == 1
    assert train_step._step.experimental_get_tracing_count() == 1


def test_a_text_without_tokens_trains():
    train_step = make(DROPPING, r_drop=1.0)
    batch = np.zeros((2, 3), np.int32), np.array([0, 1], np.int32)
    assert all(map(math.isfinite, train_step([batch], RATE)))


# Experts.

EXPERTS = SIZES.model_copy(update={"num_experts": 4, "top_k": 1, "num_layers": 2})


def balancing_reference(batches, weight):
    """(loss without balance, gradients with it) of the first step: batches as (token_ids, labels), all rows alike."""
    model = build_classifier(EXPERTS, 20, 3, seed=1)
    count = sum(len(labels) for _, labels in batches)
    with tf.GradientTape() as tape:
        loss = objective = 0.0
        for token_ids, labels in batches:
            logits = model(token_ids, training=True)
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
            assert len(model.losses) == 2  # a layer each
            loss += tf.reduce_sum(losses) / count
            objective += weight * tf.add_n(model.losses) * len(labels) / count
        objective += loss
    return float(loss), [tf.convert_to_tensor(g).numpy() for g in tape.gradient(objective, model.trainable_variables)]


@pytest.mark.parametrize("r_drop", [0.0, 5.0])
def test_the_balance_of_experts_is_in_the_objective_and_not_in_the_loss(r_drop):
    expected, gradients = balancing_reference([BATCH], 0.5)
    train_step = make(EXPERTS, load_balancing=0.5, r_drop=r_drop, clip_norm=1e6)  # without dropout R-Drop adds nothing
    assert train_step([BATCH], RATE)[0] == pytest.approx(expected, rel=1e-5)
    assert_all_close(gradients_of(train_step), gradients, atol=1e-6, rtol=1e-4)
    without = make(EXPERTS, load_balancing=0.0, clip_norm=1e6)
    without([BATCH], RATE)
    difference = global_norm([a - b for a, b in zip(gradients_of(without), gradients, strict=True)])
    assert difference > 0.01


def test_the_balance_of_accumulated_batches_counts_by_their_rows():
    token_ids, labels = BATCH
    batches = [(token_ids[:1], labels[:1]), (token_ids[1:], labels[1:])]
    expected, gradients = balancing_reference(batches, 0.5)
    train_step = make(EXPERTS, load_balancing=0.5, accumulate_batches=2, clip_norm=1e6)
    assert train_step(batches, RATE)[0] == pytest.approx(expected, rel=1e-5)
    assert_all_close(gradients_of(train_step), gradients, atol=1e-6, rtol=1e-4)


def test_the_balance_is_scaled_with_the_loss_in_float16():
    _, gradients = balancing_reference([BATCH], 0.5)
    train_step = make(EXPERTS, load_balancing=0.5, precision="mixed_float16", clip_norm=1e6)
    _, norm = train_step([BATCH], RATE)
    assert norm == pytest.approx(global_norm(gradients), rel=0.02)


def test_each_encoder_is_trained_by_its_own_loss():
    several = make(SIZES.model_copy(update={"encoders": 3}), clip_norm=100.0, r_drop=1.0)
    members = several.model.members()
    assert len({m.embedding.embeddings.numpy().tobytes() for m in members}) == 3
    losses, gradients = [], []
    for member in members:
        with tf.GradientTape() as tape:
            row_losses = tf.nn.sparse_softmax_cross_entropy_with_logits(BATCH[1], member(BATCH[0], training=True))
            loss = tf.reduce_mean(row_losses)
        losses.append(float(loss))
        gradients += [tf.convert_to_tensor(g).numpy() / 3 for g in tape.gradient(loss, member.trainable_variables)]
    loss, _ = several([BATCH], RATE)
    assert loss == pytest.approx(np.mean(losses), rel=1e-6)  # without dropout R-Drop has nothing to add
    assert_all_close(gradients_of(several), gradients, rtol=1e-4, atol=1e-7)


def test_several_encoders_answer_with_the_mean_of_their_logits():
    model = build_classifier(SIZES.model_copy(update={"encoders": 3}), 20, 3, seed=1)
    for i, member in enumerate(model.members()):
        member.head.bias.assign([0.1 * i, 0.0, 0.3])
    expected = np.mean([np.asarray(member(BATCH[0]), np.float64) for member in model.members()], axis=0)
    np.testing.assert_allclose(model(BATCH[0]), expected, rtol=0, atol=1e-6)
