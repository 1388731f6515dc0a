"""The float16 file: the same interface, the same answers within its tolerance, finite where float16 would overflow."""

import numpy as np
import onnx
import onnx.numpy_helper
import onnxruntime as ort
import pytest

from export import fusion
from export.float16 import convert_float16
from export.verify import FLOAT16_TOLERANCE
from pipeline.config import ModelConfig
from pipeline.text import Tokenizer, pad
from tests.jobs import MAX_LENGTH, SETTINGS, make_rows, published_job

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def version_dir(tmp_path_factory):
    return published_job(tmp_path_factory).model_dir / "1"


@pytest.fixture(scope="module")
def halved(version_dir, tmp_path_factory):
    path = tmp_path_factory.mktemp("float16") / "model.float16.onnx"
    convert_float16(version_dir / "onnx" / "model.onnx", path)
    return path


def test_same_interface(version_dir, halved):
    source, result = onnx.load(version_dir / "onnx" / "model.onnx"), onnx.load(halved)
    assert list(result.graph.input) == list(source.graph.input)
    assert list(result.graph.output) == list(source.graph.output)
    assert [(o.domain, o.version) for o in result.opset_import] == [("", 20)]
    assert list(result.metadata_props) == list(source.metadata_props)
    onnx.checker.check_model(result, full_check=True)
    fusion.check_counts("float16", fusion.count_operators(result), ModelConfig(**SETTINGS["model"]))


def test_the_encoder_is_float16_and_the_head_is_not(halved):
    graph = onnx.load(halved).graph
    types = {i.name: (i.data_type, list(i.dims)) for i in graph.initializer}
    products = [types[node.input[1]] for node in graph.node if node.op_type == "MatMul" and node.input[1] in types]
    half, single = onnx.TensorProto.FLOAT16, onnx.TensorProto.FLOAT
    assert products == [(half, [16, 48]), (half, [16, 16]), (half, [16, 32]), (half, [32, 16]), (single, [16, 2])]
    assert next(types[n.input[0]][0] for n in graph.node if n.op_type == "Gather") == half
    # Rounding to float16 between two operators in float32 would lose what they are in float32 for.
    producers = {output: node for node in graph.node for output in node.output}
    for node in graph.node:
        if node.op_type == "Cast" and node.input[0] in producers:
            before = producers[node.input[0]]
            assert before.op_type != "Cast" or producers[before.input[0]].op_type == "Unsqueeze"  # of a boolean


def test_no_constant_overflows(halved):
    for initializer in onnx.load(halved).graph.initializer:
        assert not np.isinf(onnx.numpy_helper.to_array(initializer).astype(np.float64)).any()


def test_nearly_the_same_answers(version_dir, halved):
    texts = [text for text, _ in make_rows(100, seed=4)]
    token_ids = pad(Tokenizer.load(version_dir / "tokenizer.model").encode([*texts, ""], MAX_LENGTH))
    files = (version_dir / "onnx" / "model.onnx", halved)
    sessions = [ort.InferenceSession(str(file), providers=["CPUExecutionProvider"]) for file in files]
    for batch in (token_ids, token_ids[-1:], np.zeros((3, MAX_LENGTH), np.int32)):
        expected, found = [s.run(["probabilities"], {"token_ids": batch})[0] for s in sessions]
        assert found.dtype == np.float32
        np.testing.assert_allclose(found, expected, rtol=0, atol=FLOAT16_TOLERANCE / 2)
