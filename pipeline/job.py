"""The scheduled job: its stages in order, each done once, each resumable, under one lock.

Every stage stores the fingerprint of what it was made from; it is done when that still holds. A stage imports
TensorFlow only when there is work for it, so a job that is all done, or wrong, ends at once.
"""

import functools
import shutil

from pipeline import checkpoint, dataset
from pipeline.config import differences, fingerprint
from pipeline.contract import ONNX_FILES, ONNX_TEXT, Manifest, next_version
from pipeline.errors import ArtifactError, JobError, PipelineError
from pipeline.files import locked, read_json, remove_staged, write_json

JOB = "job.json"
EVALUATION = "evaluation/report.json"
CANDIDATE = "candidate"
PUBLISHED = "published.json"


class Job:
    """One job at work in its run directory; use it inside `with job.at_work():`.

    Args:
        config: a `JobConfig`.
        console: shows notes and progress; see `pipeline.console`.
        fresh: start over although a run could be continued; the old run is kept aside.
    """

    def __init__(self, config, console, fresh=False):
        self.config = config
        self.console = console
        self.fresh = fresh
        self.run_dir = config.run_dir
        self.data_dir = config.run_dir / "data"

    def at_work(self):
        """Holds the run's lock. Raises LockHeld when another process does."""
        # Beside the run directory, which may be set aside while the lock is held.
        return locked(self.run_dir.parent / f".{self.config.name}.lock", f"job {self.config.name}")

    # The stages.

    def run(self):
        """Does what is left to do: prepare, train, evaluate, export, publish; prints a summary."""
        self._open_run()
        if self._published() is None:
            self.prepare()
            self.train()
            self.evaluate()
            self.export()
            self.publish()
        else:
            shutil.rmtree(self.run_dir / CANDIDATE, ignore_errors=True)  # a kill may have come before it went
            self.console.note("nothing to do: this job is done and its version is published")
        self._summary()

    def prepare(self):
        """Makes `data/` from the input files."""
        self._open_run()
        report = dataset.prepare(self.config, self.data_dir)
        rows = ", ".join(f"{name} {split['rows']}" for name, split in report["splits"].items())
        self.console.note(f"data: {rows} rows; vocabulary {report['vocab_size']}")
        for line in report["warnings"]:
            self.console.warn(line)

    def train(self):
        """Trains, or goes on training, until the best weights are there."""
        self._require(self.data_dir / dataset.REPORT, "fingerprint", self.data_key, "prepare")
        if checkpoint.finished_best(self.run_dir, self.train_key) is not None:
            return
        self._start_tensorflow()
        from pipeline.training import train

        train(self.config, self.run_dir, self.train_key, self.console)

    def evaluate(self):
        """Measures the best weights on the test split and asks the gate. Raises GateRefused."""
        report = self._evaluation_report()
        if report is None:
            report = self._measure()
        gate, test = self._ask_gate(report), report["test"]
        self.console.note(
            f"test: accuracy {test['accuracy']:.4f}, macro-F1 {test['macro_f1']:.4f}, loss {test['loss']:.4f}, "
            f"calibration error {test['calibration_error']:.4f}; {_describe_gate(gate)}"
        )

    def export(self):
        """Builds and verifies the candidate version."""
        report = self._require_evaluated()
        if self._candidate() is not None:
            return
        self._start_tensorflow()
        from export.bundle import build_candidate
        from pipeline.training import load_best

        model = load_best(self.config, self.run_dir, self.train_key)
        version = next_version(self.config.model_dir)
        manifest = build_candidate(
            self.config, self.run_dir, model, version, self.export_key, report, self.console.note
        )
        for line in manifest.warnings:
            self.console.warn(line)

    def publish(self):
        """Publishes the candidate if the gate still lets it pass."""
        from serving.publish import publish

        report = self._require_evaluated()
        manifest = self._candidate()
        if manifest is None:
            raise ArtifactError(
                f"{self.run_dir / CANDIDATE} holds no whole candidate of this job with the next version number. "
                "Run `python -m pipeline export` first."
            )
        self._ask_gate(report)  # the live version may be another one by now
        target = self.config.model_dir / str(manifest.version)
        # Before the rename, and believed only once that version is there: a kill in between publishes nothing twice.
        write_json(
            self.run_dir / PUBLISHED, {"export_key": self.export_key, "version": manifest.version, "path": str(target)}
        )
        publish(self.run_dir / CANDIDATE, self.config.model_dir, self.config.publish.keep_versions)
        shutil.rmtree(self.run_dir / CANDIDATE)
        self.console.note(f"published {target}")

    # Fingerprints: what each stage's result depends on.

    @functools.cached_property
    def data_key(self):
        return dataset.data_fingerprint(self.config)

    @functools.cached_property
    def train_key(self):
        return fingerprint(self.data_key, _identity(self.config.resolved()))

    @functools.cached_property
    def export_key(self):
        config = self.config.resolved()
        return fingerprint(self.train_key, config["name"], config["export"])

    # What is on disk.

    def _open_run(self):
        """Continues the run that is there, or starts a new one; an old one is set aside, not deleted."""
        self.data_key  # noqa: B018 - an input that cannot be read is found before anything is touched
        stored = read_json(self.run_dir / JOB)
        if stored is not None:
            changed = differences(_identity(stored), _identity(self.config.resolved()))
            report = read_json(self.data_dir / dataset.REPORT)
            new_data = not changed and report is not None and report["fingerprint"] != self.data_key
            if report is None and not (self.run_dir / checkpoint.CHECKPOINTS).exists():
                changed = []  # nothing was made yet: a job that was refused may be corrected
            if changed and not self.fresh and not self._was_trained():
                raise JobError(
                    f"{self.run_dir} holds an unfinished run of another job: {'; '.join(changed)}. "
                    "Undo the change to go on with it, or start over with --fresh (the old run is kept aside)."
                )
            if changed or new_data or self.fresh:
                self._set_aside("new data" if new_data else "a changed job" if changed else "--fresh")
        self.fresh = False
        self.run_dir.mkdir(parents=True, exist_ok=True)
        for directory in (self.run_dir, (self.run_dir / EVALUATION).parent):
            remove_staged(directory)
        if read_json(self.run_dir / JOB) != self.config.resolved():
            write_json(self.run_dir / JOB, self.config.resolved())

    def _set_aside(self, reason):
        aside = self.run_dir.with_name(f"{self.run_dir.name}.previous")
        shutil.rmtree(aside, ignore_errors=True)
        self.run_dir.rename(aside)
        self.console.note(f"starting a new run ({reason}); the one before is in {aside}")

    def _was_trained(self):
        return (self.run_dir / EVALUATION).exists()

    def _require(self, path, key, value, command):
        stored = read_json(path)
        if stored is None or stored[key] != value:
            raise PipelineError(
                f"{path} is missing or was made from other data or settings. Run `python -m pipeline {command}` first."
            )
        return stored

    def _evaluation_report(self):
        report = read_json(self.run_dir / EVALUATION)
        return report if report is not None and report["train_key"] == self.train_key else None

    def _require_evaluated(self):
        return self._require(self.run_dir / EVALUATION, "train_key", self.train_key, "evaluate")

    def _candidate(self):
        """The manifest of a whole candidate of this job that can still be published, else None."""
        try:
            manifest = Manifest.read(self.run_dir / CANDIDATE)
            manifest.check_files(self.run_dir / CANDIDATE)
        except ArtifactError:
            return None
        current = manifest.export_key == self.export_key and manifest.version == next_version(self.config.model_dir)
        return manifest if current else None

    def _published(self):
        """The record of this job's published version if that is still there, else None."""
        record = read_json(self.run_dir / PUBLISHED)
        if record is None or record["export_key"] != self.export_key:
            return None
        path = self.config.model_dir / str(record["version"])
        try:
            return record if Manifest.read(path).export_key == self.export_key else None
        except ArtifactError:
            return None

    # Work of the stages.

    def _start_tensorflow(self):
        from pipeline.runtime import start_tensorflow

        start_tensorflow()

    def _measure(self):
        self._start_tensorflow()
        from pipeline import evaluation
        from pipeline.batches import sequential_plan
        from pipeline.optimization import compile_predict
        from pipeline.training import load_best

        model = load_best(self.config, self.run_dir, self.train_key)
        labels = dataset.load_labels(self.data_dir)
        report = {"train_key": self.train_key, "data_fingerprint": self.data_key, "labels": labels}
        for name in ("validation", "test"):
            split = dataset.Split.load(self.data_dir, name)
            plan = sequential_plan(split.lengths, self.config.training.batch_tokens)
            logits = evaluation.predict_logits(compile_predict(model), split, plan)
            report[name] = evaluation.metrics(evaluation.softmax(logits), split.labels, labels)
        (self.run_dir / EVALUATION).parent.mkdir(exist_ok=True)
        write_json(self.run_dir / EVALUATION, report)
        return report

    def _ask_gate(self, report):
        from serving.publish import check_gate, require_passed

        texts = dataset.load_texts(self.data_dir, "test")
        gold = dataset.Split.load(self.data_dir, "test").labels
        gate = check_gate(
            self.config.evaluation, report["test"], self.config.model_dir, texts, gold, report["labels"]
        )
        write_json(self.run_dir / EVALUATION, {**report, "gate": gate})
        require_passed(gate, self.run_dir / EVALUATION)
        return gate

    def _summary(self):
        report = read_json(self.run_dir / EVALUATION)
        data = dataset.load_report(self.data_dir)
        path = self.config.model_dir / str(self._published()["version"])
        manifest = Manifest.read(path)
        rows = ", ".join(f"{name} {split['rows']}" for name, split in data["splits"].items())
        test = report["test"]
        lines = [
            ("data", f"{rows} rows; {len(report['labels'])} classes; vocabulary {data['vocab_size']}"),
            ("test", f"accuracy {test['accuracy']:.4f}, macro-F1 {test['macro_f1']:.4f}, loss {test['loss']:.4f}"),
            ("gate", _describe_gate(report["gate"])),
            ("artifacts", ", ".join(_artifacts(manifest))),
            ("parity", "; ".join(f"{name} {_describe_parity(p)}" for name, p in manifest.parity.items())),
            ("published", str(path)),
        ]
        for name, text in lines:
            self.console.result(f"{name:>10}  {text}")


