"""Attention to the neighbourhood of each token, and to a few tokens that see all."""

import keras
import tensorflow as tf
from keras import ops

from pipeline.layers.attention import MASKED, attention_scores
from pipeline.layers.checks import check_heads, check_key_mask
from pipeline.layers.dropout import Dropout
from pipeline.layers.position import alibi


@keras.saving.register_keras_serializable(package="pipeline")
class LocalAttention(keras.layers.Layer):
    """Each query attends to keys at most `window` positions away and to the first `num_global`, which attend to all.

    Beltagy et al. 2020 ("Longformer"), section 3.1; in blocks as Zaheer et al. 2020 ("BigBird"), appendix D: a block of
    `window` queries against the same block of keys and its two neighbours: time and memory grow with T * window.
    Softmax and dropout are float32 whatever the policy. Self-attention only: S = T. Attention weights aren't returned.

    Args:
        window: distance of the farthest key, on each side.
        num_global: first positions that attend to every key and that every query attends to.
        dropout: share of attention weights dropped in training, in [0, 1).
        seed: integer seed of the dropout, or None for a random one.
        alibi: whether a score falls with the distance of its key; see `pipeline.layers.position.alibi`.

    Raises:
        ValueError: `window` is below 1 or `num_global` below 0.
    """

    def __init__(self, window, num_global=0, dropout=0.0, seed=None, alibi=False, **kwargs):
        super().__init__(**kwargs)
        if window < 1 or num_global < 0:
            raise ValueError(
                f"window must be >= 1 and num_global >= 0. Received: window={window}, num_global={num_global}"
            )
        self.window = window
        self.num_global = num_global
        self.dropout = dropout
        self.seed = seed
        self.alibi = alibi
        self.weight_dropout = Dropout(dropout, seed=seed, dtype="float32", name="dropout")

    def call(self, query, key, value, attend=None, training=None):
        """Attends.

        Args:
            query: float [B, N, T, H].
            key: float [B, N, T, H].
            value: float [B, N, T, H].
            attend: bool [B, 1, T], True = may attend; None = every key.
            training: True drops weights.

        Returns:
            context [B, N, T, H] in the compute dtype; exactly zero for a query that may attend to no key.

        Raises:
            ValueError: a rank does not fit, T is not S, `attend` is not boolean or differs between queries.
        """
        check_heads(query, key, value)
        check_key_mask(attend, query, key)
        if query.shape[2] != key.shape[2]:
            raise ValueError(
                "local attention is self-attention: as many queries as keys. "
                f"Received: query={tuple(query.shape)}, key={tuple(key.shape)}"
            )
        if attend is None:
            attend = ops.ones((1, 1, ops.shape(key)[2]), "bool")
        context = self._near(query, key, value, attend, training)
        if self.num_global == 0:
            return context
        length = ops.shape(key)[2]
        g, positions = ops.minimum(self.num_global, length), ops.arange(length)
        first = _part(query, 2, 0, g)  # [B, N, g, H]
        of_first = self._attend(first, key, value, attend[:, None], positions[:g], positions, training)
        return ops.concatenate([of_first, _part(context, 2, g, length - g)], axis=2)

    def _near(self, query, key, value, attend, training):
        """Returns what each query finds within the window and in the first `num_global` keys: [B, N, T, H]."""
        length = ops.shape(key)[2]
        size = ops.maximum(ops.minimum(self.window, length), 1)  # of a block: no larger than a short text
        count = (length + size - 1) // size
        starts = ops.arange(count)[:, None] * size  # [count, 1]
        query_positions = starts + ops.arange(size)  # [count, size]
        key_positions = starts + ops.arange(-size, 2 * size)  # [count, 3 * size]
        distance = ops.abs(query_positions[:, :, None] - key_positions[:, None])
        is_near = (distance <= self.window) & (key_positions >= self.num_global)[:, None]  # [count, size, 3 * size]
        near = _with_neighbours(attend, count, size)[:, :, :, None] & is_near

        def keys(x):
            """The keys that a block of queries sees: [B, N, T, H] -> [B, N, count, g + 3 * size, H]."""
            return self._behind_first(ops.expand_dims(x, 2), _with_neighbours(x, count, size), axis=3)

        context = self._attend(
            _blocks(query, count, size),
            keys(key),
            keys(value),
            self._behind_first(attend[:, :, None, None], near, axis=4),
            query_positions,
            self._behind_first(ops.arange(length)[None], key_positions, axis=1),
            training,
        )  # [B, N, count, size, H]
        batch, heads, _, width = ops.shape(query)
        return _part(ops.reshape(context, (batch, heads, count * size, width)), 2, 0, length)

    def _behind_first(self, x, blocks, axis):
        """Puts the first `num_global` of x along `axis` in front of the blocks; its axes of size 1 become theirs."""
        if self.num_global == 0:  # no tensors without elements: ONNX Runtime fails on some in float16
            return blocks
        first = _part(x, axis, 0, ops.minimum(self.num_global, ops.shape(x)[axis]))
        shape, rest = ops.shape(blocks), ops.shape(first)[axis:]
        return ops.concatenate([ops.broadcast_to(first, (*shape[:axis], *rest)), blocks], axis=axis)

    def _attend(self, query, key, value, attend, query_positions, key_positions, training):
        """As `ScaledDotProductAttention`: float [B, N, ..., T, H] under a mask bool [B, 1, ..., 1 | T, S]."""
        masked = ops.where(attend, 0.0, MASKED)
        scores = attention_scores(query, key) + masked
        if self.alibi:
            scores = scores + alibi(query_positions, key_positions, query.shape[1])
        weights = self.weight_dropout(ops.softmax(scores, axis=-1), training=training)
        context = tf.matmul(ops.cast(weights, self.compute_dtype), value)
        # The same as any(attend), which is five times as slow.
        has_key = ops.max(masked, axis=-1, keepdims=True) == 0.0  # [B, 1, ..., 1 | T, 1]
        return context * ops.cast(has_key, self.compute_dtype)

    def compute_output_shape(self, query_shape, key_shape=None, value_shape=None, attend_shape=None):
        return query_shape

    def compute_output_spec(self, query, key, value, attend=None, training=None):
        return keras.KerasTensor(query.shape, self.compute_dtype)

    def get_config(self):
        config = {key: getattr(self, key) for key in ("window", "num_global", "dropout", "seed", "alibi")}
        return {**super().get_config(), **config}


