"""Reloads exported artifacts in a fresh process and compares their answers with the trained model's.

The process that trained writes the cases and the model's answers with `write_cases`; `verify` starts one process
per runtime (TensorFlow and ONNX Runtime Extensions crash together), each of which writes what it saw as JSON.
"""

import contextlib
import dataclasses
import json
import sys
from pathlib import Path

import numpy as np

from pipeline.contract import (
    LABEL,
    LOGITS,
    ONNX_FILES,
    ONNX_TEXT,
    PROBABILITIES,
    SERVING_SIGNATURE,
    TEXT,
    TOKEN_IDS,
    TOKEN_IDS_SIGNATURE,
    Manifest,
)
from pipeline.dataset import Split
from pipeline.errors import VerificationError
from pipeline.evaluation import predict_logits, softmax
from pipeline.files import read_json
from pipeline.fresh_process import FreshProcess, run_fresh
from pipeline.text import Tokenizer, pad

TOLERANCE = 1e-4  # absolute, and relative for answers above 1
FLOAT16_TOLERANCE = 1e-2  # of probabilities
# What int8 may cost on the test split, against float32.
MIN_AGREEMENT = 0.99  # share of rows whose label stays the same; float16 too
MAX_ACCURACY_DROP = 0.005
REAL_TEXTS = 200
# What real data may lack: nothing at all, blanks, other scripts, signs outside the BMP, more than max_length.
_ODD_TEXTS = ["", "   ", "\t\n", "naïve café – 100 %", "好看，推荐！", "\U0001f600\U0001f44d\u200d", "so " * 3000]
# Runs of one sign have many equally good segmentations: every runtime must choose the same.
_ODD_TEXTS += ["she said ???????? 2.", "Noooooo!!!!!!!!!", "times ...........", "aaahhhhhhh *******", "so" + "o" * 40]
_BATCH_SIZES = (1, 3, 17)
_BATCH_TOKENS = 4352  # of a batch of more than two rows: attention's memory grows with the square of the length
_TEST_BATCH = 64  # rows, of like length


