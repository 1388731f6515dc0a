"""What a job came to, in lines for people."""

from pipeline.calibration import TEMPERATURES
from pipeline.contract import ONNX_FILES, ONNX_TEXT, Manifest


def lines(version_dir, data_report, evaluation_report):
    """Returns the summary of a published version, one str per line.

    Args:
        version_dir: the version directory.
        data_report: `data/report.json`, or None when the run directory is gone.
        evaluation_report: `evaluation/report.json`, or None likewise.
    """
    manifest = Manifest.read(version_dir)
    test = manifest.metrics
    there = {name: figures for name, figures in manifest.parity.items() if "/" not in name or name in manifest.files}
    parity = "; ".join(f"{name} {describe_parity(figures)}" for name, figures in there.items())
    rows = {
        "data": data_report
        and f"{describe_rows(data_report)}; {len(manifest.labels)} classes; vocabulary {data_report['vocab_size']}",
        "test": f"accuracy {test['accuracy']:.4f}, macro-F1 {test['macro_f1']:.4f}, loss {test['loss']:.4f}",
        "baseline": manifest.baseline and describe_baseline(manifest.baseline),
        "gate": _describe_forced(manifest.forced) or evaluation_report and describe_gate(evaluation_report["gate"]),
        "artifacts": ", ".join(_artifacts(manifest)),
        "parity": parity,
        "published": str(version_dir),
    }
    return [f"{name:>10}  {text}" for name, text in rows.items() if text]


def describe_rows(data_report):
    """Returns the number of rows of each split, e.g. "train 800, validation 100, test 100 rows"."""
    parts = {**data_report["splits"], "unlabelled": data_report.get("unlabelled")}
    return ", ".join(f"{name} {part['rows']}" for name, part in parts.items() if part) + " rows"


def describe_gate(gate):
    """Returns what the gate of `serving.gate.check_gate` compared with; thresholds that are not set are said."""
    if not gate["passed"]:
        return "refused"
    limit = [f"min_value {gate['min_value']}"] if gate["min_value"] else []
    live = [f"live version {gate['live']['version']} has {gate['live']['value']:.4f}"] if gate["live"] else []
    value = f"{gate['metric']} {gate['value']:.4f}"
    # Reports of earlier runs lack these.
    baseline = [f"the baseline has {gate['baseline']:.4f}"] if gate.get("baseline") is not None else []
    notes = gate.get("notes", [])
    return f"passed ({'; '.join([value, *limit, *live, *baseline, *notes])})"


def describe_test(report):
    """Returns the test figures of an evaluation report; with n-grams also what each part answers alone."""
    test = report["test"]
    errors = " -> ".join(f"{report['calibration']['test'][when]:.4f}" for when in ("before", "after"))
    parts = ", ".join(f"{name} alone {accuracy:.4f}" for name, accuracy in report.get("parts", {}).items())
    return (
        f"accuracy {test['accuracy']:.4f}{f' ({parts})' if parts else ''}, macro-F1 {test['macro_f1']:.4f}, "
        f"loss {test['loss']:.4f}, calibration error {errors}"
    )


def describe_limit(calibration):
    """Returns the warning about a temperature that went as far as it may, "" for any other."""
    temperature = calibration["temperature"]
    if min(TEMPERATURES) < temperature < max(TEMPERATURES):
        return ""
    return (
        f"the temperature that makes logits into probabilities is at its limit, {temperature:g}: on validation the "
        "encoder's answers say little of how sure it is; give it more validation rows, or more training.epochs"
    )


def describe_baseline(baseline):
    """Returns the figures of `pipeline.baseline.compare` and how ours differ from them."""
    rows, fitted = baseline["train_rows"], baseline["fitted_rows"]
    sample = f" fitted on {fitted} of {rows} rows" if fitted < rows else ""
    return (
        f"TF-IDF of {baseline['features']} + linear SVM{sample}: accuracy {baseline['accuracy']:.4f}, macro-F1 "
        f"{baseline['macro_f1']:.4f}; ours {baseline['difference']:+.4f} (McNemar {_describe_p_value(baseline)})"
    )


def describe_shortfall(baseline):
    """Returns the warning about a model that is not better than the baseline, "" for one that is."""
    if baseline["better"]:
        return ""
    how = "worse than" if baseline["difference"] < 0 else "no better than"
    accuracy = baseline["accuracy"]
    return (
        f"the model is {how} TF-IDF of {baseline['features']} and a linear SVM on the test rows: accuracy "
        f"{accuracy + baseline['difference']:.4f} against {accuracy:.4f} ({_describe_p_value(baseline)}); see "
        "training.recipe"
    )


def _describe_p_value(baseline):
    return f"p = {baseline['mcnemar']['p_value']:.2g}{'' if baseline['significant'] else ', not significant'}"


def _describe_forced(forced):
    if not forced:
        return ""
    return f"refused: {'; '.join(forced['reasons'])}; published by {forced['by']} with --force at {forced['at']}"


def _artifacts(manifest):
    named = ("saved_model.pb", *ONNX_FILES.values(), ONNX_TEXT)
    return [f"{file} ({manifest.files[file]['size'] / 1e6:.1f} MB)" for file in named if file in manifest.files]


def describe_parity(figures):
    """Returns how near an artifact came to the trained model, from its figures in the manifest."""
    if "label_agreement" in figures:
        return f"{figures['label_agreement']:.1%} of labels"
    return f"within {figures['max_abs_difference']:.1e} in {figures['cases']} cases"
