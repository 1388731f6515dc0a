"""The reference model: a Pre-Norm Transformer encoder with masked mean pooling and a linear head."""

import math

import keras
import tensorflow as tf

from pipeline.contract import PAD_ID, TOKEN_IDS
from pipeline.layers import MaskedMeanPooling, PreNormEncoderLayer, SinusoidalPosition
from pipeline.layers.attention import padding_mask
from pipeline.layers.dense import Dense
from pipeline.layers.dropout import Dropout
from pipeline.layers.normalization import LayerNorm
from pipeline.seeds import derive_seed

TOKEN_IDS_SPEC = tf.TensorSpec([None, None], tf.int32, TOKEN_IDS)


@keras.saving.register_keras_serializable(package="pipeline")
class EncoderClassifier(keras.Model):
    """Token ids in, class logits out.

    embedding * sqrt(D) + positions, `num_layers` Pre-Norm encoder layers, mean over the real tokens, LayerNorm,
    dropout, one Dense layer to the logits.

    Args:
        vocab_size: number of token ids V; ids must be in [0, V).
        num_classes: number of classes C.
        d_model: size D of the vectors.
        num_heads: attention heads; divides `d_model`.
        d_ff: size of the feed-forward networks' hidden layer.
        num_layers: encoder layers.
        dropout: share dropped inside the encoder.
        head_dropout: share of the pooled vector dropped before the last layer.
        max_length: longest text, in tokens.
        seed: integer seed of initial values and dropout, or None for a random one.
        dtype: Keras dtype policy, e.g. "float32" or "mixed_bfloat16". Under a mixed policy the matrix products of the
            encoder are in half precision, everything else is float32.
    """

    def __init__(
        self,
        vocab_size,
        num_classes,
        d_model=256,
        num_heads=8,
        d_ff=768,
        num_layers=4,
        dropout=0.1,
        head_dropout=0.2,
        max_length=256,
        seed=None,
        **kwargs,
    ):
        super().__init__(**kwargs)
        self._config = {
            "vocab_size": vocab_size,
            "num_classes": num_classes,
            "d_model": d_model,
            "num_heads": num_heads,
            "d_ff": d_ff,
            "num_layers": num_layers,
            "dropout": dropout,
            "head_dropout": head_dropout,
            "max_length": max_length,
            "seed": seed,
        }
        self.seed = seed
        self.d_model = d_model
        policy = self.dtype_policy
        self.embedding = keras.layers.Embedding(
            vocab_size,
            d_model,
            # Times sqrt(D) this has unit variance, as the positions nearly have.
            embeddings_initializer=keras.initializers.RandomNormal(
                stddev=d_model**-0.5, seed=derive_seed(seed, "embedding")
            ),
            dtype="float32",
            name="embedding",
        )
        self.position = SinusoidalPosition(max_length, dtype=policy, name="position")
        self.encoder_layers = [
            PreNormEncoderLayer(
                num_heads, d_ff, dropout, seed=derive_seed(seed, f"encoder_{i}"), dtype=policy, name=f"encoder_{i}"
            )
            for i in range(num_layers)
        ]
        self.pooling = MaskedMeanPooling(dtype="float32", name="pooling")
        self.head_norm = LayerNorm(name="head_norm")
        self.head_dropout = Dropout(
            head_dropout, seed=derive_seed(seed, "head_dropout"), dtype="float32", name="head_dropout"
        )
        # Small: the first answers are near 1 / C for every class, and the first loss near ln C.
        initial = keras.initializers.RandomNormal(stddev=0.02, seed=derive_seed(seed, "head"))
        self.head = Dense(num_classes, kernel_initializer=initial, dtype="float32", name="head")

    def build(self, token_ids_shape=None):
        """Creates every weight; no data is needed."""
        hidden_shape = (None, None, self.d_model)
        self.embedding.build((None, None))
        for layer in (self.position, *self.encoder_layers):
            layer.build(hidden_shape)
        for layer in (self.head_norm, self.head):
            layer.build((None, self.d_model))

    def encode(self, token_ids, training=None):
        """Returns the encoder's output, one vector per token.

        Args:
            token_ids: int32 [B, T], padded with 0 at the end.
            training: True applies dropout.

        Returns:
            float32 [B, T, D]; what stands at padded positions has no meaning.
        """
        attend = padding_mask(token_ids != PAD_ID)  # [B, 1, T]
        x = self.embedding(token_ids)  # [B, T, D]
        x = self.position(x * math.sqrt(self.d_model))
        for layer in self.encoder_layers:
            x = layer(x, attend=attend, training=training)
        return x

    def call(self, token_ids, training=None):
        """Returns logits float32 [B, C] for token_ids int32 [B, T]; a text without tokens has one defined answer."""
        pooled = self.pooling(self.encode(token_ids, training=training), token_ids != PAD_ID)  # [B, D]
        return self.head(self.head_dropout(self.head_norm(pooled), training=training))

    def compute_output_shape(self, token_ids_shape):
        return (token_ids_shape[0], self._config["num_classes"])

    def compute_output_spec(self, token_ids, training=None):
        return keras.KerasTensor(self.compute_output_shape(token_ids.shape), "float32")

    def get_config(self):
        return {**super().get_config(), **self._config}


def build_classifier(model_config, vocab_size, num_classes, seed=None, dtype="float32"):
    """Returns a built `EncoderClassifier` for the `[model]` section of a job.

    Args:
        model_config: a `pipeline.config.ModelConfig`.
        vocab_size: number of token ids.
        num_classes: number of labels.
        seed: root seed of the initial values and of dropout, or None for a random one.
        dtype: Keras dtype policy.
    """
    sizes = model_config.model_dump(exclude={"pooling", "position"})
    # A fixed name: Keras would count the models that the process has built.
    name, seed = "encoder_classifier", derive_seed(seed, "model")
    model = EncoderClassifier(vocab_size, num_classes, **sizes, seed=seed, dtype=dtype, name=name)
    model.build()
    return model


def compile_predict(model):
    """Returns token_ids int32 [B, T] -> logits float32 [B, C], compiled, without dropout."""

    @tf.function(input_signature=[TOKEN_IDS_SPEC])
    def predict(token_ids):
        return model(token_ids, training=False)

    return predict
