from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from pipeline.classifier import CHUNKED_ABOVE, EncoderClassifier, build_classifier, compile_predict
from pipeline.config import ModelConfig
from pipeline.layers import ChunkedAttention, LinearAttention, LocalAttention, ScaledDotProductAttention

GOLDEN = Path(__file__).parents[1] / "golden" / "encoder_classifier.npz"
VOCABULARY, CLASSES, LENGTH = 40, 3, 80
ATOL = 1e-5

# Keras warns of a softmax over one key, which is what a text of one token has.
pytestmark = pytest.mark.filterwarnings("ignore:You are using a softmax over axis")


def load_torch_weights(model, weight):
    """Puts PyTorch's weights into our model; `weight` gives the array of a PyTorch name."""

    def linear(layer, kernel, bias):
        layer.kernel.assign(kernel.T)  # PyTorch's is [out, in]
        layer.bias.assign(bias)

    def norm(layer, name):
        layer.gamma.assign(weight(f"{name}.weight"))
        layer.beta.assign(weight(f"{name}.bias"))

    model.embedding.embeddings.assign(weight("embedding.weight"))
    for i, layer in enumerate(model.encoder_layers):
        name = f"encoder.layers.{i}"
        kernels = np.split(weight(f"{name}.self_attn.in_proj_weight"), 3)
        biases = np.split(weight(f"{name}.self_attn.in_proj_bias"), 3)
        projections = (layer.attention.query, layer.attention.key, layer.attention.value)
        for projection, kernel, bias in zip(projections, kernels, biases, strict=True):
            linear(projection, kernel, bias)
        for ours, theirs in (
            (layer.attention.output_projection, "self_attn.out_proj"),
            (layer.feed_forward.hidden, "linear1"),
            (layer.feed_forward.output_projection, "linear2"),
        ):
            linear(ours, weight(f"{name}.{theirs}.weight"), weight(f"{name}.{theirs}.bias"))
        norm(layer.attention_norm, f"{name}.norm1")
        norm(layer.feed_forward_norm, f"{name}.norm2")
    norm(model.head_norm, "norm")
    linear(model.head, weight("out.weight"), weight("out.bias"))


def test_equals_pytorch():
    with np.load(GOLDEN) as golden:
        arrays = dict(golden)
    sizes = ModelConfig(d_model=16, num_heads=4, d_ff=24, num_layers=2, max_length=64)
    model = build_classifier(sizes, vocab_size=50, num_classes=3)
    load_torch_weights(model, lambda name: arrays[f"weight/{name}"])
    assert sum(v.shape.num_elements() for v in model.trainable_variables) == sum(
        a.size for name, a in arrays.items() if name.startswith("weight/")
    )
    real = arrays["token_ids"] != 0
    encoded = np.asarray(model.encode(arrays["token_ids"]))
    np.testing.assert_allclose(encoded[real], arrays["encoder_output"][real], atol=ATOL, rtol=0)
    np.testing.assert_allclose(model(arrays["token_ids"]), arrays["logits"], atol=ATOL, rtol=0)


@pytest.fixture(scope="module")
def model():
    sizes = ModelConfig(d_model=16, num_heads=4, d_ff=24, num_layers=2, max_length=LENGTH)
    model = build_classifier(sizes, VOCABULARY, CLASSES, seed=3)
    for i, v in enumerate(model.trainable_variables):  # biases and LayerNorm too
        v.assign(v + 0.2 * np.random.default_rng(i).normal(size=v.shape))
    return model


def make_rows(count=8):
    """Rows of 0 to 12 tokens: empty, full and between."""
    rng = np.random.default_rng(1)
    lengths = [12, 0, 1, 7, 12, 3, 5, 2][:count]
    return [rng.integers(1, VOCABULARY, n).astype(np.int32) for n in lengths]


def pad(rows, length):
    token_ids = np.zeros((len(rows), length), np.int32)
    for i, row in enumerate(rows):
        token_ids[i, : len(row)] = row
    return token_ids


