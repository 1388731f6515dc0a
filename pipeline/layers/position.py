"""Where a token stands: added to its vector (sinusoidal, learned), turned into queries and keys (rotary), or as a bias
on the scores (ALiBi)."""

import keras
import numpy as np
import tensorflow as tf
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
        _check_length(x.shape[1], self.max_length)
        positions = ops.convert_to_tensor(self.table)[: ops.shape(x)[1]]  # [T, D]
        return ops.cast(x, "float32") + positions

    def compute_output_shape(self, input_shape):
        return input_shape

    def compute_output_spec(self, x):
        return keras.KerasTensor(x.shape, "float32")

    def get_config(self):
        return {**super().get_config(), "max_length": self.max_length}


@keras.saving.register_keras_serializable(package="pipeline")
class LearnedPosition(SinusoidalPosition):
    """As `SinusoidalPosition`, with a table that starts as the sinusoidal one and is trained.

    So rows that no training text reaches are still of use.
    """

    def build(self, input_shape):
        table = sinusoidal_table(self.max_length, input_shape[-1])
        self.table = self.add_weight(
            shape=table.shape, initializer=lambda shape, dtype: ops.convert_to_tensor(table), dtype="float32",
            autocast=False, name="position_table",
        )


@keras.saving.register_keras_serializable(package="pipeline")
class RotaryPosition(keras.layers.Layer):
    """Turns each pair of values of a query or key by an angle that grows with its position.

    Su et al. 2021 ("RoFormer"), section 3.2. A score then depends on positions through their distance alone. Pair i is
    values i and i + H / 2, its angle p / 10000^(2i / H); computed in float32 whatever the policy. It has no weights:
    one layer serves queries and keys.

    Args:
        max_length: longest sequence, in positions.
    """

    def __init__(self, max_length, **kwargs):
        super().__init__(**kwargs)
        self.max_length = max_length

    def build(self, x_shape):
        size = x_shape[-1]
        if size % 2:
            raise ValueError(f"the head size must be even: its values are turned in pairs. Received: head size={size}")
        table = sinusoidal_table(self.max_length, size)  # column 2i and 2i + 1: sine and cosine of pair i
        self.sines, self.cosines = table[:, 0::2], table[:, 1::2]  # [max_length, H / 2]

    def call(self, x):
        """Maps float [B, N, T, H] to the same shape and dtype.

        Raises:
            ValueError: T is known when the graph is built and is longer than `max_length`.
        """
        _check_length(x.shape[2], self.max_length)
        length = ops.shape(x)[2]
        sines, cosines = (ops.convert_to_tensor(t)[:length] for t in (self.sines, self.cosines))  # [T, H / 2]
        first, second = tf.split(ops.cast(x, "float32"), 2, axis=-1)  # [B, N, T, H / 2]
        turned = [first * cosines - second * sines, second * cosines + first * sines]
        return ops.cast(ops.concatenate(turned, axis=-1), x.dtype)

    def compute_output_shape(self, x_shape):
        return x_shape

    def compute_output_spec(self, x):
        return keras.KerasTensor(x.shape, x.dtype)

    def get_config(self):
        return {**super().get_config(), "max_length": self.max_length}


def alibi_slopes(num_heads):
    """Returns how fast each head's attention falls with distance (Press et al. 2022, "Train Short, Test Long").

    A geometric sequence from 2^(-8 / N) to 2^-8; where N is no power of two, the remaining heads take every other value
    of the sequence for twice as many heads, as the authors' code does.

    Returns:
        float32 [N].
    """
    power = 2 ** int(np.log2(num_heads))
    slopes = 2.0 ** (-8.0 / power * np.arange(1, power + 1))
    between = 2.0 ** (-8.0 / (2 * power) * np.arange(1, 2 * power + 1, 2))
    return np.concatenate([slopes, between[: num_heads - power]]).astype(np.float32)


def alibi(query_positions, key_positions, num_heads):
    """Returns what is added to the scores: -slope * |distance|; both directions alike, as an encoder looks both ways.

    Args:
        query_positions: int32 [..., T].
        key_positions: int32 [..., S].
        num_heads: N.

    Returns:
        float32 [N, ..., T, S].
    """
    distance = ops.abs(ops.expand_dims(query_positions, -1) - ops.expand_dims(key_positions, -2))  # [..., T, S]
    distance = ops.cast(distance, "float32")
    return -alibi_slopes(num_heads).reshape([-1] + [1] * len(distance.shape)) * distance


def _check_length(length, max_length):
    if length is not None and length > max_length:
        raise ValueError(f"length must be <= max_length={max_length}. Received: length={length}")
