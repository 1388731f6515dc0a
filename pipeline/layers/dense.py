"""The dense sublayers of the encoder: seeded by name, in the dtype policy of the layer that owns them."""

import keras
import tensorflow as tf

from pipeline.seeds import derive_seed


def dense(owner, units, name, dtype=None):
    """Returns a `Dense` whose initial kernel derives from `owner.seed` and `name`; the dtype policy is the owner's
    unless given."""
    return Dense(
        units,
        kernel_initializer=keras.initializers.GlorotUniform(seed=derive_seed(owner.seed, name)),
        dtype=dtype or owner.dtype_policy,
        name=name,
    )


@keras.saving.register_keras_serializable(package="pipeline")
class Dense(keras.layers.Dense):
    """`keras.layers.Dense` on rows: as one matrix product, into which TensorFlow fuses the bias.

    Keras writes a product of rank 3 as a tensordot, with a dozen operations on shapes around it.
    """

    def call(self, x, training=None):
        """Maps float [..., D] to float [..., units]."""
        rows = tf.reshape(x, [-1, x.shape[-1]])
        rows = tf.matmul(rows, self.kernel)
        if self.use_bias:
            rows = tf.nn.bias_add(rows, self.bias)
        return self.activation(tf.reshape(rows, tf.concat([tf.shape(x)[:-1], [self.units]], 0)))
