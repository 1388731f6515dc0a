import math

import numpy as np
import onnx
import onnxruntime
import pytest
import tensorflow as tf
import tf2onnx.optimizer
from tf2onnx import tf_loader, tfonnx

from export.onnx_graph import _LEFT_OUT_PASSES
from pipeline.layers import MixtureOfExperts
from pipeline.layers.experts import balancing_loss, gate

SIZE, HIDDEN = 6, 10


def random(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def built(num_experts=4, top_k=2, **kwargs):
    """A layer whose biases are not zero either, and whose router is sure of something."""
    layer = MixtureOfExperts(num_experts, top_k, HIDDEN, seed=1, **kwargs)
    layer.build((None, None, SIZE))
    for i, v in enumerate(layer.trainable_variables):
        v.assign(v + 0.5 * random(*v.shape, seed=i))
    return layer


def exact_gelu(x):
    return np.vectorize(lambda v: v * 0.5 * (1.0 + math.erf(v / math.sqrt(2.0))))(x)


def softmax(logits):
    shares = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return shares / shares.sum(axis=-1, keepdims=True)


def mixture_of(layer, x):
    """The layer in NumPy and float64, one token after the other."""
    router_kernel, router_bias = (np.asarray(v, np.float64) for v in layer.router.weights)
    out = np.zeros(x.shape)
    for place in np.ndindex(x.shape[:2]):
        token = x[place].astype(np.float64)
        p = softmax(token @ router_kernel + router_bias)
        order = np.argsort(-p)
        chosen = order[: layer.top_k]
        threshold = p[order[layer.top_k]] if layer.top_k < layer.num_experts else 0.0
        for i in chosen:
            w1, b1, w2, b2 = (np.asarray(v, np.float64) for v in layer.experts[i].weights)
            out[place] += (p[i] - threshold) / p[chosen].sum() * (exact_gelu(token @ w1 + b1) @ w2 + b2)
    return out


def dense_mixture(layer, x):
    """What every expert makes of every token, weighted: the same function with another gradient."""
    tokens = tf.reshape(x, [-1, x.shape[-1]])
    weights, _ = gate(tf.nn.softmax(layer.router(tokens)), layer.top_k)
    parts = [expert(tokens) * weights[:, i, None] for i, expert in enumerate(layer.experts)]
    return tf.reshape(tf.add_n(parts), tf.shape(x))


# The gate.


@pytest.mark.parametrize(
    ("top_k", "expected"),
    [(1, [0.0, 0.4, 0.0]), (2, [0.125, 0.375, 0.0]), (3, [0.3, 0.5, 0.2])],  # (0.5 - 0.3) / 0.5; (0.5 - 0.2) / 0.8
)
def test_gate_by_hand(top_k, expected):
    weights, choices = gate(tf.constant([[0.3, 0.5, 0.2]]), top_k)
    np.testing.assert_allclose(weights, [expected], atol=1e-6, rtol=0)
    assert choices.numpy().tolist() == [[1, 0, 2][:top_k]]


@pytest.mark.parametrize("top_k", [1, 2])
def test_a_tie_that_swaps_experts_moves_nothing(top_k):
    # Of equally probable experts a change of 1e-6 chooses either; what they make of a token differs by more than 0.1.
    layer = built(num_experts=3, top_k=top_k)
    kernel, bias = layer.router.weights
    tied = random(SIZE, seed=5)
    first = 4.0 * random(SIZE, seed=6) if top_k == 2 else -4.0 * np.abs(random(SIZE, seed=7))
    x = np.abs(random(1, 1, SIZE, seed=7))
    kernel.assign(np.stack([np.abs(first) if top_k == 2 else first, tied, tied], axis=1))
    bias.assign(np.zeros(3))
    nudge = np.zeros((2, 3), np.float32)
    nudge[0, 1] = nudge[1, 2] = 1e-6
    outputs, choices = [], []
    for values in nudge:
        bias.assign(values)
        outputs.append(layer(x).numpy())
        choices.append(gate(tf.nn.softmax(layer.router(x[0])), top_k)[1].numpy()[0].tolist())
    assert [chosen[-1] for chosen in choices] == [1, 2]
    assert np.abs(layer.experts[1](x) - layer.experts[2](x)).max() > 0.1
    assert np.abs(outputs[0] - outputs[1]).max() < 1e-5


def test_balancing_loss_by_hand():
    uniform, first = tf.fill([5, 4], 0.25), tf.one_hot([0] * 5, 4)
    assert float(balancing_loss(uniform, gate(uniform, 2)[1])) == pytest.approx(1.0)
    assert float(balancing_loss(first, gate(first, 1)[1])) == pytest.approx(4.0)
    p = tf.constant([[0.7, 0.2, 0.1], [0.5, 0.4, 0.1], [0.1, 0.1, 0.8]])
    choices = tf.constant([[0, 1], [0, 1], [2, 0]])
    # Of the two real tokens f = 1/2, 1/2, 0 and P = 0.6, 0.3, 0.1.
    assert float(balancing_loss(p, choices, [True, True, False])) == pytest.approx(3 * (0.3 + 0.15))
    # Of all three f = 1/2, 1/3, 1/6 and P = 13/30, 7/30, 1/3.
    assert float(balancing_loss(p, choices)) == pytest.approx(3 * (13 / 60 + 7 / 90 + 1 / 18))
    assert float(balancing_loss(p, choices, [False] * 3)) == 0.0


# The layer.


@pytest.mark.parametrize("top_k", [1, 2, 4])
def test_equals_numpy_at_every_position(top_k):
    layer, x = built(top_k=top_k), random(3, 5, SIZE)
    np.testing.assert_allclose(layer(x), mixture_of(layer, x), atol=1e-5, rtol=1e-5)


def test_the_experts_start_with_other_weights_each():
    layer = MixtureOfExperts(4, 2, HIDDEN, seed=1)
    layer.build((None, None, SIZE))
    assert len({expert.hidden.kernel.numpy().tobytes() for expert in layer.experts}) == 4


def test_a_token_depends_neither_on_batch_mates_nor_on_padding():
    layer, x = built(), random(3, 5, SIZE)
    token_valid = np.arange(5) < np.array([[3], [5], [0]])
    out = layer(x, token_valid=token_valid).numpy()
    assert not out[~token_valid].any()
    for row, count in ((0, 3), (1, 5)):
        alone = layer(x[row : row + 1, :count])
        np.testing.assert_allclose(out[row, :count], alone[0], atol=1e-6, rtol=1e-6)
    other = np.where(token_valid[:, :, None], x, 100.0)
    np.testing.assert_array_equal(layer(other.astype(np.float32), token_valid=token_valid), out)


def test_no_token_is_dropped_when_all_want_one_expert():
    layer, x = built(top_k=1), random(4, 50, SIZE)
    layer.router.bias.assign([0.0, 50.0, 0.0, 0.0])
    np.testing.assert_allclose(layer(x), layer.experts[1](x), atol=1e-5, rtol=1e-5)


def test_the_experts_compute_their_own_tokens_only():
    layer = built(top_k=1)
    layer.router.kernel.assign(np.eye(SIZE, 4) * 100.0)
    layer.router.bias.assign(np.zeros(4))
    rows = []
    for expert in layer.experts:
        hidden = expert.hidden

        def counted(x, training=None, call=hidden.call):
            rows.append(x.shape[0])
            return call(x)

        hidden.call = counted
    x = np.eye(SIZE, dtype=np.float32)[[0, 0, 2, 1, 0, 3]]
    layer(x[None], token_valid=np.array([[True, True, True, True, True, False]]))
    assert rows == [3, 1, 1, 0]


@pytest.mark.parametrize(("dtype", "atol"), [("mixed_bfloat16", 0.05), ("mixed_float16", 0.01)])
def test_half_precision_routes_as_float32_does(dtype, atol):
    x = random(3, 5, SIZE)
    layer, exact = built(dtype=dtype), built()
    assert layer.router(x).dtype == tf.float32
    np.testing.assert_array_equal(layer.router(x), exact.router(x))
    out = layer(x)
    assert out.dtype.name == dtype.removeprefix("mixed_")
    np.testing.assert_allclose(tf.cast(out, tf.float32), exact(x), atol=atol, rtol=0.02)


@pytest.mark.parametrize("jit", [False, True])
def test_compiled_for_any_shape(jit):
    layer = built(dropout=0.1)
    signature = [tf.TensorSpec([None, None, SIZE]), tf.TensorSpec([None, None], tf.bool)]
    call = tf.function(layer, input_signature=signature, jit_compile=jit)
    for batch, length in ((2, 3), (1, 1), (4, 7)):
        x, token_valid = random(batch, length, SIZE), random(batch, length, seed=1) > 0
        np.testing.assert_allclose(call(x, token_valid), layer(x, token_valid=token_valid), atol=1e-5, rtol=1e-5)
    assert call.experimental_get_tracing_count() == 1


@pytest.mark.parametrize(("top_k", "jit"), [(1, False), (2, False), (2, True), (4, False)])
def test_gradients_equal_those_of_the_dense_computation(top_k, jit):
    layer, x, upstream = built(top_k=top_k), tf.constant(random(3, 5, SIZE)), random(3, 5, SIZE, seed=9)

    def gradients_of(function):
        with tf.GradientTape() as tape:
            tape.watch(x)
            total = tf.reduce_sum(function(x) * upstream)
        return [tf.convert_to_tensor(g) for g in tape.gradient(total, [x, *(v.value for v in layer.weights)])]

    found = tf.function(lambda: gradients_of(layer), jit_compile=jit)()
    expected = gradients_of(lambda x: dense_mixture(layer, x))
    assert all(np.abs(g).max() > 1e-3 for g in found)  # the router's too, also of a single expert
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5, rtol=1e-4)


