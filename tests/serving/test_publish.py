"""The one rename that publishes, and version numbers; no TensorFlow needed."""

import dataclasses
import errno
import os
import shutil
import subprocess
import sys

import pytest

from pipeline.contract import Manifest, ledger_rows, list_files, next_version, versions
from pipeline.errors import ArtifactError, LockHeld
from pipeline.files import locked
from serving.ledger import Ledger
from serving.publish import publish
from tests.jobs import ROOT, TIMEOUT_S, contents, environment, snapshot
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
        (["12.tmp", "v14", "-15", "1e3", "２０"], [], 1),
        ([".staged-13-1"], [], 14),
        (["2", ".staged-13-1-removed"], [".staged-versions.json-7"], 14),
        (["007", "20240101"], [], 20240102),
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
    for version in (1, 9, 0, 2**63, -1):
        with pytest.raises(ArtifactError, match=f"candidate is version {version}, but 10 is the next"):
            publish(candidate(version), model_dir, keep_versions=5)
    publish(candidate(11), model_dir, keep_versions=5)  # 10 was being published by another when it was exported
    assert list(versions(model_dir)) == [9, 11]
    with pytest.raises(ArtifactError, match="candidate is version 10, but 12 is the next"):
        publish(candidate(10), model_dir, keep_versions=5)


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
    (model_dir / "outside").mkdir()
    (model_dir / "outside" / "file").write_text("mine")
    (model_dir / ".staged-1-4712-removed").symlink_to(model_dir / "outside")
    (model_dir / ".staged-versions.json-4711").write_text("{")
    publish(candidate(1), model_dir, keep_versions=5)
    assert _leftovers(model_dir) == []
    assert (model_dir / "outside" / "file").read_text() == "mine"
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
def disk(tmp_path):
    """Returns a function that mounts a file system with the given options on one directory, or mounts it anew."""
    directory, mounted = tmp_path / "disk", []
    directory.mkdir()

    def mount(options):
        command = ["mount", "-t", "tmpfs", "-o", ",".join([*mounted, options]), "tmpfs", str(directory)]
        may_mount = os.geteuid() == 0 and shutil.which("mount") is not None
        if not may_mount or subprocess.run(command, capture_output=True).returncode:
            pytest.skip("needs the right to mount a tmpfs")
        mounted[:] = ["remount"]
        return directory

    yield mount
    if mounted:
        subprocess.run(["umount", str(directory)], check=True)


def test_full_disk(candidate, disk):
    small_disk = disk("size=128k")  # less than a version has
    source = candidate(1)
    assert sum(f["size"] for f in list_files(source).values()) > 130_000
    with pytest.raises(ArtifactError, match="cannot publish to .*/tiny/1: .*No space left on device") as caught:
        publish(source, small_disk / "tiny", keep_versions=5)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400
    assert [p.name for p in (small_disk / "tiny").iterdir()] == [".lock"]
    assert next_version(small_disk / "tiny") == 1
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


def test_read_only_disk(candidate, disk):
    model_dir = disk("size=4m") / "tiny"
    publish(candidate(1), model_dir, keep_versions=5)
    disk("ro")
    with pytest.raises(ArtifactError, match=r"cannot publish to .*/tiny: Read-only file system\. The live version is"):
        publish(candidate(2), model_dir, keep_versions=5)
    assert list(versions(model_dir)) == [1]
    disk("rw")
    publish(candidate(3), model_dir, keep_versions=5)
    assert list(versions(model_dir)) == [1, 3]


def test_candidate_on_another_disk(candidate, disk):
    """Where a rename across would fail."""
    model_dir = disk("size=4m") / "tiny"
    source = candidate(1)
    assert os.stat(source).st_dev != os.stat(model_dir.parent).st_dev
    publish(source, model_dir, keep_versions=5)
    assert contents(model_dir / "1") == contents(source)


def test_full_disk_after_the_rename_is_a_warning(candidate, model_dir, monkeypatch):
    """The next publish writes what the ledger lacks."""
    publish(candidate(1), model_dir, keep_versions=1)
    source, warnings = candidate(2), []

    def full(self):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Ledger, "settle", full)
    assert publish(source, model_dir, 1, warnings.append) == model_dir / "2"
    assert list(versions(model_dir)) == [2]
    (line,) = warnings
    assert line.endswith("2 is published, but the ledger beside it cannot be written: No space left on device.")
    monkeypatch.undo()
    publish(candidate(3), model_dir, 1, warnings.append)
    assert len(warnings) == 1
    rows = ledger_rows(model_dir)
    assert [bool(row["removed_at"]) for row in rows.values()] == [True, True, False]
    assert "pending" not in rows[2]


