"""Pre-Norm Transformer decoder layer (Vaswani et al. 2017, section 3.1; Xiong et al. 2020)."""

import keras
from keras import ops

from pipeline.layers.attention import MultiHeadAttention, causal_mask
from pipeline.layers.dropout import Dropout
from pipeline.layers.feed_forward import PositionwiseFeedForward
from pipeline.layers.normalization import LayerNorm
from pipeline.seeds import derive_seed


@keras.saving.register_keras_serializable(package="pipeline")
class PreNormDecoderLayer(keras.layers.Layer):
    """x + Drop(SelfAttention(LN(x))), x + Drop(CrossAttention(LN(x), source)), then x + Drop(FeedForward(LN(x))).

    A target attends to itself, to earlier targets and to the source. The source is taken as it is: normalize a Pre-Norm
    encoder's output once, after its last layer. The sum keeps the dtype of x.

    Args:
        num_heads: number of attention heads; divides the size of the target vectors.
        d_ff: size of the feed-forward network's hidden layer.
        dropout: share dropped in training: of attention weights, of hidden values, of the three branches.
        seed: integer seed of initial values and dropout, or None for a random one.
    """

    def __init__(self, num_heads, d_ff, dropout=0.0, seed=None, **kwargs):
        # As in the encoder layer: rounding the sum of all branches would lose what each of them adds.
        super().__init__(autocast=False, **kwargs)
        self.num_heads = num_heads
        self.d_ff = d_ff
        self.dropout = dropout
        self.seed = seed

    def build(self, x_shape, source_shape, attend_shape=None, source_attend_shape=None):
        self.self_attention_norm = LayerNorm(name="self_attention_norm")
        self.self_attention = self._attention(x_shape[-1], "self_attention")
        self.self_attention_dropout = self._dropout("self_attention_dropout")
        self.cross_attention_norm = LayerNorm(name="cross_attention_norm")
        self.cross_attention = self._attention(x_shape[-1], "cross_attention")
        self.cross_attention_dropout = self._dropout("cross_attention_dropout")
        self.feed_forward_norm = LayerNorm(name="feed_forward_norm")
        seed, policy = derive_seed(self.seed, "feed_forward"), self.dtype_policy
        self.feed_forward = PositionwiseFeedForward(
            self.d_ff, self.dropout, seed=seed, dtype=policy, name="feed_forward"
        )
        self.feed_forward_dropout = self._dropout("feed_forward_dropout")
        for layer in (self.self_attention_norm, self.self_attention, self.cross_attention_norm):
            layer.build(x_shape)
        self.cross_attention.build(x_shape, source_shape)
        for layer in (self.feed_forward_norm, self.feed_forward):
            layer.build(x_shape)

    def _attention(self, d_model, name):
        seed, policy = derive_seed(self.seed, name), self.dtype_policy
        return MultiHeadAttention(d_model, self.num_heads, self.dropout, seed=seed, dtype=policy, name=name)

    def _dropout(self, name):
        return Dropout(self.dropout, seed=derive_seed(self.seed, name), dtype="float32", name=name)

    def call(self, x, source, attend=None, source_attend=None, training=None):
        """Decodes.

        Args:
            x: float [B, T, D], the targets so far.
            source: float [B, S, D'], the encoder's output.
            attend: bool [B, 1 | T, T], which targets are real; that none attends to a later one goes without saying.
            source_attend: bool [B, 1 | T, S], True = may attend; None = the whole source.
            training: True applies dropout.

        Returns:
            [B, T, D] of the dtype of x.
        """
        causal = causal_mask(ops.shape(x)[1])  # [1, T, T]
        attend = causal if attend is None else causal & attend  # [B, T, T]
        attended = self.self_attention(self.self_attention_norm(x), attend=attend, training=training)
        x = x + ops.cast(self.self_attention_dropout(attended, training=training), x.dtype)
        attended = self.cross_attention(
            self.cross_attention_norm(x), source, attend=source_attend, training=training
        )
        x = x + ops.cast(self.cross_attention_dropout(attended, training=training), x.dtype)
        transformed = self.feed_forward(self.feed_forward_norm(x), training=training)
        return x + ops.cast(self.feed_forward_dropout(transformed, training=training), x.dtype)

    def compute_output_shape(self, x_shape, source_shape=None, attend_shape=None, source_attend_shape=None):
        return x_shape

    def compute_output_spec(self, x, source, attend=None, source_attend=None, training=None):
        return keras.KerasTensor(x.shape, x.dtype)

    def get_config(self):
        config = {key: getattr(self, key) for key in ("num_heads", "d_ff", "dropout", "seed")}
        return {**super().get_config(), **config}
