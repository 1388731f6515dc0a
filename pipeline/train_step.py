"""One optimizer step, compiled: the loss of its batches, their gradients, clipping and AdamW."""

import contextlib

import numpy as np
import tensorflow as tf

from pipeline.classifier import TOKEN_IDS_SPEC
from pipeline.losses import smoothed_cross_entropy, soft_cross_entropy, symmetric_divergence
from pipeline.optimization import AdamW, LossScale, WeightAverage
from pipeline.replicas import OneDevice

_LABELS_SPEC = tf.TensorSpec([None], tf.int32, "labels")
_SOFT_LABELS_SPEC = tf.TensorSpec([None, None], tf.float32, "soft_labels")
_SCALAR_SPEC = tf.TensorSpec([], tf.float32)


class TrainStep:
    """What training changes, all of it in variables, and the step that changes it.

    On several replicas each computes the part that its rows have in the objective and in the gradients. Those parts are
    summed once in a step; what follows is the same on all.

    With a teacher a batch has a third array, its soft labels; the loss of a row is then (1 - w) * cross-entropy(label)
    + w * cross-entropy(soft labels), w being `training.teacher_weight` (Hinton et al. 2015, at temperature 1).

    Args:
        model: a built `EncoderClassifier`.
        training: a `pipeline.config.TrainingConfig`.
        class_weights: float32 [C], how much a row of each class counts.
        replicas: where it runs, see `pipeline.replicas`; model and step are made in its scope.
    """

    batch_spec = (TOKEN_IDS_SPEC, _LABELS_SPEC)

    def __init__(self, model, training, class_weights, replicas=None):
        self.model = model
        self.training = training
        self.replicas = replicas or OneDevice()
        if training.teacher:
            self.batch_spec = (*self.batch_spec, _SOFT_LABELS_SPEC)
        self.class_weights = np.asarray(class_weights, np.float32)
        weights = model.trainable_variables
        self.optimizer = AdamW(weights, training.weight_decay, beta_2=training.beta_2)
        self.loss_scale = LossScale() if training.precision == "mixed_float16" else None
        self.average = WeightAverage(weights, training.ema_decay) if training.ema_decay else None
        # Empty between steps, so no part of the state.
        self._sums = [tf.Variable(tf.zeros(w.shape)) for w in weights] if training.accumulate_batches > 1 else []
        self._loss_sum = tf.Variable(0.0)
        self._add = self.replicas.compile(self._add, [self.batch_spec, _SCALAR_SPEC])
        self._step = self.replicas.compile(self._step, [self.batch_spec, _SCALAR_SPEC, _SCALAR_SPEC])

    @property
    def variables(self):
        """Every variable of the state, always in the same order."""
        parts = [self.optimizer, self.loss_scale, self.average]
        return [v.value for v in self.model.variables] + [v for part in parts if part for v in part.variables]

    def __call__(self, batches, rate):
        """Does one optimizer step on one or more batches, as if they were one.

        Args:
            batches: pairs (token_ids int32 [B, T], labels int32 [B]), B and T each their own; with a teacher triples,
                the third array being soft_labels float32 [B, C].
            rate: the learning rate.

        Returns:
            (loss, gradient norm) as floats: the objective, in nats, averaged over the rows of all batches by their
            class weights, without what the balance of experts adds; the global norm of the gradients before clipping,
            not finite when float16 overflowed and the step was skipped.
        """
        with np.errstate(over="ignore"):  # what is infinite here ends as a loss or weights that are not finite
            total = np.float32(sum(self._weight(*batch) for batch in batches) or 1.0)
            rate = np.float32(rate)
        for batch in batches[:-1]:
            self._add(tuple(batch), total)
        loss, norm = self._step(tuple(batches[-1]), total, rate)
        return float(loss), float(norm)

    def is_skipped(self, norm):
        """True when a step of this gradient norm was no failure: the loss scale was lowered instead.

        When even a scale of 1 overflowed, the gradients themselves are not finite.
        """
        return self.loss_scale is not None and not np.isfinite(norm) and float(self.loss_scale.value) >= 1.0

    def evaluated_weights(self):
        """A context in which the model has the weights that are evaluated and exported: the averaged ones, if any."""
        return self.average.in_place() if self.average else contextlib.nullcontext()

    def _add(self, batch, total):
        loss, gradients = self._gradients(batch, total)
        self._loss_sum.assign_add(loss)
        for sum_, gradient in zip(self._sums, gradients, strict=True):
            sum_.assign_add(gradient)

    def _step(self, batch, total, rate):
        loss, gradients = self._gradients(batch, total)
        if self._sums:
            loss += self._loss_sum
            gradients = [s + g for s, g in zip(self._sums, gradients, strict=True)]
            for variable in (self._loss_sum, *self._sums):
                variable.assign(tf.zeros(variable.shape))
        *gradients, loss = self.replicas.sum([*gradients, loss])
        norm = tf.linalg.global_norm(gradients)
        gradients, _ = tf.clip_by_global_norm(gradients, self.training.clip_norm, use_norm=norm)
        if self.loss_scale is None:
            self._apply(gradients, rate)
        else:
            is_good = tf.math.is_finite(norm)
            tf.cond(is_good, lambda: self._apply(gradients, rate), lambda: None)
            self.loss_scale.update(is_good)
        return loss, norm

    def _gradients(self, batch, total):
        """Returns this replica's part of the objective and the gradients of that part, dense float32."""
        batch = [self.replicas.share(rows) for rows in batch]
        scale = 1.0 if self.loss_scale is None else self.loss_scale.value
        with tf.GradientTape() as tape:
            loss, weight = self._weighted_loss(*batch)
            loss, share = loss / total, weight / total
            objective = loss
            if self.training.load_balancing and self.model.losses:
                # Of this part's own tokens; it counts by the share that its rows have in the step.
                balance = tf.add_n(self.model.losses) / len(self.model.members())
                objective += self.training.load_balancing * share * balance
            objective *= scale
        gradients = tape.gradient(objective, self.model.trainable_variables)
        # Dense: the norm of an embedding's slices would count a token once for every place where it stands.
        gradients = [tf.convert_to_tensor(g) for g in gradients]
        return loss, gradients if self.loss_scale is None else [g / scale for g in gradients]

    def _weight(self, token_ids, labels, *soft_labels):
        """Returns how much a batch counts: a number."""
        return self.class_weights[labels].sum()

    def _weighted_loss(self, token_ids, labels, *soft_labels):
        """Returns (the sum of the objectives of these rows by how much each counts, how much they count): scalars."""
        row_weights = tf.gather(self.class_weights, labels)
        losses = self._row_losses(token_ids, labels, *soft_labels)
        return tf.reduce_sum(losses * row_weights), tf.reduce_sum(row_weights)

    def _row_losses(self, token_ids, *targets):
        """Returns the objective of every row, the mean of all members': float32 [B]."""
        members = self.model.members()
        return tf.add_n([self._losses_of(member, token_ids, *targets) for member in members]) / len(members)

    def _losses_of(self, model, token_ids, *targets):
        if not self.training.r_drop:
            return self._cross_entropies(model(token_ids, training=True), *targets)
        # R-Drop (Liang et al. 2021): the same rows twice, each time with other dropout; half of the paper's objective,
        # which adds the two cross-entropies up.
        twice = model(tf.concat([token_ids, token_ids], 0), training=True)  # [2B, C]
        losses = self._cross_entropies(twice, *(tf.concat([target, target], 0) for target in targets))
        difference = symmetric_divergence(*tf.split(twice, 2))
        return tf.add_n(tf.split(losses, 2)) / 2.0 + self.training.r_drop / 4.0 * difference

    def _cross_entropies(self, logits, labels, soft_labels=None):
        """Returns float32 [B], in nats."""
        losses = smoothed_cross_entropy(logits, labels, self.training.label_smoothing)
        if soft_labels is None:
            return losses
        weight = self.training.teacher_weight
        return (1.0 - weight) * losses + weight * soft_cross_entropy(logits, soft_labels)

    def _apply(self, gradients, rate):
        self.optimizer.apply(gradients, rate)
        if self.average:
            self.average.update(self.optimizer.steps)
