"""Scaled dot-product and multi-head attention (Vaswani et al. 2017, section 3.2), with a boolean mask."""

import math

import keras
import tensorflow as tf
from keras import ops

from pipeline.layers.dense import dense
from pipeline.layers.dropout import Dropout
from pipeline.seeds import derive_seed

# Added to the score of a key that may not be attended to, always in float32: large enough that its weight is
# exactly 0 beside any real key, small enough that several masks on one position stay finite.
_MASKED = -1e30


def padding_mask(token_valid):
    """Returns the mask that keeps every query from attending to padding.

    Args:
        token_valid: bool [B, S], True = real token.

    Returns:
        attend: bool [B, 1, S].
    """
    return ops.expand_dims(token_valid, 1)


def causal_mask(length):
    """Returns the mask that keeps a query from attending to later keys: bool [1, T, T], True = may attend."""
    positions = ops.arange(length)
    return ops.expand_dims(positions, 1)[None] >= ops.expand_dims(positions, 0)[None]


def attention_scores(query, key):
    """Returns query . key / sqrt(H) in float32.

    Args:
        query: float [..., T, H].
        key: float [..., S, H].

    Returns:
        float32 [..., T, S].
    """
    # Scaling the query, not the product, keeps float16 scores away from overflow and is the smaller tensor.
    query = query * ops.cast(1.0 / math.sqrt(query.shape[-1]), query.dtype)
    return ops.cast(tf.matmul(query, key, transpose_b=True), "float32")


@keras.saving.register_keras_serializable(package="pipeline")
class ScaledDotProductAttention(keras.layers.Layer):
    """softmax(Q K^T / sqrt(H)) V over the keys that may be attended to.

    Softmax and dropout are computed in float32 whatever the policy, the two products in its compute dtype. A query
    that may attend to no key gets an exactly zero context, and zero weights.

    Args:
        dropout: share of attention weights dropped in training, in [0, 1).
        seed: integer seed of the dropout, or None for a random one.
    """

    def __init__(self, dropout=0.0, seed=None, **kwargs):
        super().__init__(**kwargs)
        self.dropout = dropout
        self.seed = seed
        self.weight_dropout = Dropout(dropout, seed=seed, dtype="float32", name="dropout")

    def call(self, query, key, value, attend=None, training=None, return_weights=False):
        """Attends.

        Args:
            query: float [B, N, T, H].
            key: float [B, N, S, H].
            value: float [B, N, S, H].
            attend: bool [B, 1 | T, S], True = may attend; None = every key.
            training: True drops weights.
            return_weights: also return the weights.

        Returns:
            context [B, N, T, H] in the compute dtype; with `return_weights` the pair (context, weights), weights
            [B, N, T, S] being the ones that were used, after dropout.

        Raises:
            ValueError: a rank does not fit, or `attend` is not boolean.
        """
        _check_heads(query, key, value)
        scores = attention_scores(query, key)  # [B, N, T, S] float32
        has_key = None
        if attend is not None:
            _check_attend(attend)
            scores = scores + ops.where(attend, 0.0, _MASKED)[:, None]  # [B, 1, 1 | T, S]
            # softmax over nothing but masked keys is uniform: the factor makes it exactly zero.
            has_key = ops.cast(ops.any(attend, axis=-1), self.compute_dtype)[:, None, :, None]  # [B, 1, 1 | T, 1]
        weights = self.weight_dropout(ops.softmax(scores, axis=-1), training=training)
        weights = ops.cast(weights, self.compute_dtype)
        context = ops.matmul(weights, value)  # [B, N, T, H]
        if has_key is not None:
            context = context * has_key  # on the context: T * H elements instead of T * S
        if not return_weights:
            return context
        return context, (weights if has_key is None else weights * has_key)

    def compute_output_shape(self, query_shape, key_shape=None, value_shape=None, attend_shape=None):
        return query_shape

    def compute_output_spec(self, query, key, value, attend=None, training=None, return_weights=False):
        context = keras.KerasTensor(query.shape, self.compute_dtype)
        weights = keras.KerasTensor((*query.shape[:-1], key.shape[-2]), self.compute_dtype)
        return (context, weights) if return_weights else context

    def get_config(self):
        return {**super().get_config(), "dropout": self.dropout, "seed": self.seed}


