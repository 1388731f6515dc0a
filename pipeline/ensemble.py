"""Several encoder classifiers as one model."""

import keras
import tensorflow as tf


@keras.saving.register_keras_serializable(package="pipeline")
class EncoderEnsemble(keras.Model):
    """Token ids in, the mean of the members' class logits out.

    The members differ by what they began with and by what dropout hid, so they err on different texts (Lakshminarayanan
    et al. 2017, "Deep Ensembles"). Each is trained by a loss of its own: trained by that of the mean they would be one
    large model.

    Args:
        members: `EncoderClassifier`s of the same sizes.
    """

    def __init__(self, members, **kwargs):
        super().__init__(**kwargs)
        self.members = members
        if all(member.built for member in members):
            self.built = True

    def build(self, token_ids_shape=None):
        """Creates every weight of members that have none."""
        for member in self.members:
            if not member.built:
                member.build()

    @property
    def vocab_size(self):
        """Number of token ids."""
        return self.members[0].vocab_size

    @property
    def num_classes(self):
        """Number of classes."""
        return self.members[0].num_classes

    @property
    def is_chunked(self):
        """True when attention is full and computed in chunks of keys."""
        return self.members[0].is_chunked

    def copy_encoder(self, other):
        """Gives every member the encoder of an `EncoderClassifier` of its sizes."""
        for member in self.members:
            member.copy_encoder(other)

    def in_one_piece(self):
        """As of `EncoderClassifier`."""
        return type(self)([member.in_one_piece() for member in self.members])

    def call(self, token_ids, training=None):
        """Returns logits float32 [B, C] for token_ids int32 [B, T]."""
        # The mean of linear heads is one head on all features: one product, which the exporter knows.
        features = tf.concat([member.features(token_ids, training) for member in self.members], -1)  # [B, K D]
        heads = [member.head for member in self.members]
        kernel = tf.concat([head.kernel for head in heads], 0) / len(heads)  # [K D, C]
        return tf.matmul(features, kernel) + tf.add_n([head.bias.value for head in heads]) / len(heads)

    def compute_output_shape(self, token_ids_shape):
        return self.members[0].compute_output_shape(token_ids_shape)

    def compute_output_spec(self, token_ids, training=None):
        return self.members[0].compute_output_spec(token_ids)

    def get_config(self):
        members = [keras.saving.serialize_keras_object(member) for member in self.members]
        return {**super().get_config(), "members": members}

    @classmethod
    def from_config(cls, config):
        members = [keras.saving.deserialize_keras_object(member) for member in config["members"]]
        return cls(**{**config, "members": members})
