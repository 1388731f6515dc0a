"""From one vector per token to one vector per text."""

import keras
import tensorflow as tf
from keras import ops

from pipeline.layers.attention import MASKED
from pipeline.layers.checks import check_token_valid
from pipeline.seeds import derive_seed


@keras.saving.register_keras_serializable(package="pipeline")
class MaskedMeanPooling(keras.layers.Layer):
    """Mean over the real tokens, in float32; a text without tokens gives exactly zero."""

    def build(self, x_shape, token_valid_shape=None):
        """Nothing to create."""

    def call(self, x, token_valid):
        """Pools.

        Args:
            x: float [B, T, D].
            token_valid: bool [B, T], True = real token.

        Returns:
            float32 [B, D].
        """
        check_token_valid(token_valid, x)
        valid = ops.cast(ops.expand_dims(token_valid, -1), "float32")  # [B, T, 1]
        total = ops.sum(ops.cast(x, "float32") * valid, axis=1)  # [B, D]
        # Dividing by max(count, 1) is safe; choosing with `where` afterwards would be 0 * NaN in ONNX.
        return total / ops.maximum(ops.sum(valid, axis=1), 1.0)

    def compute_output_shape(self, x_shape, token_valid_shape=None):
        return (x_shape[0], x_shape[2])

    def compute_output_spec(self, x, token_valid):
        return keras.KerasTensor((x.shape[0], x.shape[2]), "float32")


@keras.saving.register_keras_serializable(package="pipeline")
class MaskedMaxPooling(MaskedMeanPooling):
    """Maximum over the real tokens of each component, in float32; a text without tokens gives exactly zero."""

    def call(self, x, token_valid):
        """Pools; arguments and result as of `MaskedMeanPooling`."""
        check_token_valid(token_valid, x)
        valid = ops.expand_dims(token_valid, -1)  # [B, T, 1]
        highest = ops.max(ops.cast(x, "float32") + ops.where(valid, 0.0, MASKED), axis=1)  # [B, D]
        return highest * ops.cast(ops.any(valid, axis=1), "float32")


@keras.saving.register_keras_serializable(package="pipeline")
class FirstPooling(MaskedMeanPooling):
    """The first vector, in float32: that of `ClassVector`, which the encoder fills with what the tokens say."""

    def call(self, x, token_valid):
        """Pools; arguments and result as of `MaskedMeanPooling`, but that `token_valid` has no effect."""
        check_token_valid(token_valid, x)
        # A slice, not x[:, 0]: the gradient of an index is slow.
        first = tf.slice(ops.cast(x, "float32"), [0, 0, 0], [-1, 1, -1])  # [B, 1, D]
        return tf.squeeze(first, 1)


@keras.saving.register_keras_serializable(package="pipeline")
class ClassVector(keras.layers.Layer):
    """Puts a learned vector in front of the tokens (Devlin et al. 2019, section 3: [CLS]), in float32.

    It is a vector and no token, so that no text can contain it and `max_length` counts tokens only.

    Args:
        seed: integer seed of the initial values, or None for random ones.
    """

    def __init__(self, seed=None, **kwargs):
        super().__init__(autocast=False, **kwargs)
        self.seed = seed

    def build(self, x_shape, token_valid_shape=None):
        # Of unit variance, like the scaled embeddings beside it.
        initial = keras.initializers.RandomNormal(stddev=1.0, seed=derive_seed(self.seed, "class_vector"))
        self.vector = self.add_weight(
            shape=(x_shape[-1],), initializer=initial, dtype="float32", autocast=False, name="class_vector"
        )

    def call(self, x, token_valid):
        """Puts it there.

        Args:
            x: float [B, T, D].
            token_valid: bool [B, T], True = real token.

        Returns:
            (float32 [B, 1 + T, D], bool [B, 1 + T]): the vector counts as real in every text, an empty one too.
        """
        check_token_valid(token_valid, x)
        x = ops.cast(x, "float32")
        first = ops.zeros_like(x[:, :1]) + self.vector  # [B, 1, D]
        return ops.concatenate([first, x], axis=1), ops.concatenate([ops.ones_like(token_valid[:, :1]), token_valid], 1)

    def compute_output_shape(self, x_shape, token_valid_shape=None):
        batch, length, size = x_shape
        length = None if length is None else length + 1
        return (batch, length, size), (batch, length)

    def compute_output_spec(self, x, token_valid):
        x_shape, valid_shape = self.compute_output_shape(x.shape)
        return keras.KerasTensor(x_shape, "float32"), keras.KerasTensor(valid_shape, "bool")

    def get_config(self):
        return {**super().get_config(), "seed": self.seed}