@keras.saving.register_keras_serializable(package="pipeline")
class MultiHeadAttention(keras.layers.Layer):
    """Attention in `num_heads` subspaces of size d_model / num_heads, concatenated and projected.

    Args:
        d_model: size of the input and output vectors.
        num_heads: number of heads; divides `d_model`.
        dropout: share of attention weights dropped in training.
        seed: integer seed of initial values and dropout, or None for a random one.

    Raises:
        ValueError: `d_model` is not a multiple of `num_heads`.
    """

    def __init__(self, d_model, num_heads, dropout=0.0, seed=None, **kwargs):
        super().__init__(**kwargs)
        if num_heads < 1 or d_model % num_heads:
            raise ValueError(
                f"d_model must be a multiple of num_heads. Received: d_model={d_model}, num_heads={num_heads}"
            )
        self.d_model = d_model
        self.num_heads = num_heads
        self.dropout = dropout
        self.seed = seed
        self.query = dense(self, d_model, "query")
        self.key = dense(self, d_model, "key")
        self.value = dense(self, d_model, "value")
        self.attention = ScaledDotProductAttention(
            dropout, seed=derive_seed(seed, "attention"), dtype=self.dtype_policy, name="attention"
        )
        self.output_projection = dense(self, d_model, "output")

    def build(self, query_shape, source_shape=None):
        source_shape = source_shape or query_shape
        self.query.build(query_shape)
        self.key.build(source_shape)
        self.value.build(source_shape)
        self.output_projection.build((*query_shape[:-1], self.d_model))

    def call(self, query, source=None, attend=None, training=None, return_weights=False):
        """Attends from `query` to `source`.

        Args:
            query: float [B, T, D].
            source: float [B, S, D] that keys and values are made from; None = `query` (self-attention).
            attend: bool [B, 1 | T, S], True = may attend; None = every position.
            training: True drops weights.
            return_weights: also return the attention weights.

        Returns:
            float [B, T, d_model]; with `return_weights` the pair (output, weights [B, N, T, S]).
        """
        source = query if source is None else source
        heads = self.attention(
            self._split(self.query(query)),
            self._split(self.key(source)),
            self._split(self.value(source)),
            attend=attend,
            training=training,
            return_weights=return_weights,
        )
        context, weights = heads if return_weights else (heads, None)
        context = ops.transpose(context, (0, 2, 1, 3))  # [B, T, N, H]
        batch, length = ops.shape(context)[:2]
        output = self.output_projection(ops.reshape(context, (batch, length, self.d_model)))
        return (output, weights) if return_weights else output

    def _split(self, x):
        batch, length = ops.shape(x)[:2]
        x = ops.reshape(x, (batch, length, self.num_heads, self.d_model // self.num_heads))
        return ops.transpose(x, (0, 2, 1, 3))  # [B, N, T, H]

    def compute_output_shape(self, query_shape, source_shape=None, attend_shape=None):
        return (*query_shape[:-1], self.d_model)

    def compute_output_spec(self, query, source=None, attend=None, training=None, return_weights=False):
        batch, length = query.shape[:2]
        keys = length if source is None else source.shape[1]
        output = keras.KerasTensor((batch, length, self.d_model), self.compute_dtype)
        weights = keras.KerasTensor((batch, self.num_heads, length, keys), self.compute_dtype)
        return (output, weights) if return_weights else output

    def get_config(self):
        config = {key: getattr(self, key) for key in ("d_model", "num_heads", "dropout", "seed")}
        return {**super().get_config(), **config}


def _check_heads(query, key, value):
    shapes = [tuple(x.shape) for x in (query, key, value)]
    if any(len(s) != 4 for s in shapes) or len({s[-1] for s in shapes}) != 1:
        raise ValueError(
            "query [B, N, T, H], key [B, N, S, H] and value [B, N, S, H] must have rank 4 and one head size. "
            f"Received: query={shapes[0]}, key={shapes[1]}, value={shapes[2]}"
        )


def _check_attend(attend):
    if len(attend.shape) != 3 or keras.backend.standardize_dtype(attend.dtype) != "bool":
        raise ValueError(
            "attend must be boolean [B, 1 | T, S], True = may attend. "
            f"Received: shape={tuple(attend.shape)}, dtype={attend.dtype}"
        )
