"""The candidate directory: what is in it follows the job file, and its manifest describes it."""

import dataclasses
import json

import pytest

from export import bundle
from export.verify import MAX_ACCURACY_DROP, MIN_AGREEMENT
from pipeline.config import load_job
from pipeline.contract import Manifest, list_files
from tests.jobs import copy_trained, load_trained, published_job

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:You are using a softmax over axis -1")]


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    return published_job(tmp_path_factory)


@pytest.fixture(scope="module")
def ids_only(job, tmp_path_factory):
    """(run directory, manifest, notes) of a candidate without text signature and int8."""
    export = {"text_signature": False, "precisions": ["float32", "float16", "ort"]}
    copied = copy_trained(job, tmp_path_factory.mktemp("ids-only"), export=export)
    notes = []
    manifest = bundle.build_candidate(
        load_job(copied.file), copied.run_dir, load_trained(job)[1], 41, "some key", job.report, notes.append
    )
    return copied.run_dir, manifest, notes


def test_candidate_is_what_the_job_asks_for(ids_only):
    run_dir, manifest, notes = ids_only
    candidate = run_dir / "candidate"
    assert Manifest.read(candidate) == manifest
    manifest.check_files(candidate)
    assert manifest.files == list_files(candidate)
    assert (manifest.version, manifest.export_key, manifest.warnings) == (41, "some key", [])
    assert sorted(p.name for p in (candidate / "onnx").iterdir()) == [
        "model.float16.onnx",
        "model.onnx",
        "model.ort.onnx",
        "model.text.onnx",
    ]
    onnx_files = {"onnx/model.onnx", "onnx/model.text.onnx", "onnx/model.float16.onnx", "onnx/model.ort.onnx"}
    assert set(manifest.parity) == {"saved_model", *onnx_files}
    for file, figures in manifest.parity.items():
        assert figures["cases"] > 0
        assert 0 <= figures["max_abs_difference"] <= (1e-2 if "float16" in file else 1e-4)
    assert set(manifest.graphs) == onnx_files
    for file, counts in manifest.graphs.items():
        attentions = 1 if "ort" in file else 0
        assert (counts["LayerNormalization"], counts["Gelu"], counts["Attention"]) == (3, 1, attentions)
        assert counts["weight_products"] == 5 - attentions
    assert manifest.job["export"]["text_signature"] is False
    assert not list(run_dir.glob(".staged-*"))
    assert len(notes) == 2


def test_warmup_without_text_takes_token_ids(ids_only):
    from serving.warmup import read_warmup

    records = read_warmup(ids_only[0] / "candidate")
    assert {name for name, _ in records} == {"token_ids", "serving_default"}
    assert all(list(inputs) == ["token_ids"] for _, inputs in records)


def test_manifest_holds_no_path_of_the_staging_directory(ids_only):
    assert ".staged-" not in (ids_only[0] / "candidate" / "manifest.json").read_text()


@pytest.mark.parametrize(
    ("agreement", "drop", "stays"),
    [
        (1.0, 0.0, True),
        (MIN_AGREEMENT, MAX_ACCURACY_DROP, True),
        (MIN_AGREEMENT - 0.001, -0.1, False),
        (1.0, MAX_ACCURACY_DROP + 0.001, False),
    ],
)
def test_poor_int8_file_is_left_out_with_a_warning(job, tmp_path, agreement, drop, stays):
    manifest = Manifest.read(job.model_dir / "1")
    figures = {"cases": 9, "label_agreement": agreement, "float32_accuracy": 0.775 + drop, "accuracy": 0.775}
    parity = {"onnx/model.int8.onnx": figures}
    (tmp_path / "onnx").mkdir()
    (tmp_path / "onnx" / "model.int8.onnx").write_bytes(b"x")
    manifest = dataclasses.replace(manifest, parity=parity, files=list_files(tmp_path), warnings=[])
    result = bundle._without_poor(manifest, tmp_path)
    assert ("onnx/model.int8.onnx" in result.files) is stays
    assert (tmp_path / "onnx" / "model.int8.onnx").exists() is stays
    assert ("onnx/model.int8.onnx" in result.graphs) is stays
    assert len(result.warnings) == (0 if stays else 1)
    for figure in (f"{agreement:.2%}", f"{0.775 + drop:.4f}", "0.7750"):
        assert all(figure in warning for warning in result.warnings)
    json.dumps(dataclasses.asdict(result))


def test_source_revision_from_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))  # no git
    monkeypatch.setenv("SOURCE_REVISION", "abc123")
    assert bundle.source_revision() == "abc123"
    monkeypatch.delenv("SOURCE_REVISION")
    assert bundle.source_revision() == ""


def test_package_versions():
    found = bundle.package_versions()
    assert {"tensorflow", "keras", "onnx", "numpy"} <= set(found)
    assert all(version[0].isdigit() for version in found.values())