@pytest.mark.parametrize(
    ("options", "core"),
    [
        ({}, ScaledDotProductAttention),
        ({"max_length": CHUNKED_ABOVE}, ScaledDotProductAttention),
        ({"max_length": CHUNKED_ABOVE + 1, "position": "alibi"}, ChunkedAttention),
        ({"attention": "local", "window": 3, "position": "alibi"}, LocalAttention),
        ({"attention": "local_global", "window": 3, "global_tokens": 2}, LocalAttention),
        ({"attention": "linear"}, LinearAttention),
    ],
)
def test_kinds_of_attention(options, core):
    sizes = ModelConfig(d_model=8, num_heads=2, d_ff=12, num_layers=2, dropout=0.3, **options)
    model = build_classifier(sizes, VOCABULARY, CLASSES, seed=3)
    found = model.encoder_layers[1].attention.core
    assert type(found) is core
    expected = {"alibi": options.get("position") == "alibi", "window": 3, "dropout": 0.3}
    expected["num_global"] = options.get("global_tokens", 0)
    config = found.get_config()
    assert {key: config[key] for key in expected.keys() & config} == {k: expected[k] for k in expected.keys() & config}
    rows = make_rows()
    together = np.asarray(model(pad(rows, 30)))
    for row, logits in zip(rows, together, strict=True):
        np.testing.assert_allclose(logits, model(pad([row], max(1, len(row))))[0], atol=ATOL, rtol=0)


def test_chunks_change_neither_logits_nor_weights():
    sizes = ModelConfig(d_model=8, num_heads=2, d_ff=12, num_layers=2, max_length=CHUNKED_ABOVE + 1)
    chunked = build_classifier(sizes, VOCABULARY, CLASSES, seed=3)
    plain = EncoderClassifier.from_config({**chunked.get_config(), "chunked_above": sizes.max_length})
    plain.build()
    assert type(plain.encoder_layers[0].attention.core) is ScaledDotProductAttention
    plain.set_weights(chunked.get_weights())
    for rows, length in ((make_rows(), 20), ([np.arange(600) % 39 + 1], 640)):  # of one chunk, and of two
        np.testing.assert_allclose(chunked(pad(rows, length)), plain(pad(rows, length)), atol=ATOL, rtol=0)


@pytest.mark.parametrize("added", [0, 5, 60])
def test_padding_length_never_changes_a_rows_logits(model, added):
    rows = make_rows()
    padded = np.asarray(model(pad(rows, 12 + added)))
    for row, logits in zip(rows, padded, strict=True):
        alone = model(pad([row], max(1, len(row))))
        np.testing.assert_allclose(logits, alone[0], atol=ATOL, rtol=0)


def test_padding_content_never_changes_a_rows_logits(model):
    token_ids = pad(make_rows(), 20)
    before = np.asarray(model(token_ids))
    table = model.embedding.embeddings.numpy()
    changed = table.copy()
    changed[0] = np.random.default_rng(2).normal(0.0, 100.0, size=changed[0].shape)
    try:
        model.embedding.embeddings.assign(changed)
        np.testing.assert_allclose(model(token_ids), before, atol=ATOL, rtol=0)
        changed[token_ids[0, 0], :8] += 1.0
        model.embedding.embeddings.assign(changed)
        assert not np.allclose(model(token_ids)[0], before[0], atol=1e-3)  # a real token's does
    finally:
        model.embedding.embeddings.assign(table)


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_batch_mates_never_change_a_rows_logits(model, size):
    rows = make_rows()
    together = np.asarray(model(pad(rows, 12)))
    for start in range(0, 8, size):
        batch = rows[start : start + size]
        found = model(pad(batch, max(1, max(map(len, batch)))))
        np.testing.assert_allclose(found, together[start : start + size], atol=ATOL, rtol=0)


@pytest.mark.parametrize(("rows", "length"), [(1, 1), (1, 12), (5, 1), (5, LENGTH)])
def test_a_text_without_tokens_has_one_answer(model, rows, length):
    # The mean over nothing is zero, LayerNorm makes its own offset of it: gamma plays no part.
    offset = np.asarray(model.head_norm.beta, np.float64)
    expected = offset @ np.asarray(model.head.kernel, np.float64) + np.asarray(model.head.bias, np.float64)
    logits = np.asarray(model(np.zeros((rows, length), np.int32)))
    np.testing.assert_allclose(logits, np.broadcast_to(expected, logits.shape), atol=ATOL, rtol=0)
    np.testing.assert_array_equal(logits, np.broadcast_to(np.asarray(model(pad(make_rows(), 12)))[1], logits.shape))


def test_padding_row_gets_no_gradient(model):
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(model(pad(make_rows(), 14), training=True) ** 2)
    gradient = tf.convert_to_tensor(tape.gradient(loss, model.embedding.embeddings.value)).numpy()
    np.testing.assert_array_equal(gradient[0], 0.0)
    assert np.isfinite(gradient).all()
    assert gradient[make_rows()[0][0]].any()


