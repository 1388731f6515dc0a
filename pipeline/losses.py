"""What training minimizes: the loss of a row, and how much each row counts."""

import numpy as np
import tensorflow as tf

from pipeline.errors import JobError
from pipeline.reading import join_some


def smoothed_cross_entropy(logits, labels, smoothing):
    """Returns the cross-entropy of each row in nats, float32 [B].

    Args:
        logits: float32 [B, C].
        labels: int32 [B].
        smoothing: share of the target that is spread evenly over all classes (Szegedy et al. 2016, section 7).
    """
    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
    if not smoothing:
        return losses
    spread = -tf.reduce_mean(tf.nn.log_softmax(logits), axis=-1)
    return (1.0 - smoothing) * losses + smoothing * spread


def soft_cross_entropy(logits, soft_labels):
    """Returns -sum(soft_labels * log softmax(logits)) of each row in nats, float32 [B].

    Args:
        logits: float32 [B, C].
        soft_labels: float32 [B, C], probabilities (Hinton et al. 2015, section 2, at temperature 1).
    """
    return tf.nn.softmax_cross_entropy_with_logits(soft_labels, logits)


def symmetric_divergence(logits, others):
    """Returns KL(p || q) + KL(q || p) of the softmaxes p and q of two float32 [B, C], in nats, float32 [B]."""
    log_p, log_q = tf.nn.log_softmax(logits), tf.nn.log_softmax(others)
    return tf.reduce_sum((tf.exp(log_p) - tf.exp(log_q)) * (log_p - log_q), axis=-1)


def class_weights(setting, labels, counts):
    """Returns how much a row of each class counts in the loss: float32 [C].

    Args:
        setting: "none" (all 1), "balanced" (rows / (classes * rows of the class): every class has the same part in the
            loss; classes without rows aside), or a dict of label -> weight, 1 for labels that are not in it.
        labels: C label strings.
        counts: number of training rows of each class.

    Raises:
        JobError: the dict names a label that is not among `labels`.
    """
    if setting == "none":
        return np.ones(len(labels), np.float32)
    if setting == "balanced":
        counts = np.asarray(counts)
        # A class without rows, which only the live version has, has no part in the loss: any weight will do.
        return (counts.sum() / (np.count_nonzero(counts) * np.maximum(counts, 1))).astype(np.float32)
    unknown = sorted(setting.keys() - set(labels))
    if unknown:
        raise JobError(
            f"training.class_weights names labels that are neither in data.train nor in the live version: "
            f"{join_some(unknown)}. Known labels: {join_some(labels)}."
        )
    return np.array([setting.get(label, 1.0) for label in labels], np.float32)
