"""A linear model over tokens, pairs of neighbours and their characters, a layer whose weights are fitted elsewhere."""

import keras
import tensorflow as tf
from keras import ops

from pipeline.contract import PAD_ID
from pipeline.layers.checks import check_token_ids
from pipeline.ngrams import MULTIPLIER, TINY


@keras.saving.register_keras_serializable(package="pipeline")
class NgramScores(keras.layers.Layer):
    """Class scores from the tf-idf weighted, length-normalised set of a text's tokens and pairs of neighbours.

    Each feature has a row of two tables: a token that of its id; a pair (a, b) the one that `pair_rows` has in slot
    (a * MULTIPLIER + b) mod slots (Weinberger et al. 2009, "Feature hashing"), 0 where it is not known. Over all
    different rows of a text,

        scores = sum table[row] / sqrt(sum squared_weights[row]) + bias

    where a row of `table` is idf times the linear model's coefficients, with those of its characters added, and of
    `squared_weights` idf^2. Row 0, PAD's, is zero in both, and a pair that ends in PAD has it too: padding adds
    nothing, a text without tokens gets `bias`. `pipeline.ngrams` has the same in NumPy, and fits the weights; no
    gradient step changes them. All is in float32.

    Args:
        vocab_size: number of token ids V. An id outside [0, V) counts as the nearest that is inside.
        num_classes: number of classes C.
        slots: size of the hash table of pairs.
        pairs: rows for pairs, after those of the tokens.
    """

    def __init__(self, vocab_size, num_classes, slots, pairs, **kwargs):
        super().__init__(autocast=False, **kwargs)
        if slots < 1 or pairs < 0:
            raise ValueError(f"slots must be at least 1, pairs at least 0. Received: slots={slots}, pairs={pairs}")
        self.vocab_size = vocab_size
        self.num_classes = num_classes
        self.slots = slots
        self.pairs = pairs

    @classmethod
    def of(cls, arrays, **kwargs):
        """Returns a built layer with the weights that `pipeline.ngrams.fit` returned."""
        slots, (rows, num_classes) = len(arrays["pair_rows"]), arrays["table"].shape
        vocab_size = rows - int((arrays["pair_rows"] > 0).sum())
        layer = cls(vocab_size, num_classes, slots, rows - vocab_size, **kwargs)
        layer.build()
        for name, array in arrays.items():
            getattr(layer, name).assign(array)
        return layer

    def build(self, token_ids_shape=None):
        rows = self.vocab_size + self.pairs
        shapes = {
            "pair_rows": (self.slots,),
            "table": (rows, self.num_classes),
            "squared_weights": (rows,),
            "bias": (self.num_classes,),
        }
        for name, shape in shapes.items():
            dtype = "int32" if name == "pair_rows" else "float32"
            weight = self.add_weight(
                shape=shape, initializer="zeros", dtype=dtype, autocast=False, trainable=False, name=name
            )
            setattr(self, name, weight)

    def call(self, token_ids):
        """Maps int [B, T], padded with 0 at the end, to float32 [B, C]."""
        check_token_ids(token_ids)
        # A GPU reads zeros for a row that is not there; where a wrong id matters, others see it.
        token_ids = tf.clip_by_value(tf.cast(token_ids, tf.int32), 0, self.vocab_size - 1)
        first = tf.cast(token_ids, tf.int64)  # [B, T]
        second = tf.pad(first[:, 1:], [[0, 0], [0, 1]], constant_values=PAD_ID)
        slot = (first * MULTIPLIER + second) % self.slots
        rows = tf.concat([token_ids, tf.gather(ops.convert_to_tensor(self.pair_rows), slot)], axis=1)  # [B, 2 T]
        rows = _distinct(rows)
        total = tf.reduce_sum(tf.gather(ops.convert_to_tensor(self.table), rows), axis=1)  # [B, C]
        squares = tf.reduce_sum(tf.gather(ops.convert_to_tensor(self.squared_weights), rows), axis=1, keepdims=True)
        return total / tf.sqrt(tf.maximum(squares, TINY)) + self.bias

    def compute_output_shape(self, token_ids_shape):
        return (token_ids_shape[0], self.num_classes)

    def compute_output_spec(self, token_ids):
        return keras.KerasTensor(self.compute_output_shape(token_ids.shape), "float32")

    def get_config(self):
        sizes = {key: getattr(self, key) for key in ("vocab_size", "num_classes", "slots", "pairs")}
        return {**super().get_config(), **sizes}


def _distinct(rows):
    """Returns int32 [B, N] >= 0, in another order, with 0 in the place of all but one of equal values."""
    ordered = tf.math.top_k(rows, tf.shape(rows)[1]).values
    following = tf.pad(ordered[:, 1:], [[0, 0], [0, 1]], constant_values=-1)
    return ordered * tf.cast(ordered != following, tf.int32)
