"""The model: a Transformer encoder, pooling and a linear head; by default Pre-Norm, with the mean over the tokens."""

import math

import keras
import tensorflow as tf
from keras import ops

from pipeline.config import CHUNKED_ABOVE, KEY_CHUNK
from pipeline.contract import PAD_ID, TOKEN_IDS
from pipeline.ensemble import EncoderEnsemble
from pipeline.layers.attention import MultiHeadAttention, ScaledDotProductAttention, padding_mask
from pipeline.layers.checks import check_token_ids
from pipeline.layers.chunked_attention import ChunkedAttention
from pipeline.layers.convolution import PreNormConvolution
from pipeline.layers.dense import Dense
from pipeline.layers.dropout import Dropout
from pipeline.layers.encoder import PostNormEncoderLayer, PreNormEncoderLayer
from pipeline.layers.experts import MixtureOfExperts
from pipeline.layers.feed_forward import PositionwiseFeedForward
from pipeline.layers.linear_attention import LinearAttention
from pipeline.layers.local_attention import LocalAttention
from pipeline.layers.normalization import LayerNorm
from pipeline.layers.pooling import ClassVector, FirstPooling, MaskedMaxPooling, MaskedMeanPooling
from pipeline.layers.position import LearnedPosition, RotaryPosition, SinusoidalPosition
from pipeline.layers.recompute import Recomputed
from pipeline.seeds import derive_seed

TOKEN_IDS_SPEC = tf.TensorSpec([None, None], tf.int32, TOKEN_IDS)


