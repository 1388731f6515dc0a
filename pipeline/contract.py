"""Names and files shared by the pipeline, the exporters and the services.

Standard library only: a service that runs the ONNX file can import this module alone.
"""

import dataclasses
import hashlib
import json
import re
from pathlib import Path

from pipeline.errors import ArtifactError

# Token ids. Padding and truncation are at the end.
PAD_ID = 0
UNK_ID = 1
MASK = "<mask>"  # the piece that stands for a hidden token, where a tokenizer has one; no text is parsed into it

# Tensor names.
TOKEN_IDS = "token_ids"
TEXT = "text"
LABEL = "label"
LOGITS = "logits"
PROBABILITIES = "probabilities"
SERVING_SIGNATURE = "serving_default"
TOKEN_IDS_SIGNATURE = "token_ids"

# Figures in the rows of metrics.jsonl that tell how fast a process was; all others are the same however often training
# was killed.
TIMINGS = frozenset({"real_tokens_per_s", "waiting_share", "training_s", "waiting_s", "validating_s", "saving_s"})

# Files of a version directory.
MANIFEST = "manifest.json"
TOKENIZER_MODEL = "tokenizer.model"
ONNX_DIR = "onnx"
ONNX_FILES = {
    "float32": "onnx/model.onnx",
    "int8": "onnx/model.int8.onnx",
    "float16": "onnx/model.float16.onnx",
    "ort": "onnx/model.ort.onnx",
}
ONNX_TEXT = "onnx/model.text.onnx"
SAVED_MODEL = "saved_model.pb"
WARMUP = "assets.extra/tf_serving_warmup_requests"

# Beside the versions in base_path/name.
LEDGER = "versions.json"  # every number that a version was given; see serving.ledger
STAGED = ".staged-"  # begins the names of what is half-written or half-deleted; no server reads one as a number
MAX_VERSION = 2**63 - 1
# TensorFlow Serving reads names with absl::SimpleAtoi: blanks around, a sign, decimal digits, int64. Ours are positive.
_NUMBER = re.compile(r"[ \t\n\v\f\r]*\+?([0-9]+)[ \t\n\v\f\r]*")
_STAGED_NUMBER = re.compile(re.escape(STAGED) + "(.+)-[0-9]+(-removed|-replaced)?", re.DOTALL)

# Keys of the ONNX `metadata_props`; every value is a string, labels a JSON list in index order.
ONNX_METADATA = ("name", "version", "labels", "max_length", "pad_id", "tokenizer_sha256")

JOB_NAME = re.compile(r"[a-z0-9-]+")