def _blocks(x, count, size):
    """Cuts [B, N, T, ...] into [B, N, count, size, ...]; what is missing in the last block is 0 or False."""
    batch, heads, length, *rest = ops.shape(x)
    x = tf.pad(x, [[0, 0], [0, 0], [0, count * size - length], *([0, 0] for _ in rest)])
    return ops.reshape(x, (batch, heads, count, size, *rest))


def _with_neighbours(x, count, size):
    """Cuts [B, N, T, ...] into blocks with the one before and the one after each: [B, N, count, 3 * size, ...]."""
    batch, heads, length, *rest = ops.shape(x)
    x = tf.pad(x, [[0, 0], [0, 0], [size, (count + 1) * size - length], *([0, 0] for _ in rest)])
    shifted = (_part(x, 2, i * size, count * size) for i in range(3))
    return ops.concatenate([ops.reshape(part, (batch, heads, count, size, *rest)) for part in shifted], axis=3)


def _part(x, axis, start, size):
    """Returns `size` rows of x along an axis.

    Not by indexing: its gradient takes as long as a matrix product, and tf2onnx compares an open end with a bound that
    float16 cannot hold.
    """
    starts, sizes = [0] * len(x.shape), list(ops.shape(x))
    starts[axis], sizes[axis] = start, size
    return tf.slice(x, starts, sizes)