def test_longer_than_max_length_is_refused(model):
    with pytest.raises(ValueError, match=f"max_length={LENGTH}. Received: length={LENGTH + 1}"):
        model(np.ones((1, LENGTH + 1), np.int32))


@pytest.mark.parametrize("dtype", ["float32", "mixed_bfloat16", "mixed_float16"])
def test_logits_and_weights_are_float32_whatever_the_policy(model, dtype):
    sizes = ModelConfig(d_model=16, num_heads=4, d_ff=24, num_layers=2, max_length=LENGTH)
    other = build_classifier(sizes, VOCABULARY, CLASSES, dtype=dtype)
    for v, value in zip(other.trainable_variables, model.trainable_variables, strict=True):
        assert v.dtype == "float32"
        v.assign(value)
    token_ids = pad(make_rows(), 12)
    logits = other(token_ids)
    assert logits.dtype.name == "float32"
    atol = {"float32": 0.0, "mixed_float16": 0.02, "mixed_bfloat16": 0.2}[dtype]
    np.testing.assert_allclose(logits, model(token_ids), atol=atol, rtol=0)
    assert other.encode(token_ids).dtype.name == "float32"
    np.testing.assert_array_equal(other.embedding(token_ids), model.embedding(token_ids))  # not rounded


def initial(seed):
    sizes = ModelConfig(d_model=8, num_heads=2, d_ff=12, num_layers=2)
    return [v.numpy() for v in build_classifier(sizes, 20, 3, seed=seed).variables]


def test_same_seed_same_weights_another_seed_others():
    first, again, other = initial(1), initial(1), initial(2)
    for a, b, c in zip(first, again, other, strict=True):
        np.testing.assert_array_equal(a, b)
        if a.ndim == 2:  # biases and LayerNorm start alike
            assert not np.array_equal(a, c)
    kernels = [a for a in first if a.ndim == 2]
    assert len({a.tobytes() for a in kernels}) == len(kernels) == 14


def test_every_dropout_has_its_own_seed():
    sizes = ModelConfig(d_model=8, num_heads=2, d_ff=12, num_layers=2)
    states = [
        v.numpy().tobytes() for seed in (1, 2) for v in build_classifier(sizes, 20, 3, seed).non_trainable_variables
    ]
    assert len(states) == len(set(states)) == 2 * (2 * 4 + 1)


def test_without_a_seed_every_model_is_another():
    assert not np.array_equal(initial(None)[0], initial(None)[0])


def test_initial_embeddings_have_unit_variance_after_scaling():
    sizes = ModelConfig(d_model=64, num_heads=2, d_ff=8, num_layers=1)
    table = build_classifier(sizes, 2000, 2, seed=0).embedding.embeddings.numpy()
    assert np.std(table * np.sqrt(64)) == pytest.approx(1.0, rel=0.02)


def test_first_answers_are_near_even():
    sizes = ModelConfig(d_model=64, num_heads=2, d_ff=8, num_layers=1)
    token_ids = np.random.default_rng(0).integers(1, 50, (64, 9)).astype(np.int32)
    logits = np.asarray(build_classifier(sizes, 50, 5, seed=0)(token_ids))
    # LayerNorm's output has 64 values of variance 1, times 0.02: a standard deviation of 0.16.
    assert np.std(logits) == pytest.approx(0.16, rel=0.5)
    loss = np.mean(np.log(np.exp(logits).sum(axis=1)) - logits[:, 0])
    assert loss == pytest.approx(np.log(5), abs=0.3)


@pytest.mark.parametrize("dtype", ["float32", "mixed_bfloat16"])
def test_compiled_predict_does_not_drop(dtype):
    sizes = ModelConfig(d_model=8, num_heads=2, d_ff=12, num_layers=1, dropout=0.5, head_dropout=0.5)
    model = build_classifier(sizes, 20, 3, seed=1, dtype=dtype)
    predict = compile_predict(model)
    for token_ids in (pad([np.array([5, 3, 9]), np.array([7])], 4), pad([np.array([1, 2])], 2)):
        logits = predict(token_ids)
        assert logits.dtype == tf.float32
        np.testing.assert_array_equal(predict(token_ids), logits)
        # Graph and eager may fuse differently: a unit in the last place of bfloat16 at these sizes.
        np.testing.assert_allclose(logits, model(token_ids), atol=1e-5 if dtype == "float32" else 1e-2, rtol=0)
    assert predict.experimental_get_tracing_count() == 1


def test_bad_heads_are_refused():
    with pytest.raises(ValueError, match="Received: d_model=16, num_heads=3"):
        EncoderClassifier(10, 2, d_model=16, num_heads=3).build()
