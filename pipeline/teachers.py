"""Teachers: finished runs, or files of answers, whose probabilities a training learns beside its labels.

Hinton, Vinyals and Dean 2015, "Distilling the Knowledge in a Neural Network", at temperature 1. The mean over the
teachers is computed once and kept in the run directory, so that a training goes on with the numbers it began with.
"""

import math
from pathlib import Path

import numpy as np

from pipeline import checkpoint, dataset
from pipeline.checkpoint import BEST, CHECKPOINTS, SUMS
from pipeline.config import fingerprint
from pipeline.contract import list_files, sha256_file
from pipeline.errors import DataError, JobError
from pipeline.files import read_json, staged_directory, write_json
from pipeline.gatekeeper import EVALUATION
from pipeline.reading import join_some, read_json_lines
from pipeline.text import well_formed

SOFT_LABELS = "soft_labels"  # folder of the run directory

_PROBABILITIES = "probabilities.npy"
_REPORT = "report.json"
_FORMS = (".jsonl", ".jsonl.gz")
_SUM_TOLERANCE = 1e-3


def digests(setting, run_dir):
    """Returns what tells each teacher's answers from others: {path: SHA-256 (hex)}, in the order of the job.

    A teacher that is gone, or is just being trained again, counts as the one whose answers are in `run_dir`, if any.

    Args:
        setting: `training.teacher` of a job.
        run_dir: the run directory of that job.

    Raises:
        JobError: a teacher is no finished run and no file of answers, or is `run_dir` itself.
    """
    found, kept = {}, recorded(run_dir)
    for path in _paths(setting):
        try:
            found[path] = _digest(path, run_dir)
        except JobError:
            if path not in kept:
                raise
            found[path] = kept[path]
    return found


def recorded(run_dir):
    """Returns `digests` as they were when the soft labels in `run_dir` were made, {} where there are none."""
    return (_read_report(Path(run_dir) / SOFT_LABELS) or {"teachers": {}})["teachers"]


def soft_labels(setting, run_dir, key, answer):
    """Returns the mean of the teachers' probabilities for the training texts: float32 [rows, C].

    Args:
        setting: `training.teacher` of a job, not empty.
        run_dir: the run directory of that job, with `data/` prepared; what was computed is kept in it.
        key: fingerprint of the training; what was kept for another one is computed anew.
        answer: (run directory, texts) -> (labels, float [rows, len(labels)]), the probabilities that a run answers.

    Raises:
        JobError: as in `digests`; or a teacher changed meanwhile.
        DataError: a teacher has a label that the job has not, a training text is not in a file, or its lines are wrong.
    """
    directory, data_dir = Path(run_dir) / SOFT_LABELS, Path(run_dir) / "data"
    labels = dataset.load_labels(data_dir)
    key = fingerprint(key, labels)  # their order is no part of the training's
    if (stored := _read_report(directory)) is None or stored["key"] != key:
        teachers = {path: _digest(path, run_dir) for path in _paths(setting)}
        texts = dataset.load_texts(data_dir, "train")
        mean = np.zeros((len(texts), len(labels)))
        for path in teachers:
            if Path(path).is_dir():
                own, probabilities = answer(Path(path), texts)
                _require_known(own, labels, path)
                mean[:, [labels.index(label) for label in own]] += probabilities / len(teachers)
            else:
                mean += read_answers(path, texts, labels) / len(teachers)
        if {path: _digest(path, run_dir) for path in teachers} != teachers:
            raise JobError("training.teacher changed while it answered. Run it again when the teacher is finished.")
        with staged_directory(directory) as staged:
            np.save(staged / _PROBABILITIES, mean.astype(np.float32))
            write_json(staged / _REPORT, {"key": key, "teachers": teachers, "files": list_files(staged)})
    return np.load(directory / _PROBABILITIES)


