"""The file for ONNX Runtime alone: its attention operator, the same interface, the same answers."""

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from export import fusion
from export.ort import convert_ort
from export.patterns import Rule
from pipeline.config import ModelConfig
from pipeline.errors import VerificationError
from pipeline.text import Tokenizer, pad
from tests.jobs import MAX_LENGTH, SETTINGS, make_rows, published_job

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return published_job(tmp_path_factory).model_dir / "1" / "onnx" / "model.onnx"


@pytest.fixture(scope="module")
def converted(source, tmp_path_factory):
    path = tmp_path_factory.mktemp("ort") / "model.ort.onnx"
    convert_ort(source, path)
    return path


def test_same_interface(source, converted):
    standard, result = onnx.load(source), onnx.load(converted)
    assert list(result.graph.input) == list(standard.graph.input)
    assert list(result.graph.output) == list(standard.graph.output)
    assert [(o.domain, o.version) for o in result.opset_import] == [("", 20), ("com.microsoft", 1)]
    assert list(result.metadata_props) == list(standard.metadata_props)
    assert {node.op_type for node in result.graph.node if node.domain} == {"Attention"}
    fusion.check_counts("ort", fusion.count_operators(result), ModelConfig(**SETTINGS["model"]))


def test_attention_that_stops_fitting_is_noticed(source, tmp_path, monkeypatch):
    monkeypatch.setattr("export.ort._ATTENTION", Rule(("NoSuchOperator", "x"), None))
    convert_ort(source, tmp_path / "model.onnx")
    counts = fusion.count_operators(onnx.load(tmp_path / "model.onnx"))
    with pytest.raises(VerificationError, match=r"onnx/model\.ort\.onnx is not fused.*Attention 0 instead of 1"):
        fusion.check_counts("ort", counts, ModelConfig(**SETTINGS["model"]))


def test_the_same_answers(source, converted):
    texts = [text for text, _ in make_rows(100, seed=4)]
    token_ids = pad(Tokenizer.load(source.parents[1] / "tokenizer.model").encode([*texts, ""], MAX_LENGTH))
    sessions = [ort.InferenceSession(str(file), providers=["CPUExecutionProvider"]) for file in (source, converted)]
    padded = np.pad(token_ids, [(0, 0), (0, 5)])[:, :MAX_LENGTH]
    for batch in (token_ids, padded, token_ids[-1:], np.zeros((3, MAX_LENGTH), np.int32), token_ids[:1, :1]):
        expected, found = [s.run(["logits"], {"token_ids": batch})[0] for s in sessions]
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)
