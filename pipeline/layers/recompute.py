"""Gradient checkpointing (Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost"): memory for time."""

import tensorflow as tf


def recompute(layer, x, **kwargs):
    """Returns `layer(x, **kwargs)` and keeps nothing of it for the gradient but x: that computes the layer again.

    Nothing else changes: the gradients are the same, bit for bit on one device. Dropout draws the same masks again, and
    its state moves once. What the layer adds with `add_loss` is in its `losses`, with a gradient.

    Args:
        layer: a built Keras layer with one output and without weight regularizers, e.g. a `PreNormEncoderLayer`.
        x: float tensor, the layer's first argument.
        **kwargs: its other arguments; they get no gradient.
    """
    states = [tf.convert_to_tensor(v.value) for v in layer.non_trainable_variables]  # of dropout

    def run(x, weights):
        """Returns ([output, *losses], states afterwards), and changes nothing."""
        output, after, losses = layer.stateless_call(weights, states, x, return_losses=True, **kwargs)
        return [output, *losses], after

    @tf.custom_gradient
    def forgetful(x, *weights):
        outputs, after = run(x, weights)
        for variable, state in zip(layer.non_trainable_variables, after, strict=True):
            variable.assign(state)

        def gradient(*upstream):
            # Not before the gradient is there: else TensorFlow would run it early, or take it for the first computation
            # and keep what that computed.
            with tf.control_dependencies(upstream), tf.GradientTape(watch_accessed_variables=False) as tape:
                inputs = [tf.identity(tensor) for tensor in (x, *weights)]
                tape.watch(inputs)
                outputs, _ = run(inputs[0], inputs[1:])
            return tape.gradient(outputs, inputs, upstream, unconnected_gradients="zero")

        return outputs, gradient

    output, *losses = forgetful(x, *(tf.convert_to_tensor(v.value) for v in layer.trainable_variables))
    for loss in losses:
        layer.add_loss(loss)
    return output
