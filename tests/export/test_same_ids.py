"""The token ids that the SavedModel and model.text.onnx compute inside are SentencePiece's, for odd texts too.

ONNX Runtime Extensions run in a process without TensorFlow: the two crash together.
"""

import io
import json
import random
import subprocess
import sys

import numpy as np
import onnx
import pytest
import sentencepiece

from export.onnx_text import build_text_graph
from pipeline.config import ModelConfig
from pipeline.text import Tokenizer, pad, train_tokenizer
from tests.jobs import MAX_LENGTH, environment, published_job
from tests.odd_texts import KINDS, LONG, odd_texts
from tests.serving.tiny import Tiny

tf = pytest.importorskip("tensorflow")
import tensorflow_text  # noqa: E402, F401 - registers the operations of the text signature

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:You are using a softmax over axis -1")]

_REPLACED = dict.fromkeys(range(0xD800, 0xE000), "\ufffd")
TEXTS = [text.translate(_REPLACED) for text in odd_texts(2000)]
BATCHES = [TEXTS[i::20] for i in range(20)] + [LONG, [""], ["", " "], ["\0"], ["a\0b"]]
_NOISE = np.random.default_rng(0)
NOT_UTF8 = [
    b"\xff", b"a\xffb", b"\x80abc", b"good \xc3", b"\xf0\x9f\x98", b"\xed\xa0\x80", b"\xc0\x80",
    b"\xf8\x88\x80\x80\x80", b"a\xff\0b", b"\0\xff", b"\xe5\xa5\xbd\xe5\xa5", *(_NOISE.bytes(n) for n in range(1, 100)),
]  # fmt: skip

_RUN_ONNX = """
import json, sys
import numpy as np
import onnxruntime as ort
import onnxruntime_extensions

options = ort.SessionOptions()
options.register_custom_ops_library(onnxruntime_extensions.get_library_path())
batches = json.load(sys.stdin)
for file in sys.argv[1:]:
    session = ort.InferenceSession(file, options, providers=["CPUExecutionProvider"])
    if session.get_inputs():
        found = [session.run(["token_ids"], {"text": np.array(texts, object)})[0] for texts in batches]
    else:
        found = session.run(["token_ids"], {})
    np.savez(file + ".npz", *found)
"""


def _train(texts, **options):
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts), model_writer=model, pad_id=0, unk_id=1, bos_id=-1, eos_id=-1, minloglevel=3,
        num_threads=4, **options,
    )  # fmt: skip
    return model.getvalue()


def _models():
    """Models as data owners bring them, and our own that folds case: name -> (bytes, max_length)."""
    parts = [text.encode("utf-8", "replace").decode() for texts in KINDS.values() for text in texts if "\0" not in text]
    rng = random.Random(0)
    texts = [" ".join(rng.choices(parts, k=8)) for _ in range(1500)]
    some = {"hard_vocab_limit": False, "vocab_size": 1000}
    symbols = {"user_defined_symbols": ["[URL]", "@user", "<sep>"], "control_symbols": ["<mask>"]}
    as_is = {"normalization_rule_name": "identity", "remove_extra_whitespaces": False, "add_dummy_prefix": False}
    return {
        "chinese": (Tiny.build().tokenizer.model, 100),
        "case-folding": (train_tokenizer(texts, 700, mask=True, case_folding=True), 1000),
        "symbols": (_train(texts, character_coverage=0.98, **symbols, **some), 100),
        "as-is": (_train(texts, byte_fallback=True, **as_is, **some), 7),
    }


NAMES = ("published", "chinese", "case-folding", "symbols", "as-is")


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """Name -> (tokenizer, max_length, directory with saved_model.pb and model.text.onnx)."""
    from export.saved_model import export_saved_model
    from pipeline.calibrated import build_calibrated

    version = published_job(tmp_path_factory).model_dir / "1"
    found = {"published": (Tokenizer.load(version / "tokenizer.model"), MAX_LENGTH, version)}
    for name, (model, max_length) in _models().items():
        tokenizer, directory = Tokenizer(model), tmp_path_factory.mktemp(name)
        sizes = ModelConfig(d_model=2, num_heads=1, d_ff=2, num_layers=1, max_length=max_length)
        classifier = build_calibrated(sizes, tokenizer.vocab_size, 2, seed=0)
        export_saved_model(classifier, directory, ["a", "b"], model, max_length)
        (directory / "onnx").mkdir()
        weights = (np.zeros(shape, np.float32) for shape in ((tokenizer.vocab_size, 8), (8, 3), (3,)))
        tiny = Tiny(tokenizer, *weights)
        graph = build_text_graph(tiny.ids_model(), model, max_length)
        onnx.save(graph, directory / "onnx" / "model.text.onnx")
        found[name] = tokenizer, max_length, directory
    return found


