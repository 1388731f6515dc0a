"""Checkpoints that are whole or absent: every array and counter of the training state, with checksums.

A checkpoint `step-00000120/` holds `state.npz` (every variable), `progress.json` (every counter) and
`SHA256SUMS` over both. It is written beside its place, synced to the disk and renamed.
"""

import dataclasses
import json
import re
import shutil
import zipfile
from pathlib import Path

import numpy as np

from pipeline.contract import sha256_file
from pipeline.errors import CheckpointError
from pipeline.files import staged_directory

# Folders of the run directory, both of checkpoints; and one that has the first of them for the pretraining.
CHECKPOINTS = "checkpoints"
BEST = "best"
PRETRAINING = "pretraining"

STATE = "state.npz"
PROGRESS = "progress.json"
SUMS = "SHA256SUMS"

_NAME = re.compile(r"step-(\d{8,})")


@dataclasses.dataclass(frozen=True)
class Progress:
    """Where training stands; what is in no variable.

    Attributes:
        epoch: epoch being trained, from 0.
        batch: batches of this epoch already trained; when it is their number, validation is due.
        step: optimizer steps done.
        best_step: step of the best weights, -1 before the first validation.
        best_value: their value of the chosen metric on validation, None before the first validation.
        evaluations_without_improvement: validations since then.
        metrics_bytes: length of metrics.jsonl at this moment, in bytes.
        finished: why training ended ("epochs", "patience"), "" while it goes on.
        replicas: number of devices that train together; another number rounds differently.
    """

    epoch: int = 0
    batch: int = 0
    step: int = 0
    best_step: int = -1
    best_value: float | None = None
    evaluations_without_improvement: int = 0
    metrics_bytes: int = 0
    finished: str = ""
    replicas: int = 1

    @property
    def epochs_begun(self):
        """Epochs of which at least one batch is trained."""
        return self.epoch + (self.batch > 0)

    def why_finished(self, training):
        """Returns why a `[training]` section ends here: "epochs", "patience", or "" while training goes on.

        Judged anew by the job at hand, since more epochs or another patience may come while a run waits.
        """
        if self.batch:  # training ends only where an epoch does
            return ""
        if self.epoch >= training.epochs:
            return "epochs"
        waited = self.evaluations_without_improvement
        return "patience" if training.patience and waited >= training.patience else ""


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that was read and found good."""

    arrays: dict
    progress: Progress
    key: str


def save(directory, arrays, progress, key):
    """Writes the checkpoint of step `progress.step` under `directory`; one of the same step is replaced.

    Args:
        directory: the folder of all checkpoints.
        arrays: name -> array or variable, the whole state; variables are copied one after the other.
        progress: the counters.
        key: fingerprint of what this run trains on and how; training goes on from no other.

    Raises:
        CheckpointError: a value is not finite, or the disk refuses; nothing half-written stays.
    """
    name = _not_finite(arrays)
    if name is not None:
        raise CheckpointError(
            f"step {progress.step}: {name} holds a value that is not finite; nothing was saved. "
            "Lower training.learning_rate, or use another training.precision."
        )
    target = Path(directory) / f"step-{progress.step:08d}"
    try:
        with staged_directory(target) as staged:
            np.savez(staged / STATE, **arrays)
            record = {"key": key, **dataclasses.asdict(progress)}
            (staged / PROGRESS).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
            (staged / SUMS).write_text(_sums(staged), encoding="utf-8")
    except OSError as e:
        raise CheckpointError(
            f"cannot write checkpoint {target}: {e.strerror or e}. Earlier checkpoints are untouched: "
            "make room on the disk and run again to go on from the newest."
        ) from e


def steps(directory):
    """Returns the steps that have a checkpoint under `directory`, ascending, good or not."""
    root = Path(directory)
    names = [_NAME.fullmatch(p.name) for p in root.iterdir()] if root.is_dir() else []
    return sorted(int(name[1]) for name in names if name)


def read(directory, step):
    """Reads the checkpoint of one step.

    Raises:
        CheckpointError: it is damaged or cannot be read; says how.
    """
    path = Path(directory) / f"step-{step:08d}"
    try:
        if (path / SUMS).read_text(encoding="utf-8") != _sums(path):
            raise CheckpointError(f"checkpoint {path} is damaged: a file differs from its {SUMS}")
        record = json.loads((path / PROGRESS).read_text(encoding="utf-8"))
        with np.load(path / STATE, allow_pickle=False) as state:
            arrays = {name: state[name] for name in state.files}
        name = _not_finite(arrays)
        if name is not None:
            raise CheckpointError(f"checkpoint {path} is damaged: {name} holds a value that is not finite")
        return Checkpoint(arrays, key=record.pop("key"), progress=Progress(**record))
    except (OSError, ValueError, KeyError, TypeError, zipfile.BadZipFile) as e:
        raise CheckpointError(f"checkpoint {path} is damaged: {e}") from e


def _sums(path):
    return "".join(_sum_line(path, name) for name in (STATE, PROGRESS))


def _sum_line(path, name):
    return f"{sha256_file(path / name)}  {name}\n"


def _not_finite(arrays):
    """Returns the name of an array that holds a NaN or an infinity, None when there is none."""
    for name, array in arrays.items():
        array = np.asarray(array)
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            return name
    return None


def read_progress(directory, step):
    """Returns the counters of a checkpoint without its arrays, None when its record is damaged."""
    path = Path(directory) / f"step-{step:08d}"
    try:
        if _sum_line(path, PROGRESS) not in (path / SUMS).read_text(encoding="utf-8"):
            return None
        record = json.loads((path / PROGRESS).read_text(encoding="utf-8"))
        record.pop("key")
        return Progress(**record)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def newest_progress(directory):
    """Returns the counters of the newest checkpoint whose record is whole, None when there is none."""
    return next(filter(None, (read_progress(directory, step) for step in reversed(steps(directory)))), None)


def newest_key(directory):
    """Returns the key of the newest checkpoint whose record is whole, None when there is none."""
    progress = newest_progress(directory)
    if progress is None:
        return None
    path = Path(directory) / f"step-{progress.step:08d}" / PROGRESS
    return json.loads(path.read_text(encoding="utf-8"))["key"]


def is_trained_in(run_dir):
    """True when training or pretraining has begun in a run directory."""
    return any((Path(run_dir) / folder).exists() for folder in (CHECKPOINTS, f"{PRETRAINING}/{CHECKPOINTS}"))


def where_it_stands(run_dir):
    """Returns the folder of the checkpoints that a run goes on from: its training's, before that its pretraining's."""
    own = Path(run_dir) / CHECKPOINTS
    before = Path(run_dir) / PRETRAINING / CHECKPOINTS
    return before if newest_progress(own) is None and newest_progress(before) is not None else own


def best_step(directory, step):
    """Returns the step of the best weights that a checkpoint names, None when its record is damaged."""
    progress = read_progress(directory, step)
    return None if progress is None else progress.best_step


def newest_first(directory, warn):
    """Yields the good checkpoints under `directory`, the newest first.

    Args:
        directory: the folder of all checkpoints.
        warn: called with one line for every damaged checkpoint that is passed over.
    """
    existing = steps(directory)
    for step in reversed(existing):
        try:
            found = read(directory, step)
        except CheckpointError as e:
            warn(f"{e}; " + ("using the one before it." if step > existing[0] else "there is none before it."))
        else:
            yield found


def resume_point(run_dir, warn):
    """Returns the newest good checkpoint of a run, and the best weights it names.

    One whose best weights are damaged does not count: going on from an earlier one makes them again.

    Args:
        run_dir: the run directory.
        warn: called with one line for everything damaged.

    Returns:
        A pair of `Checkpoint` or None: the second is None before the first validation, both are where none is good.
    """
    run_dir = Path(run_dir)
    for found in newest_first(run_dir / CHECKPOINTS, warn):
        if found.progress.best_step < 0:
            return found, None
        try:
            return found, read(run_dir / BEST, found.progress.best_step)
        except CheckpointError as e:
            warn(f"{e}; passing over the checkpoint of step {found.progress.step}, which needs it.")
    if steps(run_dir / CHECKPOINTS):
        warn(f"no checkpoint in {run_dir / CHECKPOINTS} can be used: training starts from its first step.")
    return None, None


def finished_best(run_dir, key, training):
    """Returns the best weights of the training of `key` as a `Checkpoint`, None unless it has finished.

    Args:
        run_dir: the run directory.
        key: fingerprint of what is trained on and how.
        training: the job's `[training]` section, which says when training ends.
    """
    last, best = resume_point(run_dir, warn=lambda line: None)
    return best if last is not None and last.key == key and last.progress.why_finished(training) else None


def prune(directory, keep):
    """Removes every checkpoint whose step is not in `keep`."""
    for step in steps(directory):
        if step not in keep:
            shutil.rmtree(Path(directory) / f"step-{step:08d}")
