"""The gate: whether a model may replace the live version."""

import numpy as np

from pipeline import evaluation
from pipeline.contract import versions
from pipeline.errors import ArtifactError, GateRefused
from serving.onnx_classifier import OnnxClassifier


def check_gate(config, metrics, model_dir, texts, gold, labels):
    """Decides whether a model may be published.

    Args:
        config: a `pipeline.config.EvaluationConfig`.
        metrics: the model's figures on the test rows, from `pipeline.evaluation.metrics`.
        model_dir: `base_path/name`, where the live version is.
        texts: the test texts.
        gold: int [N], indices into `labels`.
        labels: label strings of the model.

    Returns:
        {"passed", "reasons", "metric", "value", "min_value", "max_regression", "live"}; `live` is None, or the live
        version's number and its value on the same rows.
    """
    name, value = config.metric, metrics[config.metric]
    reasons = []
    if name == "loss":
        if config.min_value and value > config.min_value:
            reasons.append(f"test loss {value:.4f} is above evaluation.min_value {config.min_value}")
    elif value < config.min_value:
        reasons.append(f"test {name} {value:.4f} is below evaluation.min_value {config.min_value}")
    live = _live(model_dir, texts, gold, labels, name, reasons)
    if live is not None and live["value"] is not None:
        drop = value - live["value"] if name == "loss" else live["value"] - value
        if drop > config.max_regression:
            reasons.append(
                f"test {name} {value:.4f} is worse than {live['value']:.4f} of live version {live['version']} on the "
                f"same rows by more than evaluation.max_regression {config.max_regression}"
            )
    return {
        "passed": not reasons,
        "reasons": reasons,
        "metric": name,
        "value": value,
        "min_value": config.min_value,
        "max_regression": config.max_regression,
        "live": live,
    }


def _live(model_dir, texts, gold, labels, name, reasons):
    published = versions(model_dir)
    if not published:
        return None
    version, path = list(published.items())[-1]
    try:
        value = _measure(path, texts, gold, labels)[name]
    except ArtifactError as e:
        reason = str(e).partition(". ")[0]
        reasons.append(f"live version {version} cannot be compared ({reason}); restore or remove {path}")
        value = None
    return {"version": version, "value": value}


def _measure(version_dir, texts, gold, labels):
    """Figures of a published version on rows labelled with `labels`; labels it does not know it never finds."""
    classifier = OnnxClassifier.load(version_dir)
    extra = [label for label in classifier.labels if label not in labels]
    columns = {label: i for i, label in enumerate([*labels, *extra])}
    probabilities = np.zeros((len(texts), len(columns)))
    probabilities[:, [columns[label] for label in classifier.labels]] = classifier.probabilities(texts)
    figures = evaluation.metrics(probabilities, gold, list(columns))
    # A label that no row has any more would count as one found with F1 = 0.
    figures["macro_f1"] = float(np.mean([figures["per_class"][label]["f1"] for label in labels]))
    return figures


def require_passed(gate, report_path):
    """Raises GateRefused when the gate did not pass."""
    if not gate["passed"]:
        raise GateRefused(
            f"not published: {'; '.join(gate['reasons'])}. The live version stays; see {report_path}."
        )
