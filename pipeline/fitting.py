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
from pipeline.calibrated import add_ngrams, predict_parts
from pipeline.config import fingerprint
from pipeline.files import write_atomic
from pipeline.losses import class_weights

FITTED = "fitted.npz"
_FORMAT = 1  # part of the key: what was fitted in another way is fitted again


def fit_to(encoder, job, run_dir, best, stop=lambda: None):
    """Returns the `CalibratedClassifier` of an encoder that has the best weights, with everything fitted to it.

    Args:
        encoder: a built `EncoderClassifier`.
        job: a `JobConfig`.
        run_dir: the run directory, with `data/`.
        best: the `pipeline.checkpoint.Checkpoint` of the encoder's weights.
        stop: called now and then; may raise to end early. Then nothing is kept.
    """
    model = add_ngrams(encoder, job.model.ngram_buckets)
    path, key = Path(run_dir) / FITTED, _key(best)
    weights = {w.path: w for w in model.fitted_weights}
    arrays = _read(path, key, weights)
    if arrays is not None:
        for name, weight in weights.items():
            weight.assign(arrays[name])
        return model
    _fit(model, job, Path(run_dir) / "data", stop)
    _write(path, key, weights)
    return model


def _fit(model, job, data_dir, stop):
    if model.ngrams is not None:
        split, labels = dataset.Split.load(data_dir, "train"), dataset.load_labels(data_dir)
        counts = np.bincount(split.labels, minlength=len(labels))
        row_weights = class_weights(job.training.class_weights, labels, counts)
        fitted = ngrams.fit(split, model.vocab_size, len(labels), model.ngrams.buckets, row_weights, stop)
        model.ngrams.set_weights(fitted)
    split = dataset.Split.load(data_dir, "validation")
    plan = sequential_plan(split.lengths, job.training.batch_tokens)
    parts = predict_parts(model, split, plan, stop)
    scores = None if model.ngrams is None else parts[2]
    weight, temperature = calibration.fit(parts[0] if scores is None else parts[1], scores, split.labels)
    model.temperature.assign(temperature)
    if model.ngrams is not None:
        model.ngram_weight.assign(weight)


def _key(best):
    digest = hashlib.sha256()
    for array in best.arrays.values():
        digest.update(np.ascontiguousarray(array).data)
    return fingerprint(_FORMAT, best.key, digest.hexdigest())


def _write(path, key, weights):
    content = io.BytesIO()
    np.savez(content, key=np.array(key), **{name: weight.numpy() for name, weight in weights.items()})
    write_atomic(path, content.getvalue())


def _read(path, key, weights):
    """Returns name -> array; None when the file is missing, damaged or of another key."""
    try:
        with zipfile.ZipFile(path) as parts:
            if parts.testzip() is not None:  # each part has a checksum
                return None
        with np.load(path, allow_pickle=False) as stored:
            arrays = {name: stored[name] for name in stored.files}
        fits = str(arrays["key"]) == key and all(arrays[n].shape == tuple(w.shape) for n, w in weights.items())
    except (OSError, ValueError, KeyError, EOFError, RuntimeError, zipfile.BadZipFile):
        return None
    return arrays if fits else None
