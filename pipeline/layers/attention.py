"""Scaled dot-product and multi-head attention (Vaswani et al. 2017, section 3.2), with a boolean mask."""

import inspect
import math

import keras
import tensorflow as tf
from keras import ops

from pipeline.layers.checks import check_attend, check_heads, check_vectors
from pipeline.layers.dense import dense
from pipeline.layers.dropout import Dropout
from pipeline.layers.position import alibi
from pipeline.seeds import derive_seed

# Added to the score of a key that may not be attended to, always in float32: large enough that its weight is
# exactly 0 beside any real key, small enough that several masks on one position stay finite.
MASKED = -1e30


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
        alibi: whether a score falls with the distance of its key; see `pipeline.layers.position.alibi`.
    """

    def __init__(self, dropout=0.0, seed=None, alibi=False, **kwargs):
        super().__init__(**kwargs)
        self.dropout = dropout
        self.seed = seed
        self.alibi = alibi
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
        check_heads(query, key, value)
        scores = attention_scores(query, key)  # [B, N, T, S] float32
        bias = self._bias(query, key, attend)
        scores = scores if bias is None else scores + bias
        has_key = None
        if attend is not None:
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

    def _bias(self, query, key, attend):
        """Returns what is added to the scores, float32 of a shape that goes with [B, N, T, S], or None."""
        masked = distances = None
        if attend is not None:
            check_attend(attend, query, key)
            masked = ops.where(attend, 0.0, MASKED)[:, None]  # [B, 1, 1 | T, S]
        if self.alibi:
            positions = (ops.arange(ops.shape(x)[2], dtype="int32") for x in (query, key))
            distances = alibi(*positions, query.shape[1])  # [N, T, S]
        if masked is None or distances is None:
            return distances if masked is None else masked
        return masked + distances

    def compute_output_shape(self, query_shape, key_shape=None, value_shape=None, attend_shape=None):
        return query_shape

    def compute_output_spec(self, query, key, value, attend=None, training=None, return_weights=False):
        context = keras.KerasTensor(query.shape, self.compute_dtype)
        weights = keras.KerasTensor((*query.shape[:-1], key.shape[-2]), self.compute_dtype)
        return (context, weights) if return_weights else context

    def get_config(self):
        return {**super().get_config(), "dropout": self.dropout, "seed": self.seed, "alibi": self.alibi}


@keras.saving.register_keras_serializable(package="pipeline")
class MultiHeadAttention(keras.layers.Layer):
    """Attention in `num_heads` subspaces of size d_model / num_heads, concatenated and projected.

    Args:
        d_model: size of the input and output vectors.
        num_heads: number of heads; divides `d_model`.
        dropout: share of attention weights dropped in training.
        seed: integer seed of initial values and dropout, or None for a random one.
        num_kv_heads: heads of keys and values, each of which serves num_heads / num_kv_heads of the queries' (Ainslie
            et al. 2023, "GQA"; with 1, Shazeer 2019's multi-query attention); 0 = `num_heads`.
        core: the layer between the projections, which maps queries, keys and values to contexts, in the place of
            `ScaledDotProductAttention(dropout)`; it brings its own dropout and seed.
        rotary: a `RotaryPosition` for queries and keys, or None.

    Raises:
        ValueError: `d_model` is not a multiple of `num_heads`, or that not of `num_kv_heads`.
    """

    def __init__(
        self, d_model, num_heads, dropout=0.0, seed=None, num_kv_heads=0, core=None, rotary=None, **kwargs
    ):
        super().__init__(**kwargs)
        if num_heads < 1 or d_model % num_heads:
            raise ValueError(
                f"d_model must be a multiple of num_heads. Received: d_model={d_model}, num_heads={num_heads}"
            )
        if num_kv_heads < 0 or num_heads % (num_kv_heads or num_heads):
            raise ValueError(
                "num_heads must be a multiple of num_kv_heads. "
                f"Received: num_heads={num_heads}, num_kv_heads={num_kv_heads}"
            )
        self.d_model = d_model
        self.num_heads = num_heads
        self.dropout = dropout
        self.seed = seed
        self.num_kv_heads = num_kv_heads
        d_kv = d_model // num_heads * (num_kv_heads or num_heads)
        self.query = dense(self, d_model, "query")
        self.key = dense(self, d_kv, "key")
        self.value = dense(self, d_kv, "value")
        self.rotary = rotary
        self._given_core = core
        self.core = core or ScaledDotProductAttention(
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

        Raises:
            ValueError: a rank, a dtype or a mask's shape does not fit, or `return_weights` with a core that forms none.
        """
        source = query if source is None else source
        check_vectors("query", query)
        check_vectors("source", source)
        query, key, value = self.query(query), self.key(source), self.value(source)
        query, key, value = self._split(query), self._split(key), self._split(value)
        if self.rotary is not None:
            query, key = self.rotary(query), self.rotary(key)
        key, value = self._shared(key), self._shared(value)
        self._check_weights(return_weights)
        asked = {"return_weights": True} if return_weights else {}
        heads = self.core(query, key, value, attend=attend, training=training, **asked)
        context, weights = heads if return_weights else (heads, None)
        context = ops.transpose(context, (0, 2, 1, 3))  # [B, T, N, H]
        batch, length = ops.shape(context)[:2]
        output = self.output_projection(ops.reshape(context, (batch, length, self.d_model)))
        return (output, weights) if return_weights else output

    def _check_weights(self, return_weights):
        if return_weights and "return_weights" not in inspect.signature(self.core.call).parameters:
            raise ValueError(
                "return_weights needs a core that forms them, ScaledDotProductAttention: "
                f"leave core out. Received: core={type(self.core).__name__}"
            )

    def _split(self, x):
        batch, length = ops.shape(x)[:2]
        size = self.d_model // self.num_heads
        x = ops.reshape(x, (batch, length, x.shape[-1] // size, size))
        return ops.transpose(x, (0, 2, 1, 3))  # [B, N, T, H]; N is that of keys and values for those

    def _shared(self, x):
        """Gives each head of the queries its head of keys or values: [B, N, S, H]."""
        times = self.num_heads // (self.num_kv_heads or self.num_heads)
        return x if times == 1 else ops.repeat(x, times, axis=1)

    def compute_output_shape(self, query_shape, source_shape=None, attend_shape=None):
        return (*query_shape[:-1], self.d_model)

    def compute_output_spec(self, query, source=None, attend=None, training=None, return_weights=False):
        self._check_weights(return_weights)
        batch, length = query.shape[:2]
        keys = length if source is None else source.shape[1]
        output = keras.KerasTensor((batch, length, self.d_model), self.compute_dtype)
        weights = keras.KerasTensor((batch, self.num_heads, length, keys), self.compute_dtype)
        return (output, weights) if return_weights else output

    def get_config(self):
        config = {key: getattr(self, key) for key in ("d_model", "num_heads", "dropout", "seed", "num_kv_heads")}
        pieces = {"core": self._given_core, "rotary": self.rotary}
        pieces = {key: keras.saving.serialize_keras_object(piece) for key, piece in pieces.items()}
        return {**super().get_config(), **config, **pieces}

    @classmethod
    def from_config(cls, config):
        pieces = {key: keras.saving.deserialize_keras_object(config[key]) for key in ("core", "rotary")}
        return cls(**{**config, **pieces})
