"""A process that publishes again and again and is killed in each, and one that looks on.

`python -m tests.serving.publish_kills watch MODEL_DIR` looks at every version each millisecond until its stdin ends;
`... publish CANDIDATE MODEL_DIR KILLS SEED` forks a process for every attempt. Both print what they saw as JSON.
"""

import dataclasses
import hashlib
import itertools
import json
import os
import random
import select
import signal
import sys
import time
from pathlib import Path

from pipeline.contract import MANIFEST, Manifest, ledger_rows, next_version
from serving.ledger import Ledger
from serving.publish import publish

KEEP = 2
LAST = 20  # the file operations of a publish from the rename on, which take the least time


class Watcher:
    """Looks at the versions in a directory as a server would, with nothing of the pipeline's own code."""

    def __init__(self, model_dir):
        self._model_dir = model_dir
        self._hashes = {}  # what tells that a file is unchanged -> SHA-256
        self.looks = 0
        self.seen = set()
        self.wrong = []

    def look(self):
        """Compares every version with its manifest; one that vanishes meanwhile has done nothing wrong."""
        self.looks += 1
        for name in filter(str.isdigit, os.listdir(self._model_dir)):
            path = os.path.join(self._model_dir, name)
            self.seen.add(name)
            try:
                problem = self._compare(path)
            except (OSError, ValueError) as e:
                problem = repr(e)
            if problem and os.path.lexists(path):
                self.wrong.append(f"{name}: {problem}")

    def _compare(self, path):
        with open(os.path.join(path, MANIFEST), encoding="utf-8") as f:
            files = json.load(f)["files"]
        found = {os.path.relpath(os.path.join(folder, n), path) for folder, _, names in os.walk(path) for n in names}
        if found != {*files, MANIFEST}:
            return f"holds {sorted(found)}"
        return ", ".join(file for file, d in files.items() if self._sha256(os.path.join(path, file)) != d["sha256"])

    def _sha256(self, path):
        with open(path, "rb") as f:
            status = os.fstat(f.fileno())
            key = status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
            if key not in self._hashes:
                self._hashes[key] = hashlib.file_digest(f, "sha256").hexdigest()
        return self._hashes[key]


def _watch(model_dir):
    watcher = Watcher(model_dir)
    print("ready", flush=True)
    while not select.select([sys.stdin], [], [], 0.001)[0]:
        watcher.look()
    watcher.look()
    print(json.dumps({"looks": watcher.looks, "seen": sorted(watcher.seen, key=int), "wrong": watcher.wrong}))


def _attempt(candidate, model_dir, operation=0, delay_s=None):
    """Publishes in a forked process that is killed at a file operation or after a time.

    Returns:
        (file operations that it made, or None when it was killed; its process id).
    """
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        operations = itertools.count(1)
        _on_operation(model_dir, lambda: next(operations) == operation and os.kill(os.getpid(), signal.SIGKILL))
        publish(candidate, model_dir, KEEP)
        os.write(writer, b"%d" % next(operations))
        os._exit(0)
    os.close(writer)
    if delay_s is not None:
        time.sleep(delay_s)
        os.kill(pid, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    with open(reader) as f:
        count = f.read()
    if code not in (0, -signal.SIGKILL):
        raise AssertionError(f"exit code {code}")
    return int(count) if code == 0 else None, pid


def _on_operation(directory, call):
    """Calls `call` before each file operation in `directory`, and before and after each flush to the disk."""

    def on_event(event, arguments):
        if any(isinstance(a, (str, os.PathLike)) and str(a).startswith(str(directory)) for a in arguments):
            call()

    fsync = os.fsync

    def counted(fd):
        call()
        fsync(fd)
        call()

    os.fsync = counted
    sys.addaudithook(on_event)


def _publish(candidate, model_dir, kills, seed):
    """Publishes until at least `kills` attempts were killed, and once more; a killed one is repeated as it was."""
    rng = random.Random(seed)
    made, attempts = Manifest.read(candidate), []
    version = next_version(model_dir)

    def candidate_of(version):
        dataclasses.replace(made, version=version, created=f"made for {version}").write(candidate)

    for _ in range(KEEP + 1):  # the last one also removes an old one, as all later ones will
        candidate_of(version)
        started = time.monotonic()
        operations, _ = _attempt(candidate, model_dir)
        duration = time.monotonic() - started
        version += 1

    def is_enough():  # a ledger that is half-written is the rarest moment: on a busy machine it takes some more
        in_ledger = any("versions.json" in name for a in attempts for name in a["left"])
        return sum(a["killed"] for a in attempts) >= kills and (in_ledger or len(attempts) > 8 * kills)

    while not is_enough():
        candidate_of(version)
        moments = (
            {"delay_s": rng.uniform(0, duration)},
            {"operation": rng.randint(1, operations)},
            {"operation": operations - LAST + 2 * (len(attempts) // 4) % (LAST + 1)},
        )
        made_operations, pid = _attempt(candidate, model_dir, **moments[(0, 1, 0, 2)[len(attempts) % 4]])
        left = os.listdir(model_dir)
        started = [name for name in left if name.startswith(f".staged-{version}-")]
        attempts.append(
            {
                "killed": made_operations is None,
                "version": version,
                "visible": str(version) in left,
                "is_free": Ledger.read(model_dir).is_free(Manifest.read(candidate)),
                "is_used": str(version) in left or bool(started) or version in ledger_rows(model_dir),
                "next": next_version(model_dir),
                "left": [name for name in left if f"-{pid}" in name],
            }
        )
        version += str(version) in left
    candidate_of(version)
    _attempt(candidate, model_dir)
    print(json.dumps({"last": version, "operations": operations, "attempts": attempts}))


if __name__ == "__main__":
    if sys.argv[1] == "watch":
        _watch(sys.argv[2])
    else:
        _publish(Path(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4]), int(sys.argv[5]))