@keras.saving.register_keras_serializable(package="pipeline")
class EncoderClassifier(keras.Model):
    """Token ids in, class logits out.

    embedding * sqrt(D), convolution if there is one, + positions, `num_layers` encoder layers, pooling to one vector,
    LayerNorm, dropout, one Dense layer to the logits.

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
        position: "sinusoidal", "learned", "rope", "alibi" or "none".
        pooling: "mean" or "max" over the real tokens, or "cls", the place of a learned vector in front of them.
        norm: "pre" or "post".
        activation: "gelu", "relu" or "swiglu".
        num_kv_heads: heads of keys and values; 0 = `num_heads`.
        attention: "full", "local", "local_global" or "linear".
        window: of local attention, tokens on each side.
        global_tokens: of "local_global", first tokens that see all and are seen by all.
        num_experts: of a mixture-of-experts feed-forward network; 0 = one network for all tokens.
        top_k: experts that each token goes to.
        convolution: neighbouring tokens, an odd number, that a convolution before the positions spans; 0 = none.
        recompute: whether training computes each encoder layer again for its gradient instead of keeping its
            activations; changes no result but for rounding.
        chunked_above: "full" attention is computed in chunks, with memory that grows with the length, where
            `max_length` is above; in one piece elsewhere. The results and the weights are the same.
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
        position="sinusoidal",
        pooling="mean",
        norm="pre",
        activation="gelu",
        num_kv_heads=0,
        attention="full",
        window=64,
        global_tokens=1,
        num_experts=0,
        top_k=2,
        convolution=0,
        recompute=False,
        chunked_above=CHUNKED_ABOVE,
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
            "position": position,
            "pooling": pooling,
            "norm": norm,
            "activation": activation,
            "num_kv_heads": num_kv_heads,
            "attention": attention,
            "window": window,
            "global_tokens": global_tokens,
            "num_experts": num_experts,
            "top_k": top_k,
            "convolution": convolution,
            "recompute": recompute,
            "chunked_above": chunked_above,
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
        self.convolution = None
        if convolution:
            self.convolution = PreNormConvolution(
                convolution, dropout, seed=derive_seed(seed, "convolution"), dtype=policy, name="convolution"
            )
        self.class_vector = None
        if pooling == "cls":
            self.class_vector = ClassVector(derive_seed(seed, "class_vector"), dtype="float32", name="class_vector")
        # With the class vector there is one position more than tokens.
        self._positions = max_length + (pooling == "cls")
        added = {"sinusoidal": SinusoidalPosition, "learned": LearnedPosition}.get(position)
        self.position = added and added(self._positions, dtype=policy, name="position")
        self.encoder_layers = [self._encoder_layer(i) for i in range(num_layers)]
        pooling_layer = {"mean": MaskedMeanPooling, "max": MaskedMaxPooling, "cls": FirstPooling}[pooling]
        self.pooling = pooling_layer(dtype="float32", name="pooling")
        self.head_norm = LayerNorm(name="head_norm")
        self.head_dropout = Dropout(
            head_dropout, seed=derive_seed(seed, "head_dropout"), dtype="float32", name="head_dropout"
        )
        # Small: the first answers are near 1 / C for every class, and the first loss near ln C.
        initial = keras.initializers.RandomNormal(stddev=0.02, seed=derive_seed(seed, "head"))
        self.head = Dense(num_classes, kernel_initializer=initial, dtype="float32", name="head")

    def _encoder_layer(self, i):
        config, seed, policy = self._config, derive_seed(self.seed, f"encoder_{i}"), self.dtype_policy
        layer = {"pre": PreNormEncoderLayer, "post": PostNormEncoderLayer}[config["norm"]]
        return layer(
            config["num_heads"],
            config["d_ff"],
            config["dropout"],
            seed=seed,
            attention=self._attention(derive_seed(seed, "attention")),
            feed_forward=self._feed_forward(derive_seed(seed, "feed_forward")),
            dtype=policy,
            name=f"encoder_{i}",
        )

    def _attention(self, seed):
        config, policy = self._config, self.dtype_policy
        rotary = RotaryPosition(self._positions, dtype=policy, name="rotary") if config["position"] == "rope" else None
        return MultiHeadAttention(
            config["d_model"],
            config["num_heads"],
            config["dropout"],
            seed=seed,
            num_kv_heads=config["num_kv_heads"],
            core=self._attention_core(derive_seed(seed, "attention")),
            rotary=rotary,
            dtype=policy,
            name="attention",
        )

    def _attention_core(self, seed):
        config = self._config
        common = {"alibi": config["position"] == "alibi", "dtype": self.dtype_policy, "name": "attention"}
        if config["attention"] == "linear":
            return LinearAttention(dtype=common["dtype"], name=common["name"])
        if config["attention"] == "full":
            if self.is_chunked:
                return ChunkedAttention(config["dropout"], seed=seed, chunk=KEY_CHUNK, **common)
            return ScaledDotProductAttention(config["dropout"], seed=seed, **common)
        num_global = config["global_tokens"] if config["attention"] == "local_global" else 0
        return LocalAttention(config["window"], num_global, config["dropout"], seed=seed, **common)

    def members(self):
        """Returns the models whose own losses are minimized: this one alone."""
        return [self]  # no property: Keras follows those when it saves a model

    @property
    def vocab_size(self):
        """Number of token ids."""
        return self._config["vocab_size"]

    @property
    def num_classes(self):
        """Number of classes."""
        return self._config["num_classes"]

    @property
    def is_chunked(self):
        """True when attention is full and computed in chunks of keys."""
        return self._config["attention"] == "full" and self._config["max_length"] > self._config["chunked_above"]

    def _feed_forward(self, seed):
        config = self._config
        common = {"seed": seed, "activation": config["activation"], "dtype": self.dtype_policy, "name": "feed_forward"}
        if config["num_experts"]:
            # With a weight of 1: how much balance counts is the training step's business.
            return MixtureOfExperts(
                config["num_experts"], config["top_k"], config["d_ff"], config["dropout"], load_balancing=1.0, **common
            )
        return PositionwiseFeedForward(config["d_ff"], config["dropout"], **common)

    @property
    def encoder_weights(self):
        """The weights that `encode` uses, in a fixed order: all but the head's."""
        of_head = {id(weight) for layer in (self.head_norm, self.head) for weight in layer.weights}
        return [weight for weight in self.weights if id(weight) not in of_head]

    def copy_encoder(self, other):
        """Takes over the encoder of another model of equal sizes; the head and the state of dropout stay."""
        for mine, its in zip(self.encoder_weights, other.encoder_weights, strict=True):
            mine.assign(its.value.numpy())

    def build(self, token_ids_shape=None):
        """Creates every weight; no data is needed."""
        hidden_shape = (None, None, self.d_model)
        self.embedding.build((None, None))
        for layer in (self.convolution, self.class_vector, self.position, *self.encoder_layers):
            if layer is not None:
                layer.build(hidden_shape)
        self._recomputed = [Recomputed(layer, self.add_loss) for layer in self.encoder_layers]
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
        x, _ = self._encode(token_ids, training)
        return x if self.class_vector is None else tf.slice(x, [0, 1, 0], [-1, -1, -1])

    def _encode(self, token_ids, training):
        """Returns (float32 [B, T', D], token_valid bool [B, T']); T' is T, or T + 1 with the class vector in front."""
        check_token_ids(token_ids, self._config["max_length"])
        token_valid = token_ids != PAD_ID  # [B, T]
        x = self.embedding(token_ids) * math.sqrt(self.d_model)  # [B, T, D]
        if self._config["norm"] == "post":
            # No LayerNorm comes before the first products: a large vector of PAD would overflow in float16.
            x = x * ops.cast(ops.expand_dims(token_valid, -1), x.dtype)
        if self.convolution is not None:
            x = self.convolution(x, token_valid, training=training)
        if self.class_vector is not None:
            x, token_valid = self.class_vector(x, token_valid)
        if self.position is not None:
            x = self.position(x)
        attend = padding_mask(token_valid)  # [B, 1, T']
        for layer in self._recomputed if training and self._config["recompute"] else self.encoder_layers:
            x = layer(x, attend=attend, training=training)
        return x, token_valid

    def in_one_piece(self):
        """Returns a copy, the same but for its full attention, which is not computed in chunks."""
        copy = type(self).from_config({**self.get_config(), "chunked_above": self._config["max_length"]})
        copy.build()
        for ours, theirs in zip(copy.weights, self.weights, strict=True):
            ours.assign(theirs)
        return copy

    def features(self, token_ids, training=None):
        """Returns what the head takes, float32 [B, D]: one normalized vector for each text."""
        pooled = self.pooling(*self._encode(token_ids, training))
        return self.head_dropout(self.head_norm(pooled), training=training)

    def call(self, token_ids, training=None):
        """Returns logits float32 [B, C] for token_ids int32 [B, T]; a text without tokens has one defined answer."""
        return self.head(self.features(token_ids, training))

    def compute_output_shape(self, token_ids_shape):
        return (token_ids_shape[0], self._config["num_classes"])

    def compute_output_spec(self, token_ids, training=None):
        return keras.KerasTensor(self.compute_output_shape(token_ids.shape), "float32")

    def get_config(self):
        return {**super().get_config(), **self._config}