def sha256_file(path):
    """Returns the SHA-256 of a file's bytes as 64 hex digits."""
    with open(path, "rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


@dataclasses.dataclass(frozen=True)
class Manifest:
    """What a version directory holds and where it came from; `manifest.json`.

    Attributes:
        name: the served model's name.
        version: the directory's number, a positive integer.
        created: UTC time of the export, ISO 8601.
        labels: label strings in index order.
        max_length: longest text in tokens; longer texts are cut at the end.
        pad_id: the id that fills rows up to a common length.
        files: relative path -> {"sha256": hex, "size": bytes}, every file but the manifest.
        metrics: the test figures of `evaluation/report.json`; some are null where they are not defined.
        parity: per artifact, the largest differences from the trained model that were seen.
        warnings: what a reader must know, e.g. an artifact left out and why.
        job: the resolved job, as in `job.json`; of an absolute path only its last part.
        data_fingerprint: SHA-256 over the contents and settings that made the data.
        export_key: SHA-256 over everything this version was made from.
        packages: package name -> version used for training and export.
        source_revision: git revision of the pipeline, "" when unknown.
        graphs: per ONNX file, what the exporter counted in it, e.g. fused operators; see `export.fusion`.
        label_counts: label -> training rows, in index order; 0 for a class that was kept without rows.
        calibration: "temperature", that the logits are divided by before the softmax; with n-grams "ngram_weight", by
            which their scores are multiplied before they are added to the encoder's logits; and of "validation" and
            "test" the expected calibration error "before" (temperature 1) and "after".
        forced: empty, or who published against the gate: {"by", "at", "reasons"}.
        republished: empty, or for a copy that a rollback made: {"from", "by", "at"}, `from` being the first version
            with these weights.
        baseline: empty, or how the linear baseline did on the same test rows; see `pipeline.baseline.compare`.
    """

    name: str
    version: int
    created: str
    labels: list
    max_length: int
    pad_id: int
    files: dict
    metrics: dict
    parity: dict
    warnings: list
    job: dict
    data_fingerprint: str
    export_key: str
    packages: dict
    source_revision: str
    # Keys that versions published before they existed lack.
    graphs: dict = dataclasses.field(default_factory=dict)
    label_counts: dict = dataclasses.field(default_factory=dict)
    calibration: dict = dataclasses.field(default_factory=dict)
    forced: dict = dataclasses.field(default_factory=dict)
    republished: dict = dataclasses.field(default_factory=dict)
    baseline: dict = dataclasses.field(default_factory=dict)

    def write(self, version_dir):
        """Writes `manifest.json` into `version_dir`."""
        text = json.dumps(dataclasses.asdict(self), indent=2, ensure_ascii=False)
        (Path(version_dir) / MANIFEST).write_text(text + "\n", encoding="utf-8")

    @classmethod
    def read(cls, version_dir):
        """Reads the manifest of a version directory; keys added by later versions are ignored.

        Raises:
            ArtifactError: there is no manifest, or it cannot be understood.
        """
        path = Path(version_dir) / MANIFEST
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
            optional = {f.name for f in dataclasses.fields(cls) if f.default_factory is not dataclasses.MISSING}
            fields = [f for f in dataclasses.fields(cls) if f.name in values or f.name not in optional]
            wrong = [field.name for field in fields if type(values[field.name]) is not field.type]
            if wrong or (wrong := _wrong_inside(values)):
                raise TypeError(f"{', '.join(wrong)}: not what it should be")
            return cls(**{field.name: values[field.name] for field in fields})
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as e:
            raise ArtifactError(
                f"{version_dir} is not a version directory: cannot read {MANIFEST} ({_reason(e)}). "
                "Give the path of a published version, e.g. models/NAME/1."
            ) from e

    def check_files(self, version_dir, only=None):
        """Compares size and SHA-256 of the files with the manifest.

        Args:
            version_dir: the directory that holds the files.
            only: relative paths to check; None checks every file.

        Raises:
            ArtifactError: a file is missing or differs; names it.
        """
        for relative in self.files if only is None else only:
            path = Path(version_dir) / relative
            if relative not in self.files:
                raise ArtifactError(
                    f"{version_dir} has no {relative}: it was not exported. See warnings in {MANIFEST}."
                )
            if not path.is_file():
                raise ArtifactError(
                    f"{path} is missing, but {MANIFEST} lists it. Copy the whole version directory again."
                )
            expected = self.files[relative]
            if path.stat().st_size != expected["size"] or sha256_file(path) != expected["sha256"]:
                raise ArtifactError(
                    f"{path} is damaged: its size or SHA-256 differs from {MANIFEST}. "
                    "Copy the whole version directory again."
                )


def _wrong_inside(values):
    """Returns the keys of a manifest whose lists and objects hold something else than they should."""
    files = [(f.get("sha256"), f.get("size")) if isinstance(f, dict) else (f, f) for f in values["files"].values()]
    republished = values.get("republished", {})
    holds = {
        "files": all(isinstance(sha256, str) and isinstance(size, int) for sha256, size in files),
        "labels": all(isinstance(label, str) for label in values["labels"]),
        "label_counts": all(isinstance(count, int) for count in values.get("label_counts", {}).values()),
        "republished": not republished or isinstance(republished.get("from"), int),
    }
    return [key for key, it_does in holds.items() if not it_does]


def list_files(version_dir):
    """Returns relative path -> {"sha256", "size"} of every file but the manifest, sorted by path."""
    root = Path(version_dir)
    files = sorted(p for p in root.rglob("*") if p.is_file() and p != root / MANIFEST)
    return {p.relative_to(root).as_posix(): {"sha256": sha256_file(p), "size": p.stat().st_size} for p in files}


def versions(model_dir):
    """Returns number -> path of the published versions under `base_path/name`, ascending; the last one is live.

    A version is a directory, or a link to one, whose name is a number as TensorFlow Serving reads it: `0009` is 9. Of
    two with one number it takes the name that sorts last, and so do we.
    """
    root = Path(model_dir)
    found = [(version_number(p.name), p.name, p) for p in root.iterdir() if p.is_dir()] if root.is_dir() else []
    return {number: path for number, _, path in sorted(f for f in found if f[0] is not None)}


def version_number(name):
    """Returns the number that TensorFlow Serving reads in the name of an entry of `base_path/name`, None for none."""
    match = _NUMBER.fullmatch(name)
    return int(match[1]) if match and int(match[1]) <= MAX_VERSION else None


def next_version(model_dir):
    """Returns one above every number that was ever given to a version of `base_path/name`, 1 for the first.

    Counted are entries of any kind that are named as a number, half-written and half-deleted ones, and the ledger.

    Raises:
        ArtifactError: the highest number has been given away.
    """
    highest = max([*entry_numbers(model_dir), *ledger_rows(model_dir)], default=0)
    if highest >= MAX_VERSION:
        raise ArtifactError(
            f"no version number is left in {model_dir}: {highest} is the highest that a server reads. Remove the entry "
            f"of that name, and its line in {LEDGER}, if it is no version of yours, or publish to another base_path."
        )
    return highest + 1


def entry_numbers(model_dir, staged=True):
    """Returns the numbers that entries of `base_path/name` are named, of any kind, whole or (if `staged`) not."""
    root = Path(model_dir)
    names = [p.name for p in root.iterdir()] if root.is_dir() else []
    if staged:
        names += [match[1] for match in map(_STAGED_NUMBER.fullmatch, names) if match]
    return {number for number in map(version_number, names) if number is not None}


def ledger_rows(model_dir):
    """Returns number -> row of `versions.json`; what is missing or damaged in it is left out."""
    try:
        rows = json.loads((Path(model_dir) / LEDGER).read_text(encoding="utf-8"))["versions"]
        numbers = {name: version_number(name) for name in rows}
        return {numbers[name]: row for name, row in rows.items() if numbers[name] and isinstance(row, dict)}
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def _reason(error):
    if isinstance(error, KeyError):
        return f"no key {error}"
    return getattr(error, "strerror", None) or str(error)
