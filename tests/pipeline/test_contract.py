import dataclasses
import hashlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline import contract, errors
from pipeline.contract import Manifest
from pipeline.errors import ArtifactError

ROOT = Path(__file__).parents[2]


def manifest(**changes):
    values = {
        "name": "t",
        "version": 3,
        "created": "2025-01-01T00:00:00Z",
        "labels": ["bad", "好 \U0001f600"],
        "max_length": 16,
        "pad_id": 0,
        "files": {},
        "metrics": {"accuracy": 0.5},
        "parity": {},
        "warnings": [],
        "job": {"name": "t"},
        "data_fingerprint": "a",
        "export_key": "b",
        "packages": {"keras": "3"},
        "source_revision": "",
    }
    return Manifest(**{**values, **changes})


@pytest.fixture
def version_dir(tmp_path):
    (tmp_path / "onnx").mkdir()
    (tmp_path / "onnx" / "model.onnx").write_bytes(b"graph")
    (tmp_path / "tokenizer.model").write_bytes(b"abc")
    manifest(files=contract.list_files(tmp_path)).write(tmp_path)
    return tmp_path


def test_names_that_services_rely_on():
    assert (contract.PAD_ID, contract.UNK_ID) == (0, 1)
    assert contract.ONNX_FILES == {
        "float32": "onnx/model.onnx",
        "int8": "onnx/model.int8.onnx",
        "float16": "onnx/model.float16.onnx",
        "ort": "onnx/model.ort.onnx",
    }
    assert (contract.ONNX_TEXT, contract.MANIFEST) == ("onnx/model.text.onnx", "manifest.json")
    assert contract.WARMUP == "assets.extra/tf_serving_warmup_requests"
    assert (contract.SERVING_SIGNATURE, contract.TOKEN_IDS_SIGNATURE) == ("serving_default", "token_ids")
    assert contract.ONNX_METADATA == ("name", "version", "labels", "max_length", "pad_id", "tokenizer_sha256")


@pytest.mark.parametrize(
    ("error", "code"),
    [
        ("PipelineError", 1),
        ("JobError", 2),
        ("DataError", 3),
        ("GateRefused", 4),
        ("LockHeld", 5),
        ("Interrupted", 75),
        ("CheckpointError", 1),
        ("TrainingError", 1),
        ("VerificationError", 1),
        ("ArtifactError", 1),
    ],
)
def test_exit_codes(error, code):
    assert getattr(errors, error)("what").exit_code == code
    assert issubclass(getattr(errors, error), errors.PipelineError)


def test_needs_the_standard_library_only():
    script = (
        "import sys; before = set(sys.modules); import pipeline.contract\n"
        "print(sorted({m.partition('.')[0] for m in set(sys.modules) - before} - set(sys.stdlib_module_names)))"
    )
    out = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (out.stdout, out.stderr) == ("['pipeline']\n", "")


def test_sha256_of_a_file(version_dir):
    # FIPS 180-2, appendix B.1: the digest of "abc".
    expected = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert contract.sha256_file(version_dir / "tokenizer.model") == expected


def test_list_files_leaves_out_the_manifest_alone(version_dir):
    (version_dir / "assets.extra").mkdir()
    (version_dir / "assets.extra" / "manifest.json").write_text("{}")
    files = contract.list_files(version_dir)
    assert list(files) == ["assets.extra/manifest.json", "onnx/model.onnx", "tokenizer.model"]
    assert files["onnx/model.onnx"] == {"sha256": hashlib.sha256(b"graph").hexdigest(), "size": 5}


def test_manifest_round_trip(version_dir):
    assert Manifest.read(version_dir) == manifest(files=contract.list_files(version_dir))
    assert "好" in (version_dir / "manifest.json").read_text(encoding="utf-8")
    Manifest.read(version_dir).check_files(version_dir)


def test_keys_of_later_versions_are_ignored(version_dir):
    path = version_dir / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "later": 1}))
    assert Manifest.read(version_dir).name == "t"


_OPTIONAL = {"graphs", "label_counts", "calibration", "baseline", "forced", "republished"}


@pytest.mark.parametrize("key", [f.name for f in dataclasses.fields(Manifest) if f.name not in _OPTIONAL])
def test_a_missing_key_is_named(version_dir, key):
    path = version_dir / "manifest.json"
    values = json.loads(path.read_text())
    del values[key]
    path.write_text(json.dumps(values))
    with pytest.raises(ArtifactError, match=rf"is not a version directory: .*no key '{key}'"):
        Manifest.read(version_dir)


@pytest.mark.parametrize("key", sorted(_OPTIONAL))
def test_versions_from_before_a_key_existed_can_be_read(version_dir, key):
    path = version_dir / "manifest.json"
    values = json.loads(path.read_text())
    del values[key]
    path.write_text(json.dumps(values))
    assert getattr(Manifest.read(version_dir), key) == {}


@pytest.mark.parametrize(
    ("key", "value"),
    [("files", None), ("files", {"a": 1}), ("files", {"a": {"size": 1}}), ("labels", {}), ("republished", None),
     ("label_counts", []), ("version", "3"), ("version", True), ("metrics", 1), ("name", 7),
     ("files", {"a": {"sha256": "0", "size": "x"}}), ("labels", ["a", None]), ("label_counts", {"a": "x"}),
     ("republished", {"from": "1"})],
)  # fmt: skip
def test_a_value_of_another_type_is_refused(version_dir, key, value):
    path = version_dir / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), key: value}))
    with pytest.raises(ArtifactError, match="is not a version directory: cannot read manifest.json"):
        Manifest.read(version_dir)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"3", b"\xff\xfe", b"null"])
