"""The text graph runs in a subprocess: ONNX Runtime Extensions and TensorFlow crash in one process."""

import json
import subprocess
import sys

import numpy as np
import onnx
import onnx.parser
import pytest

from export.onnx_text import CUSTOM_DOMAIN, build_text_graph
from pipeline.text import pad
from tests.serving.tiny import LABELS, MAX_LENGTH, TEXTS, Tiny

BATCHES = [
    TEXTS,
    TEXTS[::-1],
    *([text] for text in TEXTS),
    ["", ""],
    ["", "   ", "\n"],
    ["good", ""],
    ["\0", "\0good", "good\0film", "good\0", "\0\0", "", "plain", "line\0\nline"],
    ["\0" * 1000, "很\0好"],
    ["good " * 3000, "很" * 3000, "\U0001f600" * 500],
    [],
]

_RUN = """
import json, sys
import numpy as np
import onnxruntime as ort
import onnxruntime_extensions

options = ort.SessionOptions()
options.register_custom_ops_library(onnxruntime_extensions.get_library_path())
session = ort.InferenceSession(sys.argv[1], options, providers=["CPUExecutionProvider"])
batches = json.loads(sys.stdin.read())
np.savez(sys.argv[2], *[session.run(None, {"text": np.array(texts, dtype=object)})[0] for texts in batches])
"""

# Its "probabilities" are the ids themselves, so that a test sees what the tokenizer part hands on. The
# name of an inner value is one that the tokenizer part uses too.
_ECHO = """
<ir_version: 10, opset_import: ["": 20], producer_name: "echo", metadata_props: ["name": "echo", "labels": "[]"]>
echo (int32[batch, length] token_ids) => (float[batch, length] logits, float[batch, length] probabilities)
{ lengths = Identity (token_ids) probabilities = Cast <to = 1> (lengths) logits = Neg (probabilities) }
"""


@pytest.fixture(scope="module")
def tiny():
    return Tiny.build()


def _run(model, directory, batches):
    onnx.save(model, directory / "model.text.onnx")
    args = [sys.executable, "-c", _RUN, directory / "model.text.onnx", directory / "results.npz"]
    done = subprocess.run(args, input=json.dumps(batches), capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    results = np.load(directory / "results.npz")
    return [results[f"arr_{i}"] for i in range(len(batches))]


@pytest.mark.parametrize("max_length", [1, MAX_LENGTH, 1000])
def test_ids_equal_sentencepiece(tiny, tmp_path, max_length):
    model = build_text_graph(onnx.parser.parse_model(_ECHO), tiny.tokenizer.model, max_length)
    for texts, got in zip(BATCHES, _run(model, tmp_path, BATCHES), strict=True):
        np.testing.assert_array_equal(got, pad(tiny.tokenizer.encode(texts, max_length)))


def test_numpy_arrays_of_other_types_do_not_hold_the_text(tiny, tmp_path):
    """What the interface passes on is not the text: dtype U ends at NUL, bytes are spelled as their repr."""
    onnx.save(build_text_graph(onnx.parser.parse_model(_ECHO), tiny.tokenizer.model, MAX_LENGTH), tmp_path / "m.onnx")
    run = _RUN.split("batches =")[0] + """
ids = lambda array: session.run(None, {"text": array})[0][0].tolist()
print(json.dumps([ids(np.array(["good\\0film"])), ids(np.array(["good".encode()], dtype=object))]))
"""
    done = subprocess.run([sys.executable, "-c", run, tmp_path / "m.onnx"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    passed_on = tiny.tokenizer.encode(["good", "b'good'"], MAX_LENGTH)
    assert json.loads(done.stdout) == [row.tolist() for row in passed_on]


def test_probabilities_equal_oracle(tiny, tmp_path):
    model = build_text_graph(tiny.ids_model(), tiny.tokenizer.model, MAX_LENGTH)
    for texts, got in zip(BATCHES, _run(model, tmp_path, BATCHES), strict=True):
        expected = tiny.expected_probabilities(texts) if texts else np.empty((0, len(LABELS)))
        assert got.dtype == np.float32
        np.testing.assert_allclose(got, expected, rtol=0, atol=1e-5)


def test_interface_and_metadata(tiny):
    ids_model = tiny.ids_model()
    before = ids_model.SerializeToString(deterministic=True)
    model = build_text_graph(ids_model, tiny.tokenizer.model, MAX_LENGTH)
    assert ids_model.SerializeToString(deterministic=True) == before

    [text], [probabilities] = model.graph.input, model.graph.output
    assert (text.name, text.type.tensor_type.elem_type) == ("text", onnx.TensorProto.STRING)
    assert (probabilities.name, probabilities.type.tensor_type.elem_type) == ("probabilities", onnx.TensorProto.FLOAT)
    assert [d.dim_param for d in text.type.tensor_type.shape.dim] == ["batch"]
    assert [d.dim_param for d in probabilities.type.tensor_type.shape.dim] == ["batch", "classes"]

    assert model.metadata_props == ids_model.metadata_props
    assert {o.domain: o.version for o in model.opset_import} == {"": 20, CUSTOM_DOMAIN: 1}
    assert len(model.opset_import) == 2
    assert model.ir_version == ids_model.ir_version
    assert model.graph.name == ids_model.graph.name
    assert [n.domain for n in model.graph.node if n.domain] == [CUSTOM_DOMAIN]


def test_what_is_not_needed_for_probabilities_is_left_out(tiny):
    model = build_text_graph(onnx.parser.parse_model(_ECHO), tiny.tokenizer.model, MAX_LENGTH)
    assert "Neg" not in [n.op_type for n in model.graph.node]
    assert model.producer_name == "echo"


def test_unfit_arguments_are_refused(tiny):
    with pytest.raises(ValueError, match="max_length=0"):
        build_text_graph(tiny.ids_model(), tiny.tokenizer.model, 0)
    echo = onnx.parser.parse_model(_ECHO.replace("probabilities", "scores"))
    with pytest.raises(ValueError, match="'probabilities'.*outputs=.*scores"):
        build_text_graph(echo, tiny.tokenizer.model, MAX_LENGTH)
