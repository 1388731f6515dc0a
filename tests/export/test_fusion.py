"""The rewrites: patterns, what they leave of a converted model, and that a rule that stops fitting is noticed."""

import collections

import numpy as np
import onnx
import onnx.numpy_helper
import onnx.parser
import onnxruntime as ort
import pytest

from export import fusion
from export.patterns import Graph, Named, OneOf, Rule
from pipeline.config import ModelConfig
from pipeline.errors import VerificationError
from tests.jobs import run_python

_SIZES = ModelConfig(d_model=16, num_heads=2, d_ff=24, num_layers=2, max_length=9)
_VOCAB_SIZE = 40

# Another process, with other hash values, that has built another model before.
_CONVERT = """
import json, pathlib, sys, tempfile
from tests.export.test_fusion import file_hashes
print(json.dumps(file_hashes(pathlib.Path(tempfile.mkdtemp()))))
"""


def _parse(text):
    return onnx.parser.parse_model(f'<ir_version: 9, opset_import: ["": 20]> {text}')


def _rewritten(model, *rules):
    graph = Graph(model.graph)
    graph.rewrite(*rules)
    graph.write()
    onnx.checker.check_model(model, full_check=True)
    return model


def _operators(model):
    return [node.op_type for node in model.graph.node]


def _run(model, **inputs):
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, inputs)


_LINEAR = """g (float[N, 2] x) => (float[N, 2] y, float[N, 2] z)
<float[2] b = {1.0, 2.0}, float two = {2.0}>
{ s = Add (b, x)  y = Mul (s, two)  r = Relu (y)  z = Mul (two, r) }"""


def test_a_pattern_matches_operands_in_either_order_and_binds_names():
    graph = Graph(_parse(_LINEAR).graph)
    assert graph.match("y", ("Mul", 2.0, ("Add", "x", "b"))) == {"x": "b", "b": "x"}
    assert graph.match("y", ("Mul", Named("sum", ("Add", "a", [1.0, 2.0])), 2.0)) == {"sum": "s", "a": "x"}
    assert graph.match("z", ("Mul", OneOf(("Erf", "a"), ("Relu", "a")), "two")) == {"a": "y", "two": "two"}
    wrong = [("Mul", 3.0, "s"), ("Mul", "a", "a"), ("Add", "a", "b"), ("Mul", "a"), ("Mul", ("Add", "a", [1.0]), "b")]
    for pattern in wrong:
        assert graph.match("y", pattern) is None


def test_a_replaced_output_keeps_its_name_for_whoever_uses_it():
    model, plain = _parse(_LINEAR), _parse(_LINEAR)
    tripled = Rule(("Mul", "a", 2.0), lambda graph, match: graph.add("Mul", match["a"], np.float32(3)))
    _rewritten(model, tripled)
    assert [o.name for o in model.graph.output] == ["y", "z"]
    x = np.array([[1, -5], [0, 0]], np.float32)
    (y, _), (y_3, z_3) = _run(plain, x=x), _run(model, x=x)
    np.testing.assert_allclose(y_3, y * 1.5, rtol=1e-6)
    np.testing.assert_allclose(z_3, 3 * np.maximum(y_3, 0), rtol=1e-6)


def test_an_output_whose_node_vanishes_is_made_by_the_one_before():
    doubled = Rule(("Neg", ("Neg", "x")), lambda graph, match: match["x"])
    model = _parse("g (float[N] x) => (float[N] y, float[N] z) { a = Relu (x) b = Neg (a) y = Neg (b) z = Exp (y) }")
    _rewritten(model, doubled)
    assert _operators(model) == ["Relu", "Exp"]
    assert [list(node.output) for node in model.graph.node] == [["y"], ["z"]]


def test_what_is_written_follows_from_the_structure_alone():
    """Names and order of the nodes, and what is there twice, do not matter."""
    one = _parse("g (float[N] x) => (float[N] y) <float c = {2.0}> { a = Exp (x) b = Mul (a, c) y = Add (a, b) }")
    other = _parse(
        "g (float[N] x) => (float[N] y) <float k = {2.0}, float unused = {1.0}>"
        "{ d = Exp (x) q = Exp (x) w = Mul (q, k) v = Neg (x) y = Add (d, w) }"
    )
    one, other = _rewritten(one), _rewritten(other)
    assert one.SerializeToString() == other.SerializeToString()


def sizes(**changes):
    return _SIZES.model_copy(update=changes)


def build_model(config=_SIZES, with_biases=True):
    """Returns an untrained classifier whose biases aren't all zero; imports TensorFlow here."""
    from pipeline.calibrated import build_calibrated

    model = build_calibrated(config, _VOCAB_SIZE, 3, seed=5)
    rng = np.random.default_rng(0)
    for weight in model.weights if with_biases else []:
        weight.assign(weight.numpy() + rng.normal(0, 0.1, weight.shape).astype(np.float32))
    return model


