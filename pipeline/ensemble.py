"""Several encoder classifiers as one model."""

import keras
import tensorflow as tf


@keras.saving.register_keras_serializable(package="pipeline")
class EncoderEnsemble(keras.Model):
    """Token ids in, the mean of the encoders' class logits out.

    They differ by what they began with and by what dropout hid, so they err on different texts (Lakshminarayanan
    et al. 2017, "Deep Ensembles"). Each is trained by a loss of its own: trained by that of the mean they would be one
    large model.

    Args:
        encoders: `EncoderClassifier`s of the same sizes.
    """

    def __init__(self, encoders, **kwargs):
        super().__init__(**{**kwargs, "dtype": "float32"})  # heads are, whatever the encoders' policy
        self.encoders = encoders
        if all(encoder.built for encoder in encoders):
            self.built = True

    def members(self):
        """Returns the models whose own losses are minimized."""
        return self.encoders

    def build(self, token_ids_shape=None):
        """Creates every weight of encoders that have none."""
        for encoder in self.encoders:
            if not encoder.built:
                encoder.build()

    @property
    def vocab_size(self):
        """Number of token ids."""
        return self.encoders[0].vocab_size

    @property
    def num_classes(self):
        """Number of classes."""
        return self.encoders[0].num_classes

    @property
    def is_chunked(self):
        """True when attention is full and computed in chunks of keys."""
        return self.encoders[0].is_chunked

    def copy_encoder(self, other):
        """Gives all of them the encoder of an `EncoderClassifier` of its sizes."""
        for encoder in self.encoders:
            encoder.copy_encoder(other)

    def in_one_piece(self):
        """As of `EncoderClassifier`."""
        return type(self)([encoder.in_one_piece() for encoder in self.encoders])

    def call(self, token_ids, training=None):
        """Returns logits float32 [B, C] for token_ids int32 [B, T]."""
        # The mean of linear heads is one head on all features: one product, which the exporter knows.
        features = tf.concat([encoder.features(token_ids, training) for encoder in self.encoders], -1)  # [B, K D]
        heads = [encoder.head for encoder in self.encoders]
        kernel = tf.concat([head.kernel for head in heads], 0) / len(heads)  # [K D, C]
        return tf.matmul(features, kernel) + tf.add_n([head.bias.value for head in heads]) / len(heads)

    def compute_output_shape(self, token_ids_shape):
        return self.encoders[0].compute_output_shape(token_ids_shape)

    def compute_output_spec(self, token_ids, training=None):
        return self.encoders[0].compute_output_spec(token_ids)

    def get_config(self):
        encoders = [keras.saving.serialize_keras_object(encoder) for encoder in self.encoders]
        return {**super().get_config(), "encoders": encoders}

    @classmethod
    def from_config(cls, config):
        encoders = [keras.saving.deserialize_keras_object(encoder) for encoder in config["encoders"]]
        return cls(**{**config, "encoders": encoders})