@pytest.fixture(scope="module")
def onnx_ids(exported, tmp_path_factory):
    """Name -> (token ids of each batch, token ids of NOT_UTF8), as the written files compute them."""
    scratch, files = tmp_path_factory.mktemp("token-ids"), []
    for name, (_, _, directory) in exported.items():
        files += [scratch / f"{name}.onnx", scratch / f"{name}.bytes.onnx"]
        model = onnx.load(directory / "onnx" / "model.text.onnx")
        del model.graph.output[:]
        model.graph.output.append(onnx.helper.make_tensor_value_info("token_ids", onnx.TensorProto.INT32, None))
        onnx.save(model, files[-2])
        # Python passes only str; bytes reach the graph as they do from C, as strings of the graph itself.
        del model.graph.input[:]
        strings = onnx.helper.make_tensor("text", onnx.TensorProto.STRING, [len(NOT_UTF8)], NOT_UTF8)
        model.graph.initializer.append(strings)
        onnx.save(model, files[-1])
    command = [sys.executable, "-c", _RUN_ONNX, *map(str, files)]
    done = subprocess.run(command, input=json.dumps(BATCHES).encode(), env=environment(), capture_output=True)
    assert done.returncode == 0, done.stderr
    results = [list(np.load(f"{file}.npz").values()) for file in files]
    return dict(zip(exported, zip(results[::2], results[1::2], strict=True), strict=True))


def _assert_same(found, rows, texts):
    differ = [texts[i] for i, (got, row) in enumerate(zip(found, pad(rows), strict=True)) if (got != row).any()]
    assert found.dtype == np.int32 and not differ, differ[:5]


def _of_bytes(tokenizer, max_length):
    processor = sentencepiece.SentencePieceProcessor(model_proto=tokenizer.model)
    return [processor.encode(text.replace(b"\0", b" "))[:max_length] for text in NOT_UTF8]


def test_the_texts_are_what_they_should_be():
    assert len(TEXTS) == len(set(odd_texts(2000))) - (len(odd_texts(2000)) - 2000) == 2000
    assert odd_texts(2000) == odd_texts(2000)
    assert {len(text) for text in LONG} == {100_000} and set(LONG) < set(TEXTS)
    assert sum("\0" in text for text in TEXTS) > 50
    assert all(any(kind[0] in text for text in TEXTS) for kind in KINDS.values() if kind[0] != "\ud800")


@pytest.mark.parametrize("name", NAMES)
def test_saved_model(exported, name):
    tokenizer, max_length, directory = exported[name]
    tokenize = tf.saved_model.load(str(directory)).tokenize
    for texts in BATCHES:
        _assert_same(tokenize(tf.constant(texts)).numpy(), tokenizer.encode(texts, max_length), texts)
    _assert_same(tokenize(tf.constant(NOT_UTF8)).numpy(), _of_bytes(tokenizer, max_length), NOT_UTF8)


@pytest.mark.parametrize("name", NAMES)
def test_onnx_text_graph(exported, onnx_ids, name):
    tokenizer, max_length, _ = exported[name]
    batches, of_bytes = onnx_ids[name]
    for texts, found in zip(BATCHES, batches, strict=True):
        _assert_same(found, tokenizer.encode(texts, max_length), texts)
    _assert_same(of_bytes[0], _of_bytes(tokenizer, max_length), NOT_UTF8)


def test_lone_surrogates_are_replaced_by_the_tokenizer_and_refused_by_python_elsewhere(exported):
    tokenizer = exported["as-is"][0]
    for text in KINDS["surrogates"]:
        np.testing.assert_array_equal(*tokenizer.encode([text, text.translate(_REPLACED)]))
        with pytest.raises((UnicodeEncodeError, ValueError)):
            tf.constant([text])
