"""The one rename that publishes, under one lock for each served model."""

import contextlib
import os
import shutil
from pathlib import Path

from pipeline.contract import STAGED, Manifest, versions
from pipeline.errors import ArtifactError
from pipeline.files import locked, remove, remove_staged, staged_directory
from serving.ledger import Ledger


def publish(candidate_dir, model_dir, keep_versions, warn=lambda line: None):
    """Copies a candidate beside its target and renames it into place, whole.

    Args:
        candidate_dir: a verified version directory; its manifest names the version.
        model_dir: `base_path/name`.
        keep_versions: number of versions to keep; the oldest go first, never the new one, and never a directory that
            no pipeline made.
        warn: called with one line for what the user should know.

    Returns:
        The path of the published version.

    Raises:
        ArtifactError: the candidate is damaged, its number was given to another version, or the disk refuses.
        LockHeld: another process publishes the same model.
    """
    candidate_dir, model_dir = Path(candidate_dir), Path(model_dir)
    manifest = Manifest.read(candidate_dir)
    target = model_dir / str(manifest.version)
    with publishing(model_dir, manifest.name, warn) as ledger:
        ledger.require_free(manifest)
        with becoming_visible(ledger, target) as staged:
            shutil.copytree(candidate_dir, staged, dirs_exist_ok=True)
        _remove_old(ledger, target, keep_versions, warn)
    return target


@contextlib.contextmanager
def publishing(model_dir, name, warn):
    """Holds the publishing lock of a model, removes what dead processes left, and yields the ledger.

    Args:
        model_dir: `base_path/name`; is made.
        name: the served model's name.
        warn: called with one line when the ledger was missing or damaged.

    Raises:
        LockHeld: another process publishes the same model.
    """
    with contextlib.ExitStack() as stack:
        with _explained(model_dir):
            stack.enter_context(locked(model_dir / ".lock", f"publishing {name}"))
            ledger = Ledger.read(model_dir)
            remove_staged(model_dir)
        if ledger.problem:
            warn(ledger.problem)
        yield ledger


@contextlib.contextmanager
def becoming_visible(ledger, target):
    """Yields an empty directory that becomes the version `target` in one rename, if what was put into it is whole.

    Args:
        ledger: what `publishing` yields; its lock is held.
        target: `base_path/name/N`, N being free.

    Raises:
        ArtifactError: a file differs from the manifest, or the disk refuses; nothing is visible.
    """
    with _explained(target), staged_directory(target) as staged:
        yield staged
        manifest = Manifest.read(staged)
        manifest.check_files(staged)
        ledger.announce(manifest)


def settle(ledger, target, warn):
    """Writes the ledger after a version became visible. It can be written later as well: a full disk is no failure."""
    try:
        ledger.settle()
    except OSError as e:
        warn(f"{target} is published, but the ledger beside it cannot be written: {e.strerror or e}.")


def _remove_old(ledger, target, keep_versions, warn):
    """Removes all but the newest versions, each by one rename: a server never sees half a version."""
    present = versions(target.parent)
    gone, refused = [], []
    for number in [number for number in present if number in ledger.rows][:-keep_versions]:
        path = present[number]
        renamed = path.with_name(f"{STAGED}{path.name}-{os.getpid()}-removed")
        try:
            os.rename(path, renamed)
            gone.append(renamed)
        except OSError as e:
            refused.append(f"{path} ({e.strerror})")
    settle(ledger, target, warn)
    for path in gone:
        remove(path)
    if refused:
        raise ArtifactError(
            f"{target} is published, but what is older cannot be removed: {', '.join(refused)}. Remove it by hand."
        )


@contextlib.contextmanager
def _explained(target):
    """Says in one line why the disk refuses."""
    try:
        yield
    except OSError as e:
        # copytree goes on after an error and raises a list of (source, target, reason) at its end.
        several = isinstance(e, shutil.Error) and isinstance(e.args[0], list)
        reason = e.args[0][0][2] if several else e.strerror or e
        raise ArtifactError(
            f"cannot publish to {target}: {reason}. The live version is untouched; check room and permissions, "
            "then run again."
        ) from e
