"""The Pre-Norm Transformer encoder layer (Xiong et al. 2020, "On Layer Normalization in the Transformer")."""

import keras
from keras import ops

from pipeline.layers.attention import MultiHeadAttention
from pipeline.layers.dropout import Dropout
from pipeline.layers.feed_forward import PositionwiseFeedForward
from pipeline.layers.normalization import LayerNorm
from pipeline.seeds import derive_seed


@keras.saving.register_keras_serializable(package="pipeline")
class PreNormEncoderLayer(keras.layers.Layer):
    """x + Drop(Attention(LN(x))), then x + Drop(FeedForward(LN(x))).

    The sum keeps the dtype of x. Under a mixed policy only the matrix products are in half precision; LayerNorm,
    softmax, GELU and dropout are float32.

    Args:
        num_heads: number of attention heads; divides the size of the input vectors.
        d_ff: size of the feed-forward network's hidden layer.
        dropout: share dropped in training: of attention weights, of hidden values, of both branches.
        seed: integer seed of initial values and dropout, or None for a random one.
    """

    def __init__(self, num_heads, d_ff, dropout=0.0, seed=None, **kwargs):
        # Rounding the sum of all branches would lose what each of them adds: x keeps its dtype.
        super().__init__(autocast=False, **kwargs)
        self.num_heads = num_heads
        self.d_ff = d_ff
        self.dropout = dropout
        self.seed = seed

    def build(self, x_shape, attend_shape=None):
        policy, dropout = self.dtype_policy, self.dropout

        def seed(name):
            return derive_seed(self.seed, name)

        self.attention_norm = LayerNorm(name="attention_norm")
        self.attention = MultiHeadAttention(
            x_shape[-1], self.num_heads, dropout, seed=seed("attention"), dtype=policy, name="attention"
        )
        self.attention_dropout = Dropout(dropout, seed=seed("attention_dropout"), dtype="float32")
        self.feed_forward_norm = LayerNorm(name="feed_forward_norm")
        self.feed_forward = PositionwiseFeedForward(
            self.d_ff, dropout, seed=seed("feed_forward"), dtype=policy, name="feed_forward"
        )
        self.feed_forward_dropout = Dropout(dropout, seed=seed("feed_forward_dropout"), dtype="float32")
        for layer in (self.attention_norm, self.attention, self.feed_forward_norm, self.feed_forward):
            layer.build(x_shape)

    def call(self, x, attend=None, training=None):
        """Maps float [B, T, D] to [B, T, D] of the same dtype; `attend` is bool [B, 1 | T, T], True = may attend."""
        attended = self.attention(self.attention_norm(x), attend=attend, training=training)
        x = x + ops.cast(self.attention_dropout(attended, training=training), x.dtype)
        transformed = self.feed_forward(self.feed_forward_norm(x), training=training)
        return x + ops.cast(self.feed_forward_dropout(transformed, training=training), x.dtype)

    def compute_output_shape(self, x_shape, attend_shape=None):
        return x_shape

    def compute_output_spec(self, x, attend=None, training=None):
        return keras.KerasTensor(x.shape, x.dtype)

    def get_config(self):
        config = {key: getattr(self, key) for key in ("num_heads", "d_ff", "dropout", "seed")}
        return {**super().get_config(), **config}