def read_answers(path, texts, labels):
    """Returns what a file answers to texts: float64 [rows, C], each row scaled to the sum 1.

    Its lines are {"text": ..., "probabilities": {label: probability}}, in any order; of a text that occurs twice the
    last one counts, of texts that were not asked for none. Labels that a line leaves out have probability 0.

    Args:
        path: a .jsonl or .jsonl.gz file.
        texts: list of str.
        labels: C label strings.

    Raises:
        DataError: a line is wrong, names an unknown label, or a text is missing.
    """
    index = {text: row for row, text in enumerate(dict.fromkeys(texts))}
    found = np.full((len(index), len(labels)), np.nan)
    for place, line in read_json_lines(path):
        text, answers = line.get("text"), line.get("probabilities")
        if not isinstance(text, str) or not isinstance(answers, dict):
            raise DataError(f'{place}: must be {{"text": "...", "probabilities": {{"label": 0.9, ...}}}}.')
        _require_known(answers, labels, place)
        numbers = [answers.get(label, 0.0) for label in labels]
        if not all(_is_probability(number) for number in numbers) or abs(sum(numbers) - 1.0) > _SUM_TOLERANCE:
            raise DataError(
                f"{place}: probabilities must be finite, not negative, and have the sum 1 (within {_SUM_TOLERANCE}). "
                f"Received: {str(answers)[:100]}"
            )
        if (row := index.get(well_formed(text))) is not None:
            found[row] = np.array(numbers, np.float64) / sum(numbers)
    missing = [text for text, row in index.items() if np.isnan(found[row, 0])]
    if missing:
        raise DataError(
            f"{path} has no answer to {len(missing)} of {len(index)} training texts, the first is "
            f"{join_some(missing[:1])}. Let training.teacher answer every text of data.train."
        )
    return found[[index[text] for text in texts]]


def describe(teachers):
    """Returns one str for what `digests` returned."""
    return ", ".join(f"{path} (sha256 {digest[:12]})" for path, digest in teachers.items()) or "none"


def _is_probability(number):
    return isinstance(number, (int, float)) and not isinstance(number, bool) and math.isfinite(number) and number >= 0


def _require_known(found, labels, place):
    if unknown := [label for label in found if label not in labels]:
        raise DataError(
            f"{place}: a teacher may only know labels of the job. Unknown: {join_some(unknown)}. Known labels: "
            f"{join_some(labels)}."
        )


def _paths(setting):
    return list(dict.fromkeys([setting] if isinstance(setting, str) else setting)) if setting else []


def _digest(path, run_dir):
    """Returns the SHA-256 (hex) of what a teacher's answers depend on."""
    teacher = Path(path)
    if teacher.resolve() == Path(run_dir).resolve():
        raise JobError(
            f"training.teacher={path} is the run directory of this job itself, which its training replaces. Give the "
            "job another name, or name a copy of that directory."
        )
    if teacher.is_dir():
        return _digest_of_run(teacher)
    try:
        if path.lower().endswith(_FORMS):
            return sha256_file(teacher)
        reason = "it is neither a directory nor a .jsonl or .jsonl.gz file" if teacher.exists() else "it does not exist"
    except OSError as e:
        reason = e.strerror
    raise JobError(
        f"training.teacher={path} cannot be used: {reason}. Name run directories whose training is finished, or files "
        "of answers. Relative paths start at the current directory."
    )


def _digest_of_run(teacher):
    progress = checkpoint.newest_progress(teacher / CHECKPOINTS)
    report, labels = read_json(teacher / EVALUATION), read_json(teacher / "data" / dataset.LABELS)
    if progress is None or labels is None or not isinstance(report, dict) or "test" not in report:
        raise JobError(
            f"training.teacher={teacher} holds no finished run. Train and evaluate that job first: `python -m pipeline "
            "run ITS_JOB.toml`."
        )
    try:
        sums = (teacher / BEST / f"step-{progress.best_step:08d}" / SUMS).read_text(encoding="utf-8")
    except (OSError, ValueError) as e:
        raise JobError(f"training.teacher={teacher} has lost its best weights: {e}. Train it again.") from e
    return fingerprint(sums, labels)


def _read_report(directory):
    """Returns the record of soft labels that are whole, else None."""
    report = read_json(directory / _REPORT)
    if not isinstance(report, dict) or not report.keys() >= {"key", "teachers", "files"}:
        return None
    files = list_files(directory)
    files.pop(_REPORT)
    return report if files == report["files"] else None