def test_gradients_without_any_token():
    layer, x = built(dropout=0.1), tf.constant(random(2, 3, SIZE))
    with tf.GradientTape() as tape:
        out = layer(x, token_valid=tf.zeros([2, 3], tf.bool), training=True)
    assert not out.numpy().any()
    gradients = tape.gradient(out, [v.value for v in layer.trainable_variables])
    assert all(not tf.convert_to_tensor(g).numpy().any() for g in gradients)


@pytest.mark.parametrize("top_k", [1, 2])
def test_learns_to_fit(top_k):
    layer = MixtureOfExperts(3, top_k, 16, seed=1, load_balancing=0.01)
    x, target = random(1, 24, SIZE), random(1, 24, SIZE, seed=1)
    layer.build(x.shape)
    weights = [v.value for v in layer.trainable_variables]
    moments = [(tf.Variable(tf.zeros(v.shape)), tf.Variable(tf.zeros(v.shape))) for v in weights]

    @tf.function
    def step(rate):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(layer(x, training=True) - target))
            total = loss + tf.add_n(layer.losses)
        for v, g, (m, s) in zip(weights, tape.gradient(total, weights), moments, strict=True):
            m.assign(0.9 * m + 0.1 * g)
            s.assign(0.99 * s + 0.01 * tf.square(g))
            v.assign_sub(rate * m / (tf.sqrt(s) + 1e-8))
        return loss

    losses = [float(step(tf.constant(0.02 * 0.995**i))) for i in range(600)]
    assert losses[0] > 0.5
    assert losses[-1] < 0.01


