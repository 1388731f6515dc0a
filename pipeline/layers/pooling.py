"""From one vector per token to one vector per text."""

import keras
from keras import ops


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
        valid = ops.cast(ops.expand_dims(token_valid, -1), "float32")  # [B, T, 1]
        total = ops.sum(ops.cast(x, "float32") * valid, axis=1)  # [B, D]
        # Dividing by max(count, 1) is safe; choosing with `where` afterwards would be 0 * NaN in ONNX.
        return total / ops.maximum(ops.sum(valid, axis=1), 1.0)

    def compute_output_shape(self, x_shape, token_valid_shape=None):
        return (x_shape[0], x_shape[2])

    def compute_output_spec(self, x, token_valid):
        return keras.KerasTensor((x.shape[0], x.shape[2]), "float32")
