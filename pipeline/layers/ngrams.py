"""A linear model over tokens and hashed pairs of neighbouring tokens, as a layer whose weights are fitted elsewhere."""

import keras
import tensorflow as tf
from keras import ops

from pipeline.contract import PAD_ID
from pipeline.layers.checks import check_token_ids
from pipeline.ngrams import MULTIPLIER, TINY


@keras.saving.register_keras_serializable(package="pipeline")
class NgramScores(keras.layers.Layer):
    """Class scores from tf-idf weighted, length-normalised counts of tokens and of pairs of neighbours, in float32.

    Each feature has a row of two tables: a token its id; a pair (a, b) V + (a * MULTIPLIER + b) mod buckets, in int64
    (Weinberger et al. 2009, "Feature hashing"). Over all occurrences in a text,

        scores = sum table[row] / sqrt(sum squared_weights[row]) + bias

    where a row of `table` is idf times the linear model's coefficients, and of `squared_weights` idf^2. Row 0, PAD's,
    is zero in both, and a pair that ends in PAD has it too: padding adds nothing, a text without tokens gets `bias`.
    `pipeline.ngrams` has the same in NumPy, and fits the weights; no gradient step changes them.

    Args:
        vocab_size: number of token ids V. An id outside [0, V) counts as the nearest that is inside.
        num_classes: number of classes C.
        buckets: rows for pairs, at least 1.
    """

    def __init__(self, vocab_size, num_classes, buckets, **kwargs):
        super().__init__(autocast=False, **kwargs)
        if buckets < 1:
            raise ValueError(f"buckets must be at least 1. Received: buckets={buckets}")
        self.vocab_size = vocab_size
        self.num_classes = num_classes
        self.buckets = buckets

    def build(self, token_ids_shape=None):
        rows = self.vocab_size + self.buckets
        shapes = {"table": (rows, self.num_classes), "squared_weights": (rows,), "bias": (self.num_classes,)}
        for name, shape in shapes.items():
            weight = self.add_weight(
                shape=shape, initializer="zeros", dtype="float32", autocast=False, trainable=False, name=name
            )
            setattr(self, name, weight)

    def call(self, token_ids):
        """Maps int [B, T], padded with 0 at the end, to float32 [B, C]."""
        check_token_ids(token_ids)
        # A GPU reads zeros for a row that is not there; where a wrong id matters, others see it.
        first = tf.cast(tf.clip_by_value(token_ids, 0, self.vocab_size - 1), tf.int64)  # [B, T]
        second = tf.pad(first[:, 1:], [[0, 0], [0, 1]], constant_values=PAD_ID)
        pairs = self.vocab_size + (first * MULTIPLIER + second) % self.buckets
        pairs = pairs * tf.cast(second != PAD_ID, tf.int64)
        rows = tf.concat([first, pairs], axis=1)  # [B, 2 T]
        total = tf.reduce_sum(tf.gather(ops.convert_to_tensor(self.table), rows), axis=1)  # [B, C]
        squares = tf.reduce_sum(tf.gather(ops.convert_to_tensor(self.squared_weights), rows), axis=1, keepdims=True)
        return total / tf.sqrt(tf.maximum(squares, TINY)) + self.bias

    def compute_output_shape(self, token_ids_shape):
        return (token_ids_shape[0], self.num_classes)

    def compute_output_spec(self, token_ids):
        return keras.KerasTensor(self.compute_output_shape(token_ids.shape), "float32")

    def get_config(self):
        sizes = {"vocab_size": self.vocab_size, "num_classes": self.num_classes, "buckets": self.buckets}
        return {**super().get_config(), **sizes}
