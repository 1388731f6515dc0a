"""Version numbers and the one rename that publishes."""

import contextlib
import os
import shutil
from pathlib import Path

from pipeline.contract import Manifest, next_version, versions
from pipeline.errors import ArtifactError
from pipeline.files import locked, remove_staged, staged_directory


def publish(candidate_dir, model_dir, keep_versions):
    """Copies a candidate beside its target and renames it into place, whole.

    Args:
        candidate_dir: a verified version directory; its manifest names the version.
        model_dir: `base_path/name`.
        keep_versions: number of versions to keep; the oldest go first, never the new one.

    Returns:
        The path of the published version.

    Raises:
        ArtifactError: the candidate is damaged, or its number is no longer the next one.
        LockHeld: another process publishes the same model.
    """
    candidate_dir, model_dir = Path(candidate_dir), Path(model_dir)
    manifest = Manifest.read(candidate_dir)
    target = model_dir / str(manifest.version)
    with _explained(target), locked(model_dir / ".lock", f"publishing {manifest.name}"):
        remove_staged(model_dir)
        if manifest.version != next_version(model_dir):
            raise ArtifactError(
                f"the candidate is version {manifest.version}, but {next_version(model_dir)} is the next one in "
                f"{model_dir}. Export again."
            )
        with staged_directory(target) as staged:
            shutil.copytree(candidate_dir, staged, dirs_exist_ok=True)
            manifest.check_files(staged)
        for path in list(versions(model_dir).values())[:-keep_versions]:
            _remove(path)
    return target


def _remove(path):
    # One rename first: a server never sees half a version.
    gone = path.with_name(f".staged-{path.name}-{os.getpid()}-removed")
    try:
        os.rename(path, gone)
    except OSError as e:
        raise ArtifactError(
            f"the new version is published, but the old {path} cannot be removed: {e.strerror}. Remove it by hand."
        ) from e
    shutil.rmtree(gone, ignore_errors=True)


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
