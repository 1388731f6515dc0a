"""Sinusoidal positions (Vaswani et al. 2017, section 3.5)."""

import keras
import numpy as np
from keras import ops


def sinusoidal_table(max_length, d_model):
    """Returns the position table: float32 [max_length, D].

    Column 2i is sin(p / 10000^(2i / D)), column 2i + 1 the cosine of the same angle; computed in float64.

    Raises:
        ValueError: `d_model` is odd.
    """
    if d_model % 2:
        raise ValueError(f"d_model must be even: sines and cosines come in pairs. Received: d_model={d_model}")
    position = np.arange(max_length, dtype=np.float64)[:, None]
    rate = np.exp(np.arange(0, d_model, 2, dtype=np.float64) * (-np.log(10000.0) / d_model))
    table = np.empty((max_length, d_model), np.float64)
    table[:, 0::2] = np.sin(position * rate)
    table[:, 1::2] = np.cos(position * rate)
    return table.astype(np.float32)


@keras.saving.register_keras_serializable(package="pipeline")
class SinusoidalPosition(keras.layers.Layer):
    """Adds the position table to a sequence of vectors; table, sum and output are float32 whatever the policy.

    Args:
        max_length: longest sequence, in positions.
    """

    def __init__(self, max_length, **kwargs):
        # Rounding the inputs first would round the sum: float32 comes in as it is.
        super().__init__(autocast=False, **kwargs)
        self.max_length = max_length

    def build(self, input_shape):
        self.table = sinusoidal_table(self.max_length, input_shape[-1])

    def call(self, x):
        """Maps float [B, T, D] to float32 [B, T, D].

        Raises:
            ValueError: T is known when the graph is built and is longer than `max_length`. A longer T met only
                at run time fails in the addition.
        """
        if x.shape[1] is not None and x.shape[1] > self.max_length:
            raise ValueError(f"length must be <= max_length={self.max_length}. Received: length={x.shape[1]}")
        positions = ops.convert_to_tensor(self.table)[: ops.shape(x)[1]]  # [T, D]
        return ops.cast(x, "float32") + positions

    def compute_output_shape(self, input_shape):
        return input_shape

    def compute_output_spec(self, x):
        return keras.KerasTensor(x.shape, "float32")

    def get_config(self):
        return {**super().get_config(), "max_length": self.max_length}
