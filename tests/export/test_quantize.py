"""The int8 file: the same interface as the float32 file, and nearly the same answers."""

import logging

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from export.quantize import quantize_int8
from pipeline.text import Tokenizer, pad
from tests.jobs import MAX_LENGTH, make_rows, published_job

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def version_dir(tmp_path_factory):
    return published_job(tmp_path_factory).model_dir / "1"


@pytest.fixture(scope="module")
def quantized(version_dir, tmp_path_factory):
    path = tmp_path_factory.mktemp("int8") / "model.int8.onnx"
    level = logging.getLogger().level
    quantize_int8(version_dir / "onnx" / "model.onnx", path)
    assert logging.getLogger().level == level
    return path


def test_same_interface(version_dir, quantized):
    source, result = onnx.load(version_dir / "onnx" / "model.onnx"), onnx.load(quantized)
    assert list(result.graph.input) == list(source.graph.input)
    assert list(result.graph.output) == list(source.graph.output)
    assert [(o.domain, o.version) for o in result.opset_import] == [("", 20)]
    assert {node.domain for node in result.graph.node} == {""}
    found = {p.key: p.value for p in result.metadata_props}
    assert found.items() >= {p.key: p.value for p in source.metadata_props}.items()
    onnx.checker.check_model(result, full_check=True)


def test_weights_are_int8_of_seven_bits(quantized):
    weights = [i for i in onnx.load(quantized).graph.initializer if i.data_type == onnx.TensorProto.INT8 and i.dims]
    matrices = [onnx.numpy_helper.to_array(w) for w in weights if len(w.dims) == 2]
    assert len(matrices) >= 7  # embedding, query, key, value, output, two of the feed-forward network
    assert max(np.abs(m.astype(int)).max() for m in matrices if m.shape[0] != 340) <= 64


def test_nearly_the_same_answers(version_dir, quantized):
    texts = [text for text, _ in make_rows(100, seed=4)]
    token_ids = pad(Tokenizer.load(version_dir / "tokenizer.model").encode([*texts, ""], MAX_LENGTH))
    files = (version_dir / "onnx" / "model.onnx", quantized)
    sessions = [ort.InferenceSession(str(file), providers=["CPUExecutionProvider"]) for file in files]
    expected, found = [s.run(["probabilities"], {"token_ids": token_ids})[0] for s in sessions]
    assert found.dtype == np.float32
    assert np.isfinite(found).all()
    assert np.abs(found - expected).max() < 0.1
    assert (found.argmax(axis=1) == expected.argmax(axis=1)).mean() >= 0.95
