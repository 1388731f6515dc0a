"""Files that are either whole or absent, whatever happens while they are written."""

import contextlib
import fcntl
import json
import os
import shutil
from pathlib import Path

from pipeline.contract import STAGED
from pipeline.errors import JobError, LockHeld


def fsync_tree(directory):
    """Flushes every file and directory below `directory` to the disk."""
    for folder, _, names in os.walk(directory):
        for name in names:
            _fsync(os.path.join(folder, name))
        _fsync(folder)


def _fsync(path):
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@contextlib.contextmanager
def staged_directory(target):
    """Yields a new empty directory that becomes `target` in one rename when the block succeeds.

    An existing `target` is replaced. When the block fails, it stays as it was and nothing of the staged one does.
    The staged name starts with a dot, so no reader takes it for a finished one.
    """
    target = Path(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    staged = target.parent / f"{STAGED}{target.name}-{os.getpid()}"
    replaced = target.parent / f"{STAGED}{target.name}-{os.getpid()}-replaced"
    shutil.rmtree(staged, ignore_errors=True)
    staged.mkdir()
    try:
        yield staged
        fsync_tree(staged)
        if target.exists():
            os.rename(target, replaced)
        os.rename(staged, target)
        _fsync(target.parent)
    finally:
        if replaced.exists() and not target.exists():  # stopped between the two renames
            os.rename(replaced, target)
        shutil.rmtree(staged, ignore_errors=True)
        shutil.rmtree(replaced, ignore_errors=True)


def require_directory(path, key):
    """Raises JobError when `path` is no directory that can be written to, and cannot become one.

    Args:
        path: a directory that exists or will be made.
        key: the key of the job file that an error names.
    """
    existing = next(p for p in (Path(path), *Path(path).absolute().parents) if os.path.lexists(p))
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        raise JobError(f"{key}: cannot write to {path}: {existing} is no directory that can be written to.")


def remove_staged(directory):
    """Removes what processes that died left half-written in `directory`. Call it under its lock."""
    for path in Path(directory).glob(STAGED + "*"):
        remove(path)


def remove(path):
    """Removes a file, a directory with all in it, or a link, but never what the link leads to."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def write_atomic(path, data):
    """Writes `data` (str or bytes) to `path` so that a reader sees the old or the new content, never a part."""
    path = Path(path)
    staged = path.parent / f"{STAGED}{path.name}-{os.getpid()}"
    try:
        with open(staged, "wb") as f:
            f.write(data.encode("utf-8") if isinstance(data, str) else data)
            f.flush()
            os.fsync(f.fileno())
        os.replace(staged, path)
        _fsync(path.parent)
    except OSError as e:
        raise OSError(e.errno, e.strerror, str(path)) from e  # the staged file, which it names, is gone when it is read
    finally:
        staged.unlink(missing_ok=True)


def write_json(path, value):
    """Writes `value` as indented JSON, atomically."""
    write_atomic(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def read_json(path):
    """Returns the JSON value in `path`, or None when the file does not exist or is damaged."""
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None


@contextlib.contextmanager
def locked(path, what):
    """Holds an exclusive lock on the file `path` for the length of the block.

    The operating system drops it when the process ends, however it ends: a dead process leaves no lock.

    Raises:
        LockHeld: another process holds it.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a+", encoding="utf-8") as f:
        try:
            fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as e:
            f.seek(0)
            holder = f.read().strip() or "unknown"
            raise LockHeld(
                f"another process (pid {holder}) is working on {what} (lock {path}). Wait for it to end."
            ) from e
        f.truncate(0)
        f.write(str(os.getpid()))
        f.flush()
        yield
