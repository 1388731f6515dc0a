"""Every option of the model in every artifact: the same answers as the trained model, and no answer for a wrong id."""

import json

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from export import fusion
from export.float16 import convert_float16
from export.onnx_graph import convert, make_metadata
from export.onnx_text import build_text_graph
from export.ort import convert_ort
from export.quantize import quantize_int8
from export.saved_model import export_saved_model
from export.verify import FLOAT16_TOLERANCE
from pipeline.contract import ONNX_FILES
from pipeline.text import Tokenizer, train_tokenizer
from tests.jobs import VOCAB_SIZE, make_rows, run_python
from tests.options import BESIDE, OPTIONS, SIZES, build_fitted, config_of, make_ids

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:You are using a softmax over axis -1")]

LABELS = ["a", "b", "c"]
TEXTS = [*(text for text, _ in make_rows(12)), "", "so " * 30]
ATOL = 1e-5
INT8_ATOL = 0.1  # of logits; how many labels differ is judged on real data
NAMES = [*OPTIONS, *BESIDE]
every_option = pytest.mark.parametrize("name", NAMES)

# In another process: TensorFlow and the extensions crash together.
_TEXT_GRAPHS = """
import json, sys
import numpy as np
import onnxruntime as ort
import onnxruntime_extensions

options = ort.SessionOptions()
options.register_custom_ops_library(onnxruntime_extensions.get_library_path())
texts, answers = json.loads(sys.argv[1]), {}
for path in sys.argv[2:]:
    session = ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    answers[path] = session.run(None, {"text": np.array(texts, object)})[0].tolist()
print(json.dumps(answers))
"""


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer(train_tokenizer([text for text, _ in make_rows(360)], VOCAB_SIZE))


@pytest.fixture(scope="module")
def models(tokenizer):
    return {name: build_fitted(name, tokenizer.vocab_size, len(LABELS)) for name in NAMES}


@pytest.fixture(scope="module")
def expected(models, tokenizer):
    """Option -> (batches of token ids with the model's logits, probabilities of TEXTS); each computed once."""
    from pipeline.classifier import compile_predict

    found = {}
    for name, model in models.items():
        predict = compile_predict(model)
        batches = [(token_ids, np.asarray(predict(token_ids))) for token_ids in make_ids(tokenizer.vocab_size)]
        found[name] = batches, _probabilities(model, predict, tokenizer)
    return found


def _probabilities(model, predict, tokenizer):
    rows = tokenizer.encode(TEXTS, SIZES["max_length"])
    logits = [np.asarray(predict(row[None] if len(row) else np.zeros((1, 1), np.int32)))[0] for row in rows]
    logits = np.stack(logits) / model.temperature.numpy()
    powers = np.exp(logits - np.max(logits, axis=1, keepdims=True))
    return powers / powers.sum(axis=1, keepdims=True)


def _precisions(name):
    """All that the option can have: ONNX Runtime's own attention is the plain one."""
    config = config_of(name)
    plain = config.attention == "full" and config.position not in ("rope", "alibi") and not config.num_kv_heads
    return [p for p in ONNX_FILES if p != "ort" or plain]


@pytest.fixture(scope="module")
def directory(models, tokenizer, tmp_path_factory):
    """Every file of every option."""
    root = tmp_path_factory.mktemp("options")
    metadata = make_metadata("x", 1, LABELS, SIZES["max_length"], tokenizer.sha256)
    for name, model in models.items():
        files = {precision: root / f"{name}.{precision}.onnx" for precision in ONNX_FILES}
        graph = convert(model, 20, metadata)
        onnx.save(graph, files["float32"])
        onnx.save(build_text_graph(graph, tokenizer.model, SIZES["max_length"]), root / f"{name}.text.onnx")
        for precision, write in (("int8", quantize_int8), ("float16", convert_float16), ("ort", convert_ort)):
            if precision in _precisions(name):
                write(files["float32"], files[precision])
    return root


def _run(path, output, token_ids):
    options = ort.SessionOptions()
    options.log_severity_level = 4  # what it refuses is no error here
    session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    return session.run([output], {"token_ids": token_ids})[0]


@every_option
def test_onnx_files(expected, directory, tokenizer, name):
    for precision in _precisions(name):
        path = directory / f"{name}.{precision}.onnx"
        fusion.check_counts(precision, fusion.count_operators(onnx.load(path)), config_of(name))
        for token_ids, logits in expected[name][0]:
            found = _run(path, "logits", token_ids)
            atol = {"int8": INT8_ATOL, "float16": FLOAT16_TOLERANCE}.get(precision, ATOL)
            np.testing.assert_allclose(found, logits, rtol=0, atol=atol, err_msg=precision)
        for bad in (-1, tokenizer.vocab_size):
            with pytest.raises(Exception, match="out of data bounds"):
                _run(path, "logits", np.array([[1, bad]], np.int32))


@every_option
def test_standard_operators_only(directory, name):
    graph = onnx.load(directory / f"{name}.float32.onnx")
    assert [(o.domain, o.version) for o in graph.opset_import] == [("", 20)]
    assert not graph.functions
    onnx.shape_inference.infer_shapes(graph, check_type=True, strict_mode=True, data_prop=True)
    operators = {n.op_type for n in graph.graph.node}
    assert not {"Erf", "ReduceMean", "Tile", "Loop", "If", "Identity"} & operators
    assert ("Sqrt" in operators) == ("Mod" in operators) == bool(config_of(name).ngram_pairs)


@every_option
def test_a_wrong_id_has_no_answer_on_a_gpu_either(directory, tokenizer, name):
    """A GPU reads zeros there and goes on: its answer for this text is NaN."""
    model = onnx.load(directory / f"{name}.float32.onnx")
    ids = {i.name for i in model.graph.initializer}
    guarded = next(n.input[1] for n in model.graph.node if n.op_type == "Gather" and n.input[0] in ids)
    for gather in (n for n in model.graph.node if n.op_type == "Gather" and n.input[1] == guarded):
        gather.input[1] = next(n.output[0] for n in model.graph.node if n.op_type == "Clip")
    onnx.save(model, directory / "as_on_gpu.onnx")
    token_ids = np.array([[3, 7, 0], [3, tokenizer.vocab_size, 0], [-1, 3, 4], [0, 0, 0]], np.int32)
    for output in ("logits", "probabilities"):
        found = _run(directory / "as_on_gpu.onnx", output, token_ids)
        assert np.isnan(found[[1, 2]]).all()
        assert np.isfinite(found[[0, 3]]).all()


def test_text_graphs(expected, directory):
    paths = {str(directory / f"{name}.text.onnx"): name for name in NAMES}
    for path, found in run_python(_TEXT_GRAPHS, json.dumps(TEXTS), *paths).items():
        np.testing.assert_allclose(found, expected[paths[path]][1], rtol=0, atol=ATOL, err_msg=paths[path])


@every_option
def test_saved_model(models, expected, tokenizer, tmp_path, name):
    import tensorflow as tf

    export_saved_model(models[name], tmp_path, LABELS, tokenizer.model, SIZES["max_length"])
    signatures = tf.saved_model.load(str(tmp_path)).signatures
    found = signatures["serving_default"](text=tf.constant(TEXTS))["probabilities"]
    np.testing.assert_allclose(found, expected[name][1], rtol=0, atol=ATOL)
    for token_ids, logits in expected[name][0]:
        found = signatures["token_ids"](token_ids=tf.constant(token_ids))["logits"]
        np.testing.assert_allclose(found, logits, rtol=0, atol=ATOL)