def test_the_balancing_loss_is_added_in_training_only():
    x, token_valid = random(2, 5, SIZE), np.arange(5) < np.array([[2], [5]])
    layer = built(load_balancing=0.5)
    layer(x, token_valid=token_valid)
    assert layer.losses == []
    layer(x, token_valid=token_valid, training=True)
    layer(x, token_valid=token_valid, training=True)
    (loss,) = layer.losses
    probabilities = tf.nn.softmax(layer.router(x[token_valid]))
    expected = balancing_loss(probabilities, gate(probabilities, 2)[1])
    assert float(loss) == pytest.approx(0.5 * float(expected), rel=1e-5)
    without = built()
    without(x, training=True)
    assert without.losses == []


def test_dropout_draws_for_every_expert():
    layer, x = built(dropout=0.5), random(2, 5, SIZE)
    assert not np.array_equal(layer(x, training=True), layer(x, training=True))
    np.testing.assert_array_equal(layer(x), layer(x))
    assert len({v.numpy()[0].item() for v in layer.non_trainable_variables}) == 4


@pytest.mark.parametrize(("num_experts", "top_k"), [(1, 1), (4, 0), (4, 5)])
def test_numbers_that_do_not_go_together_are_refused(num_experts, top_k):
    with pytest.raises(ValueError, match=f"Received: num_experts={num_experts}, top_k={top_k}"):
        MixtureOfExperts(num_experts, top_k, HIDDEN)


def test_converts_to_standard_onnx_operators():
    layer = built()
    signature = [tf.TensorSpec([None, None, SIZE]), tf.TensorSpec([None, None], tf.bool)]
    function = tf.function(lambda x, v: layer(x, token_valid=v), input_signature=signature).get_concrete_function()
    inputs = [t.name for t in function.inputs if t.dtype != tf.resource]
    outputs = [t.name for t in function.outputs]
    frozen = tf_loader.from_function(function, inputs, outputs)
    passes = {k: v for k, v in tf2onnx.optimizer._get_optimizers().items() if k not in _LEFT_OUT_PASSES}
    with tf.Graph().as_default() as graph:
        tf.import_graph_def(frozen, name="")
        converted = tfonnx.process_tf_graph(graph, opset=18, input_names=inputs, output_names=outputs)
        converted = tf2onnx.optimizer.optimize_graph(converted, catch_errors=False, optimizers=passes)
        proto = converted.make_model("mixture_of_experts")
    assert all(onnx.defs.has(node.op_type, node.domain) for node in proto.graph.node)
    assert not any(attribute.HasField("g") for node in proto.graph.node for attribute in node.attribute)
    session = onnxruntime.InferenceSession(proto.SerializeToString())
    for batch, length in ((1, 1), (2, 5), (5, 9)):
        x, token_valid = random(batch, length, SIZE), random(batch, length, seed=1) > 0
        (found,) = session.run(None, dict(zip(inputs, (x, token_valid), strict=True)))
        np.testing.assert_allclose(found, layer(x, token_valid=token_valid), atol=1e-5, rtol=1e-5)
