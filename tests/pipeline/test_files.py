import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline import files
from pipeline.errors import LockHeld

ROOT = Path(__file__).parents[2]


def start(script, *args):
    """Starts Python on `script`, waits for its line "ready", and returns the process."""
    process = subprocess.Popen(
        [sys.executable, "-c", script, *map(str, args)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "ready\n"
    return process


def end(process, number):
    process.send_signal(number)
    process.communicate(timeout=30)


def names(directory):
    return sorted(p.name for p in directory.iterdir())


_HOLD = """
import sys
from pipeline.files import locked
with locked(sys.argv[1], "job t"):
    print("ready", flush=True)
    sys.stdin.read()
"""


def test_lock_of_another_process(tmp_path):
    path = tmp_path / "made" / ".t.lock"
    process = start(_HOLD, path)
    try:
        with (
            pytest.raises(LockHeld, match=rf"another process \(pid {process.pid}\) is working on job t") as e,
            files.locked(path, "job t"),
        ):
            pass
        assert str(path) in str(e.value)
    finally:
        end(process, signal.SIGKILL)
    with files.locked(path, "job t"):  # a killed process leaves no lock
        assert path.read_text() == str(os.getpid())


def test_lock_is_free_after_the_block_and_held_within(tmp_path):
    for _ in range(2):
        with files.locked(tmp_path / "lock", "it"):
            with pytest.raises(LockHeld, match=f"pid {os.getpid()}"), files.locked(tmp_path / "lock", "it"):
                pass
            with files.locked(tmp_path / "other", "another"):
                pass


@pytest.mark.parametrize(("data", "expected"), [("é\n", "é\n".encode()), (b"\x00\xff", b"\x00\xff"), ("", b"")])
def test_write_atomic(tmp_path, data, expected):
    path = tmp_path / "file"
    for _ in range(2):
        files.write_atomic(path, data)
        assert path.read_bytes() == expected
        path.write_bytes(b"something longer than that")
    assert names(tmp_path) == ["file"]


def test_write_atomic_failing_keeps_the_old(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"old")
    with pytest.raises(UnicodeEncodeError):
        files.write_atomic(path, "\ud800")
    with pytest.raises(TypeError):
        files.write_atomic(path, 3)
    assert path.read_bytes() == b"old"
    assert names(tmp_path) == ["file"]


def test_json(tmp_path):
    path = tmp_path / "value.json"
    assert files.read_json(path) is None
    files.write_json(path, {"a": ["é", 1.5]})
    assert files.read_json(path) == {"a": ["é", 1.5]} == json.loads(path.read_text(encoding="utf-8"))
    for damaged in (b"", b'{"a"', b"\xff"):
        path.write_bytes(damaged)
        assert files.read_json(path) is None
    assert files.read_json(path / "below a file") is None


@pytest.mark.parametrize("exists", [False, True])
def test_staged_directory(tmp_path, exists):
    target = tmp_path / "made" / "target"
    if exists:
        target.mkdir(parents=True)
        (target / "old").write_text("old")
    with files.staged_directory(target) as staged:
        assert staged.is_dir() and names(staged) == []
        assert staged.name.startswith(".") and staged.parent == target.parent
        (staged / "deep").mkdir()
        (staged / "deep" / "new").write_text("new")
        assert target.exists() is exists
    assert [p.relative_to(target).as_posix() for p in sorted(target.rglob("*"))] == ["deep", "deep/new"]
    assert names(target.parent) == ["target"]


@pytest.mark.parametrize("exists", [False, True])
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_staged_directory_failing_keeps_the_old(tmp_path, exists, error):
    target = tmp_path / "target"
    if exists:
        target.mkdir()
        (target / "old").write_text("old")

    def fail():
        with files.staged_directory(target) as staged:
            (staged / "new").write_text("new")
            raise error

    with pytest.raises(error):
        fail()
    assert names(tmp_path) == (["target"] if exists else [])
    assert not exists or names(target) == ["old"]


def test_staged_directory_stopped_between_its_two_renames_keeps_the_old(tmp_path, monkeypatch):
    target = tmp_path / "target"
    target.mkdir()
    (target / "old").write_text("old")
    rename = os.rename

    def stopped(source, destination):
        if Path(destination) == target and (Path(source) / "new").exists():
            raise KeyboardInterrupt
        rename(source, destination)

    monkeypatch.setattr(os, "rename", stopped)
    with pytest.raises(KeyboardInterrupt), files.staged_directory(target) as staged:
        (staged / "new").write_text("new")
    assert names(tmp_path) == ["target"]
    assert names(target) == ["old"]


_DIE = """
import os, signal, sys
from pipeline.files import staged_directory
with staged_directory(sys.argv[1]) as staged:
    (staged / "half").write_text("half")
    print("ready", flush=True)
    sys.stdin.read()
"""


def test_what_a_killed_process_left_is_removed(tmp_path):
    (tmp_path / "target").mkdir()
    (tmp_path / "target" / "old").write_text("old")
    end(start(_DIE, tmp_path / "target"), signal.SIGKILL)
    (tmp_path / ".staged-report.json-123").write_text("half a file")
    (tmp_path / ".hidden").mkdir()
    assert len(names(tmp_path)) == 4
    files.remove_staged(tmp_path)
    assert names(tmp_path) == [".hidden", "target"]
    assert names(tmp_path / "target") == ["old"]
    files.remove_staged(tmp_path / "absent")


def test_what_cannot_be_written_is_named(tmp_path):
    (tmp_path / "taken").mkdir()
    for path, error in ((tmp_path / "taken", IsADirectoryError), (tmp_path / "missing" / "file", FileNotFoundError)):
        with pytest.raises(error) as e:
            files.write_atomic(path, "text")
        assert e.value.filename == str(path)
    assert [p.name for p in tmp_path.iterdir()] == ["taken"]
