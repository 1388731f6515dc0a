"""Mixture of experts (Shazeer et al. 2017; Fedus et al. 2021): several feed-forward networks, few for each token."""

import keras
import tensorflow as tf

from pipeline.layers.checks import check_token_valid, check_vectors
from pipeline.layers.dense import dense
from pipeline.layers.feed_forward import PositionwiseFeedForward
from pipeline.seeds import derive_seed


def gate(probabilities, top_k):
    """Returns how much each expert counts for each token, in [0, 1]; 0 for all but `top_k` of them, at least.

    Those with the largest probabilities p count (p - t) / (sum of these top_k p), where t is the (top_k + 1)th largest
    p: the softmax over the chosen experts, each times 1 - t / p. What is about to be swapped against another expert
    counts nothing, so the mixture is continuous where the choice changes, and rounding that differs from one runtime to
    the next has no visible effect. The usual weights (p, or p over their sum) jump there, and so does every norming by
    the weights' own sum: it is 0 where the top_k + 1 largest are equal. With as many experts as `top_k` nothing is
    swapped, and p itself counts.

    That top-k gates jump, and what it costs: Hazimeh et al. 2021, "DSelect-k"; another continuous gate, of ReLUs, with
    a number of experts that varies freely: Wang et al. 2024, "ReMoE".

    Args:
        probabilities: float32 [tokens, experts], each row a softmax.
        top_k: largest number of experts of a token.

    Returns:
        (weights float32 [tokens, experts], the `top_k` choices of each token int32 [tokens, top_k]).
    """
    if top_k == probabilities.shape[-1]:
        return probabilities, tf.math.top_k(probabilities, top_k).indices
    largest, choices = tf.math.top_k(probabilities, top_k + 1)
    weights = tf.nn.relu(probabilities - largest[:, top_k:])
    return weights / tf.reduce_sum(largest[:, :top_k], axis=-1, keepdims=True), choices[:, :top_k]


def balancing_loss(probabilities, choices, token_valid=None):
    """Returns E * sum over experts of f * P (Fedus et al. 2021, equation 4, without its factor): float32 scalar.

    f is an expert's share of the choices, which have no gradient, P its mean probability; both over real tokens only.
    It is 1 when all experts are equally probable, and E when one is always the only choice.

    Args:
        probabilities: float32 [tokens, E].
        choices: int32 [tokens, top_k].
        token_valid: bool [tokens], True = real; None = all are.
    """
    num_experts = probabilities.shape[-1]
    real = tf.ones(tf.shape(choices)[:1]) if token_valid is None else tf.cast(token_valid, tf.float32)
    count = tf.maximum(tf.reduce_sum(real), 1.0)
    chosen = tf.reduce_sum(tf.one_hot(choices, num_experts), axis=1) / choices.shape[-1]  # [tokens, E]
    shares = tf.reduce_sum(chosen * real[:, None], axis=0) / count
    means = tf.reduce_sum(probabilities * real[:, None], axis=0) / count
    return num_experts * tf.reduce_sum(shares * means)


@keras.saving.register_keras_serializable(package="pipeline")
class MixtureOfExperts(keras.layers.Layer):
    """Sum over the experts of weight * FeedForward(x) at every position, in the place of `PositionwiseFeedForward`.

    A router, one product in float32 whatever the policy and its softmax, tells for each token how much each expert
    counts; see `gate`. An expert computes the tokens for which it counts and no other, however many they are: none is
    dropped for want of capacity, so what becomes of a token depends neither on its batch mates nor on padding. At
    padded positions no expert counts, and the output is 0.

    Args:
        num_experts: feed-forward networks E, at least 2.
        top_k: largest number of experts of a token.
        d_ff: size of each network's hidden layer.
        dropout: share of hidden values dropped in training.
        seed: integer seed of initial values and dropout, or None for a random one.
        activation: of the networks: "gelu", "relu" or "swiglu".
        load_balancing: weight of `balancing_loss`, which a call in training adds to the layer's `losses`.

    Raises:
        ValueError: there are fewer than 2 experts, not 1 <= top_k <= num_experts, or a negative `load_balancing`.
    """

    def __init__(
        self, num_experts, top_k, d_ff, dropout=0.0, seed=None, activation="gelu", load_balancing=0.0, **kwargs
    ):
        # The router sees what came, not what half precision leaves of it; the experts round for themselves.
        super().__init__(autocast=False, **kwargs)
        if num_experts < 2 or not 1 <= top_k <= num_experts:
            raise ValueError(
                "num_experts must be at least 2, and top_k in [1, num_experts]. "
                f"Received: num_experts={num_experts}, top_k={top_k}"
            )
        if load_balancing < 0:
            raise ValueError(f"load_balancing must be >= 0. Received: load_balancing={load_balancing}")
        self.num_experts = num_experts
        self.top_k = top_k
        self.d_ff = d_ff
        self.dropout = dropout
        self.seed = seed
        self.activation = activation
        self.load_balancing = load_balancing
        self.router = dense(self, num_experts, "router", dtype="float32")
        self.experts = [self._expert(f"expert_{i}") for i in range(num_experts)]

    def _expert(self, name):
        seed = derive_seed(self.seed, name)
        return PositionwiseFeedForward(
            self.d_ff, self.dropout, seed=seed, activation=self.activation, dtype=self.dtype_policy, name=name
        )

    def build(self, x_shape, token_valid_shape=None):
        for layer in (self.router, *self.experts):
            layer.build((None, x_shape[-1]))

    def call(self, x, token_valid=None, training=None):
        """Maps float [B, T, D] to [B, T, D] in the compute dtype; `token_valid` bool [B | 1, T], None = all real."""
        check_vectors("x", x)
        tokens = tf.reshape(x, [-1, x.shape[-1]])  # [B T, D]
        probabilities = tf.nn.softmax(self.router(tokens))  # [B T, E]
        weights, choices = gate(probabilities, self.top_k)
        if token_valid is not None:
            check_token_valid(token_valid, x)
            token_valid = tf.reshape(tf.broadcast_to(token_valid, tf.shape(x)[:2]), [-1])
            weights = tf.where(token_valid[:, None], weights, 0.0)
        if training and self.load_balancing:
            self.add_loss(self.load_balancing * balancing_loss(probabilities, choices, token_valid))
        tokens = tf.cast(tokens, self.compute_dtype)
        mixture = tf.zeros(tf.shape(tokens))
        for expert, weight in zip(self.experts, tf.unstack(weights, axis=1), strict=True):
            rows = tf.where(weight > 0.0)  # [n, 1]; XLA, which knows no such shape, computes all B T and hides the rest
            transformed = expert(tf.gather(tokens, rows[:, 0]), training=training)  # [n, D]
            transformed = tf.cast(transformed, tf.float32) * tf.gather(weight, rows)
            mixture = tf.tensor_scatter_nd_add(mixture, rows, transformed)
        return tf.cast(tf.reshape(mixture, tf.shape(x)), self.compute_dtype)

    def compute_output_shape(self, x_shape, token_valid_shape=None):
        return x_shape

    def get_config(self):
        keys = ("num_experts", "top_k", "d_ff", "dropout", "seed", "activation", "load_balancing")
        return {**super().get_config(), **{key: getattr(self, key) for key in keys}}
