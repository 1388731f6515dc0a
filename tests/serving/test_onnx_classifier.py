import dataclasses
import shutil
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from pipeline.contract import Manifest, list_files
from pipeline.errors import ArtifactError, DataError, JobError
from pipeline.text import pad
from serving import onnx_classifier
from serving.onnx_classifier import OnnxClassifier, Prediction
from tests.serving.tiny import LABELS, MAX_LENGTH, TEXTS, VOCAB_SIZE, Tiny

ATOL = 1e-5


@pytest.fixture(scope="module")
def tiny():
    return Tiny.build()


@pytest.fixture(scope="module")
def version_dir(tiny, tmp_path_factory):
    return tiny.write_version(tmp_path_factory.mktemp("models") / "tiny" / "3")


@pytest.fixture
def damaged_dir(version_dir, tmp_path):
    """A copy that a test may damage."""
    return shutil.copytree(version_dir, tmp_path / "3")


@pytest.fixture(scope="module")
def classifier(version_dir):
    return OnnxClassifier.load(version_dir, threads=1)


def test_attributes(classifier):
    assert (classifier.name, classifier.version, classifier.labels) == ("tiny", 3, LABELS)
    assert classifier.max_length == MAX_LENGTH
    assert classifier.providers[-1] == "CPUExecutionProvider"


def test_predict_equals_oracle_in_given_order(classifier, tiny):
    texts = TEXTS * 3 + TEXTS[::-1]
    expected = tiny.expected_probabilities(texts)
    predictions = classifier.predict(texts)
    assert [p.label for p in predictions] == [LABELS[i] for i in expected.argmax(axis=1)]
    assert all(list(p.probabilities) == LABELS for p in predictions)
    got = [list(p.probabilities.values()) for p in predictions]
    np.testing.assert_allclose(got, expected, rtol=0, atol=ATOL)
    confidence = [p.confidence for p in predictions]
    np.testing.assert_allclose(confidence, expected.max(axis=1), rtol=0, atol=ATOL)


def test_of_equal_probabilities_the_first_label_wins(tiny, tmp_path):
    flat = Tiny(tiny.tokenizer, tiny.embedding, tiny.kernel * 0, tiny.bias * 0)
    [prediction] = OnnxClassifier.load(flat.write_version(tmp_path / "3")).predict(["good"])
    third = pytest.approx(1 / 3, abs=1e-6)
    assert prediction == Prediction(LABELS[0], dict.fromkeys(LABELS, third))
    assert prediction.confidence == third


def test_no_texts(classifier):
    assert classifier.predict([]) == []
    assert classifier.probabilities([]).shape == (0, len(LABELS))


def test_empty_text_is_the_bias(classifier, tiny):
    probabilities = np.exp(tiny.bias) / np.exp(tiny.bias).sum()
    np.testing.assert_allclose(classifier.probabilities(["", " "]), [probabilities] * 2, rtol=0, atol=ATOL)


def test_batch_mates_and_budget_do_not_matter(classifier, tiny, monkeypatch):
    texts = TEXTS * 20
    expected = tiny.expected_probabilities(texts)
    shapes = []
    run = classifier._run
    monkeypatch.setattr(classifier, "_run", lambda output, ids: (shapes.append(ids.shape), run(output, ids))[1])
    for budget in (1, 50, 100_000):
        monkeypatch.setattr(onnx_classifier, "BATCH_TOKENS", budget)
        shapes.clear()
        np.testing.assert_allclose(classifier.probabilities(texts), expected, rtol=0, atol=ATOL)
        assert sum(b for b, _ in shapes) == len(texts)
        assert all(b * t <= budget or b == 1 for b, t in shapes)
    alone = np.concatenate([classifier.probabilities([text]) for text in TEXTS])
    np.testing.assert_allclose(alone, expected[: len(TEXTS)], rtol=0, atol=ATOL)


def test_little_is_padded(classifier, monkeypatch):
    texts = ["the film was good and the story great", *["good"] * 31] * 2  # would fit one batch
    padded = []
    run = classifier._run
    monkeypatch.setattr(classifier, "_run", lambda output, ids: (padded.append(ids), run(output, ids))[1])
    classifier.probabilities(texts)
    assert len(padded) == 2
    assert not any((ids == 0).any() for ids in padded)


def test_threads_share_a_classifier(classifier, tiny):
    expected = tiny.expected_probabilities(TEXTS)
    with ThreadPoolExecutor(8) as pool:
        for got in pool.map(classifier.probabilities, [TEXTS] * 40):
            np.testing.assert_allclose(got, expected, rtol=0, atol=ATOL)


@pytest.mark.parametrize(
    ("texts", "message"),
    [("good", "texts='good'"), (["good", None], r"texts\[1\]=None"), (["a", "b", b"c"], r"texts\[2\]=b'c'")],
)
def test_what_is_no_list_of_str_is_refused(classifier, texts, message):
    with pytest.raises(DataError, match=message):
        classifier.predict(texts)


@pytest.mark.parametrize("dtype", [np.int8, np.int32, np.int64, np.uint16])
@pytest.mark.parametrize("width", [1, 5, MAX_LENGTH])
@pytest.mark.parametrize("rows", [1, 7])
def test_logits_equal_oracle(classifier, tiny, rows, width, dtype):
    ids = np.random.default_rng(1).integers(2, 120, size=(rows, width)).astype(dtype)
    expected = tiny.embedding[ids].astype(np.float64).mean(axis=1) @ tiny.kernel + tiny.bias
    got = classifier.logits(ids)
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, expected, rtol=0, atol=ATOL)