def test_base_path_behind_a_link(candidate, model_dir, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "linked").symlink_to(tmp_path / "elsewhere")
    publish(candidate(1), tmp_path / "linked" / "tiny", keep_versions=5)
    model_dir.parent.mkdir()
    model_dir.symlink_to(tmp_path / "elsewhere" / "tiny")
    publish(candidate(2), model_dir, keep_versions=5)
    assert sorted(p.name for p in (tmp_path / "elsewhere" / "tiny").iterdir()) == [".lock", "1", "2", "versions.json"]
    assert model_dir.is_symlink() and (tmp_path / "linked").is_symlink()
    (tmp_path / "broken").symlink_to(tmp_path / "nowhere")
    with pytest.raises(ArtifactError, match="cannot publish to .*/broken: File exists"):
        publish(candidate(3), tmp_path / "broken", keep_versions=5)


def test_versions_that_are_links(candidate, model_dir, tmp_path):
    """A version may lie elsewhere: it counts, and when it is old its link is removed, not what it leads to."""
    model_dir.mkdir(parents=True)
    elsewhere = candidate(4)
    (model_dir / "4").symlink_to(elsewhere)
    (model_dir / "6").symlink_to(tmp_path / "nowhere")
    before = snapshot(elsewhere)
    assert list(versions(model_dir)) == [4]
    with pytest.raises(ArtifactError, match="candidate is version 6, but 7 is the next"):
        publish(candidate(6), model_dir, keep_versions=1)
    publish(candidate(7), model_dir, keep_versions=1)
    assert list(versions(model_dir)) == [7]
    assert not (model_dir / "4").is_symlink() and (model_dir / "6").is_symlink()
    assert snapshot(elsewhere) == before
    assert _leftovers(model_dir) == []
    assert ledger_rows(model_dir)[4]["removed_at"]


def test_what_no_pipeline_made_is_not_removed(candidate, model_dir):
    (model_dir / "1").mkdir(parents=True)
    (model_dir / "1" / "saved_model.pb").write_bytes(b"by hand")
    for version in (2, 3, 4):
        publish(candidate(version), model_dir, keep_versions=2)
    assert list(versions(model_dir)) == [1, 3, 4]
    (model_dir / "3" / "manifest.json").unlink()  # ours, though damaged: the ledger knows it
    publish(candidate(5), model_dir, keep_versions=1)
    assert list(versions(model_dir)) == [1, 5]


def test_an_old_version_that_cannot_be_removed_is_named(candidate, model_dir, monkeypatch):
    for version in (1, 2):
        publish(candidate(version), model_dir, keep_versions=5)
    rename = os.rename

    def refuse(source, target):
        if source == model_dir / "1":
            raise OSError(errno.EPERM, "Operation not permitted")
        rename(source, target)

    monkeypatch.setattr(os, "rename", refuse)
    with pytest.raises(ArtifactError, match=r"3 is published, but what is older cannot be removed: .*/1 \(Operation"):
        publish(candidate(3), model_dir, keep_versions=1)
    assert list(versions(model_dir)) == [1, 3]
    assert {n: bool(row["removed_at"]) for n, row in ledger_rows(model_dir).items()} == {1: False, 2: True, 3: False}


def test_the_same_candidate_is_not_published_twice(candidate, model_dir):
    source = candidate(1)
    publish(source, model_dir, keep_versions=5)
    live = snapshot(model_dir / "1")
    for _ in range(2):
        with pytest.raises(ArtifactError, match="candidate is version 1, but 2 is the next"):
            publish(source, model_dir, keep_versions=5)
        if (model_dir / "1").exists():
            assert snapshot(model_dir / "1") == live
        shutil.rmtree(model_dir / "1", ignore_errors=True)  # nor after it was deleted


_PUBLISH = """
import sys
from pipeline.errors import PipelineError
from serving.publish import publish
try:
    publish(sys.argv[1], sys.argv[2], 5)
except PipelineError as e:
    sys.exit(e.exit_code)
"""


def test_many_processes_at_once(candidate, model_dir):
    """Each publishes, finds the lock held, or comes too late."""
    source = candidate(1)
    command = [sys.executable, "-c", _PUBLISH, str(source), str(model_dir)]
    processes = [subprocess.Popen(command, cwd=ROOT, env=environment()) for _ in range(6)]
    codes = [process.wait(TIMEOUT_S) for process in processes]
    assert codes.count(0) == 1
    assert set(codes) <= {0, LockHeld.exit_code, ArtifactError.exit_code}
    assert list(versions(model_dir)) == list(ledger_rows(model_dir)) == [1]
    assert contents(model_dir / "1") == contents(source)
    assert _leftovers(model_dir) == []
