"""Gradient checkpointing (Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost"): memory for time."""

import tensorflow as tf


class Recomputed:
    """Calls a layer and keeps nothing of it for the gradient but its input: the gradient computes the layer again.

    Nothing else changes: outputs and gradients are the same, bit for bit on one device. Dropout draws the same masks
    again, and its state moves once. What the layer adds with `add_loss` is in its `losses`, with a gradient, until the
    model that it is part of is called again.

    Args:
        layer: a built Keras layer with one output and without weight regularizers, e.g. a `PreNormEncoderLayer`.
    """

    def __init__(self, layer):
        self.layer = layer
        # Now, not in a call: Keras would hand them out in the compute dtype of the model that calls.
        self._weights = [v.value for v in layer.trainable_variables]
        self._states = [v.value for v in layer.non_trainable_variables]  # of dropout

    def __call__(self, x, **kwargs):
        """Returns `layer(x, **kwargs)` for a float tensor x; the other arguments get no gradient."""
        states = [tf.convert_to_tensor(state) for state in self._states]

        def run(inputs):
            """Returns ([output, *losses], states afterwards), and changes nothing."""
            x, *weights = inputs
            output, after, losses = self.layer.stateless_call(weights, states, x, return_losses=True, **kwargs)
            return [output, *losses], after

        @tf.custom_gradient
        def forgetful(*inputs):
            outputs, after = _run_as_for_a_gradient(run, inputs)
            for state, value in zip(self._states, after, strict=True):
                state.assign(value)

            def gradient(*upstream):
                # Not before the upstream gradient is there: else TensorFlow would compute all layers again at once, or
                # see that it has done so before and keep that.
                with tf.control_dependencies(upstream), tf.GradientTape(watch_accessed_variables=False) as tape:
                    copies = [tf.identity(tensor) for tensor in inputs]
                    tape.watch(copies)
                    outputs, _ = run(copies)
                return tape.gradient(outputs, copies, upstream, unconnected_gradients="zero")

            return outputs, gradient

        output, *losses = forgetful(x, *(tf.convert_to_tensor(weight) for weight in self._weights))
        for loss in losses:
            self.layer.add_loss(loss)
        return output


def _run_as_for_a_gradient(run, inputs):
    """Returns what `run(inputs)` does, compiled as if its gradient were wanted too.

    TensorFlow fuses operations whose intermediate result nobody else uses (x / sqrt(y) becomes x * rsqrt(y), product,
    scale and mask of the attention scores one operation), which rounds differently from what the gradient computes
    again, and from training that keeps all activations. So there is a gradient, in a branch that is never taken.
    """
    with tf.GradientTape(watch_accessed_variables=False) as tape:
        tape.watch(inputs)
        outputs, after = run(inputs)
    never = tf.shape(inputs[0])[0] < 0  # which TensorFlow does not find out
    unused = tf.cond(never, lambda: tape.gradient(outputs, inputs, unconnected_gradients="zero"), lambda: inputs)
    with tf.control_dependencies(unused):
        return [tf.identity(output) for output in outputs], after
