"""The part of the gate that needs no model: labels and training rows against those of the live version."""

import dataclasses

from pipeline.contract import Manifest, versions
from pipeline.errors import ArtifactError
from pipeline.reading import join_some


def live_version(model_dir):
    """Returns (number, path) of the live version under `base_path/name`, None where there is none."""
    published = versions(model_dir)
    return list(published.items())[-1] if published else None


def live_labels(model_dir):
    """Returns the live version's labels in index order, none where nothing is published.

    Raises:
        ArtifactError: its manifest cannot be read.
    """
    live = live_version(model_dir)
    if live is None:
        return []
    version, path = live
    try:
        return Manifest.read(path).labels
    except ArtifactError as e:
        raise ArtifactError(
            f"the labels of live version {version}, whose order a new version keeps, cannot be told ({reason(e)}). "
            f"Restore or remove {path}."
        ) from e


def check_data(job, labels, counts):
    """Asks the gate about labels and training rows alone; arguments as in `data_reasons`, returns an `answer`."""
    reasons, notes = data_reasons(job, labels, counts)
    live = live_version(job.model_dir)
    return answer(job.evaluation, reasons, notes, None, "", live and {"version": live[0], "value": None})


def answer(config, reasons, notes, value, artifact, live):
    """Returns what the gate says, as `evaluation/report.json` keeps it.

    Args:
        config: a `pipeline.config.EvaluationConfig`.
        reasons: sentences on why not to publish; none lets it pass.
        notes: sentences on what was not compared.
        value: of the chosen metric on the test rows; None before there is a model.
        artifact: what it was measured on, e.g. "onnx/model.onnx".
        live: None, or the live version's {"version", "value"} on the same rows; the value is None where there is none.

    Returns:
        These, the thresholds, "passed", and "forced", which is empty until `serving.gate.overruled` fills it.
    """
    return {
        "passed": not reasons,
        "reasons": reasons,
        "notes": notes,
        "metric": config.metric,
        "value": value,
        "artifact": artifact,
        "min_value": config.min_value,
        "max_regression": config.max_regression,
        "max_label_shift": config.max_label_shift,
        "live": live,
        "forced": {},
    }


def data_reasons(job, labels, counts):
    """Tells what is wrong with the labels and the training rows of a model, whatever its figures are.

    Args:
        job: a `JobConfig`.
        labels: label strings of the model, in index order.
        counts: label -> training rows.

    Returns:
        (reasons not to publish, notes on what was not compared), each a list of plain sentences.
    """
    reasons = list(_few_rows(counts))
    live = live_version(job.model_dir)
    if live is None:
        return reasons, ["no live version to compare with"]
    version, path = live
    try:
        manifest = dataclasses.replace(Manifest.read(path), version=version)  # the directory's number counts
    except ArtifactError as e:
        return [*reasons, not_comparable(version, path, e)], []
    reasons += _lost_classes(manifest, counts)
    reasons += _other_meanings(manifest, labels)
    if not job.data.allow_new_labels:
        reasons += _new_labels(manifest, labels)
    most = job.evaluation.max_label_shift
    if most == 1.0:
        return reasons, ["label shares not compared: evaluation.max_label_shift is 1"]
    if not manifest.label_counts:
        return reasons, [f"label shares not compared: the manifest of live version {version} does not have them"]
    return [*reasons, *_label_shifts(manifest, counts, most)], []


def not_comparable(version, path, error):
    """Returns the reason that a live version in `path` which cannot be used, for the ArtifactError `error`, gives."""
    return f"live version {version} cannot be compared ({reason(error)}): restore or remove {path}"


def reason(error):
    """Returns the first sentence of an error's message."""
    return str(error).partition(". ")[0]


def _few_rows(counts):
    present = [label for label, count in counts.items() if count]
    if len(present) == 1:
        yield (
            f"all {counts[present[0]]} training rows are of one class, {present[0]!r}: give rows of at least two, or "
            "correct data.label_column"
        )
    if single := [label for label in present if counts[label] < 2]:
        yield f"a single training row is all there is of {join_some(single)}: give more rows, or remove it"


def _lost_classes(manifest, counts):
    # One that was published without rows, by --force, is not lost again.
    lost = [label for label in manifest.labels if not counts.get(label) and manifest.label_counts.get(label, 1)]
    if lost:
        yield (
            f"no training row is left of {join_some(lost)}, which live version {manifest.version} was trained on: "
            "bring such rows back to data.train, or publish without them with --force"
        )


def _other_meanings(manifest, labels):
    new = dict(enumerate(labels))
    other = [i for i, label in enumerate(manifest.labels) if new.get(i) != label]
    if other:
        i = other[0]
        yield (
            f"label indices would change their meaning ({len(other)} of {len(manifest.labels)}, e.g. {i} from "
            f"{manifest.labels[i]!r} in live version {manifest.version} to {new.get(i, 'none')!r}): start over with "
            "--fresh, which takes the live version's order"
        )


def _new_labels(manifest, labels):
    if new := [label for label in labels if label not in manifest.labels]:
        yield (
            f"live version {manifest.version} does not have the labels {join_some(new)}: set data.allow_new_labels = "
            "true to add them, or correct them in data.train"
        )


def _label_shifts(manifest, counts, most):
    # Among rows of labels that both have: one that is added on purpose takes its share from all others.
    old, new = _shares(manifest.labels, manifest.label_counts), _shares(manifest.labels, counts)
    # Rounded: a share of 0.7 that was 0.5 has moved by 0.2, though not in floats.
    shifts = {label: round(abs(new[label] - old[label]), 9) for label in manifest.labels}
    shifted = [label for label in sorted(shifts, key=shifts.get, reverse=True) if shifts[label] > most]
    if shifted:
        moves = [f"{label!r} from {old[label]:.1%} to {new[label]:.1%}" for label in shifted[:3]]
        yield (
            f"label shares of the training rows moved by more than evaluation.max_label_shift {most} since live "
            f"version {manifest.version} ({len(shifted)} of {len(manifest.labels)} labels, e.g. {', '.join(moves)}): "
            "look at data.train, or raise that key"
        )


def _shares(labels, counts):
    total = sum(counts.get(label, 0) for label in labels)
    return {label: counts.get(label, 0) / max(1, total) for label in labels}