def _identity(resolved):
    """The part of a resolved job that shapes the trained weights; paths of data files aside, their content counts."""
    without_effect = {
        "data": {"train", "validation", "test"},
        "training": {"checkpoint_every_s", "checkpoint_every_steps", "keep_checkpoints", "log_every_steps"},
        "evaluation": {"min_value", "max_regression"},  # its metric chooses the best weights
    }
    shaping = {key: resolved.get(key) for key in ("seed", "data", "tokenizer", "model", "training", "evaluation")}
    for section, keys in without_effect.items():
        shaping[section] = {k: v for k, v in (shaping[section] or {}).items() if k not in keys}
    return shaping


def _artifacts(manifest):
    named = ("saved_model.pb", *ONNX_FILES.values(), ONNX_TEXT)
    return [f"{file} ({manifest.files[file]['size'] / 1e6:.1f} MB)" for file in named if file in manifest.files]


def _describe_parity(parity):
    if "label_agreement" in parity:
        return f"{parity['label_agreement']:.1%} of labels"
    return f"within {parity['max_abs_difference']:.1e} in {parity['cases']} cases"


def _describe_gate(gate):
    if not gate["passed"]:
        return "gate refuses"
    limit = f"min_value {gate['min_value']}" if gate["min_value"] else "no evaluation.min_value set"
    live = gate["live"]
    against = f"live version {live['version']} has {live['value']:.4f}" if live else "no live version to compare with"
    return f"gate passed ({gate['metric']} {gate['value']:.4f}; {limit}; {against})"