def test_logits_of_texts(classifier, tiny, monkeypatch):
    ids = pad(tiny.tokenizer.encode(TEXTS, MAX_LENGTH))
    expected = tiny.expected_logits(TEXTS)
    np.testing.assert_allclose(classifier.logits(ids), expected, rtol=0, atol=ATOL)
    monkeypatch.setattr(onnx_classifier, "BATCH_TOKENS", 2 * MAX_LENGTH)
    np.testing.assert_allclose(classifier.logits(ids), expected, rtol=0, atol=ATOL)
    np.testing.assert_allclose(classifier.logits(ids.tolist()), expected, rtol=0, atol=ATOL)
    assert classifier.logits(ids[:0]).shape == (0, len(LABELS))


@pytest.mark.parametrize(
    ("token_ids", "message"),
    [
        (np.array([[2, 3], [4, -1]]), r"token_ids\[1, 1\]=-1"),
        (np.array([[2, VOCAB_SIZE]]), rf"< {VOCAB_SIZE}.*token_ids\[0, 1\]={VOCAB_SIZE}"),
        (np.array([[2**32 + 2]]), rf"token_ids\[0, 0\]={2**32 + 2}"),
        (np.array([2, 3]), r"shape=\[2\]"),
        (np.zeros((1, 1, 1), np.int32), r"shape=\[1, 1, 1\]"),
        (np.array([[2.0]]), "dtype=float64"),
        (np.array([[True]]), "dtype=bool"),
        (np.zeros((1, MAX_LENGTH + 1), np.int32), rf"max_length={MAX_LENGTH}.*shape=\[1, {MAX_LENGTH + 1}\]"),
        (np.zeros((1, 0), np.int32), r"shape=\[1, 0\]"),
    ],
)
def test_bad_token_ids_are_refused(classifier, token_ids, message):
    with pytest.raises(DataError, match=message):
        classifier.logits(token_ids)


def test_int8_is_loaded_from_its_own_file(damaged_dir):
    _flip_byte(damaged_dir / "onnx" / "model.onnx")
    assert OnnxClassifier.load(damaged_dir, precision="int8").predict(["good"])


@pytest.mark.parametrize("precision", ["int8", "float16"])
def test_a_missing_precision_names_those_there_are(tiny, tmp_path, precision):
    version_dir = tiny.write_version(tmp_path / "3", precisions=["float32"])
    with pytest.raises(ArtifactError, match=f"{precision}.*exported: float32"):
        OnnxClassifier.load(version_dir, precision=precision)


@pytest.mark.parametrize("file", ["onnx/model.onnx", "tokenizer.model"])
def test_a_flipped_byte_is_found(damaged_dir, file):
    _flip_byte(damaged_dir / file)
    with pytest.raises(ArtifactError, match=f"{file} is damaged"):
        OnnxClassifier.load(damaged_dir)


@pytest.mark.parametrize("file", ["onnx/model.onnx", "tokenizer.model", "manifest.json"])
def test_a_missing_file_is_named(damaged_dir, file):
    (damaged_dir / file).unlink()
    with pytest.raises(ArtifactError, match=file):
        OnnxClassifier.load(damaged_dir)


@pytest.mark.parametrize(
    ("key", "value"),
    [("labels", '["good"]'), ("labels", "good"), ("max_length", "13"), ("pad_id", "1"), ("tokenizer_sha256", "0")],
)
def test_metadata_of_another_version_is_refused(tiny, tmp_path, key, value):
    version_dir = tiny.write_version(tmp_path / "3", **{key: value})
    with pytest.raises(ArtifactError, match=f"{key} is .*(good|13|1|0).* instead of"):
        OnnxClassifier.load(version_dir)


def test_another_pad_id_in_the_manifest_is_refused(damaged_dir):
    dataclasses.replace(Manifest.read(damaged_dir), pad_id=3).write(damaged_dir)
    with pytest.raises(ArtifactError, match="pad_id of the manifest is 3 instead of 0"):
        OnnxClassifier.load(damaged_dir)


def test_what_onnx_runtime_cannot_load_is_an_artifact_error(damaged_dir):
    (damaged_dir / "onnx" / "model.onnx").write_bytes(b"no graph")
    dataclasses.replace(Manifest.read(damaged_dir), files=list_files(damaged_dir)).write(damaged_dir)
    with pytest.raises(ArtifactError, match="cannot load .*model.onnx"):
        OnnxClassifier.load(damaged_dir)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"threads": 0}, "threads=0"),
        ({"providers": ["NoSuchProvider"]}, "CPUExecutionProvider.*NoSuchProvider"),
        ({"providers": []}, r"providers=\[\]"),
    ],
)
def test_unusable_settings_are_refused(version_dir, arguments, message):
    with pytest.raises(JobError, match=message):
        OnnxClassifier.load(version_dir, **arguments)


@pytest.mark.filterwarnings("ignore:Specified provider")
def test_a_chosen_provider_that_does_not_start_is_an_error(version_dir, monkeypatch):
    available = ["CUDAExecutionProvider", "CPUExecutionProvider"]
    monkeypatch.setattr(onnx_classifier.ort, "get_available_providers", lambda: available)
    if "CUDAExecutionProvider" in OnnxClassifier.load(version_dir).providers:
        pytest.skip("CUDA starts here")
    with pytest.raises(JobError, match="CPUExecutionProvider started.*CUDAExecutionProvider"):
        OnnxClassifier.load(version_dir, providers=["CUDAExecutionProvider"])


def test_providers_can_be_chosen(version_dir):
    for provider in ("CPUExecutionProvider", ("CPUExecutionProvider", {"use_arena": "0"})):
        assert OnnxClassifier.load(version_dir, providers=[provider]).providers == ["CPUExecutionProvider"]


def _flip_byte(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