def test_a_damaged_manifest_is_refused(version_dir, content):
    (version_dir / "manifest.json").write_bytes(content)
    with pytest.raises(ArtifactError, match="is not a version directory"):
        Manifest.read(version_dir)


@pytest.mark.parametrize("path", ["absent", "tokenizer.model"])
def test_no_manifest(version_dir, path):
    with pytest.raises(ArtifactError, match=rf"{path} is not a version directory"):
        Manifest.read(version_dir / path)


@pytest.mark.parametrize("content", [b"", b"ab", b"abd", b"abcd"])
def test_a_changed_file_is_named(version_dir, content):
    (version_dir / "tokenizer.model").write_bytes(content)
    found = Manifest.read(version_dir)
    with pytest.raises(ArtifactError, match=r"tokenizer\.model is damaged"):
        found.check_files(version_dir)
    found.check_files(version_dir, only=["onnx/model.onnx"])


def test_a_missing_file_is_named(version_dir):
    found = Manifest.read(version_dir)
    (version_dir / "onnx" / "model.onnx").unlink()
    with pytest.raises(ArtifactError, match=r"onnx/model\.onnx is missing"):
        found.check_files(version_dir)
    with pytest.raises(ArtifactError, match=r"has no onnx/model\.int8\.onnx: it was not exported"):
        found.check_files(version_dir, only=["onnx/model.int8.onnx"])


def test_versions(tmp_path):
    assert contract.versions(tmp_path / "absent") == {}
    assert contract.next_version(tmp_path / "absent") == 1
    assert contract.next_version(tmp_path) == 1
    for name in ("1", "10", "0009", "11.tmp", "-12", "1e3", "١٤", "²"):
        (tmp_path / name).mkdir()
    assert contract.next_version(tmp_path) == 11
    (tmp_path / "12").write_text("a file, not a version")
    assert [(n, p.name) for n, p in contract.versions(tmp_path).items()] == [(1, "1"), (9, "0009"), (10, "10")]
    assert contract.next_version(tmp_path) == 13
    (tmp_path / ".staged-13-99").mkdir()
    (tmp_path / ".staged-0014-99-removed").mkdir()
    assert contract.next_version(tmp_path) == 15
    assert list(contract.versions(tmp_path)) == [1, 9, 10]
    (tmp_path / "versions.json").write_text('{"versions": {"20": {"removed_at": "2025-01-01"}}}')
    assert contract.next_version(tmp_path) == 21
    rows = '{"versions": {"x": {}, "-30": {}, "31": 1, "0": {}}}'
    for damaged in ("", "[]", "{", "32", '{"versions": 33}', '{"versions": [34]}', rows):
        (tmp_path / "versions.json").write_text(damaged)
        assert contract.next_version(tmp_path) == 15


@pytest.mark.parametrize(
    ("name", "number"),
    [
        ("7", 7),
        ("007", 7),
        ("+7", 7),
        (" 7", 7),
        ("7\n", 7),
        ("\t+07 ", 7),
        ("20240101", 20240101),
        ("9223372036854775807", 2**63 - 1),
        ("9223372036854775808", None),
        ("9" * 200, None),
        ("-7", None),  # a server reads it as -7, which is below every version of ours
        ("+ 7", None),
        ("++7", None),
        ("7_0", None),
        ("0x7", None),
        ("7.0", None),
        ("7e1", None),
        ("v7", None),
        ("٧", None),
        ("", None),
        ("\u00a07", None),
        (".staged-7-1", None),
    ],
)
def test_names_that_a_server_reads_as_a_number(name, number):
    """The rules of absl::SimpleAtoi for int64, which TensorFlow Serving uses."""
    assert contract.version_number(name) == number


@pytest.mark.parametrize("name", ["staged", "removed", "entry"])
def test_the_highest_number_is_not_passed(tmp_path, name):
    entry = {"staged": ".staged-{}-1", "removed": ".staged-{}-1-removed", "entry": "{}"}[name]
    (tmp_path / entry.format(2**63 - 2)).mkdir()
    assert contract.next_version(tmp_path) == 2**63 - 1
    (tmp_path / entry.format(2**63 - 1)).mkdir()
    with pytest.raises(ArtifactError, match="no version number is left in .*: 9223372036854775807 is the highest"):
        contract.next_version(tmp_path)


def test_of_two_with_one_number_the_last_name_counts(tmp_path):
    for name in ("7", "07", "007"):
        (tmp_path / name).mkdir()
    assert contract.versions(tmp_path) == {7: tmp_path / "7"}


@pytest.mark.parametrize(
    ("name", "valid"),
    [
        ("a", True),
        ("movie-reviews-2", True),
        ("A", False),
        ("a_b", False),
        ("", False),
        ("a\n", False),
        ("../a", False),
    ],
)
def test_job_name(name, valid):
    assert bool(contract.JOB_NAME.fullmatch(name)) is valid
