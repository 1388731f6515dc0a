"""Attention whose cost is linear in the length of the text."""

import keras
import tensorflow as tf
from keras import ops

from pipeline.layers.checks import check_heads, check_key_mask

_LEAST = 1e-30  # of a divisor, so that a query without keys gets 0 / _LEAST; real ones are far above it


@keras.saving.register_keras_serializable(package="pipeline")
class LinearAttention(keras.layers.Layer):
    """phi(Q) (phi(K)^T V), each row divided by phi(Q) sum(phi(K)); phi(x) = elu(x) + 1.

    Katharopoulos et al. 2020, "Transformers are RNNs", section 3.2, without the causal order. It replaces softmax's
    exp(q . k) by phi(q) . phi(k), so that the keys are summed up once, in an H x H matrix, for all queries. All of it
    is float32 whatever the policy: the sums over a long text would overflow float16. There are no attention weights,
    hence none to return and no dropout on them.
    """

    def call(self, query, key, value, attend=None, training=None):
        """Attends.

        Args:
            query: float [B, N, T, H].
            key: float [B, N, S, H].
            value: float [B, N, S, H].
            attend: bool [B, 1, S], True = may attend; None = every key.
            training: changes nothing.

        Returns:
            context [B, N, T, H] in the compute dtype; exactly zero for a row without keys.

        Raises:
            ValueError: a rank does not fit, `attend` is not boolean or differs between queries.
        """
        check_heads(query, key, value)
        check_key_mask(attend, query, key)
        query, key = _feature_map(query), _feature_map(key)
        if attend is not None:
            key *= ops.cast(attend, "float32")[:, :, :, None]  # [B, 1, S, 1]
        key = ops.transpose(key, (0, 1, 3, 2))  # [B, N, H, S]
        summed = tf.matmul(key, ops.cast(value, "float32"))  # [B, N, H, H]
        divisor = tf.matmul(query, ops.sum(key, axis=-1, keepdims=True))  # [B, N, T, 1]
        return ops.cast(tf.matmul(query, summed) / ops.maximum(divisor, _LEAST), self.compute_dtype)

    def compute_output_shape(self, query_shape, key_shape=None, value_shape=None, attend_shape=None):
        return query_shape

    def compute_output_spec(self, query, key, value, attend=None, training=None):
        return keras.KerasTensor(query.shape, self.compute_dtype)

    def get_config(self):
        return super().get_config()  # Keras's guess at a config fails where dtype is given as a policy object


def _feature_map(x):
    """elu(x) + 1, written so that exp(x) of a large negative x isn't lost beside 1; float32."""
    x = ops.cast(x, "float32")
    return ops.relu(x) + ops.exp(ops.minimum(x, 0.0))
