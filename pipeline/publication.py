"""What has become of a job: its candidate, its published version, a rollback of that."""

from pipeline.contract import Manifest, versions
from pipeline.errors import ArtifactError
from serving.ledger import Ledger


def find_candidate(directory, model_dir, export_key):
    """Returns the manifest of a whole candidate that can still be published, else None.

    Args:
        directory: where it is.
        model_dir: `base_path/name`.
        export_key: of the job; that of another job's candidate differs.
    """
    try:
        manifest = Manifest.read(directory)
        manifest.check_files(directory)
    except ArtifactError:
        return None
    return manifest if manifest.export_key == export_key and Ledger.read(model_dir).is_free(manifest) else None


def find_version(model_dir, export_key, above):
    """Returns the path of the newest whole version that a job became, else None.

    Args:
        model_dir: `base_path/name`.
        export_key: of the job.
        above: versions up to this number do not count.
    """
    for version, path in reversed(versions(model_dir).items()):
        try:
            manifest = Manifest.read(path)
            if version > above and manifest.export_key == export_key:
                manifest.check_files(path)
                return path
        except ArtifactError:
            continue
    return None


def rolled_back_by(model_dir, export_key, above):
    """Returns the number of the version that a rollback put in the place of a job's, 0 for none; arguments as above.

    The ledger knows it even when the bad version has been removed: it must not come back by itself.
    """
    rows = {n: row for n, row in Ledger.read(model_dir).rows.items() if not row.get("pending")}
    mine = [n for n, row in rows.items() if n > above and row.get("export_key") == export_key]
    return max((n for n, row in rows.items() if mine and n > max(mine) and row.get("republished")), default=0)


def newest_of_the_past(model_dir):
    """Returns the highest number of a version that neither is live nor was replaced by the rollback that is live."""
    live = max(versions(model_dir), default=0)
    republished = Ledger.read(model_dir).rows.get(live, {}).get("republished") or {}
    origin = republished.get("from") if isinstance(republished, dict) else None  # a damaged row tells nothing
    return max(0, min(origin if isinstance(origin, int) else live, live - 1))
