"""Dropout (Srivastava et al. 2014) whose masks cost one pass over memory."""

import functools

import keras
import numpy as np
import tensorflow as tf

from pipeline.seeds import derive_seed

_WINDOW = 1 << 23  # values of the longest mask that is one cut: 4,096 tokens x 8 heads x 256 keys
_ROW = 16  # values in a row of the table: 64 bytes, so that TensorFlow reads a run of rows in place


@keras.saving.register_keras_serializable(package="pipeline")
class Dropout(keras.layers.Layer):
    """Sets a share `rate` of the values to zero in training and divides the others by 1 - rate.

    On a CPU the mask is cut out of a fixed table of random zeros and ones, at a place drawn anew for every call:
    drawing every value anew, as `keras.layers.Dropout` does, took a quarter of a training step (benchmarks/NOTES.md).
    A mask longer than half of the table is put together from several cuts. On a GPU every value is drawn anew.
    Replicas that train together draw other masks each, from one state that is the same on all of them.

    1 / (1 - rate) is rounded to the dtype of the values, 0.2 % off at most in bfloat16 (as `tf.nn.dropout` does it).
    The encoder's dropouts have the dtype float32, so that no branch is scaled by it.

    Args:
        rate: share of the values that are dropped, in [0, 1).
        seed: integer seed, or None for a random one. The state of the generator is a variable of the layer.

    Raises:
        ValueError: `rate` is outside of [0, 1).
    """

    def __init__(self, rate, seed=None, **kwargs):
        super().__init__(**kwargs)
        if not 0.0 <= rate < 1.0:
            raise ValueError(f"rate must be in [0, 1). Received: rate={rate}")
        self.rate = rate
        self.seed = seed
        if rate > 0.0:
            self.seed_generator = keras.random.SeedGenerator(seed)
        self.built = True

    def call(self, x, training=False):
        """Maps float [...] to float [...] of the same shape; without `training` nothing changes."""
        if not training or self.rate == 0.0:
            return x
        seed = self.next_seed()
        if tf.config.list_physical_devices("GPU"):
            return tf.nn.experimental.stateless_dropout(x, self.rate, seed)
        return x * tf.cast(_mask(tf.shape(x), self.rate, seed), x.dtype)

    def next_seed(self):
        """Returns the seed of the next mask, int32 [2]; another one on each replica."""
        seed = tf.cast(self.seed_generator.next(), tf.int32)
        if tf.distribute.get_strategy().num_replicas_in_sync > 1:
            seed = tf.random.fold_in(seed, tf.distribute.get_replica_context().replica_id_in_sync_group)
        return seed

    def compute_output_shape(self, x_shape):
        return x_shape

    def get_config(self):
        return {**super().get_config(), "rate": self.rate, "seed": self.seed}


def dropout_mask(shape, rate, seed):
    """Returns float32 values of `shape`, each 0 or 1 / (1 - rate): the same ones for the same seed, int32 [2]."""
    if tf.config.list_physical_devices("GPU"):
        return tf.nn.experimental.stateless_dropout(tf.ones(shape), rate, seed)
    return _mask(shape, rate, seed)


def _mask(shape, rate, seed):
    count = tf.reduce_prod(shape)
    rows = (count + _ROW - 1) // _ROW
    window = _WINDOW // _ROW  # in rows
    cuts = tf.maximum((rows + window - 1) // window, 1)
    starts = tf.random.stateless_uniform([cuts], seed, 0, window, tf.int32)
    table = _table(rate)
    # Several cuts rather than one repeated: R-Drop's second pass would get the mask of its first.
    values = tf.cond(
        cuts > 1,
        lambda: tf.gather(table, tf.reshape(starts[:, None] + tf.range(window), [-1])),
        lambda: table[starts[0] : starts[0] + rows],
    )
    return tf.reshape(tf.reshape(values, [-1])[:count], shape)


@functools.cache
def _table(rate):
    """Two windows of mask values, float32 [rows, _ROW]; every cut starts in the first."""
    uniform = np.random.default_rng(derive_seed(0, "dropout")).random(2 * _WINDOW, np.float32)
    with tf.init_scope():  # outside of the graph being traced: one tensor, however many layers and graphs use it
        return tf.constant(np.where(uniform < rate, 0.0, 1.0 / (1.0 - rate)).astype(np.float32).reshape(-1, _ROW))
