"""The record of a training: `metrics.jsonl`, and TensorBoard's files made from it."""

import contextlib
import json
import os
import shutil
from pathlib import Path

import tensorflow as tf

from pipeline.files import write_atomic

METRICS = "metrics.jsonl"
TENSORBOARD = "tensorboard"


class Record:
    """Rows of figures, one JSON object per line; use it in a `with` block.

    Args:
        run_dir: the run directory.
        num_bytes: length of the part that holds; rows after it belong to steps that will be done again.
        warn: called with one line when rows were lost or damaged.
    """

    def __init__(self, run_dir, num_bytes, warn):
        run_dir = Path(run_dir)
        path = run_dir / METRICS
        rows = _whole_rows(path.read_bytes()[:num_bytes] if path.exists() else b"")
        if sum(map(len, rows)) != num_bytes:
            warn(f"{path} has lost rows: {num_bytes - sum(map(len, rows))} bytes before the checkpoint are missing.")
        write_atomic(path, b"".join(rows))
        self.num_bytes = sum(map(len, rows))
        self._file = open(path, "ab")  # noqa: SIM115 - closed by __exit__
        self._tensorboard = _TensorBoard(run_dir / TENSORBOARD, warn)
        for line in rows:
            self._tensorboard.add(json.loads(line))

    def __enter__(self):
        return self

    def __exit__(self, *exc_info):
        self._file.close()
        self._tensorboard.close()

    def add(self, row):
        """Appends one row: "kind" and "step", and figures as floats."""
        line = (json.dumps(row) + "\n").encode()
        self._file.write(line)
        self._file.flush()
        self.num_bytes += len(line)
        self._tensorboard.add(row)

    def sync(self):
        """Flushes the rows to the disk, so that a checkpoint may count on them."""
        os.fsync(self._file.fileno())


class _TensorBoard:
    """The rows once more, in TensorBoard's form. They are a copy: training goes on where they cannot be written."""

    def __init__(self, directory, warn):
        self._directory = directory
        self._warn = warn
        shutil.rmtree(directory, ignore_errors=True)
        self._writer = None
        with self._or_without():
            self._writer = tf.summary.create_file_writer(str(directory))

    def add(self, row):
        if self._writer is None:
            return
        with self._or_without(), self._writer.as_default(step=row["step"]):
            for name, value in row.items():
                if isinstance(value, float):
                    tf.summary.scalar(f"{row['kind']}/{name}", value)
            self._writer.flush()

    def close(self):
        if self._writer is not None:
            with self._or_without():
                self._writer.close()

    @contextlib.contextmanager
    def _or_without(self):
        try:
            yield
        except tf.errors.OpError as e:
            self._writer = None
            reason = e.message.rpartition("}} ")[2].splitlines()[0]
            self._warn(f"{self._directory} cannot be written, training goes on without it: {reason[:200]}")


class NoRecord(contextlib.nullcontext):
    """Stands in for `Record` at the workers beside the chief."""

    def add(self, row):
        """Drops the row."""


def _whole_rows(data):
    """Returns the lines of `data` that are rows, as bytes with their line ends."""
    rows = []
    for line in data.splitlines(keepends=True):
        with contextlib.suppress(ValueError):
            if isinstance(json.loads(line), dict):
                rows.append(line)
    return rows
