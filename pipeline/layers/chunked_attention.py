"""Full attention whose memory grows with the length of the text, not with its square."""

import math

import keras
import tensorflow as tf
from keras import ops

from pipeline.layers.attention import MASKED, attention_scores
from pipeline.layers.checks import check_attend, check_heads
from pipeline.layers.dropout import Dropout, dropout_mask
from pipeline.layers.position import alibi


@keras.saving.register_keras_serializable(package="pipeline")
class ChunkedAttention(keras.layers.Layer):
    """What `ScaledDotProductAttention` computes, over one chunk of keys after the other.

    Each chunk's softmax is merged into the context so far by the log of the sums of their exponentials (Rabe & Staats
    2021, "Self-attention Does Not Need O(n^2) Memory"; Dao et al. 2022, "FlashAttention", algorithm 1). The gradient
    computes each chunk's weights again from the saved context and sum (there, algorithm 4), and its dropout mask from
    the saved seed. Memory is B * N * T * chunk for the scores, in training too. Without gradients of gradients.

    It loops, and so takes 1.2 to 1.5 times as long as the plain form (benchmarks/NOTES.md), and has no form in ONNX;
    neither has weights, so the one may take the other's place.

    Args:
        dropout: share of attention weights dropped in training, in [0, 1).
        seed: integer seed of the dropout, or None for a random one.
        alibi: whether a score falls with the distance of its key; see `pipeline.layers.position.alibi`.
        chunk: longest chunk, in keys; a text is cut into equal ones.

    Raises:
        ValueError: `chunk` is below 1.
    """

    def __init__(self, dropout=0.0, seed=None, alibi=False, chunk=512, **kwargs):
        super().__init__(**kwargs)
        if chunk < 1:
            raise ValueError(f"chunk must be >= 1. Received: chunk={chunk}")
        self.dropout = dropout
        self.seed = seed
        self.alibi = alibi
        self.chunk = chunk
        self.weight_dropout = Dropout(dropout, seed=seed, dtype="float32", name="dropout")

    def call(self, query, key, value, attend=None, training=None):
        """Attends.

        Args:
            query: float [B, N, T, H].
            key: float [B, N, S, H].
            value: float [B, N, S, H].
            attend: bool [B, 1 | T, S], True = may attend; None = every key.
            training: True drops weights.

        Returns:
            context [B, N, T, H] in the compute dtype; exactly zero for a query that may attend to no key.

        Raises:
            ValueError: a rank does not fit, or `attend` is not boolean.
        """
        check_heads(query, key, value)
        seed = self.weight_dropout.next_seed() if training and self.dropout else None
        length = ops.shape(key)[2]
        given = attend is not None
        if given:
            check_attend(attend, query, key)
        else:
            attend = tf.ones((1, 1, length), "bool")
        count = tf.maximum((length + self.chunk - 1) // self.chunk, 1)
        size = (length + count - 1) // count
        attend_chunks = _chunks(attend, count, size)

        def scores(query, key, i):
            """Of the i-th chunk: float32 [B, N, T, size]."""
            scores = attention_scores(query, key)
            if self.alibi:
                scores += alibi(tf.range(tf.shape(query)[2]), i * size + tf.range(size), query.shape[1])
            return scores + tf.where(attend_chunks[:, :, i], 0.0, MASKED)[:, None]

        def drop(weights, i):
            if seed is None:
                return weights
            return weights * dropout_mask(tf.shape(weights), self.dropout, tf.random.fold_in(seed, i))

        context = _attend_in_chunks(query, key, value, count, size, scores, drop)
        if given:
            context *= tf.cast(tf.reduce_any(attend, axis=-1), context.dtype)[:, None, :, None]
        return context

    def compute_output_shape(self, query_shape, key_shape=None, value_shape=None, attend_shape=None):
        return query_shape

    def compute_output_spec(self, query, key, value, attend=None, training=None):
        return keras.KerasTensor(query.shape, self.compute_dtype)

    def get_config(self):
        config = {key: getattr(self, key) for key in ("dropout", "seed", "alibi", "chunk")}
        return {**super().get_config(), **config}


def _attend_in_chunks(query, key, value, count, size, scores, drop):
    """Returns the context [B, N, T, H] from `count` chunks of `size` keys, with a gradient that forms no larger matrix.

    Args:
        query: float [B, N, T, H].
        key: float [B, N, S, H].
        value: float [B, N, S, H].
        count: int32, number of chunks.
        size: int32, keys in a chunk; count * size >= S.
        scores: called with query, a chunk of keys and its number; returns float32 [B, N, T, size].
        drop: called with weights, float32 [B, N, T, size], and the number of their chunk; the same at each call.
    """
    dtype = query.dtype

    @tf.custom_gradient
    def attend(query, key, value):
        keys, values = _chunks(key, count, size), _chunks(value, count, size)

        def merge(i, log_sum, context):
            chunk_scores = scores(query, keys[:, :, i], i)
            weights = tf.nn.softmax(chunk_scores)
            # weight = exp(score) / sum: of the largest score, which is cheaper than to sum exponentials again.
            largest, its_weight = (tf.reduce_max(x, axis=-1, keepdims=True) for x in (chunk_scores, weights))
            chunk_log_sum = largest - tf.math.log(its_weight)  # [B, N, T, 1]
            chunk_context = tf.cast(tf.matmul(tf.cast(drop(weights, i), dtype), values[:, :, i]), "float32")
            difference = chunk_log_sum - log_sum
            # Each share is exactly 0 where the chunk, or all before it, holds only masked keys.
            context = tf.sigmoid(-difference) * context + tf.sigmoid(difference) * chunk_context
            log_sum = tf.maximum(log_sum, chunk_log_sum) + tf.math.softplus(-tf.abs(difference))
            return i + 1, log_sum, context

        nothing = tf.zeros_like(query, "float32")
        log_sum, context = _loop(count, merge, tf.fill(tf.shape(query[..., :1]), MASKED), nothing)
        saved = query, keys, values, log_sum

        def gradient(d_context):
            # Not before the upstream gradient is there: TensorFlow would begin during the forward pass, and keep the
            # first chunk's matrices of every layer.
            with tf.control_dependencies([d_context]):
                query, keys, values, log_sum = (tf.identity(x) for x in saved)
            scaled = query * tf.cast(1.0 / math.sqrt(query.shape[-1]), dtype)  # what is multiplied with the keys
            row = tf.reduce_sum(tf.cast(d_context, "float32") * context, axis=-1, keepdims=True)  # [B, N, T, 1]

            def add(i, d_query, d_keys, d_values):
                weights = tf.exp(scores(query, keys[:, :, i], i) - log_sum)
                d_values = d_values.write(i, tf.matmul(tf.cast(drop(weights, i), dtype), d_context, transpose_a=True))
                d_weights = drop(tf.cast(tf.matmul(d_context, values[:, :, i], transpose_b=True), "float32"), i)
                d_scores = tf.cast(weights * (d_weights - row), dtype)
                d_keys = d_keys.write(i, tf.matmul(d_scores, scaled, transpose_a=True))
                return i + 1, d_query + tf.cast(tf.matmul(d_scores, keys[:, :, i]), "float32"), d_keys, d_values

            d_keys, d_values = (tf.TensorArray(dtype, count, element_shape=keys[:, :, 0].shape) for _ in range(2))
            d_query, d_keys, d_values = _loop(count, add, tf.zeros_like(query, "float32"), d_keys, d_values)
            d_query = tf.cast(d_query / math.sqrt(query.shape[-1]), dtype)
            return d_query, _joined(d_keys.stack(), key), _joined(d_values.stack(), value)

        return tf.cast(context, dtype), gradient

    return attend(query, key, value)


def _loop(count, body, *state):
    """Runs `body` for i = 0 ... count - 1; one after the other, since memory is what this is about."""
    return tf.while_loop(lambda i, *_: i < count, body, (0, *state), parallel_iterations=1)[1:]


def _chunks(x, count, size):
    """Cuts [B, N, S, ...] into [B, N, count, size, ...]; what is missing in the last chunk is 0 or False."""
    batch, heads, length, *rest = ops.shape(x)
    x = tf.pad(x, [[0, 0], [0, 0], [0, count * size - length], *([0, 0] for _ in rest)])
    return tf.reshape(x, [batch, heads, count, size, *rest])


def _joined(chunks, like):
    """The inverse of a stack of chunks: [count, B, N, size, H] -> [B, N, S, H]."""
    batch, heads, length, width = ops.shape(like)
    return tf.reshape(tf.transpose(chunks, (1, 2, 0, 3, 4)), (batch, heads, -1, width))[:, :, :length]
