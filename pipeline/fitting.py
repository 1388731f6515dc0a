"""What is fitted once training has finished: the n-grams on the training split, two numbers on validation.

It is a function of the data, the job and the best weights, fitted when it is first needed and kept beside them.
"""

import hashlib
import io
import zipfile
from pathlib import Path

import numpy as np

from pipeline import calibration, dataset, ngrams
from pipeline.batches import sequential_plan
from pipeline.calibrated import CalibratedClassifier
from pipeline.classifier import compile_predict
from pipeline.config import fingerprint
from pipeline.contract import TOKENIZER_MODEL
from pipeline.evaluation import predict_logits
from pipeline.files import write_atomic
from pipeline.layers.ngrams import NgramScores
from pipeline.losses import class_weights
from pipeline.text import Tokenizer

FITTED = "fitted.npz"
WEIGHTS = "pair_rows", "squared_weights", "table", "bias"  # of `NgramScores`
SCALARS = "ngram_weight", "temperature"
_FORMAT = 2  # part of the key: what was fitted in another way is fitted again


def fit_to(encoder, job, run_dir, best, stop=lambda: None):
    """Returns the `CalibratedClassifier` of an encoder that has the best weights, with everything fitted to it.

    Args:
        encoder: a built `EncoderClassifier` or `EncoderEnsemble`.
        job: a `JobConfig`.
        run_dir: the run directory, with `data/`.
        best: the `pipeline.checkpoint.Checkpoint` of the encoder's weights.
        stop: called now and then; may raise to end early. Then nothing is kept.
    """
    path, key, data_dir = Path(run_dir) / FITTED, _key(best), Path(run_dir) / "data"
    arrays = _read(path, key, bool(job.model.ngram_pairs))
    if arrays is None:
        arrays = _fit(encoder, job, data_dir, stop)
        _write(path, key, arrays)
    return _assembled(encoder, arrays)


def _fit(encoder, job, data_dir, stop):
    """Returns name -> array: SCALARS, and WEIGHTS if the job has n-grams."""
    weights, machines = {}, []
    if job.model.ngram_pairs:
        split, labels = dataset.Split.load(data_dir, "train"), dataset.load_labels(data_dir)
        counts = np.bincount(split.labels, minlength=len(labels))
        row_weights = class_weights(job.training.class_weights, labels, counts)
        pieces = Tokenizer.load(Path(data_dir) / TOKENIZER_MODEL).pieces
        weights, machines = ngrams.fit(split, pieces, len(labels), job.model.ngram_pairs, row_weights, stop)
    split = dataset.Split.load(data_dir, "validation")
    plan = sequential_plan(split.lengths, job.training.batch_tokens)
    encoded = predict_logits(compile_predict(encoder), split, plan, stop)
    scores = ngrams.scores(weights, machines, split) if machines else []
    shares, temperature = calibration.fit(encoded, scores, split.labels)
    weight = shares.sum()
    if machines:  # as one; where none says anything, all the same
        weights |= ngrams.mix(machines, shares / weight if weight else np.full(len(shares), 1 / len(shares)))
    return {**weights, "ngram_weight": np.float32(weight), "temperature": np.float32(temperature)}


def _assembled(encoder, arrays):
    layer = None
    if "table" in arrays:
        layer = NgramScores.of({name: arrays[name] for name in WEIGHTS}, name="ngrams")
    model = CalibratedClassifier(encoder, layer)
    model.temperature.assign(arrays["temperature"])
    if layer is not None:
        model.ngram_weight.assign(arrays["ngram_weight"])
    return model


def _key(best):
    digest = hashlib.sha256()
    for array in best.arrays.values():
        digest.update(np.ascontiguousarray(array).data)
    return fingerprint(_FORMAT, best.key, digest.hexdigest())


def _write(path, key, arrays):
    content = io.BytesIO()
    np.savez(content, key=np.array(key), **arrays)
    write_atomic(path, content.getvalue())


def _read(path, key, with_ngrams):
    """Returns name -> array; None when the file is missing, damaged or of another key."""
    try:
        with zipfile.ZipFile(path) as parts:
            if parts.testzip() is not None:  # each part has a checksum
                return None
        with np.load(path, allow_pickle=False) as stored:
            arrays = {name: stored[name] for name in stored.files}
    except (OSError, ValueError, KeyError, EOFError, RuntimeError, zipfile.BadZipFile):
        return None
    if str(arrays.pop("key", "")) != key:
        return None
    # The archive's own list of its parts has no checksum.
    return arrays if arrays.keys() == {*SCALARS, *(WEIGHTS if with_ngrams else ())} else None