def write_cases(path, predict, texts, tokenizer, max_length, test, temperature):
    """Writes inputs and the trained model's answers for them.

    Args:
        path: `.npz` file to write.
        predict: token_ids int32 [B, T] -> logits [B, C], the trained model.
        texts: real texts; the first 200 are used.
        tokenizer: the `Tokenizer` the model was trained with.
        max_length: longest text, in tokens.
        test: the test `Split`, on which the smaller precisions are compared with float32.
        temperature: that the model divides its logits by before the softmax.
    """
    rng = np.random.default_rng(0)
    cases = {}
    for batch in _BATCH_SIZES:
        for length in sorted({1, 7, max_length}):
            length = min(length, max_length)
            rows = min(batch, max(2, _BATCH_TOKENS // length))
            token_ids = rng.integers(1, tokenizer.vocab_size, (rows, length), np.int32)
            # Full, empty and short rows, as far as there are rows; a single row is full.
            if rows > 1:
                token_ids[1] = 0
                for row in range(2, rows):
                    token_ids[row, rng.integers(1, length + 1) :] = 0
            cases[f"ids/{rows}x{length}"] = token_ids
            cases[f"logits/{rows}x{length}"] = np.asarray(predict(token_ids), np.float32)
    empty = np.zeros((1, min(7, max_length)), np.int32)  # a batch of nothing but an empty text
    cases |= {"ids/empty": empty, "logits/empty": np.asarray(predict(empty), np.float32)}
    texts = [*texts[:REAL_TEXTS], *_ODD_TEXTS]
    rows = tokenizer.encode(texts, max_length)
    logits = [np.asarray(predict(pad([row])), np.float32)[0] for row in rows]
    cases |= {f"test/{field.name}": getattr(test, field.name) for field in dataclasses.fields(test)}
    cases["temperature"] = np.float64(temperature)
    np.savez(path, texts=np.array(json.dumps(texts)), text_logits=np.stack(logits), **cases)


def verify(version_dir, cases):
    """Compares every artifact of `version_dir` with the answers in `cases`, in fresh processes.

    Returns:
        artifact -> figures: cases and max_abs_difference; for int8 and float16 label_agreement, accuracy and
        float32_accuracy on the test split, whose rows are the cases of int8.

    Raises:
        VerificationError: an artifact cannot be loaded, or differs; says which, where and by how much.
    """
    parity = {}
    answers = {runtime: Path(cases).with_name(f"{runtime}.json") for runtime in _RUNTIMES}
    with contextlib.ExitStack() as running:
        # Side by side: most of the time is imports.
        checks = {
            runtime: running.enter_context(FreshProcess("export.verify", runtime, version_dir, cases, answer))
            for runtime, answer in answers.items()
        }
        for runtime, check in checks.items():
            problem, found = check.wait(), read_json(answers[runtime])
            if problem or found is None:
                raise VerificationError(
                    f"exported artifacts could not be checked with {runtime} and were deleted: {problem or 'no answer'}"
                )
            parity |= found
    differing = [f"{artifact}: {p['failed']}" for artifact, p in parity.items() if "failed" in p]
    if differing:
        raise VerificationError(
            "exported artifacts differ from the trained model and were deleted: " + "; ".join(differing) + "."
        )
    return parity


# What follows runs in the fresh process.


class _Comparison:
    """Collects the differences of one artifact."""

    def __init__(self, tolerance=TOLERANCE):
        self.tolerance = tolerance
        self.cases = 0
        self.max_abs_difference = 0.0
        self.failed = None

    def add(self, case, found, expected):
        found = np.asarray(found)
        self.cases += 1
        if found.shape != expected.shape or not np.isfinite(found).all():
            self._fail(f"{case}: shape {found.shape}, all finite: {bool(np.isfinite(found).all())}")
            return
        difference = np.abs(found - expected)
        self.max_abs_difference = max(self.max_abs_difference, float(difference.max()))
        if (difference > self.tolerance * np.maximum(1.0, np.abs(expected))).any():
            self._fail(f"{case}: differs by up to {difference.max():.3g}, allowed {self.tolerance}")

    def require(self, case, holds, message):
        self.cases += 1
        if not holds:
            self._fail(f"{case}: {message}")

    def _fail(self, message):
        self.failed = self.failed or message

    def result(self, key="failed"):
        failed = {key: self.failed} if self.failed else {}
        return {"cases": self.cases, "max_abs_difference": self.max_abs_difference, **failed}


def _check_saved_model(version_dir, cases):
    import tensorflow as tf

    manifest = Manifest.read(version_dir)
    labels = np.array([label.encode() for label in manifest.labels], object)
    has_text = manifest.job["export"]["text_signature"]
    if has_text:
        import tensorflow_text  # noqa: F401 - registers the operations of the text signature
    loaded = tf.saved_model.load(str(version_dir))
    ids_signature = loaded.signatures[TOKEN_IDS_SIGNATURE]
    serving_signature = loaded.signatures[SERVING_SIGNATURE]
    comparison = _Comparison()
    probabilities = _probabilities_of(cases)
    for case, token_ids, logits in _id_cases(cases):
        for signature in (ids_signature,) if has_text else (ids_signature, serving_signature):
            answer = signature(token_ids=tf.constant(token_ids))
            comparison.add(f"{case} logits", answer[LOGITS], logits)
            comparison.add(f"{case} probabilities", answer[PROBABILITIES], probabilities(logits))
    vocab_size = Tokenizer.load(Path(version_dir) / "tokenizer.model").vocab_size
    for bad in _bad_ids(vocab_size):
        try:
            ids_signature(token_ids=tf.constant(bad))
            comparison.require("ids", False, f"{bad.tolist()} was answered")
        except tf.errors.InvalidArgumentError:
            comparison.cases += 1
    if has_text:
        texts, logits = _text_cases(cases)
        for case, batch, expected in _text_batches(texts, probabilities(logits), manifest.max_length):
            answer = serving_signature(text=tf.constant(batch))
            comparison.add(f"{case} probabilities", answer[PROBABILITIES], expected)
            given = labels[np.argmax(answer[PROBABILITIES], axis=1)]
            comparison.require(f"{case} label", (answer[LABEL].numpy() == given).all(), "not the most probable one")
    from serving.warmup import check_warmup

    try:
        comparison.cases += check_warmup(version_dir, manifest.name, loaded.signatures)
    except VerificationError as e:
        comparison.require("warm-up", False, str(e))
    return {"saved_model": comparison.result()}


def _check_onnx(version_dir, cases):
    from serving.onnx_classifier import OnnxClassifier

    manifest = Manifest.read(version_dir)
    exported = [precision for precision, file in ONNX_FILES.items() if file in manifest.files]
    loaded = {precision: OnnxClassifier.load(version_dir, precision) for precision in exported}  # compares metadata
    smaller = {p: check for p, check in (("int8", _check_int8), ("float16", _check_float16)) if p in loaded}
    parity = {ONNX_FILES[p]: _check_exact(version_dir, p, loaded[p], cases) for p in exported if p not in smaller}
    expected = _test_logits(loaded["float32"], cases) if smaller else None
    parity |= {ONNX_FILES[p]: check(loaded[p], cases, expected) for p, check in smaller.items()}
    vocab_size = Tokenizer.load(Path(version_dir) / "tokenizer.model").vocab_size
    for precision in exported:
        for bad in _bad_ids(vocab_size):
            if _is_answered(_session(version_dir, precision), bad):
                parity[ONNX_FILES[precision]]["failed"] = f"ids {bad.tolist()}, outside the vocabulary, were answered"
    return parity


def _session(version_dir, precision):
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.log_severity_level = 4  # what it refuses is no error here
    path = str(Path(version_dir) / ONNX_FILES[precision])
    return ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def _bad_ids(vocab_size):
    return [np.array([[1, bad]], np.int32) for bad in (-1, vocab_size)]


def _is_answered(session, token_ids):
    try:
        session.run([LOGITS], {TOKEN_IDS: token_ids})
    except Exception:  # onnxruntime's exceptions have no common base
        return False
    return True


def _check_exact(version_dir, precision, classifier, cases):
    comparison, probabilities = _Comparison(), _probabilities_of(cases)
    session = _session(version_dir, precision)
    for case, token_ids, logits in _id_cases(cases):
        found = session.run([LOGITS, PROBABILITIES], {TOKEN_IDS: token_ids})
        comparison.add(f"{case} logits", found[0], logits)
        comparison.add(f"{case} probabilities", found[1], probabilities(logits))
    texts, logits = _text_cases(cases)
    rows = Tokenizer.load(Path(version_dir) / "tokenizer.model").encode(texts, classifier.max_length)
    comparison.add("text logits", classifier.logits(pad(rows)), logits)
    comparison.add("text probabilities", classifier.probabilities(texts), probabilities(logits))
    return comparison.result()


def _check_int8(classifier, cases, expected):
    """How many labels differ is for the caller to judge: the file is left out then, and the version goes on."""
    texts, _ = _text_cases(cases)
    found = _test_logits(classifier, cases)
    finite = np.isfinite(found).all() and np.isfinite(classifier.probabilities(texts)).all()
    failed = {} if finite else {"failed": "an answer is not finite"}
    return {"cases": len(found), **_labels_compared(found, expected, cases), **failed}


def _check_float16(classifier, cases, expected):
    """Beyond the tolerance it is "poor", which is for the caller to judge as well."""
    comparison, probabilities = _Comparison(FLOAT16_TOLERANCE), _probabilities_of(cases)
    for case, token_ids, logits in _id_cases(cases):
        comparison.add(f"{case} probabilities", probabilities(classifier.logits(token_ids)), probabilities(logits))
    texts, text_logits = _text_cases(cases)
    comparison.add("text probabilities", classifier.probabilities(texts), probabilities(text_logits))
    found = _test_logits(classifier, cases)
    comparison.add("test probabilities", probabilities(found), probabilities(expected))
    return {**comparison.result("poor"), **_labels_compared(found, expected, cases)}


def _test_logits(classifier, path):
    split = _test_split(path)
    by_length = np.argsort(split.lengths, kind="stable")
    return predict_logits(classifier.logits, split, np.array_split(by_length, len(split) // _TEST_BATCH + 1))


def _labels_compared(found, expected, cases):
    gold = _test_split(cases).labels
    labels, expected = found.argmax(axis=1), expected.argmax(axis=1)
    return {
        "label_agreement": float((labels == expected).mean()),
        "accuracy": float((labels == gold).mean()),
        "float32_accuracy": float((expected == gold).mean()),
    }


def _check_onnx_text(version_dir, cases):
    import onnxruntime as ort
    import onnxruntime_extensions

    options = ort.SessionOptions()
    options.register_custom_ops_library(onnxruntime_extensions.get_library_path())
    path = str(Path(version_dir) / ONNX_TEXT)
    session = ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    texts, logits = _text_cases(cases)
    comparison, probabilities = _Comparison(), _probabilities_of(cases)
    max_length = Manifest.read(version_dir).max_length
    for case, batch, expected in _text_batches(texts, probabilities(logits), max_length):
        found = session.run([PROBABILITIES], {TEXT: np.array(batch, object)})[0]
        comparison.add(f"{case} probabilities", found, expected)
    ids_graph = ort.InferenceSession(str(Path(version_dir) / ONNX_FILES["float32"]), providers=["CPUExecutionProvider"])
    same = session.get_modelmeta().custom_metadata_map == ids_graph.get_modelmeta().custom_metadata_map
    comparison.require("metadata", same, f"differs from that of {ONNX_FILES['float32']}")
    return {ONNX_TEXT: comparison.result()}


_RUNTIMES = {"tensorflow": _check_saved_model, "onnxruntime": _check_onnx, "onnxruntime-extensions": _check_onnx_text}


def _id_cases(path):
    with np.load(path) as cases:
        for name in cases.files:
            if name.startswith("ids/"):
                yield name, cases[name], cases["logits/" + name.removeprefix("ids/")]


def _probabilities_of(path):
    """Returns the function logits [N, C] -> the model's probabilities of them, float64 [N, C]."""
    with np.load(path) as cases:
        temperature = float(cases["temperature"])
    return lambda logits: softmax(np.asarray(logits, np.float64) / temperature)


def _test_split(path):
    with np.load(path) as cases:
        return Split(**{f.name: cases[f"test/{f.name}"] for f in dataclasses.fields(Split)})


def _text_cases(path):
    with np.load(path) as cases:
        return json.loads(str(cases["texts"])), cases["text_logits"]


def _text_batches(texts, expected, max_length):
    size = min(_BATCH_SIZES[-1], max(2, _BATCH_TOKENS // max_length))
    for start in range(0, len(texts), size):
        yield f"texts {start}+", texts[start : start + size], expected[start : start + size]
    for i, text in enumerate(texts):
        if not text.strip():
            yield f"text {i} alone", [text], expected[i : i + 1]


def main(runtime, version_dir, cases, answer):
    """Checks the artifacts of one runtime and writes what was seen to the file `answer`."""
    Path(answer).write_text(json.dumps(_RUNTIMES[runtime](version_dir, cases)), encoding="utf-8")


if __name__ == "__main__":
    run_fresh(main, *sys.argv[1:])
