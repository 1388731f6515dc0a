"""The int8 file: the same interface as the float32 file, and nearly the same answers."""

import logging

import numpy as np
import onnx
import onnx.numpy_helper
import onnxruntime as ort
import pytest

from export import fusion
from export.quantize import quantize_int8
from pipeline.config import ModelConfig
from pipeline.text import Tokenizer, pad
from tests.jobs import MAX_LENGTH, SETTINGS, make_rows, published_job

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
    assert found == {p.key: p.value for p in source.metadata_props}
    onnx.checker.check_model(result, full_check=True)


def test_every_product_with_a_weight_is_int8(quantized):
    graph = onnx.load(quantized).graph
    fusion.check_counts("int8", fusion.count_operators(onnx.load(quantized)), ModelConfig(**SETTINGS["model"]))
    arrays = {i.name: onnx.numpy_helper.to_array(i) for i in graph.initializer}
    kernels = [arrays[node.input[1]] for node in graph.node if node.op_type == "MatMulInteger"]
    # Queries, keys and values; the output projection; two of the feed-forward network; the head.
    assert [kernel.shape for kernel in kernels] == [(16, 48), (16, 16), (16, 32), (32, 16), (16, 2)]
    for kernel in kernels:
        # 7 bits, and a scale for each output channel: the largest value of every one is reached.
        assert (np.abs(kernel.astype(int)).max(axis=0) >= 63).all()
        assert np.abs(kernel.astype(int)).max() <= 64
    floats = [array for array in arrays.values() if array.dtype == np.float32]
    assert not [array.shape for array in floats if array.ndim == 2 and array.shape not in [(MAX_LENGTH, 16), (340, 1)]]


def test_the_embedding_has_a_scale_for_each_row(version_dir, quantized):
    def table(path):
        graph = onnx.load(path).graph
        arrays = {i.name: onnx.numpy_helper.to_array(i) for i in graph.initializer}
        return [arrays[node.input[0]] for node in graph.node if node.op_type == "Gather"]

    (expected,), (rows, scale) = table(version_dir / "onnx" / "model.onnx"), table(quantized)
    assert rows.dtype == np.int8
    assert (np.abs(rows.astype(int)).max(axis=1) == 127).all()
    assert (np.abs(rows * scale - expected) <= np.abs(expected).max(axis=1, keepdims=True) / 250).all()


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
