"""The Dense sublayers of the encoder: seeded by name, in the dtype policy of the layer that owns them."""

import keras

from pipeline.seeds import derive_seed


def dense(owner, units, name, dtype=None):
    """Returns a `keras.layers.Dense` whose initial kernel derives from `owner.seed` and `name`;
    the dtype policy is the owner's unless given."""
    return keras.layers.Dense(
        units,
        kernel_initializer=keras.initializers.GlorotUniform(seed=derive_seed(owner.seed, name)),
        dtype=dtype or owner.dtype_policy,
        name=name,
    )
