"""How weights move: the learning rate of each step, AdamW, the loss scale of float16 and the averaged weights."""

import contextlib
import math

import tensorflow as tf

_NO_DECAY = ("bias", "gamma", "beta", "embeddings", "position_table", "class_vector")


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


class AdamW:
    """AdamW (Loshchilov and Hutter 2019, algorithm 2); biases, LayerNorm, embeddings and the like do not decay.

    On TensorFlow's fused Adam kernel: one pass over gradient, moments and variable. Keras's AdamW makes a dozen passes,
    4 % of a training step of the reference model.

    Args:
        variables: the `keras.Variable`s that it updates.
        weight_decay: what a matrix loses in one step, in shares of itself and of the learning rate.
        beta_1: decay of the gradients' mean.
        beta_2: decay of the squared gradients' mean.
        epsilon: keeps the divisor away from 0.
    """

    def __init__(self, variables, weight_decay, beta_1=0.9, beta_2=0.999, epsilon=1e-8):
        self.weight_decay = weight_decay
        self.beta_1 = beta_1
        self.beta_2 = beta_2
        self.epsilon = epsilon
        self.steps = tf.Variable(0.0, trainable=False, name="steps")
        self._targets = [v.value for v in variables]
        self._decays = [v.name not in _NO_DECAY for v in variables]
        self._means = [_zeros_like(v) for v in self._targets]
        self._squares = [_zeros_like(v) for v in self._targets]

    @property
    def variables(self):
        """Its whole state, always in the same order."""
        return [self.steps, *self._means, *self._squares]

    def apply(self, gradients, rate):
        """Does one step; `gradients` are dense float32 in the order of the variables, `rate` is a float32 scalar."""
        step = self.steps.assign_add(1.0)
        powers = {"beta1_power": self.beta_1**step, "beta2_power": self.beta_2**step}
        for variable, gradient, mean, square, decays in zip(
            self._targets, gradients, self._means, self._squares, self._decays, strict=True
        ):
            if decays and self.weight_decay:
                variable.assign_sub(variable * (self.weight_decay * rate))
            tf.raw_ops.ResourceApplyAdam(
                var=variable.handle,
                m=mean.handle,
                v=square.handle,
                lr=rate,
                beta1=self.beta_1,
                beta2=self.beta_2,
                epsilon=self.epsilon,
                grad=gradient,
                **powers,
            )


class LossScale:
    """Keeps small gradients of float16 from vanishing (Micikevicius et al. 2018, section 3.2).

    The loss is multiplied by `value`, the gradients are divided by it. A step whose gradients overflow is skipped and
    halves it; 2,000 good steps in a row double it.
    """

    _GROW_AFTER = 2000

    def __init__(self):
        self.value = tf.Variable(2.0**15, trainable=False, name="loss_scale")
        self.good_steps = tf.Variable(0, trainable=False, name="good_steps")

    @property
    def variables(self):
        """Its whole state, always in the same order."""
        return [self.value, self.good_steps]

    def update(self, is_good):
        """Adapts the scale after a step; `is_good` is a boolean scalar: every gradient was finite."""
        good_steps = tf.where(is_good, self.good_steps + 1, 0)
        grows = good_steps == self._GROW_AFTER
        shrunk = tf.maximum(self.value / 2.0, 0.5)  # below 1: nothing is left to scale
        self.value.assign(tf.where(is_good, tf.where(grows, self.value * 2.0, self.value), shrunk))
        self.good_steps.assign(tf.where(grows, 0, good_steps))


class WeightAverage:
    """Exponential moving average of the weights (Polyak and Juditsky 1992): less noisy than the last.

    After step t an average moves by 1 - min(decay, (1 + t) / (10 + t)) towards its weight, so that the initial weights
    are soon forgotten.

    Args:
        variables: the `keras.Variable`s.
        decay: in (0, 1); near 1 averages over more steps.
    """

    def __init__(self, variables, decay):
        self.decay = decay
        self._weights = [v.value for v in variables]
        self.variables = [tf.Variable(w, trainable=False) for w in self._weights]

    def update(self, step):
        """Moves the averages; `step` is a float32 scalar, the number of steps done."""
        share = 1.0 - tf.minimum(self.decay, (1.0 + step) / (10.0 + step))
        for average, weight in zip(self.variables, self._weights, strict=True):
            average.assign_sub((average - weight) * share)

    @contextlib.contextmanager
    def in_place(self):
        """The weights are the averages inside of this block, and what they were after it."""
        kept = [tf.identity(w) for w in self._weights]
        try:
            for weight, average in zip(self._weights, self.variables, strict=True):
                weight.assign(average)
            yield
        finally:
            for weight, value in zip(self._weights, kept, strict=True):
                weight.assign(value)


def _zeros_like(variable):
    return tf.Variable(tf.zeros(variable.shape), trainable=False)
