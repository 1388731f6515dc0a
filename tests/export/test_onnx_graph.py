"""The converted graph: its contract, and the same answers as the Keras model."""

import json

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from export.onnx_graph import convert, make_metadata
from pipeline.contract import ONNX_METADATA
from pipeline.errors import VerificationError
from tests.jobs import LABELS, MAX_LENGTH, load_trained, published_job, run_python

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:You are using a softmax over axis -1")]

TOLERANCE = {"rtol": 1e-4, "atol": 1e-4}

_TEXT_GRAPH = """
import json, sys
import numpy as np
import onnxruntime as ort
import onnxruntime_extensions

options = ort.SessionOptions()
options.register_custom_ops_library(onnxruntime_extensions.get_library_path())
session = ort.InferenceSession(sys.argv[1], options, providers=["CPUExecutionProvider"])
batches = json.loads(sys.argv[2])
print(json.dumps([session.run(None, {"text": np.array(batch, object)})[0].tolist() for batch in batches]))
"""


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    return published_job(tmp_path_factory)


@pytest.fixture(scope="module")
def version_dir(job):
    return job.model_dir / "1"


@pytest.fixture(scope="module")
def trained(job):
    return load_trained(job)


@pytest.fixture(scope="module")
def proto(version_dir):
    return onnx.load(version_dir / "onnx" / "model.onnx")


@pytest.fixture(scope="module")
def session(version_dir):
    return ort.InferenceSession(str(version_dir / "onnx" / "model.onnx"), providers=["CPUExecutionProvider"])


def _describe(value):
    tensor = value.type.tensor_type
    return value.name, tensor.elem_type, [d.dim_param or d.dim_value for d in tensor.shape.dim]


def test_inputs_and_outputs(proto):
    assert [_describe(v) for v in proto.graph.input] == [("token_ids", onnx.TensorProto.INT32, ["batch", "length"])]
    assert [_describe(v) for v in proto.graph.output] == [
        ("logits", onnx.TensorProto.FLOAT, ["batch", 2]),
        ("probabilities", onnx.TensorProto.FLOAT, ["batch", 2]),
    ]


def test_only_standard_operators(proto):
    assert [(o.domain, o.version) for o in proto.opset_import] == [("", 20)]
    assert {node.domain for node in proto.graph.node} == {""}
    assert not proto.functions
    onnx.checker.check_model(proto, full_check=True)
    onnx.shape_inference.infer_shapes(proto, check_type=True, strict_mode=True, data_prop=True)


def test_text_graph(version_dir):
    proto = onnx.load(version_dir / "onnx" / "model.text.onnx")
    assert [_describe(v) for v in proto.graph.input] == [("text", onnx.TensorProto.STRING, ["batch"])]
    assert [_describe(v) for v in proto.graph.output] == [("probabilities", onnx.TensorProto.FLOAT, ["batch", 2])]
    assert {(o.domain, o.version) for o in proto.opset_import} == {("", 20), ("ai.onnx.contrib", 1)}


@pytest.mark.parametrize("file", ["model.onnx", "model.text.onnx"])
def test_metadata(version_dir, trained, file):
    _, _, tokenizer, labels, _ = trained
    metadata = {p.key: p.value for p in onnx.load(version_dir / "onnx" / file).metadata_props}
    assert tuple(metadata) == ONNX_METADATA
    assert json.loads(metadata.pop("labels")) == labels == LABELS
    assert metadata == {
        "name": "tiny",
        "version": "1",
        "max_length": str(MAX_LENGTH),
        "pad_id": "0",
        "tokenizer_sha256": tokenizer.sha256,
    }


def test_labels_of_any_script_survive():
    labels = ["很好", 'say "no"', "\U0001f600"]
    metadata = make_metadata("x", 3, labels, 7, "ab")
    assert tuple(metadata) == ONNX_METADATA
    assert json.loads(metadata["labels"]) == labels
    assert all(isinstance(value, str) for value in metadata.values())


