"""What is evaluated and exported: the trained encoder, and what is fitted to it afterwards."""

import keras
import numpy as np
import tensorflow as tf

from pipeline import evaluation
from pipeline.classifier import TOKEN_IDS_SPEC, build_classifier
from pipeline.layers.ngrams import NgramScores
from pipeline.ngrams import slots_for


@keras.saving.register_keras_serializable(package="pipeline")
class CalibratedClassifier(keras.Model):
    """Token ids in, class logits out; `probabilities` divides them by a temperature (Guo et al. 2017, section 4.2).

    logits = encoder(token_ids) + ngram_weight * ngrams(token_ids); without n-grams just the encoder's, bit for bit.

    Args:
        encoder: a built `EncoderClassifier` or `EncoderEnsemble`.
        ngrams: a built `NgramScores` of its vocabulary and classes, or None.

    Attributes:
        ngram_weight: float32 scalar, None without n-grams; 0 until it is fitted.
        temperature: float32 scalar; 1 until it is fitted.
    """

    def __init__(self, encoder, ngrams=None, name="calibrated_classifier", **kwargs):
        super().__init__(name=name, **kwargs)
        self.encoder = encoder
        self.ngrams = ngrams
        self.ngram_weight = self._scalar("ngram_weight", "zeros") if ngrams is not None else None
        self.temperature = self._scalar("temperature", "ones")
        self.built = True

    def _scalar(self, name, initial):
        return self.add_weight(
            shape=(), initializer=initial, dtype="float32", autocast=False, trainable=False, name=name
        )

    def build(self, token_ids_shape=None):
        """Nothing to create: the parts are built."""

    @property
    def vocab_size(self):
        """Number of token ids."""
        return self.encoder.vocab_size

    @property
    def is_chunked(self):
        """True when the encoder's attention is computed in chunks of keys."""
        return self.encoder.is_chunked

    def parts(self, token_ids, training=None):
        """Returns [logits], with n-grams [logits, the encoder's, the n-grams' scores], each float32 [B, C]."""
        encoded = self.encoder(token_ids, training=training)
        if self.ngrams is None:
            return [encoded]
        scores = self.ngrams(token_ids)
        return [encoded + self.ngram_weight * scores, encoded, scores]

    def call(self, token_ids, training=None):
        """Returns logits float32 [B, C] for token_ids int32 [B, T]."""
        return self.parts(token_ids, training)[0]

    def probabilities(self, logits):
        """Returns the calibrated probabilities float32 [B, C] of logits [B, C]."""
        return tf.nn.softmax(logits / self.temperature)

    def fitted_scalars(self):
        """Returns {"temperature": float}, with n-grams their "ngram_weight" as well."""
        scalars = {"temperature": self.temperature, "ngram_weight": self.ngram_weight}
        return {name: float(weight) for name, weight in scalars.items() if weight is not None}

    def compute_output_shape(self, token_ids_shape):
        return self.encoder.compute_output_shape(token_ids_shape)

    def compute_output_spec(self, token_ids, training=None):
        return self.encoder.compute_output_spec(token_ids)

    def get_config(self):
        parts = {"encoder": self.encoder, "ngrams": self.ngrams}
        serialized = {name: keras.saving.serialize_keras_object(part) for name, part in parts.items()}
        return {**super().get_config(), **serialized}

    @classmethod
    def from_config(cls, config):
        parts = {name: keras.saving.deserialize_keras_object(config[name]) for name in ("encoder", "ngrams")}
        for part in parts.values():
            if part is not None and not part.built:
                part.build()
        return cls(**{**config, **parts})

    def with_encoder(self, encoder):
        """Returns one that has another encoder of the same weights, and these n-grams and scalars."""
        other = type(self)(encoder, self.ngrams)
        if self.ngrams is not None:
            other.ngram_weight.assign(self.ngram_weight)
        other.temperature.assign(self.temperature)
        return other


def build_calibrated(model_config, vocab_size, num_classes, **settings):
    """Returns a built `CalibratedClassifier`, neither trained nor fitted; arguments as of `build_classifier`.

    It knows as many pairs as `model.ngram_pairs` allows; a fitted one those that the training texts have.
    """
    encoder, pairs = build_classifier(model_config, vocab_size, num_classes, **settings), model_config.ngram_pairs
    ngrams = NgramScores(vocab_size, num_classes, slots_for(pairs), pairs, name="ngrams") if pairs else None
    if pairs:
        ngrams.build()
    return CalibratedClassifier(encoder, ngrams)


def predict_parts(model, split, plan, stop=lambda: None):
    """Runs `CalibratedClassifier.parts` over a split, in one pass.

    Args:
        model: a `CalibratedClassifier`.
        split: a `pipeline.dataset.Split`.
        plan: row indices per batch, every row once.
        stop: called before each batch; may raise to end early.

    Returns:
        A list of float32 [N, C], in the order of the rows.
    """

    @tf.function(input_signature=[TOKEN_IDS_SPEC])
    def predict(token_ids):
        return tf.concat(model.parts(token_ids, training=False), axis=1)

    count = 1 if model.ngrams is None else 3
    return np.split(evaluation.predict_logits(predict, split, plan, stop), count, axis=1)
