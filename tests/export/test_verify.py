"""An artifact that does not answer as the trained model does is found, named, and never becomes a candidate."""

import dataclasses
import gzip
import json
import shutil

import numpy as np
import onnx
import onnx.numpy_helper
import pytest

from export import bundle, verify
from export.float16 import convert_float16
from export.onnx_text import build_text_graph
from export.quantize import quantize_int8
from export.saved_model import export_saved_model
from pipeline.contract import ONNX_FILES, ONNX_TEXT, WARMUP, Manifest, list_files
from pipeline.dataset import Split
from pipeline.errors import VerificationError
from pipeline.text import train_tokenizer
from tests.jobs import LABELS, MAX_LENGTH, VOCAB_SIZE, load_trained, make_rows, published_job

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:You are using a softmax over axis -1")]


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    return published_job(tmp_path_factory)


@pytest.fixture(scope="module")
def trained(job):
    return load_trained(job)


@pytest.fixture(scope="module")
def cases(job, trained, tmp_path_factory):
    _, model, tokenizer, _, texts = trained
    path = tmp_path_factory.mktemp("cases") / "cases.npz"
    test = Split.load(job.run_dir / "data", "test")
    temperature = model.fitted_scalars()["temperature"]
    verify.write_cases(path, lambda ids: model(ids, training=False), texts, tokenizer, MAX_LENGTH, test, temperature)
    return path


@pytest.fixture
def version_dir(job, tmp_path):
    """A copy that a test may damage; `_seal` makes its manifest fit again."""
    return shutil.copytree(job.model_dir / "1", tmp_path / "version")


def _seal(version_dir):
    dataclasses.replace(Manifest.read(version_dir), files=list_files(version_dir)).write(version_dir)


def _shifted(proto, by=0.1):
    """The graph with one number of its last layer's bias changed."""
    proto = onnx.ModelProto.FromString(proto.SerializeToString())
    (bias,) = [i for i in proto.graph.initializer if list(i.dims) == [len(LABELS)] and i.data_type == 1]
    values = onnx.numpy_helper.to_array(bias).copy()
    values[0] += by
    bias.CopyFrom(onnx.numpy_helper.from_array(values, bias.name))
    return proto


def test_cases_cover_batch_sizes_lengths_and_odd_texts(cases, trained):
    texts = json.loads(str(np.load(cases)["texts"]))
    assert texts[: len(trained[4])] == trained[4][: verify.REAL_TEXTS]
    assert {"", "   "} <= set(texts)
    with np.load(cases) as found:
        ids = {name: found[name] for name in found.files if name.startswith("ids/")}
    shapes = {array.shape for array in ids.values()}
    assert shapes >= {(batch, length) for batch in (1, 3, 17) for length in (1, 7, MAX_LENGTH)}
    for array in ids.values():
        lengths = (array != 0).sum(axis=1)
        assert array.dtype == np.int32
        assert ((array != 0) == (np.arange(array.shape[1]) < lengths[:, None])).all()  # padding only at the end
    lengths = (ids[f"ids/17x{MAX_LENGTH}"] != 0).sum(axis=1)
    assert {0, MAX_LENGTH} <= set(lengths)
    assert ((lengths > 0) & (lengths < MAX_LENGTH)).any()


def test_every_wrong_artifact_is_named(trained, version_dir, cases):
    """An ONNX weight off by 0.1, a SavedModel of another model, a text graph with another tokenizer."""
    config, _, _, _, _ = trained
    proto = onnx.load(version_dir / ONNX_FILES["float32"])
    onnx.save(_shifted(proto), version_dir / ONNX_FILES["float32"])
    other = train_tokenizer([text for text, _ in make_rows(200, seed=8)], VOCAB_SIZE - 40)
    onnx.save(build_text_graph(proto, other, MAX_LENGTH), version_dir / ONNX_TEXT)

    from pipeline.calibrated import build_calibrated

    for name in ("variables", "assets"):
        shutil.rmtree(version_dir / name)
    another = build_calibrated(config.model, trained[2].vocab_size, len(LABELS), seed=99)
    export_saved_model(another, version_dir, LABELS, trained[2].model, MAX_LENGTH)
    _seal(version_dir)
    with pytest.raises(VerificationError) as caught:
        verify.verify(version_dir, cases)
    message = str(caught.value)
    assert "\n" not in message
    for artifact in ("saved_model: ", "onnx/model.onnx: ", "onnx/model.text.onnx: "):
        assert artifact in message
    assert "int8" not in message
    assert "allowed 0.0001" in message


