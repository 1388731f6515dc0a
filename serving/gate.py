"""The gate: whether a model may replace the live version."""

import datetime
import math

import numpy as np

from pipeline import evaluation
from pipeline.contract import ONNX_FILES, TOKENIZER_MODEL, Manifest
from pipeline.errors import ArtifactError
from serving.actor import actor
from serving.data_gate import answer, data_reasons, live_version, not_comparable
from serving.onnx_classifier import OnnxClassifier

_ROUNDING = 1e-6  # in another runtime the same weights have another loss, and 0.8 - 0.7 is above 0.1


def check_gate(job, labels, counts, metrics, artifact, live, baseline=None):
    """Decides whether a model may be published.

    Args:
        job: a `JobConfig`.
        labels: label strings of the model, in index order.
        counts: label -> training rows.
        metrics: the model's figures on the test rows, from `pipeline.evaluation.metrics`.
        artifact: what they were measured on, e.g. "onnx/model.onnx".
        live: the live version's figures on the same rows, from `measure_live`.
        baseline: the baseline's figures on the same rows, from `pipeline.baseline.compare`; None when there are none.

    Returns:
        What `serving.data_gate.answer` returns, and "baseline": None, or what the baseline has where
        `evaluation.beat_baseline` compares with it.
    """
    config = job.evaluation
    name, value = config.metric, metrics[config.metric]
    reasons, notes = data_reasons(job, labels, counts)
    if not config.min_value:
        notes = ["no evaluation.min_value set", *notes]
    elif not _holds(name, value, config.min_value, 0.0):
        side = "above" if name == "loss" else "below"
        reasons.append(
            f"test {name} {value:.4f} is {side} evaluation.min_value {config.min_value}: train a better model, or "
            "change that key"
        )
    if live is not None and "problem" in live:
        reasons.append(live["problem"])
    elif live is not None and not _holds(name, value, live["metrics"][name], config.max_regression):
        reasons.append(
            f"test {name} {value:.4f} is worse than {live['metrics'][name]:.4f} of live version {live['version']} on "
            f"the same rows by more than evaluation.max_regression {config.max_regression}: train a better model, or "
            "raise that key"
        )
    compared_baseline = None
    if config.beat_baseline and baseline is None:
        reasons.append(
            "evaluation.beat_baseline is set, but no baseline was fitted: run `python -m pipeline evaluate JOB.toml`"
        )
    elif config.beat_baseline:
        figure = "accuracy" if name == "loss" else name  # a support vector machine has no probabilities
        compared_baseline = baseline[figure]
        if not metrics[figure] > compared_baseline:
            reasons.append(
                f"test {figure} {metrics[figure]:.4f} is not above {compared_baseline:.4f} of the baseline (TF-IDF of "
                f"{baseline['features']} and a linear SVM), which evaluation.beat_baseline asks for: train a better "
                "model, or change that key"
            )
    if not math.isfinite(value):
        reasons.append(f"test {name} is not a finite number: the model's answers cannot be used")
    compared = live and {"version": live["version"], "value": live["metrics"][name] if "metrics" in live else None}
    gate = answer(config, list(dict.fromkeys(reasons)), notes, value, artifact, compared)
    return {**gate, "baseline": compared_baseline}


def _holds(name, value, bound, allowed):
    """True when `value` is not worse than `bound` by more than `allowed`."""
    return (value - bound if name == "loss" else bound - value) <= allowed + _ROUNDING


def measure_live(model_dir, texts, gold, labels, data_fingerprint, known):
    """Measures the live version on test rows.

    Args:
        model_dir: `base_path/name`, where the live version is.
        texts: the test texts.
        gold: int [N], indices into `labels`.
        labels: label strings.
        data_fingerprint: of the data that the rows are from.
        known: what this function returned before, or None; it holds as long as model and rows are the same.

    Returns:
        None where nothing is published, else {"version", "onnx_sha256", "data_fingerprint", "metrics"}, or
        {"version", "problem"} when the live version cannot be measured.
    """
    live = live_version(model_dir)
    if live is None:
        return None
    version, path = live
    try:
        manifest = Manifest.read(path)
        manifest.check_files(path, only=[ONNX_FILES["float32"], TOKENIZER_MODEL])
        onnx_sha256 = manifest.files[ONNX_FILES["float32"]]["sha256"]
        measured = {"version": version, "onnx_sha256": onnx_sha256, "data_fingerprint": data_fingerprint}
        if isinstance(known, dict) and known == {**measured, "metrics": known.get("metrics")}:
            return known
        return {**measured, "metrics": measure(path, texts, gold, labels)}
    except ArtifactError as e:
        return {"version": version, "problem": not_comparable(version, path, e)}


def measure(version_dir, texts, gold, labels):
    """Returns the figures of a version directory's float32 ONNX file on rows labelled with `labels`.

    Labels that it does not know it never finds.

    Raises:
        ArtifactError: the file cannot be used.
    """
    classifier = OnnxClassifier.load(version_dir)
    extra = [label for label in classifier.labels if label not in labels]
    columns = {label: i for i, label in enumerate([*labels, *extra])}
    probabilities = np.zeros((len(texts), len(columns)))
    probabilities[:, [columns[label] for label in classifier.labels]] = classifier.probabilities(texts)
    return evaluation.metrics(probabilities, gold, list(columns))


def overruled(gate):
    """Returns a gate that refused as one that was overruled: `forced` says by whom, when and against what."""
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    return {**gate, "forced": {"by": actor(), "at": now, "reasons": gate["reasons"]}}
