"""The scheduled job: its stages in order, each done once, each resumable, under one lock.

Every stage stores the fingerprint of what it was made from; it is done when that still holds. A stage imports
TensorFlow only when there is work for it, so a job that is all done, or wrong, ends at once.
"""

import contextlib
import dataclasses
import functools
import os
import shutil
import signal
import sys
import time

from pipeline import checkpoint, dataset, summary, teachers
from pipeline.cluster import read_cluster
from pipeline.config import fingerprint
from pipeline.console import Console
from pipeline.contract import next_version, version_number
from pipeline.errors import ArtifactError, DataError, JobError, PipelineError, VerificationError
from pipeline.files import locked, remove_staged, require_directory, write_json
from pipeline.gatekeeper import CANDIDATE, EVALUATION, Gatekeeper
from pipeline.identity import another_job, changes, identity, read_record
from pipeline.publication import find_candidate, find_version, rolled_back_by
from pipeline.run_directory import RunDirectory

_SHARED_DISK_S = 120.0  # network file systems show a new directory after up to a minute


class Job:
    """One job at work in its run directory; use it inside `with job.at_work():`.

    Args:
        config: a `JobConfig`.
        console: shows notes and progress; see `pipeline.console`.
        fresh: start over although a run could be continued; the old run is kept aside.
        stop: called between steps; raises Interrupted when a signal came whose exception was lost on its way.
        force: publish although the gate refuses, and record it in the manifest.
    """

    def __init__(self, config, console, fresh=False, stop=lambda: None, force=False):
        self.config = config
        self.directory = RunDirectory(config, console)
        self.gatekeeper = Gatekeeper(config, console, force)
        self.stop = stop
        self.console = console
        self.fresh = fresh
        self.cluster = read_cluster(config.training.strategy)
        self._in_cluster = False
        self.run_dir = config.run_dir
        self.data_dir = self.directory.data_dir

    @property
    def is_chief(self):
        """True unless this process only helps another to train."""
        return self.cluster is None or self.cluster.is_chief

    def at_work(self):
        """Holds the run's lock. Raises LockHeld when another process does."""
        if not self.is_chief:
            return contextlib.nullcontext()
        # Beside the run directory, which may be set aside while the lock is held.
        return locked(self.run_dir.parent / f".{self.config.name}.lock", f"job {self.config.name}")

    def do(self, stage):
        """Does a stage, one of the methods below; of several workers the chief does all, the others help to train."""
        if self.is_chief:
            stage(self)
        elif stage in (Job.run, Job.train):
            self.assist()
        else:
            self.console.note("nothing to do: that is the chief's work")

    # The stages.

    def run(self):
        """Does what is left to do: prepare, train, evaluate, export, publish; prints a summary."""
        require_directory(self.config.model_dir, "publish.base_path")
        self._open_run()
        replaced_by = self._rolled_back_by()
        if replaced_by:
            shutil.rmtree(self.run_dir / CANDIDATE, ignore_errors=True)
            self.console.note(
                f"nothing to do: this job's version was rolled back, version {replaced_by} took its place. New data or "
                "another job makes a new version, and so does --fresh"
            )
            return
        if self._published() is None:
            begin = (self._prepare_run, self._ask_about_data)
            for stage in (*begin, self.train, self.evaluate, self.export, self.publish):
                stage()
                self.stop()
                if self._in_cluster:
                    self._leave_cluster()
        else:
            shutil.rmtree(self.run_dir / CANDIDATE, ignore_errors=True)  # a kill may have come before it went
            self.console.note("nothing to do: this job is done and its version is published")
        self._summary()

    def check(self):
        """Shows, before hours are spent, whether this job can learn; raises CheckFailed. A run stays as it was."""
        with self.directory.data_to_check(self.data_key) as (data_dir, first_labels):
            self._prepare(data_dir, first_labels)
            self.gatekeeper.warn(data_dir)
            self.stop()
            self._start_tensorflow()
            from pipeline.check import Subject, check

            check(Subject.load(self.config, data_dir), self.console, self.stop)

    def tune(self, trials, output, job_file):
        """Trains with other settings, `trials` times in all; writes the job that is best on validation to `output`.

        The run and the published versions stay as they were.
        """
        try:
            from pipeline.tuning import Tuning, check_output
        except ModuleNotFoundError as e:
            if e.name not in ("optuna", "tomli_w"):
                raise
            raise JobError(f"tune needs the package {e.name}. Install it: pip install '.[tune]'") from e
        if self.cluster is not None:
            raise JobError('tune trains in one process: unset TF_CONFIG, or set training.strategy to "one".')
        check_output(output, job_file)
        self.data_key = dataset.data_fingerprint(self.config)
        tuning = Tuning(self.config, self.console, self.stop)
        with tuning.at_work():
            first_labels = tuning.open(
                self.result_key, self.data_key, lambda: self.directory.first_labels(self.data_key), self.fresh
            )
            if tuning.is_left(trials):
                self._prepare(tuning.data_dir, first_labels)
                self._start_tensorflow()
                tuning.run(trials, self._train_trial)
                if tuning.is_left(trials):
                    self._start_again()
            else:
                self.console.note("nothing to do: so many trials are done")
            tuning.finish(output)

    def prepare(self):
        """Makes `data/` from the input files."""
        self._open_run()
        self._prepare_run()
        self.gatekeeper.warn(self.data_dir)

    def train(self):
        """Trains, or goes on training, until the best weights are there. Raises JobError when the job has changed."""
        settings, data = changes(self.config, self.run_dir, self.data_key, self.train_key)
        if settings or data:
            raise another_job(self.run_dir, settings + data)
        if dataset.prepared(self.data_dir, self.data_key) is None:
            raise self._missing("data", "prepare")
        if checkpoint.finished_best(self.run_dir, self.train_key, self.config.training) is not None:
            return
        (self.run_dir / EVALUATION).unlink(missing_ok=True)  # of fewer epochs; its presence says that a run is finished
        self.directory.fix_labels()
        self._start_tensorflow()
        from pipeline.training import train

        if self.cluster is not None:
            self.cluster.call_roll(self.result_key, self.console.note)
            self._in_cluster = True
        train(self.config, self.run_dir, self.train_key, self.console, self.cluster)

    def evaluate(self):
        """Measures the best weights on the test split and asks the gate. Raises GateRefused."""
        report = self._evaluation_report()
        if report is None:
            report = self._measure()
        if self.config.baseline.enabled and "baseline" not in report:
            report = self._compare_with_baseline(report)
        self.console.note(f"test: {summary.describe_test(report)}")  # before the gate, which may refuse
        if baseline := report.get("baseline"):
            self.console.note(f"baseline: {summary.describe_baseline(baseline)}")
            if shortfall := summary.describe_shortfall(baseline):
                self.console.warn(shortfall)
        if limit := summary.describe_limit(report["calibration"]):
            self.console.warn(limit)
        gate = self.gatekeeper.ask_about_model(report)
        self.console.note(f"gate {summary.describe_gate(gate)}")

    def export(self):
        """Builds and verifies the candidate version."""
        report = self._require_evaluated()
        if self._is_published() or self._candidate() is not None:
            self.console.note("nothing to do: this job's version is there")
            return
        remove_staged(self.run_dir)
        self._start_tensorflow()
        from export.bundle import build_candidate
        from pipeline.training import load_best

        model = load_best(self.config, self.run_dir, self.train_key, self.stop)
        version = next_version(self.config.model_dir)
        try:
            manifest = build_candidate(self.config, self.run_dir, model, version, self.export_key, report, self._step)
        except VerificationError as e:
            raise self.gatekeeper.refusal_of_unverified(report, e) from e
        for line in manifest.warnings:
            self.console.warn(line)

    def publish(self):
        """Publishes the candidate if the gate lets it pass; the live version may be another one by now."""
        from serving.publish import publish

        report = self._require_evaluated()
        if self._is_published():
            self.console.note("nothing to do: this job's version is published")
            return
        manifest = self._candidate()
        if manifest is None:
            raise ArtifactError(
                f"{self.run_dir / CANDIDATE} holds no whole candidate of this job with the next version number. "
                "Run `python -m pipeline export JOB.toml` first."
            )
        gate = self.gatekeeper.ask_about_candidate(report)
        if manifest.forced != gate["forced"]:
            dataclasses.replace(manifest, forced=gate["forced"]).write(self.run_dir / CANDIDATE)
        keep_versions = self.config.publish.keep_versions
        target = publish(self.run_dir / CANDIDATE, self.config.model_dir, keep_versions, self.console.warn)
        shutil.rmtree(self.run_dir / CANDIDATE)
        self.console.note(f"published {target}")

    # What is done with versions, without the run.

    def rollback(self, number, ignore_signals):
        """Publishes an old version again under a new number; 0 is the one before the live one."""
        from serving.rollback import rollback

        def on_ready():
            ignore_signals()
            self.stop()  # one that came before, and whose exception was lost

        require_directory(self.config.model_dir, "publish.base_path")
        target = rollback(self.config.model_dir, number, self.console.note, self.console.warn, on_ready)
        self.console.result(f"live: {target}")

    def list_versions(self):
        """Prints a table of the versions."""
        from serving.listing import table

        for line in table(self.config.model_dir, self.console.warn):
            self.console.result(line)

    def wait_until_served(self, address, timeout_s):
        """Returns when the server at `address` serves the version that this job became, or the one that replaced it."""
        if not self.is_chief or not self._is_published():
            return
        version = self._rolled_back_by() or version_number(self._published().name)
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # gRPC's part imports TensorFlow
        from serving.tensorflow_serving import wait_available

        what = f"version {version} of {self.config.name}"
        self.console.note(f"waiting until {address} serves {what}")
        started = time.monotonic()
        wait_available(address, self.config.name, version, timeout_s)
        self.console.note(f"{address} serves {what}; waited {time.monotonic() - started:.1f} s")

    # What a worker beside the chief does.

    def assist(self):
        """Trains together with the chief, on the data that it prepares; returns when there is nothing to train."""
        if not self._is_trained():
            self._start_tensorflow()  # before the roll call: afterwards the others wait for it
            if self.cluster.call_roll(self.result_key, self.console.note, is_done=self._is_trained):
                self._train_with_chief()
                return
        self.console.note("nothing to do: training is finished")

    def _train_with_chief(self):
        from pipeline.training import train

        end = time.monotonic() + _SHARED_DISK_S
        while dataset.prepared(self.data_dir, self.data_key) is None:
            if time.monotonic() > end:
                raise JobError(
                    f"this worker does not see what the chief prepared in {self.data_dir}. All workers need the same "
                    "work_dir, on a disk that they share."
                )
            time.sleep(1.0)
        train(self.config, self.run_dir, self.train_key, Console(quiet=True), self.cluster)

    def _is_trained(self):
        if self.fresh:
            return False
        best = checkpoint.finished_best(self.run_dir, self.train_key, self.config.training)
        return best is not None or self._is_published()

    def _leave_cluster(self):
        # TensorFlow cannot leave a cluster, and would write the names of its devices into the exported graphs.
        self._start_again()

    def _start_again(self):
        """Runs the rest of the command in a new program in this process."""
        sys.stdout.flush()
        signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM, signal.SIGINT))  # the new program takes them up
        os.execv(sys.executable, [sys.executable, *(a for a in sys.orig_argv[1:] if a != "--fresh")])

    # Fingerprints: what each stage's result depends on.

    @functools.cached_property
    def data_key(self):
        try:
            return dataset.data_fingerprint(self.config)
        except (DataError, JobError):  # the input files may be gone: a single stage goes by what was made of them
            report = read_record(self.data_dir / dataset.REPORT, "inputs", "tokenizer_sha256")
            if report is None:
                raise
            return dataset.data_fingerprint(self.config, report)

    @functools.cached_property
    def train_key(self):
        """Of checkpoints: training goes on from those of an equal key only."""
        taught_by = teachers.digests(self.config.training.teacher, self.run_dir).values()
        return fingerprint(self.data_key, identity(self.config.resolved()), *taught_by)

    @functools.cached_property
    def result_key(self):
        """Of the best weights: how far training goes counts too, so more epochs make another result."""
        return fingerprint(self.train_key, self.config.training.epochs, self.config.training.patience)

    @functools.cached_property
    def export_key(self):
        config = self.config.resolved()
        return fingerprint(self.result_key, config["name"], config["export"])

    # What is on disk.

    def _open_run(self):
        self.data_key = dataset.data_fingerprint(self.config)  # an input that cannot be read: nothing is touched
        self.directory.open(self.data_key, self.train_key, self.fresh)
        self.fresh = False

    def _evaluation_report(self):
        report = read_record(
            self.run_dir / EVALUATION, "result_key", "data_fingerprint", "test", "labels", "calibration"
        )
        is_whole = report is not None and isinstance(report["test"], dict) and isinstance(report["labels"], list)
        return report if is_whole and report["result_key"] == self.result_key else None

    def _require_evaluated(self):
        report = self._evaluation_report()
        if report is None or "gate" not in report:
            raise self._missing(EVALUATION, "evaluate")
        return report

    def _missing(self, name, command):
        return PipelineError(
            f"{self.run_dir / name} is missing, damaged or made from other data or settings. "
            f"Run `python -m pipeline {command} JOB.toml` first."
        )

    def _candidate(self):
        return find_candidate(self.run_dir / CANDIDATE, self.config.model_dir, self.export_key)

    def _published(self):
        return find_version(self.config.model_dir, self.export_key, self.directory.above_version())

    def _rolled_back_by(self):
        return rolled_back_by(self.config.model_dir, self.export_key, self.directory.above_version())

    def _is_published(self):
        """True when this job's version is there, or was until a rollback."""
        return self._published() is not None or bool(self._rolled_back_by())

    # Work of the stages.

    def _prepare_run(self):
        self._prepare(self.data_dir, self.directory.first_labels(self.data_key))

    def _ask_about_data(self):
        # One of fewer epochs as well: it says that the run was finished.
        self.gatekeeper.ask_about_data(read_record(self.run_dir / EVALUATION, "test") or {})

    def _prepare(self, data_dir, first_labels):
        report = dataset.prepare(self.config, data_dir, first_labels)
        self.console.note(f"data: {summary.describe_rows(report)}; vocabulary {report['vocab_size']}")
        for line in report["warnings"]:
            self.console.warn(line)
        if self.config.data.unlabelled and not self.config.pretraining.epochs:
            self.console.warn("data.unlabelled is not used: pretraining.epochs is 0")

    def _step(self, line):
        self.stop()
        self.console.note(line)

    def _start_tensorflow(self):
        from pipeline.runtime import start_tensorflow

        # What it logs when a worker is lost fills pages; on a CPU it calls float16 an error, though it works.
        if self.cluster is not None or self.config.training.precision == "mixed_float16":
            os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
        start_tensorflow()
        self.stop()  # its modules catch exceptions of any kind while they are imported

    def _train_trial(self, config, run_dir, after_validation):
        """Trains another `JobConfig` on the same data, which lies in `run_dir`. Raises MemoryError, too."""
        import tensorflow as tf

        from pipeline.training import train

        job = Job(config, self.console)
        job.data_key = self.data_key
        try:
            train(config, run_dir, job.train_key, self.console, after_validation=after_validation)
        except tf.errors.ResourceExhaustedError as e:
            raise MemoryError(e.message) from e
        finally:
            tf.keras.backend.clear_session()  # or the graphs of all trials stay in memory

    def _measure(self):
        self._start_tensorflow()
        from pipeline import evaluation
        from pipeline.batches import sequential_plan
        from pipeline.calibrated import predict_parts
        from pipeline.training import load_best

        model = load_best(self.config, self.run_dir, self.train_key, self.stop)
        labels = dataset.load_labels(self.data_dir)
        report = {"result_key": self.result_key, "data_fingerprint": self.data_key, "labels": labels}
        calibration = model.fitted_scalars()
        for name in ("validation", "test"):
            split = dataset.Split.load(self.data_dir, name)
            plan = sequential_plan(split.lengths, self.config.training.batch_tokens)
            logits, *parts = predict_parts(model, split, plan, self.stop)
            report[name] = evaluation.metrics(
                evaluation.softmax(logits / calibration["temperature"]), split.labels, labels
            )
            before = evaluation.calibration_error(evaluation.softmax(logits), split.labels)
            calibration[name] = {"before": before, "after": report[name]["calibration_error"]}
        report["calibration"] = calibration
        if parts:  # of the test split, what each answers alone
            right = [float((scores.argmax(axis=1) == split.labels).mean()) for scores in parts]
            report["parts"] = dict(zip(("encoder", "ngrams"), right, strict=True))
        (self.run_dir / EVALUATION).parent.mkdir(exist_ok=True)
        write_json(self.run_dir / EVALUATION, report)
        return report

    def _compare_with_baseline(self, report):
        self._start_tensorflow()
        from pipeline import baseline, evaluation
        from pipeline.batches import sequential_plan
        from pipeline.classifier import compile_predict
        from pipeline.training import load_best

        predict = compile_predict(load_best(self.config, self.run_dir, self.train_key, self.stop))
        split = dataset.Split.load(self.data_dir, "test")
        plan = sequential_plan(split.lengths, self.config.training.batch_tokens)
        predicted = evaluation.predict_logits(predict, split, plan, self.stop).argmax(axis=1)
        report = {**report, "baseline": baseline.compare(self.data_dir, predicted, self.stop)}
        write_json(self.run_dir / EVALUATION, report)
        return report

    def _summary(self):
        data = read_record(self.data_dir / dataset.REPORT, "fingerprint", "splits", "vocab_size")
        if data is not None and data["fingerprint"] != self.data_key:
            data = None  # of a run that the gate refused since
        report = self._evaluation_report()
        for line in summary.lines(self._published(), data, report if report and "gate" in report else None):
            self.console.result(line)
