"""What neighbouring tokens say together, learned from few texts: a convolution over them (Kim 2014)."""

import keras
import tensorflow as tf
from keras import ops

from pipeline.layers.checks import check_token_valid
from pipeline.layers.dense import dense
from pipeline.layers.dropout import Dropout
from pipeline.layers.feed_forward import gelu
from pipeline.layers.normalization import LayerNorm
from pipeline.seeds import derive_seed


@keras.saving.register_keras_serializable(package="pipeline")
class PreNormConvolution(keras.layers.Layer):
    """x + Drop(GELU(W [LN(x) of `width` neighbouring tokens] + b)); what is no real token counts as zeros.

    The sum keeps the dtype of x. One matrix product over the tokens' vectors side by side: a product has fast kernels
    in every runtime, in 8 bits as well.

    Args:
        width: number of neighbouring tokens, odd: as many on each side.
        dropout: share dropped in training.
        seed: integer seed of initial values and dropout, or None for a random one.

    Raises:
        ValueError: `width` is even or below 1.
    """

    def __init__(self, width, dropout=0.0, seed=None, **kwargs):
        super().__init__(autocast=False, **kwargs)
        if width < 1 or width % 2 == 0:
            raise ValueError(f"width must be odd and at least 1. Received: width={width}")
        self.width = width
        self.dropout = dropout
        self.seed = seed
        self.norm = LayerNorm(name="norm")
        self.output_dropout = Dropout(dropout, seed=derive_seed(seed, "dropout"), dtype="float32", name="dropout")

    def build(self, x_shape, token_valid_shape=None):
        self.projection = dense(self, x_shape[-1], "projection")
        self.norm.build(x_shape)
        self.projection.build((*x_shape[:-1], self.width * x_shape[-1]))

    def call(self, x, token_valid, training=None):
        """Maps float [B, T, D] to [B, T, D] of the same dtype; `token_valid` is bool [B, T], True = real token."""
        check_token_valid(token_valid, x)
        normalized = self.norm(x)
        normalized = normalized * ops.cast(ops.expand_dims(token_valid, -1), normalized.dtype)
        side = self.width // 2
        padded = tf.pad(normalized, [[0, 0], [side, side], [0, 0]])  # [B, T + width - 1, D]
        length = tf.shape(x)[1]
        # Slices of a known size, not padded[:, i : i - width + 1]: the gradient of an index is slow.
        neighbours = [tf.slice(padded, [0, i, 0], tf.stack([-1, length, -1])) for i in range(self.width)]
        windows = tf.concat(neighbours, -1)  # [B, T, width D]
        windows = tf.ensure_shape(windows, (*x.shape[:-1], self.width * x.shape[-1]))
        convolved = gelu(ops.cast(self.projection(windows), "float32"))
        return x + ops.cast(self.output_dropout(convolved, training=training), x.dtype)

    def compute_output_shape(self, x_shape, token_valid_shape=None):
        return x_shape

    def compute_output_spec(self, x, token_valid, training=None):
        return keras.KerasTensor(x.shape, x.dtype)

    def get_config(self):
        return {**super().get_config(), **{key: getattr(self, key) for key in ("width", "dropout", "seed")}}
