"""Attention of long models in blocks of queries: the same answers as in one piece, in less memory."""

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from export import blocks, fusion
from export.float16 import convert_float16
from export.onnx_graph import _in_one_piece, convert, make_metadata
from export.onnx_text import build_text_graph
from export.quantize import quantize_int8
from export.verify import FLOAT16_TOLERANCE
from pipeline.calibrated import CalibratedClassifier
from pipeline.classifier import build_classifier
from pipeline.config import ModelConfig
from pipeline.layers import NgramScores
from pipeline.text import train_tokenizer
from tests.jobs import VOCAB_SIZE, make_rows, run_python
from tests.options import make_ngram_weights

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:You are using a softmax over axis -1")]

LONG = 1100
OPTIONS = {
    "reference": {},
    "alibi": {"position": "alibi", "pooling": "cls"},
    "rope": {"position": "rope", "num_kv_heads": 2},
}
every_option = pytest.mark.parametrize("name", OPTIONS)

_PEAK = """
import json, sys
import numpy as np
import onnxruntime as ort
from tests.memory import peak

session = ort.InferenceSession(sys.argv[1], providers=["CPUExecutionProvider"])
token_ids = np.ones((1, 4096), np.int32)
session.run(["logits"], {"token_ids": token_ids[:, :64]})
before = peak()
session.run(["logits"], {"token_ids": token_ids})
print(json.dumps(peak() - before))
"""


def build(name, **sizes):
    sizes = {"d_model": 16, "num_heads": 4, "d_ff": 24, "num_layers": 2, "max_length": LONG} | OPTIONS[name] | sizes
    model = build_classifier(ModelConfig(**sizes), VOCAB_SIZE, 3, seed=5)
    rng = np.random.default_rng(0)
    for weight in model.trainable_weights:
        weight.assign(weight.numpy() + rng.normal(0, 0.1, weight.shape).astype(np.float32))
    return model


def converted(model):
    metadata = make_metadata("x", 1, ["a", "b", "c"], model.get_config()["max_length"], "")
    return convert(CalibratedClassifier(model), 20, metadata)


def run(path, token_ids):
    session = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return session.run(["logits"], {"token_ids": token_ids})[0]


@every_option
def test_the_same_answers_as_in_one_piece(monkeypatch, tmp_path, name):
    """Fewer queries than a block, a whole number of blocks, and a rest; full, short and empty rows."""
    monkeypatch.setattr(blocks, "BLOCK", 4)
    model = build(name)
    files = {precision: tmp_path / f"{precision}.onnx" for precision in ("float32", "int8", "float16")}
    graph = converted(model)
    assert sum(node.op_type == "Loop" for node in graph.graph.node) == 2
    assert {node.domain for node in graph.graph.node} == {""}
    onnx.save(graph, files["float32"])
    quantize_int8(files["float32"], files["int8"])
    convert_float16(files["float32"], files["float16"])
    rng = np.random.default_rng(1)
    config = ModelConfig(**{k: v for k, v in model.get_config().items() if k in ModelConfig.model_fields})
    for precision, path in files.items():
        fusion.check_counts(precision, fusion.count_operators(onnx.load(path)), config)
        for rows, length in ((1, 1), (3, 3), (2, 4), (5, 9), (2, 12)):
            token_ids = rng.integers(1, VOCAB_SIZE, (rows, length)).astype(np.int32)
            for row in range(1, rows):
                token_ids[row, rng.integers(0, length + 1) :] = 0
            atol = {"float32": 1e-5, "float16": FLOAT16_TOLERANCE, "int8": 0.1}[precision]
            np.testing.assert_allclose(run(path, token_ids), model(token_ids), rtol=0, atol=atol, err_msg=precision)


def test_the_text_graph_of_a_long_model(tmp_path):
    tokenizer = train_tokenizer([text for text, _ in make_rows(360)], VOCAB_SIZE)
    graph = build_text_graph(converted(build("reference")), tokenizer, LONG)
    onnx.save(graph, tmp_path / "text.onnx")
    answers = run_python(
        "import json, sys, numpy as np, onnxruntime as ort, onnxruntime_extensions as e\n"
        "o = ort.SessionOptions(); o.register_custom_ops_library(e.get_library_path())\n"
        "s = ort.InferenceSession(sys.argv[1], o, providers=['CPUExecutionProvider'])\n"
        "t = np.array(['a superb film', '', 'so ' * 2000], object)\n"
        "print(json.dumps(s.run(None, {'text': t})[0].tolist()))",
        tmp_path / "text.onnx",
    )
    np.testing.assert_allclose(np.sum(answers, axis=1), 1.0, atol=1e-5)


def test_the_copy_in_one_piece_keeps_what_was_fitted():
    model = CalibratedClassifier(build("reference"), NgramScores.of(make_ngram_weights(VOCAB_SIZE, 3, 500)))
    model.ngram_weight.assign(1.5)
    model.temperature.assign(0.7)
    copy = _in_one_piece(model)
    assert model.is_chunked and not copy.is_chunked
    assert copy.fitted_scalars() == model.fitted_scalars()
    token_ids = np.array([[3, 7, 9, 3], [5, 0, 0, 0]], np.int32)
    np.testing.assert_allclose(copy(token_ids), model(token_ids), rtol=0, atol=1e-5)


def test_short_models_have_no_loop():
    assert not [node for node in converted(build("reference", max_length=64)).graph.node if node.op_type == "Loop"]


@pytest.mark.parametrize("name", ["reference", "alibi"])
def test_memory_grows_with_the_length(monkeypatch, tmp_path, name):
    """Of 4,096 tokens and 4 heads the scores in one piece take 268 MB, in each of their copies."""
    matrix = 4 * 4096 * 4096 * 4
    model = build(name, max_length=4096)
    onnx.save(converted(model), tmp_path / "blocks.onnx")
    monkeypatch.setattr(blocks, "BLOCK", 4096)
    onnx.save(converted(model), tmp_path / "one.onnx")
    assert run_python(_PEAK, tmp_path / "blocks.onnx") < matrix / 2
    assert run_python(_PEAK, tmp_path / "one.onnx") > matrix  # so it is something that the measure sees