def build_classifier(model_config, vocab_size, num_classes, seed=None, dtype="float32", recompute=False):
    """Returns a built `EncoderClassifier` for the `[model]` section of a job, an `EncoderEnsemble` of several.

    Args:
        model_config: a `pipeline.config.ModelConfig`.
        vocab_size: number of token ids.
        num_classes: number of labels.
        seed: root seed of the initial values and of dropout, or None for a random one.
        dtype: Keras dtype policy.
        recompute: `training.recompute` of a job; matters to training only.
    """
    sizes = model_config.model_dump(exclude={"encoders", "ngram_pairs"})  # the others are the encoder's own

    def build(name, seed):
        # Fixed names: Keras would count the models that the process has built.
        model = EncoderClassifier(
            vocab_size, num_classes, **sizes, recompute=recompute, seed=seed, dtype=dtype, name=name
        )
        model.build()
        return model

    if model_config.encoders == 1:
        return build("encoder_classifier", derive_seed(seed, "model"))
    members = [build(f"member_{i}", derive_seed(seed, f"model/{i}")) for i in range(model_config.encoders)]
    return EncoderEnsemble(members, name="encoder_ensemble")


def compile_predict(model):
    """Returns token_ids int32 [B, T] -> logits float32 [B, C], compiled, without dropout."""

    @tf.function(input_signature=[TOKEN_IDS_SPEC])
    def predict(token_ids):
        return model(token_ids, training=False)

    return predict
