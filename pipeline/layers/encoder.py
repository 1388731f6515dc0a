"""Transformer encoder layers: Pre-Norm (Xiong et al. 2020) and Post-Norm (Vaswani et al. 2017)."""

import keras
from keras import ops

from pipeline.layers.attention import MultiHeadAttention
from pipeline.layers.checks import check_vectors
from pipeline.layers.dropout import Dropout
from pipeline.layers.feed_forward import PositionwiseFeedForward
from pipeline.layers.normalization import LayerNorm
from pipeline.seeds import derive_seed


@keras.saving.register_keras_serializable(package="pipeline")
class PreNormEncoderLayer(keras.layers.Layer):
    """x + Drop(Attention(LN(x))), then x + Drop(FeedForward(LN(x))).

    The sum keeps the dtype of x. Under a mixed policy only the matrix products are in half precision; LayerNorm,
    softmax, activation and dropout are float32.

    Args:
        num_heads: number of attention heads; divides the size of the input vectors. Of no effect with `attention`.
        d_ff: size of the feed-forward network's hidden layer. Of no effect with `feed_forward`.
        dropout: share dropped in training: of attention weights, of hidden values, of both branches; of the branches
            alone where the pieces are given.
        seed: integer seed of initial values and dropout, or None for a random one.
        attention: a layer in the place of `MultiHeadAttention(D, num_heads, dropout)`, e.g. one with another core.
        feed_forward: a layer in the place of `PositionwiseFeedForward(d_ff, dropout)`, e.g. `MixtureOfExperts`.
    """

    def __init__(self, num_heads, d_ff, dropout=0.0, seed=None, attention=None, feed_forward=None, **kwargs):
        # Rounding the sum of all branches would lose what each of them adds: x keeps its dtype.
        super().__init__(autocast=False, **kwargs)
        self.num_heads = num_heads
        self.d_ff = d_ff
        self.dropout = dropout
        self.seed = seed
        self.attention = attention
        self.feed_forward = feed_forward
        self._given = {"attention": attention, "feed_forward": feed_forward}

    def build(self, x_shape, attend_shape=None):
        policy, dropout = self.dtype_policy, self.dropout

        def seed(name):
            return derive_seed(self.seed, name)

        self.attention_norm = LayerNorm(name="attention_norm")
        if self.attention is None:
            self.attention = MultiHeadAttention(
                x_shape[-1], self.num_heads, dropout, seed=seed("attention"), dtype=policy, name="attention"
            )
        self.attention_dropout = Dropout(dropout, seed=seed("attention_dropout"), dtype="float32")
        self.feed_forward_norm = LayerNorm(name="feed_forward_norm")
        if self.feed_forward is None:
            self.feed_forward = PositionwiseFeedForward(
                self.d_ff, dropout, seed=seed("feed_forward"), dtype=policy, name="feed_forward"
            )
        self.feed_forward_dropout = Dropout(dropout, seed=seed("feed_forward_dropout"), dtype="float32")
        for name, piece in (("attention", self.attention), ("feed_forward", self.feed_forward)):
            made = piece.compute_output_shape(x_shape)
            if made[-1] != x_shape[-1]:
                raise ValueError(f"{name} must make vectors of the size of x, {x_shape[-1]}. Received: size={made[-1]}")
        for layer in (self.attention_norm, self.attention, self.feed_forward_norm, self.feed_forward):
            if not layer.built:  # a piece that was loaded from a file is
                layer.build(x_shape)

    def call(self, x, attend=None, training=None):
        """Maps float [B, T, D] to [B, T, D] of the same dtype; `attend` is bool [B, 1 | T, T], True = may attend."""
        check_vectors("x", x)
        token_valid = real_tokens(attend)
        attended = self.attention(self.attention_norm(x), attend=attend, training=training)
        x = x + ops.cast(self.attention_dropout(attended, training=training), x.dtype)
        transformed = self.feed_forward(self.feed_forward_norm(x), token_valid=token_valid, training=training)
        return x + ops.cast(self.feed_forward_dropout(transformed, training=training), x.dtype)

    def compute_output_shape(self, x_shape, attend_shape=None):
        return x_shape

    def compute_output_spec(self, x, attend=None, training=None):
        return keras.KerasTensor(x.shape, x.dtype)

    def get_config(self):
        config = {key: getattr(self, key) for key in ("num_heads", "d_ff", "dropout", "seed")}
        pieces = {name: keras.saving.serialize_keras_object(piece) for name, piece in self._given.items()}
        return {**super().get_config(), **config, **pieces}

    @classmethod
    def from_config(cls, config):
        pieces = {key: keras.saving.deserialize_keras_object(config[key]) for key in ("attention", "feed_forward")}
        return cls(**{**config, **pieces})


@keras.saving.register_keras_serializable(package="pipeline")
class PostNormEncoderLayer(PreNormEncoderLayer):
    """LN(x + Drop(Attention(x))), then LN(x + Drop(FeedForward(x))), in float32; arguments as of `PreNormEncoderLayer`.

    The first Transformer's order. Deep ones need a long warm-up (Xiong et al. 2020).
    """

    def call(self, x, attend=None, training=None):
        """Maps float [B, T, D] to float32 [B, T, D]; `attend` is bool [B, 1 | T, T], True = may attend."""
        check_vectors("x", x)
        token_valid = real_tokens(attend)
        attended = self.attention(x, attend=attend, training=training)
        x = self.attention_norm(x + ops.cast(self.attention_dropout(attended, training=training), x.dtype))
        transformed = self.feed_forward(x, token_valid=token_valid, training=training)
        return self.feed_forward_norm(x + ops.cast(self.feed_forward_dropout(transformed, training=training), x.dtype))

    def compute_output_spec(self, x, attend=None, training=None):
        return keras.KerasTensor(x.shape, "float32")


def real_tokens(attend):
    """Returns bool [B, T] of those that any query may attend to, None where there is no mask."""
    return None if attend is None else ops.any(attend, axis=1)
