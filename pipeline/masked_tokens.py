"""Predicting masked tokens (Devlin et al. 2019, "BERT", section 3.1): the head on an encoder, its loss and its step."""

import keras
import tensorflow as tf

from pipeline.classifier import TOKEN_IDS_SPEC
from pipeline.layers.normalization import LayerNorm
from pipeline.train_step import TrainStep

_TARGETS_SPEC = tf.TensorSpec([None, None], tf.int32, "targets")
_COUNTS_SPEC = tf.TensorSpec([None, None], tf.bool, "counts")


class MaskedTokenModel(keras.Model):
    """An encoder, LayerNorm and the product with the transposed embedding table, plus a bias for each piece.

    The output weights are the embedding's (Press and Wolf 2017): what is learned of a piece where it is predicted is
    learned where it is read. Logits are float32 and are computed where the loss mask is true only: of the product with
    the vocabulary, most of the work of a small encoder, about a sixth remains.

    Args:
        encoder: a built `EncoderClassifier`; its own head is left as it is.
    """

    def __init__(self, encoder, **kwargs):
        super().__init__(**kwargs)
        self.encoder = encoder
        for layer in (encoder.head_norm, encoder.head):
            layer.trainable = False
        self.norm = LayerNorm(name="norm")
        self.norm.build((None, encoder.d_model))
        vocab_size = encoder.embedding.input_dim
        self.bias = self.add_weight(shape=(vocab_size,), initializer="zeros", dtype="float32", name="bias")
        self.built = True

    def members(self):
        """Returns the models whose own losses are minimized: this one alone."""
        return [self]

    def call(self, token_ids, counts, training=None):
        """Returns logits float32 [M, V], one row for each of the M true positions of the loss mask, row after row.

        Args:
            token_ids: int32 [B, T], padded with 0 at the end.
            counts: bool [B, T], the loss mask.
            training: True applies dropout.
        """
        hidden = tf.boolean_mask(self.encoder.encode(token_ids, training), counts)  # [M, D]
        logits = tf.matmul(self.norm(hidden), self.encoder.embedding.embeddings, transpose_b=True)
        return logits + self.bias


class MaskedTokenStep(TrainStep):
    """The same step on other batches: (token_ids int32 [B, T], targets int32 [B, T], counts bool [B, T]).

    Its loss is the mean cross-entropy over the positions where `counts`, the loss mask, is true; 0 where none is.

    Args:
        model: a `MaskedTokenModel`.
        training: a `pipeline.config.TrainingConfig`.
        replicas: as in `TrainStep`.
    """

    batch_spec = (TOKEN_IDS_SPEC, _TARGETS_SPEC, _COUNTS_SPEC)

    def __init__(self, model, training, replicas=None):
        super().__init__(model, training, (), replicas)

    def _weight(self, token_ids, targets, counts):
        return counts.sum()

    def _weighted_loss(self, token_ids, targets, counts):
        logits = self.model(token_ids, counts, training=True)
        weight = tf.reduce_sum(tf.cast(counts, tf.float32))
        return tf.reduce_sum(_cross_entropies(logits, targets, counts)), weight


def compile_measure(model):
    """Returns (token_ids, targets, counts) -> (loss, right), compiled, without dropout; arguments as of a batch.

    Both are sums over the positions that count: the cross-entropy in nats, and how often the target is the most
    probable piece.
    """

    @tf.function(input_signature=MaskedTokenStep.batch_spec)
    def measure(token_ids, targets, counts):
        logits = model(token_ids, counts, training=False)
        right = tf.argmax(logits, axis=-1, output_type=tf.int32) == tf.boolean_mask(targets, counts)
        return tf.reduce_sum(_cross_entropies(logits, targets, counts)), tf.math.count_nonzero(right)

    return measure


def _cross_entropies(logits, targets, counts):
    """Returns float32 [M], in nats."""
    return tf.nn.sparse_softmax_cross_entropy_with_logits(tf.boolean_mask(targets, counts), logits)