def _convert(model):
    from export.onnx_graph import convert, make_metadata

    return convert(model, 20, make_metadata("x", 1, ["a", "b", "c"], _SIZES.max_length, ""))


def file_hashes(directory):
    """Converts a fixed model and returns file -> SHA-256 for every precision."""
    from export.float16 import convert_float16
    from export.ort import convert_ort
    from export.quantize import quantize_int8
    from pipeline.contract import sha256_file

    build_model(sizes(num_layers=1))  # moves the counters of Keras's names
    files = [directory / f"{name}.onnx" for name in ("float32", "int8", "float16", "ort")]
    onnx.save(_convert(build_model(sizes(ngram_pairs=8))), files[0])
    quantize_int8(files[0], files[1])
    convert_float16(files[0], files[2])
    convert_ort(files[0], files[3])
    return {file.name: sha256_file(file) for file in files}


@pytest.fixture(scope="module")
def converted():
    return {num_layers: _convert(build_model(sizes(num_layers=num_layers))) for num_layers in (1, 2)}


@pytest.mark.slow
def test_the_graph_is_fused_and_small(converted):
    counts = {num_layers: fusion.count_operators(model) for num_layers, model in converted.items()}
    for num_layers in counts:
        fusion.check_counts("float32", counts[num_layers], sizes(num_layers=num_layers))
    assert counts[2]["LayerNormalization"] == 5
    assert counts[2]["Gelu"] == 2
    assert counts[2]["nodes"] - counts[1]["nodes"] <= 30  # a layer
    assert counts[1]["nodes"] <= 60
    operators = collections.Counter(_operators(converted[2]))
    assert operators["Reshape"] == 2 * 2  # into heads and back, in each layer
    assert operators["Shape"] == operators["Slice"] == 1  # the positions
    assert not {"Erf", "ReduceMean", "Sqrt", "Concat", "Squeeze", "Identity"} & set(operators)
    model = converted[2]
    assert {(o.domain, o.version) for o in model.opset_import} == {("", 20)}
    onnx.shape_inference.infer_shapes(model, check_type=True, strict_mode=True, data_prop=True)


@pytest.mark.slow
@pytest.mark.parametrize(("num_heads", "with_biases"), [(2, False), (1, True), (16, True)])
def test_what_tensorflow_simplifies_is_fused_too(num_heads, with_biases):
    """It drops the addition of zeros, and the scale of heads of size 1."""
    config = sizes(num_layers=1, num_heads=num_heads)
    model = build_model(config, with_biases)
    proto = _convert(model)
    fusion.check_counts("float32", fusion.count_operators(proto), config)
    token_ids = np.array([[3, 7, 9, 0], [0, 0, 0, 0]], np.int32)
    expected = np.asarray(model(token_ids, training=False))
    np.testing.assert_allclose(_run(proto, token_ids=token_ids)[0], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rule", "what"),
    [
        ("_LAYER_NORM", "LayerNormalization 0 instead of 3"),
        ("_GELU", "Gelu 0 instead of 1"),
        ("_ATTENTION", "weight_products 7 instead of 5"),
    ],
)
def test_a_rule_that_stops_fitting_is_noticed(monkeypatch, rule, what):
    monkeypatch.setattr(fusion, rule, Rule(("NoSuchOperator", "x"), None))
    counts = fusion.count_operators(_convert(build_model(sizes(num_layers=1))))
    with pytest.raises(VerificationError, match=f"model.onnx is not fused.*{what}"):
        fusion.check_counts("float32", counts, sizes(num_layers=1))


@pytest.mark.slow
def test_the_same_weights_give_the_same_bytes_in_any_process(tmp_path):
    assert file_hashes(tmp_path) == run_python(_CONVERT)


@pytest.mark.slow
@pytest.mark.parametrize("bad", [-1, -_VOCAB_SIZE, _VOCAB_SIZE, -_VOCAB_SIZE - 1, -(2**31), 2**31 - 1])
def test_an_id_outside_the_vocabulary_never_gets_an_answer(converted, bad):
    """On a CPU the run fails. A GPU reads zeros instead, and goes on: there the answer for this text is NaN."""
    token_ids = np.array([[3, 7, 0], [3, bad, 0], [0, 0, 0]], np.int32)
    with pytest.raises(Exception, match=f"out of data bounds.*{_VOCAB_SIZE - 1}]"):
        _run(converted[1], token_ids=token_ids)
    _run(converted[1], token_ids=np.array([[0, _VOCAB_SIZE - 1]], np.int32))

    as_on_gpu = onnx.ModelProto.FromString(converted[1].SerializeToString())
    (gather,) = [node for node in as_on_gpu.graph.node if node.op_type == "Gather"]
    gather.input[1] = next(node.output[0] for node in as_on_gpu.graph.node if node.op_type == "Clip")
    for output in _run(as_on_gpu, token_ids=token_ids):
        assert np.isnan(output[1]).all()
        assert np.isfinite(output[[0, 2]]).all()