@pytest.mark.parametrize("file", [ONNX_FILES["float32"], ONNX_TEXT])
def test_truncated_onnx_file_is_named(version_dir, cases, monkeypatch, file):
    data = (version_dir / file).read_bytes()
    (version_dir / file).write_bytes(data[: len(data) * 2 // 3])
    _seal(version_dir)
    runtimes = {k: v for k, v in verify._RUNTIMES.items() if k != "tensorflow"}  # for time
    monkeypatch.setattr(verify, "_RUNTIMES", runtimes)
    with pytest.raises(VerificationError, match=file) as caught:
        verify.verify(version_dir, cases)
    assert "\n" not in str(caught.value)


def test_warmup_that_the_server_would_refuse_is_named(version_dir, cases, monkeypatch):
    data = (version_dir / WARMUP).read_bytes()
    (version_dir / WARMUP).write_bytes(gzip.compress(data))
    _seal(version_dir)
    monkeypatch.setattr(verify, "_RUNTIMES", {"tensorflow": verify._RUNTIMES["tensorflow"]})  # for time
    message = f"saved_model: warm-up: {WARMUP} is no uncompressed TFRecord file"
    with pytest.raises(VerificationError, match=message):
        verify.verify(version_dir, cases)


def test_difference_just_above_the_tolerance_is_found_and_just_below_passes():
    expected = np.array([[0.5, -40.0]])
    for difference, fails in [(0.9e-4, False), (1.1e-4, True)]:
        for scale in ([1, 0], [0, 40]):  # absolute up to 1, relative above
            comparison = verify._Comparison()
            comparison.add("case", expected + difference * np.array(scale), expected)
            assert ("failed" in comparison.result()) is fails
    for bad in (np.array([[0.5, np.nan]]), np.array([0.5, -40.0]), np.array([[0.5, -40.0], [0.5, -40.0]])):
        comparison = verify._Comparison()
        comparison.add("case", bad, expected)
        assert "case" in comparison.result()["failed"]


def test_a_wrong_artifact_never_becomes_a_candidate(job, trained, tmp_path, monkeypatch):
    config, model, _, _, _ = trained
    shutil.copytree(job.run_dir / "data", tmp_path / "data")
    convert = bundle.convert
    monkeypatch.setattr(bundle, "convert", lambda *args: _shifted(convert(*args)))
    runtimes = {k: v for k, v in verify._RUNTIMES.items() if k == "onnxruntime"}  # for time
    monkeypatch.setattr(verify, "_RUNTIMES", runtimes)
    with pytest.raises(VerificationError, match=r"deleted: onnx/model\.onnx: .*differs by up to 0\.\d+"):
        bundle.build_candidate(config, tmp_path, model, 1, "key", job.report, lambda line: None)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["data"]


def test_smaller_precisions_are_compared_on_the_whole_test_split(job, version_dir, cases, tmp_path, monkeypatch):
    """They answer with figures, for the exporter to judge."""
    monkeypatch.setattr(verify, "_RUNTIMES", {"onnxruntime": verify._check_onnx})  # for time
    convert_float16(version_dir / ONNX_FILES["float32"], version_dir / ONNX_FILES["float16"])
    _seal(version_dir)
    parity = verify.verify(version_dir, cases)
    rows = len(Split.load(job.run_dir / "data", "test"))
    assert parity[ONNX_FILES["int8"]]["cases"] == rows
    for file in (ONNX_FILES["int8"], ONNX_FILES["float16"]):
        assert parity[file]["label_agreement"] >= verify.MIN_AGREEMENT
        assert parity[file]["float32_accuracy"] == pytest.approx(job.report["test"]["accuracy"], abs=1e-9)
        assert abs(parity[file]["accuracy"] - parity[file]["float32_accuracy"]) <= 1 / rows
    assert 0 < parity[ONNX_FILES["float16"]]["max_abs_difference"] < verify.FLOAT16_TOLERANCE

    # Wrong by far: int8 knows one label only, float16 is off by 0.1.
    onnx.save(_shifted(onnx.load(version_dir / ONNX_FILES["float32"]), by=1e3), tmp_path / "shifted.onnx")
    quantize_int8(tmp_path / "shifted.onnx", version_dir / ONNX_FILES["int8"])
    _seal(version_dir)
    figures = verify.verify(version_dir, cases)[ONNX_FILES["int8"]]
    assert figures["label_agreement"] < 0.8
    assert figures["accuracy"] < 0.8 < figures["float32_accuracy"]
    onnx.save(_shifted(onnx.load(version_dir / ONNX_FILES["float16"])), version_dir / ONNX_FILES["float16"])
    _seal(version_dir)
    figures = verify.verify(version_dir, cases)[ONNX_FILES["float16"]]
    assert figures["poor"].endswith(", allowed 0.01")
    (version_dir / "onnx").rename(tmp_path / "onnx")  # with both files, of which the manifest was told
    manifest = dataclasses.replace(Manifest.read(version_dir), parity={ONNX_FILES["float16"]: figures}, warnings=[])
    left = bundle._without_poor(manifest, tmp_path)
    assert left.warnings == [f"{ONNX_FILES['float16']} was left out: {figures['poor']}"]
    assert not (tmp_path / ONNX_FILES["float16"]).exists() and ONNX_FILES["float16"] not in left.files


def test_a_file_that_answers_to_ids_outside_the_vocabulary_is_refused(version_dir, cases, monkeypatch):
    monkeypatch.setattr(verify, "_RUNTIMES", {"onnxruntime": verify._check_onnx})  # for time
    model = onnx.load(version_dir / ONNX_FILES["float32"])
    (gather,) = [node for node in model.graph.node if node.op_type == "Gather"]
    gather.input[1] = next(node.output[0] for node in model.graph.node if node.op_type == "Clip")
    onnx.save(model, version_dir / ONNX_FILES["float32"])
    _seal(version_dir)
    with pytest.raises(VerificationError, match=r"onnx/model\.onnx: ids \[\[1, \d+\]\], outside the vocabulary, were"):
        verify.verify(version_dir, cases)
