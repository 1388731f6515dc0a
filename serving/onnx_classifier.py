"""Text in, labels out, from a version directory with ONNX Runtime; loads neither TensorFlow nor Keras."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import onnxruntime as ort

from pipeline.contract import LOGITS, ONNX_FILES, PAD_ID, PROBABILITIES, TOKEN_IDS, TOKENIZER_MODEL, Manifest
from pipeline.errors import ArtifactError, DataError, JobError
from pipeline.text import Tokenizer, pad

BATCH_TOKENS = 4096  # padded tokens in one run of the graph; bounds its memory
_FILLED = 0.85  # rows shorter than this share of their batch's longest go to the next: a run costs less than padding


@dataclasses.dataclass(frozen=True)
class Prediction:
    """The answer for one text.

    Attributes:
        label: the most probable label; of equals the first in label order.
        probabilities: label -> probability, in label order. They add up to 1 within float32 rounding.
            For arrays, call `OnnxClassifier.probabilities`.
    """

    label: str
    probabilities: dict[str, float]

    @property
    def confidence(self):
        """The probability of `label`: below a threshold of your choice, take the text for one of another kind."""
        return self.probabilities[self.label]


class OnnxClassifier:
    """A loaded classifier. Threads may share one object.

    Attributes:
        name: the served model's name.
        version: the version's number.
        labels: label strings in index order.
        max_length: longest text in tokens; longer texts are cut at the end.
        providers: ONNX Runtime's execution providers in use, first choice first.
    """

    def __init__(self, session, tokenizer, manifest):
        """Use `load`, which also checks that the parts belong together."""
        self._session = session
        self._tokenizer = tokenizer
        self.name = manifest.name
        self.version = manifest.version
        self.labels = list(manifest.labels)
        self.max_length = manifest.max_length
        self.providers = session.get_providers()

    @classmethod
    def load(cls, version_dir, precision="float32", providers=None, threads=None):
        """Loads a version directory after comparing the files it uses with the manifest.

        Args:
            version_dir: path of a published version, e.g. models/NAME/1.
            precision: "float32", "int8", "float16" or "ort", if it was exported. float16 is for GPUs: on a CPU it is
                slower than float32. All take and give the same dtypes.
            providers: ONNX Runtime execution providers, first choice first. None: CUDA when this
                ONNX Runtime has it, then CPU.
            threads: CPU threads that compute one batch. None: ONNX Runtime's own choice, one per core.

        Raises:
            ArtifactError: the directory is incomplete or damaged, its parts do not belong together, or
                it has no such precision.
            JobError: providers or threads cannot be used here.
        """
        version_dir = Path(version_dir)
        manifest = Manifest.read(version_dir)
        exported = [p for p, file in ONNX_FILES.items() if file in manifest.files]
        if precision not in exported:
            raise ArtifactError(
                f"{version_dir} has no precision {precision!r}. Choose one of those exported: "
                f"{', '.join(exported) or 'none'}."
            )
        onnx_file = ONNX_FILES[precision]
        manifest.check_files(version_dir, only=[onnx_file, TOKENIZER_MODEL])
        tokenizer = Tokenizer.load(version_dir / TOKENIZER_MODEL)
        session = _open_session(version_dir / onnx_file, providers, threads)
        _check_metadata(version_dir / onnx_file, session.get_modelmeta().custom_metadata_map, manifest, tokenizer)
        return cls(session, tokenizer, manifest)

    def predict(self, texts):
        """Returns one `Prediction` per text, in order.

        Args:
            texts: any number of str; longer ones than `max_length` tokens are cut at the end.

        Raises:
            DataError: `texts` is a single str, or one of them is not a str; names its index.
        """
        probabilities = self.probabilities(texts)
        best = probabilities.argmax(axis=1)
        return [
            Prediction(self.labels[i], dict(zip(self.labels, row, strict=True)))
            for i, row in zip(best, probabilities.tolist(), strict=True)
        ]

    def probabilities(self, texts):
        """Returns float32 [N, C], one row per text in order, columns in label order.

        In float32 a text's row does not depend on the others beyond rounding (1e-5; float16: 1e-2). int8 scales its
        activations over a whole batch, so there a row moves a little with its batch mates.

        Raises:
            DataError: as for `predict`.
        """
        rows = self._tokenizer.encode(texts, self.max_length)
        probabilities = np.empty((len(rows), len(self.labels)), dtype=np.float32)
        for batch in _plan([len(row) for row in rows]):
            probabilities[batch] = self._run(PROBABILITIES, pad([rows[i] for i in batch]))
        return probabilities

    def logits(self, token_ids):
        """Returns float32 [B, C] for token ids of the version's own tokenizer.

        Args:
            token_ids: integers [B, T], 1 <= T <= max_length, PAD (0) after each row's last token.

        Raises:
            DataError: wrong dtype or shape, or an id outside the vocabulary.
        """
        token_ids = self._checked_ids(np.asarray(token_ids))
        size = _batch_size(token_ids.shape[1])
        starts = range(0, len(token_ids), size)
        parts = [self._run(LOGITS, token_ids[start : start + size]) for start in starts]
        return np.concatenate(parts) if parts else np.empty((0, len(self.labels)), dtype=np.float32)

    def _run(self, output, token_ids):
        return self._session.run([output], {TOKEN_IDS: token_ids})[0]  # [B, C]

    def _checked_ids(self, token_ids):
        if token_ids.ndim != 2 or not np.issubdtype(token_ids.dtype, np.integer):
            raise DataError(
                f"token_ids must be integers [B, T]. Received: dtype={token_ids.dtype}, shape={list(token_ids.shape)}"
            )
        if not 1 <= token_ids.shape[1] <= self.max_length:
            raise DataError(
                f"token_ids must have 1 to max_length={self.max_length} columns. "
                f"Received: shape={list(token_ids.shape)}"
            )
        # The graph refuses them as well on a CPU, but on a GPU its answer is NaN, and its message says no position.
        vocab_size = self._tokenizer.vocab_size
        outside = np.argwhere((token_ids < 0) | (token_ids >= vocab_size))
        if len(outside):
            row, column = outside[0]
            raise DataError(
                f"token_ids must be >= 0 and < {vocab_size}, the vocabulary. "
                f"Received: token_ids[{row}, {column}]={token_ids[row, column]}"
            )
        return token_ids.astype(np.int32)


def _plan(lengths):
    """Yields index arrays, each a batch of like lengths under BATCH_TOKENS; together they cover every row once."""
    lengths = np.maximum(np.array(lengths, dtype=np.int64), 1)
    # The longest first, so that ONNX Runtime reserves its memory once.
    order = np.argsort(-lengths, kind="stable")
    while len(order):
        longest = lengths[order[0]]
        batch = order[: _batch_size(longest)]
        batch = batch[lengths[batch] >= _FILLED * longest]
        yield batch
        order = order[len(batch) :]


def _batch_size(length):
    return max(1, BATCH_TOKENS // length)


def _open_session(path, providers, threads):
    options = ort.SessionOptions()
    options.log_severity_level = 3  # errors only
    if threads is not None:
        if not 1 <= threads <= 1024:
            raise JobError(f"threads must be in 1 to 1024. Received: threads={threads}")
        options.intra_op_num_threads = threads
    chosen, names = _choose_providers(providers)
    if "CUDAExecutionProvider" in names:
        ort.preload_dlls()  # finds the CUDA libraries that pip installed; not run on a GPU yet
    try:
        session = ort.InferenceSession(str(path), options, providers=chosen)
    except Exception as e:  # ONNX Runtime's exceptions have no common base
        raise ArtifactError(f"ONNX Runtime {ort.__version__} cannot load {path}: {' '.join(str(e).split())}") from e
    if providers is not None and not set(names) <= set(session.get_providers()):
        raise JobError(
            f"ONNX Runtime could not start all of the providers: {', '.join(session.get_providers())} "
            f"started; see its log above, often a CUDA library is missing. Received: providers={providers!r}"
        )
    return session


def _choose_providers(providers):
    """Returns the providers for ONNX Runtime, each a name or (name, options), and their names."""
    available = ort.get_available_providers()
    if providers is None:
        chosen = [p for p in ("CUDAExecutionProvider", "CPUExecutionProvider") if p in available]
        return chosen, chosen
    names = [p if isinstance(p, str) else p[0] for p in providers]
    # Checked here, because ONNX Runtime would print a warning and take the CPU.
    if not names or not set(names) <= set(available):
        raise JobError(f"providers must be among {', '.join(available)}. Received: providers={providers!r}")
    return list(providers), names


def _check_metadata(path, metadata, manifest, tokenizer):
    """Compares what the ONNX file says about itself with the manifest and the tokenizer beside it."""
    try:
        labels = json.loads(metadata.get("labels", "null"))
    except ValueError:
        labels = metadata["labels"]
    compared = {  # key -> (found, expected)
        "labels": (labels, manifest.labels),
        "max_length": (metadata.get("max_length"), str(manifest.max_length)),
        "pad_id": (metadata.get("pad_id"), str(PAD_ID)),
        "pad_id of the manifest": (manifest.pad_id, PAD_ID),
        "tokenizer_sha256": (metadata.get("tokenizer_sha256"), tokenizer.sha256),
    }
    differ = [f"{key} is {a!r} instead of {b!r}" for key, (a, b) in compared.items() if a != b]
    if differ:
        raise ArtifactError(f"{path} does not fit its tokenizer and manifest: {'; '.join(differ)}. Export it again.")
