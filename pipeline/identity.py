"""What a run depends on, and what has changed since it began."""

from pipeline import checkpoint, dataset, teachers
from pipeline.config import differences
from pipeline.errors import JobError
from pipeline.files import read_json
from pipeline.text import Tokenizer

JOB = "job.json"


def identity(resolved):
    """Returns the part of a resolved job that a training state depends on: a run goes on only while it stays the same.

    Paths of data files and teachers aside, their content counts. How long training goes on (`epochs`, `patience`) may
    change on the way; it is part of `Job.result_key`.
    """
    without_effect = {
        "data": {"train", "validation", "test", "unlabelled", "allow_new_labels"},
        "training": {
            "epochs",
            "patience",
            "checkpoint_every_s",
            "checkpoint_every_steps",
            "keep_checkpoints",
            "log_every_steps",
            "strategy",
            "recipe",
            "teacher",
        },
        # Not its metric, which chooses the best weights.
        "evaluation": {"min_value", "max_regression", "beat_baseline", "max_label_shift"},
    }
    sections = ("seed", "data", "tokenizer", "model", "pretraining", "training", "evaluation")
    shaping = {section: resolved.get(section) for section in sections}
    for section, keys in without_effect.items():
        if isinstance(shaping[section], dict):
            shaping[section] = {k: v for k, v in shaping[section].items() if k not in keys}
    return shaping


def changes(config, run_dir, data_key, train_key):
    """Tells what keeps the training on disk from going on.

    The key of its newest checkpoint decides; `job.json` and `data/report.json`, which may be lost, name the reasons.

    Args:
        config: a `JobConfig`.
        run_dir: the run directory.
        data_key: fingerprint of the data as it is now.
        train_key: fingerprint of the training as it would be now.

    Returns:
        (changed settings, changed data): a list of "key: old -> new" and one of a line per input file.
    """
    checkpoints = checkpoint.where_it_stands(run_dir)
    settings, progress = [], checkpoint.newest_progress(run_dir / checkpoint.CHECKPOINTS)
    if progress is not None and config.training.epochs < progress.epochs_begun:
        settings.append(f"training.epochs: {progress.epochs_begun} (begun) -> {config.training.epochs}")
    key = checkpoint.newest_key(checkpoints)
    if key == train_key:
        return settings, []
    settings = [*_changed_settings(config, run_dir), *settings]
    data = _changed_data(config, run_dir, data_key, settings)
    if key is not None and not settings and not data:
        settings = [f"what it is cannot be told, since {JOB} or data/{dataset.REPORT} is lost or damaged"]
    return settings, data


def _changed_settings(config, run_dir):
    stored = read_record(run_dir / JOB)
    changed = differences(identity(stored), identity(config.resolved())) if stored else []
    changed += _changed_teachers(config, run_dir, stored)
    report, model_file = _data_report(run_dir), config.tokenizer.model_file
    old, new = report and report.get("tokenizer_sha256"), model_file and Tokenizer.load(model_file).sha256
    if old and new and old != new:
        changed.append(f"tokenizer.model_file: {model_file}: sha256 {old[:12]} -> {new[:12]}")
    return changed


def _changed_teachers(config, run_dir, stored):
    old, new = teachers.recorded(run_dir), teachers.digests(config.training.teacher, run_dir)
    training = (stored or {}).get("training")
    is_told = bool(old) or isinstance(training, dict) and not training.get("teacher")  # else the record is lost
    if list(old.values()) == list(new.values()) or not is_told:
        return []
    return [f"training.teacher: {teachers.describe(old)} -> {teachers.describe(new)}"]


def _changed_data(config, run_dir, data_key, changed_settings):
    report = _data_report(run_dir)
    if not checkpoint.is_trained_in(run_dir) or report is None or report["fingerprint"] == data_key:
        return []
    changed = dataset.changed_inputs(config, report)
    if not changed and not changed_settings:  # e.g. the same files in another order
        changed = [f"data: fingerprint {report['fingerprint'][:12]} -> {data_key[:12]}"]
    return changed


def another_job(run_dir, changed):
    """Returns the JobError of a run that cannot go on, given what has changed."""
    checkpoints = checkpoint.where_it_stands(run_dir)
    progress = checkpoint.newest_progress(checkpoints)
    of = " of its pretraining" if checkpoints.parent.name == checkpoint.PRETRAINING else ""
    at = f", at step {progress.step}{of}" if progress is not None else ""
    return JobError(
        f"{run_dir} holds a run of another job{at}: {'; '.join(changed)}. Undo the change to go on with it, or "
        "start over with `python -m pipeline run JOB.toml --fresh` (the old run is kept aside)."
    )


def read_record(path, *keys):
    """Returns the JSON object in `path` if it has all `keys`; None when it is missing, damaged or something else."""
    record = read_json(path)
    return record if isinstance(record, dict) and all(key in record for key in keys) else None


def _data_report(run_dir):
    return read_record(run_dir / "data" / dataset.REPORT, "fingerprint")
