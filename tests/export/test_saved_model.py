"""The SavedModel: its signatures, its answers, and what it refuses."""

import json

import numpy as np
import pytest

from export.saved_model import export_saved_model
from pipeline.text import pad
from tests.jobs import LABELS, MAX_LENGTH, contents, load_trained, published_job, run_python

tf = pytest.importorskip("tensorflow")
import tensorflow_text  # noqa: E402, F401 - registers the operations of the text signature

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:You are using a softmax over axis -1")]

_WITHOUT_TF_TEXT = """
import json, sys
sys.modules["tensorflow_text"] = None  # importing it is an ImportError
import numpy as np
import tensorflow as tf
loaded = tf.saved_model.load(sys.argv[1])
token_ids = tf.constant(json.loads(sys.argv[2]), tf.int32)
answers = {name: f(token_ids=token_ids)["logits"].numpy().tolist() for name, f in loaded.signatures.items()}
print(json.dumps(answers))
"""


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    return published_job(tmp_path_factory)


@pytest.fixture(scope="module")
def trained(job):
    return load_trained(job)


@pytest.fixture(scope="module")
def loaded(job):
    return tf.saved_model.load(str(job.model_dir / "1"))


@pytest.fixture(scope="module")
def ids_only(trained, tmp_path_factory):
    """A SavedModel without text."""
    directory = tmp_path_factory.mktemp("ids-only")
    export_saved_model(trained[1], directory, LABELS, None, MAX_LENGTH)
    return directory


def _meta_graph(directory):
    from tensorflow.core.protobuf import saved_model_pb2

    (meta_graph,) = saved_model_pb2.SavedModel.FromString((directory / "saved_model.pb").read_bytes()).meta_graphs
    return meta_graph


def _signatures(directory):
    """Name -> (inputs, outputs), each name -> (dtype, shape), as TensorFlow Serving reads them."""

    def describe(infos):
        return {k: (tf.dtypes.as_dtype(i.dtype), [d.size for d in i.tensor_shape.dim]) for k, i in infos.items()}

    found = dict(_meta_graph(directory).signature_def)
    found.pop("__saved_model_init_op", None)
    assert all(s.method_name == "tensorflow/serving/predict" for s in found.values())
    return {name: (describe(s.inputs), describe(s.outputs)) for name, s in found.items()}


def _ops(directory):
    graph = _meta_graph(directory).graph_def
    return {n.op for n in graph.node} | {n.op for f in graph.library.function for n in f.node_def}


_IDS = ({"token_ids": (tf.int32, [-1, -1])}, {"logits": (tf.float32, [-1, 2]), "probabilities": (tf.float32, [-1, 2])})


def test_signatures(job):
    assert _signatures(job.model_dir / "1") == {
        "token_ids": _IDS,
        "serving_default": (
            {"text": (tf.string, [-1])},
            {"label": (tf.string, [-1]), "probabilities": (tf.float32, [-1, 2])},
        ),
    }


@pytest.mark.parametrize("batch", [1, 3, 17])
def test_text_signature_equals_the_model(loaded, trained, batch):
    _, model, tokenizer, labels, texts = trained
    for batch_texts in (
        texts[:batch],
        ["superb " * 500, *texts][:batch],  # longer than max_length
        ["", *texts][:batch],
        ["这部电影 \U0001f600", *texts][:batch],  # nothing the tokenizer has seen
    ):
        rows = tokenizer.encode(batch_texts, MAX_LENGTH)
        expected = model.probabilities(np.stack([model(pad([row]), training=False)[0] for row in rows])).numpy()
        answer = loaded.signatures["serving_default"](text=tf.constant(batch_texts))
        np.testing.assert_allclose(answer["probabilities"], expected, rtol=0, atol=1e-5)
        assert [label.decode() for label in answer["label"].numpy()] == [labels[i] for i in expected.argmax(axis=1)]


def test_empty_texts_alone(loaded, trained):
    model = trained[1]
    expected = model.probabilities(model(np.zeros((1, 1), np.int32), training=False)).numpy()
    for texts in ([""], ["", "", ""], [" ", "\n"]):
        answer = loaded.signatures["serving_default"](text=tf.constant(texts))
        np.testing.assert_allclose(answer["probabilities"], np.repeat(expected, len(texts), 0), rtol=0, atol=1e-5)


@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (17, MAX_LENGTH)])
def test_ids_signature_equals_the_model(loaded, trained, shape):
    _, model, tokenizer, _, _ = trained
    token_ids = np.random.default_rng(0).integers(0, tokenizer.vocab_size, shape, np.int32)
    token_ids[-1] = 0
    expected = np.asarray(model(token_ids, training=False))
    answer = loaded.signatures["token_ids"](token_ids=tf.constant(token_ids))
    np.testing.assert_allclose(answer["logits"], expected, rtol=0, atol=1e-5)
    np.testing.assert_allclose(answer["probabilities"], model.probabilities(expected), rtol=0, atol=1e-5)


def test_no_rows(loaded):
    assert loaded.signatures["token_ids"](token_ids=tf.zeros([0, 3], tf.int32))["logits"].shape == (0, 2)


@pytest.mark.parametrize("wrong", [-1, "vocab_size"])
def test_ids_outside_the_vocabulary_are_refused(loaded, trained, wrong):
    wrong = trained[2].vocab_size if wrong == "vocab_size" else wrong
    with pytest.raises(tf.errors.InvalidArgumentError, match=f"must be >= 0 and < {trained[2].vocab_size}"):
        loaded.signatures["token_ids"](token_ids=tf.constant([[5, wrong]], tf.int32))


def test_the_tokenizer_lies_inside(job):
    assert "SentencepieceOp" in _ops(job.model_dir / "1")
    graph = _meta_graph(job.model_dir / "1").graph_def
    assert str(job.directory) not in str(graph)  # no path of this machine
    assert (job.run_dir / "data" / "tokenizer.model").read_bytes() in (
        job.model_dir / "1" / "saved_model.pb"
    ).read_bytes() or any((job.model_dir / "1" / "assets").iterdir())


def test_equal_models_give_equal_files_whatever_the_process_did_before(trained, job, tmp_path):
    _, model, tokenizer, labels, _ = trained
    export_saved_model(model, tmp_path, labels, tokenizer.model, MAX_LENGTH)
    written, version = contents(tmp_path), contents(job.model_dir / "1")
    assert written == {file: version[file] for file in written}
    assert set(written) == {"saved_model.pb", "variables/variables.index", "variables/variables.data-00000-of-00001"}


def test_without_text_there_is_no_tf_text_op(ids_only):
    assert _signatures(ids_only) == {"token_ids": _IDS, "serving_default": _IDS}
    foreign = {op for op in _ops(ids_only) if "entencepiece" in op or "Ragged" in op or ">" in op}
    assert foreign == set()


def test_without_text_it_loads_without_tensorflow_text(ids_only, trained):
    token_ids = [[7, 8, 9], [7, 0, 0], [0, 0, 0]]
    expected = np.asarray(trained[1](np.array(token_ids, np.int32), training=False))
    answers = run_python(_WITHOUT_TF_TEXT, ids_only, json.dumps(token_ids))
    assert set(answers) == {"token_ids", "serving_default"}
    for logits in answers.values():
        np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-5)


def test_nul_counts_as_a_blank(loaded):
    serve = loaded.signatures["serving_default"]
    found, expected = (serve(text=tf.constant([text]))["probabilities"] for text in ("good\0film", "good film"))
    np.testing.assert_array_equal(found, expected)
