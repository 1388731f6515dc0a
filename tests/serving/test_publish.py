"""The one rename that publishes, and version numbers; no TensorFlow needed."""

import dataclasses
import os
import shutil
import subprocess

import pytest

from pipeline.contract import Manifest, list_files, next_version, versions
from pipeline.errors import ArtifactError, LockHeld
from pipeline.files import locked
from serving.publish import publish
from tests.jobs import contents, snapshot
from tests.serving.tiny import Tiny


@pytest.fixture(scope="module")
def tiny():
    return Tiny.build()


@pytest.fixture(scope="module")
def made(tiny, tmp_path_factory):
    return tiny.write_version(tmp_path_factory.mktemp("made") / "version")


@pytest.fixture
def model_dir(tmp_path):
    return tmp_path / "models" / "tiny"


@pytest.fixture
def candidate(made, tmp_path):
    """Returns a function: version number -> a whole candidate directory."""

    def make(version):
        directory = shutil.copytree(made, tmp_path / f"candidate-{version}")
        dataclasses.replace(Manifest.read(made), version=version).write(directory)
        return directory

    return make


def _leftovers(model_dir):
    return list(model_dir.glob(".staged-*"))

def test_first_version(candidate, model_dir):
    source = candidate(1)
    assert publish(source, model_dir, keep_versions=5) == model_dir / "1"
    assert contents(model_dir / "1") == contents(source)
    Manifest.read(model_dir / "1").check_files(model_dir / "1")
    assert _leftovers(model_dir) == []


@pytest.mark.parametrize(
    ("directories", "files", "expected"),
    [
        ([], [], 1),
        (["7"], [], 8),
        (["0009"], [], 10),
        (["0009", "7"], [], 10),
        (["12.tmp", ".staged-13-1", "v14", "-15", "1e3", "２０"], [], 1),
        (["2", "12.tmp"], ["notes.txt"], 3),
        (["2"], ["5"], 6),  # a rename onto a file would fail
        (["10", "9"], [], 11),  # by number, not by letter
    ],
)
def test_next_version(model_dir, directories, files, expected):
    for name in directories:
        (model_dir / name).mkdir(parents=True)
    for name in files:
        (model_dir / name).write_text("")
    assert next_version(model_dir) == expected
    numbers = sorted(int(name) for name in directories if name.isascii() and name.isdigit())
    assert list(versions(model_dir)) == numbers


def test_number_that_is_not_the_next_is_refused(candidate, model_dir):
    (model_dir / "0009").mkdir(parents=True)
    for version in (1, 9, 11):
        with pytest.raises(ArtifactError, match=f"candidate is version {version}, but 10 is the next"):
            publish(candidate(version), model_dir, keep_versions=5)
    publish(candidate(10), model_dir, keep_versions=5)
    assert list(versions(model_dir)) == [9, 10]


def test_old_versions_go_and_nothing_else(candidate, model_dir):
    for version in range(1, 4):
        publish(candidate(version), model_dir, keep_versions=9)
    (model_dir / "2.tmp").mkdir()
    (model_dir / "notes.txt").write_text("mine")
    kept = snapshot(model_dir / "3")
    publish(candidate(4), model_dir, keep_versions=2)
    assert list(versions(model_dir)) == [3, 4]
    assert snapshot(model_dir / "3") == kept
    assert (model_dir / "2.tmp").is_dir() and (model_dir / "notes.txt").is_file()
    publish(candidate(5), model_dir, keep_versions=1)
    assert list(versions(model_dir)) == [5]
    assert _leftovers(model_dir) == []


@pytest.mark.parametrize("damage", ["changed", "missing", "no manifest"])
def test_damaged_candidate_is_refused(candidate, model_dir, damage):
    publish(candidate(1), model_dir, keep_versions=1)
    live = snapshot(model_dir / "1")
    source = candidate(2)
    file = source / "onnx" / "model.onnx"
    if damage == "changed":
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 1
        file.write_bytes(data)
    elif damage == "missing":
        file.unlink()
    else:
        (source / "manifest.json").unlink()
    with pytest.raises(ArtifactError, match="manifest.json" if damage == "no manifest" else "model.onnx"):
        publish(source, model_dir, keep_versions=1)
    assert snapshot(model_dir / "1") == live
    assert list(versions(model_dir)) == [1]
    assert _leftovers(model_dir) == []


def test_what_dead_processes_left_is_removed(candidate, model_dir):
    (model_dir / ".staged-1-4711" / "onnx").mkdir(parents=True)
    (model_dir / ".staged-1-4711-removed").mkdir()
    publish(candidate(1), model_dir, keep_versions=5)
    assert _leftovers(model_dir) == []
    assert list(versions(model_dir)) == [1]


def test_only_one_process_publishes_a_model(candidate, model_dir):
    source = candidate(1)
    with (
        locked(model_dir / ".lock", "publishing tiny"),
        pytest.raises(LockHeld, match=f"pid {os.getpid()}.*publishing tiny"),
    ):
        publish(source, model_dir, keep_versions=5)
    assert list(versions(model_dir)) == []
    publish(source, model_dir, keep_versions=5)


def test_disk_that_refuses(candidate, model_dir, monkeypatch):
    """As shutil.copytree reports a full disk: at its end, with a list of all files that failed."""
    publish(candidate(1), model_dir, keep_versions=5)
    live = snapshot(model_dir / "1")
    source = candidate(2)

    def full(source, target, **options):
        raise shutil.Error([(str(source), str(target), "[Errno 28] No space left on device: 'x'")])

    monkeypatch.setattr(shutil, "copytree", full)
    message = r"cannot publish to .*/2: \[Errno 28\] No space left on device: 'x'\. The live"
    with pytest.raises(ArtifactError, match=message):
        publish(source, model_dir, keep_versions=5)
    assert snapshot(model_dir / "1") == live
    assert list(versions(model_dir)) == [1]
    assert _leftovers(model_dir) == []


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 128 KiB that is smaller than a version."""
    directory = tmp_path / "disk"
    directory.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=128k", "tmpfs", str(directory)]
    if os.geteuid() != 0 or shutil.which("mount") is None or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("needs the right to mount a tmpfs")
    yield directory
    subprocess.run(["umount", str(directory)], check=True)


def test_full_disk(candidate, small_disk):
    source = candidate(1)
    assert sum(f["size"] for f in list_files(source).values()) > 130_000
    with pytest.raises(ArtifactError, match="cannot publish to .*/tiny/1: .*No space left on device") as caught:
        publish(source, small_disk / "tiny", keep_versions=5)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400
    assert [p.name for p in (small_disk / "tiny").iterdir()] == [".lock"]
    # And one on which not even the lock has room.
    (small_disk / "fill").write_bytes(b"")
    try:
        with open(small_disk / "fill", "wb", buffering=0) as f:
            while f.write(bytes(4096)):
                pass
    except OSError:
        pass
    with pytest.raises(ArtifactError, match="cannot publish to"):
        publish(source, small_disk / "tiny", keep_versions=5)
    assert versions(small_disk / "tiny") == {}