@pytest.mark.parametrize("batch", [1, 2, 17])
@pytest.mark.parametrize("length", [1, 2, 7, MAX_LENGTH])
def test_answers_equal_the_model(session, trained, batch, length):
    _, model, tokenizer, _, _ = trained
    rng = np.random.default_rng(batch * 100 + length)
    token_ids = rng.integers(1, tokenizer.vocab_size, (batch, length), np.int32)
    for row in range(1, batch):
        token_ids[row, rng.integers(0, length + 1) :] = 0
    expected = np.asarray(model(token_ids, training=False))
    logits, probabilities = session.run(["logits", "probabilities"], {"token_ids": token_ids})
    np.testing.assert_allclose(probabilities, model.probabilities(expected), **TOLERANCE)
    assert logits.dtype == probabilities.dtype == np.float32
    np.testing.assert_allclose(logits, expected, **TOLERANCE)
    np.testing.assert_allclose(probabilities.sum(axis=1), 1, rtol=0, atol=1e-6)


def test_padding_and_batch_mates_change_nothing(session, trained):
    _, _, tokenizer, _, texts = trained
    rows = tokenizer.encode(texts[:20], MAX_LENGTH)
    together = np.zeros((len(rows), MAX_LENGTH), np.int32)
    for i, row in enumerate(rows):
        together[i, : len(row)] = row
    logits = session.run(["logits"], {"token_ids": together})[0]
    alone = [session.run(["logits"], {"token_ids": row[None, :]})[0][0] for row in rows]
    np.testing.assert_allclose(logits, alone, rtol=0, atol=1e-5)


def test_all_pad_rows_have_one_answer_in_every_runtime(version_dir, session, trained):
    """The Keras model, both SavedModel signatures, ONNX by ids and ONNX by text (in a process of its own)."""
    import tensorflow as tf
    import tensorflow_text  # noqa: F401 - registers the operations of the text signature

    _, model, _, _, _ = trained
    expected = np.asarray(model(np.zeros((1, 1), np.int32), training=False))
    assert np.isfinite(expected).all()
    loaded = tf.saved_model.load(str(version_dir)).signatures
    answers = {}
    for batch, length in [(1, 1), (3, 7), (17, MAX_LENGTH)]:
        token_ids = np.zeros((batch, length), np.int32)
        answers[f"model {batch}x{length}"] = model(token_ids, training=False)
        answers[f"SavedModel {batch}x{length}"] = loaded["token_ids"](token_ids=tf.constant(token_ids))["logits"]
        answers[f"ONNX {batch}x{length}"] = session.run(["logits"], {"token_ids": token_ids})[0]
    for name, logits in answers.items():
        np.testing.assert_allclose(logits, np.repeat(expected, len(logits), axis=0), rtol=0, atol=1e-5, err_msg=name)

    probabilities = model.probabilities(expected).numpy()
    batches = [[""], ["", "  ", "\t"], ["", "a superb film"]]
    found = run_python(_TEXT_GRAPH, version_dir / "onnx" / "model.text.onnx", json.dumps(batches))
    found += [loaded["serving_default"](text=tf.constant(batch))["probabilities"].numpy().tolist() for batch in batches]
    for rows in (found[0], found[1], found[2][:1], found[3], found[4], found[5][:1]):
        np.testing.assert_allclose(rows, np.repeat(probabilities, len(rows), axis=0), rtol=0, atol=1e-5)


def test_operation_without_onnx_form_is_named():
    import tensorflow as tf

    class Model:
        is_chunked = False
        probabilities = staticmethod(tf.nn.softmax)

        def __call__(self, token_ids, training):
            return tf.math.bessel_i0e(tf.cast(token_ids[:, :1], tf.float32) * tf.ones([1, 2]))

    with pytest.raises(VerificationError, match=r"cannot be converted to ONNX.*BesselI0e"):
        convert(Model(), 20, make_metadata("x", 1, LABELS, MAX_LENGTH, ""))
