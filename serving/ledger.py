"""The ledger of a served model: which numbers were given to versions, and what became of each.

It lies in `base_path/name/versions.json` and outlives the versions, so no number is given twice. Servers and services
do without it. Only who holds the publishing lock writes it.
"""

import datetime
import hashlib
import json
import os
from pathlib import Path

from pipeline.contract import LEDGER, MAX_VERSION, Manifest, entry_numbers, ledger_rows, next_version, versions
from pipeline.errors import ArtifactError
from pipeline.files import read_json, remove, write_json

_FIGURES = ("accuracy", "macro_f1", "loss")


class Ledger:
    """What is known of every version of a model.

    A row is written before its version is renamed into place, with the key "pending"; the first look after the rename
    drops that key. So a kill between the two neither loses the number nor keeps the same candidate from being
    published under it; nothing else can be.

    Attributes:
        rows: number -> {"created", "published_at", "metrics", "export_key", "forced", "republished", "removed_at"},
            ascending; times are UTC, ISO 8601, "" when unknown or not yet. Keys of later versions are kept.
        problem: what was wrong with the file, as one line, "" when nothing was.
    """

    def __init__(self, model_dir, values, rows, is_damaged):
        """Use `read`."""
        self._model_dir = model_dir
        self._values = values
        self._is_damaged = is_damaged
        self.rows = rows
        self.problem = ""

    @classmethod
    def read(cls, model_dir):
        """Reads the ledger and brings it up to date with what lies in the directory; nothing is written.

        Args:
            model_dir: `base_path/name`, which need not exist.
        """
        model_dir = Path(model_dir)
        path, rows = model_dir / LEDGER, ledger_rows(model_dir)
        exists = os.path.lexists(path)
        values = None if path.is_dir() else read_json(path)
        is_ledger = isinstance(values, dict) and isinstance(values.get("versions"), dict)
        is_damaged = exists and not (is_ledger and len(rows) == len(values["versions"]))
        ledger = cls(model_dir, values if is_ledger else {}, rows, is_damaged)
        found = ledger._compare_with_directory()
        if is_damaged or found and not exists:
            ledger.problem = (
                f"{path} is {'damaged' if exists else 'missing'}: it is made anew from the versions that are there; "
                "numbers of versions that were removed before may be lost"
            )
        return ledger

    def _compare_with_directory(self):
        """Adds rows of versions that it lacks, and what happened to those that it has; returns the added numbers."""
        present, added = versions(self._model_dir), []
        for number in present.keys() - self.rows.keys():
            try:
                self.rows[number] = _row(Manifest.read(present[number]), published_at="")
                added.append(number)
            except ArtifactError:
                continue  # not made by this pipeline, or damaged
        for number, row in self.rows.items():
            if number in present:
                row.pop("pending", None)
                row["removed_at"] = ""  # or it was put back
            elif not row.get("pending") and not row.get("removed_at"):
                row["removed_at"] = _now()
        self.rows = dict(sorted(self.rows.items()))
        return added

    def is_free(self, manifest):
        """True when a version can be published under the number in its manifest."""
        number = manifest.version
        if type(number) is not int or not 0 < number <= MAX_VERSION:
            return False
        rows = {n for n, row in self.rows.items() if n != number or row.get("pending") != _fingerprint(manifest)}
        return number > max(rows | entry_numbers(self._model_dir, staged=False), default=0)

    def require_free(self, manifest):
        """Raises ArtifactError unless `is_free`."""
        if not self.is_free(manifest):
            raise ArtifactError(
                f"the candidate is version {manifest.version}, but {next_version(self._model_dir)} is the next one in "
                f"{self._model_dir}. Export again."
            )

    def announce(self, manifest):
        """Writes that a version is about to be renamed into place."""
        number = manifest.version
        self.rows[number] = _row(manifest, published_at=_now()) | {"pending": _fingerprint(manifest)}
        self._write()

    def settle(self):
        """Writes what has become of the versions."""
        self._compare_with_directory()
        self._write()

    def _write(self):
        path = self._model_dir / LEDGER
        if self._is_damaged:
            aside = path.with_name(f"{LEDGER}.damaged")
            remove(aside)
            os.rename(path, aside)
            self._is_damaged = False
        rows = {str(number): row for number, row in sorted(self.rows.items())}
        write_json(path, {**self._values, "versions": rows})


def _row(manifest, published_at):
    metrics = manifest.metrics if isinstance(manifest.metrics, dict) else {}
    return {
        "created": manifest.created,
        "published_at": published_at,
        "metrics": {name: metrics[name] for name in _FIGURES if name in metrics},
        "export_key": manifest.export_key,
        "forced": manifest.forced,
        "republished": manifest.republished,
        "removed_at": "",
    }


def _fingerprint(manifest):
    """Tells one candidate from another of the same number; `forced` does not count, which publishing may add."""
    identity = [manifest.name, manifest.version, manifest.created, manifest.export_key, manifest.files]
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()


def _now():
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
