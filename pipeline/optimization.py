"""One step of training, compiled: loss, gradients, clipping, AdamW; and the learning rate of each step."""

import math

import keras
import tensorflow as tf

from pipeline.contract import TOKEN_IDS

_TOKEN_IDS_SPEC = tf.TensorSpec([None, None], tf.int32, TOKEN_IDS)


def learning_rate(step, steps, peak, warmup_ratio):
    """Returns the learning rate of one step: linear warm-up to `peak`, then a cosine towards 0.

    Args:
        step: number of the step, from 0.
        steps: number of all steps.
        peak: the highest rate, reached when the warm-up ends.
        warmup_ratio: share of all steps that warm up.
    """
    warmup = math.ceil(warmup_ratio * steps)
    if step < warmup:
        return peak * (step + 1) / warmup
    return peak * 0.5 * (1.0 + math.cos(math.pi * (step - warmup) / max(steps - warmup, 1)))


def build_optimizer(model, training):
    """Returns AdamW (Loshchilov and Hutter 2019) for a `[training]` section, its variables created.

    Biases, LayerNorm and embeddings do not decay. In mixed_float16 it scales the loss.
    """
    optimizer = keras.optimizers.AdamW(
        learning_rate=training.learning_rate, weight_decay=training.weight_decay, epsilon=1e-8
    )
    optimizer.exclude_from_weight_decay(var_names=["bias", "gamma", "beta", "embeddings"])
    if training.precision == "mixed_float16":
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer)
    optimizer.build(model.trainable_variables)
    return optimizer


def compile_train_step(model, optimizer, clip_norm):
    """Returns the compiled step.

    Args:
        model: a built `EncoderClassifier`.
        optimizer: from `build_optimizer`.
        clip_norm: largest global norm of the gradients.

    Returns:
        (token_ids int32 [B, T], labels int32 [B], rate float32) -> (loss, gradient norm), float32 scalars; the mean
        loss of the batch in nats and the norm before clipping.
    """
    scaled = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
    inner = optimizer.inner_optimizer if scaled else optimizer

    @tf.function(
        input_signature=[
            _TOKEN_IDS_SPEC,
            tf.TensorSpec([None], tf.int32, "labels"),
            tf.TensorSpec([], tf.float32, "rate"),
        ]
    )
    def train_step(token_ids, labels, rate):
        with tf.GradientTape() as tape:
            logits = model(token_ids, training=True)  # [B, C] float32
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits))
            objective = optimizer.scale_loss(loss)
        gradients = tape.gradient(objective, model.trainable_variables)
        scale = optimizer.dynamic_scale.value if scaled else 1.0
        norm = tf.linalg.global_norm(gradients)
        gradients, _ = tf.clip_by_global_norm(gradients, clip_norm * scale, use_norm=norm)
        inner.learning_rate.assign(rate)
        optimizer.apply(gradients, model.trainable_variables)
        return loss, norm / scale

    return train_step


def compile_predict(model):
    """Returns token_ids int32 [B, T] -> logits float32 [B, C], compiled, without dropout."""

    @tf.function(input_signature=[_TOKEN_IDS_SPEC])
    def predict(token_ids):
        return model(token_ids, training=False)

    return predict
