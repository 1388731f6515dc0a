"""The training loop: batches from a plan, and a state that survives any kill exactly."""

import contextlib
import dataclasses
import math
import signal
import time
from pathlib import Path

import numpy as np

from pipeline import checkpoint, dataset, evaluation
from pipeline.ahead import Ahead
from pipeline.batches import drop_tokens, epoch_plan, sequential_plan
from pipeline.checkpoint import BEST, CHECKPOINTS, Progress
from pipeline.classifier import build_classifier, compile_predict
from pipeline.clock import Clock
from pipeline.contract import TOKENIZER_MODEL
from pipeline.errors import Interrupted, JobError, TrainingError
from pipeline.files import remove_staged
from pipeline.losses import class_weights
from pipeline.optimization import learning_rate
from pipeline.record import NoRecord, Record
from pipeline.replicas import open_replicas
from pipeline.runtime import trim_memory
from pipeline.subwords import PieceSplitter, sample_split
from pipeline.text import Tokenizer
from pipeline.train_step import TrainStep


def train(job, run_dir, key, console, cluster=None):
    """Trains until the last epoch or until patience runs out; goes on from the newest good checkpoint.

    Of several workers, each of which calls this, only the chief writes, judges and reads checkpoints.

    Args:
        job: a `JobConfig`.
        run_dir: the run directory, with `data/` prepared.
        key: fingerprint of the data and of every setting that shapes the weights.
        console: shows progress; see `pipeline.console`.
        cluster: the `pipeline.cluster.Cluster` that trains together, after its roll call; None for this process alone.

    Raises:
        Interrupted: SIGTERM or SIGINT arrived, here or at another worker; the state is saved.
        TrainingError: the loss, a gradient or a validation logit is not finite, or another worker is lost.
        CheckpointError: a checkpoint cannot be written.
        JobError: the checkpoints in `run_dir` are of another `key`.
    """
    replicas = open_replicas(job.training.strategy, cluster)
    with _stop_signals() as stop, replicas.watched():
        trainer = _Trainer(job, Path(run_dir), key, console, replicas)
        try:
            trainer.run(stop)
            stop.check()
        except Interrupted as e:
            raise Interrupted(
                f"{e} at step {trainer.done}; the state is saved in "
                f"{trainer.run_dir / CHECKPOINTS}. Run the same command again to go on."
            ) from None
    stop.check()  # for what came after the last look and before the handlers were put back


def load_best(job, run_dir, key):
    """Returns the finished training's model with its best weights, in float32.

    Raises:
        TrainingError: training of this job has not finished.
    """
    best = checkpoint.finished_best(run_dir, key, job.training)
    if best is None:
        raise TrainingError(
            f"{run_dir} holds no finished training of this job. Run `python -m pipeline train JOB.toml` first."
        )
    data_dir = Path(run_dir) / "data"
    vocab_size = dataset.load_report(data_dir)["vocab_size"]
    model = build_classifier(job.model, vocab_size, len(dataset.load_labels(data_dir)), seed=job.seed)
    for variable, array in zip(model.weights, best.arrays.values(), strict=True):
        variable.assign(array)
    return model


class _Stop:
    """Set by a signal; looked at between steps, where the state is consistent."""

    signal = None

    def check(self):
        if self.signal is not None:
            raise Interrupted(f"stopped by {signal.Signals(self.signal).name}")


@contextlib.contextmanager
def _stop_signals():
    stop = _Stop()

    def on_signal(number, frame):
        stop.signal = number

    before = {number: signal.signal(number, on_signal) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _Trainer:
    def __init__(self, job, run_dir, key, console, replicas):
        self.replicas = replicas
        self.job = job
        self.run_dir = run_dir
        self.key = key
        self.console = console
        data_dir = run_dir / "data"
        self.labels = dataset.load_labels(data_dir)
        self.train_split = dataset.Split.load(data_dir, "train")
        self.validation_split = dataset.Split.load(data_dir, "validation")
        self.tokenizer = tokenizer = Tokenizer.load(data_dir / TOKENIZER_MODEL)
        training = job.training
        self.splitter = PieceSplitter(tokenizer) if training.subword_regularization else None
        self.epochs = Ahead(self._make_epoch, training.epochs)
        counts = np.bincount(self.train_split.labels, minlength=len(self.labels))
        weights = class_weights(training.class_weights, self.labels, counts)
        with replicas.scope():
            self.model = build_classifier(
                job.model,
                tokenizer.vocab_size,
                len(self.labels),
                seed=job.seed,
                dtype=training.precision,
                recompute=training.recompute,
            )
            self.train_step = TrainStep(self.model, training, weights, replicas)
        self.predict = compile_predict(self.model)
        self.progress = Progress(replicas=replicas.count)
        self.clock = Clock()
        self.tokens_since_log = 0
        self.saved_at = time.monotonic()

    # The loop, in the order things happen.

    def run(self, stop):
        self._by_chief(self._restore)
        self.replicas.copy_from_chief(self.train_step.variables)
        if self.progress.finished:
            return
        self.record = self._open_record()
        agreed = self.replicas.agreed(stop)
        if self.replicas.is_chief:
            # The longest validation batch, now: what does not fit shows before an epoch is spent.
            plan = sequential_plan(self.validation_split.lengths, self.job.training.batch_tokens)
            self.predict(self.validation_split.token_ids(plan[0]))
        with self.record, self.epochs, self.console.training() as bar:
            while not self.progress.finished:
                try:
                    split, plan = self._epoch(agreed, bar)
                    for batch in range(self.progress.batch, len(plan)):
                        agreed.check()
                        self._train(split, plan, bar)
                        self._save_if_due(is_last=batch + 1 == len(plan))
                    agreed.check()
                    self._by_chief(lambda: self._end_epoch(stop, bar))
                except Interrupted:
                    self._save()
                    raise

    def _by_chief(self, function):
        """Only the chief does it; the progress that it makes is told to all."""

        def progress():
            function()
            return dataclasses.asdict(self.progress)

        self.progress = Progress(**self.replicas.from_chief(progress))

    def _open_record(self):
        if not self.replicas.is_chief:
            return NoRecord()
        return Record(self.run_dir, self.progress.metrics_bytes, self.console.warn)

    def _epoch(self, stop, bar):
        """Returns the rows of the present epoch and the batches of each of its steps."""
        with self.clock("waiting"):
            split, plan = self.epochs.get(self.progress.epoch, stop.check)
        epochs_left = self.job.training.epochs - self.progress.epoch
        bar.expect(self.progress.step - self.progress.batch + epochs_left * len(plan))
        return split, plan

    def _make_epoch(self, epoch, pause):
        """The rows of an epoch and the batches of each of its steps; a pure function of the seed and the epoch."""
        split, training, seed = self.train_split, self.job.training, self.job.seed
        max_length = self.job.model.max_length
        if training.subword_sampling:
            texts = dataset.iterate_texts(self.run_dir / "data", "train")
            share, alpha = training.subword_sampling, training.subword_alpha
            split = sample_split(split, texts, self.tokenizer, share, alpha, max_length, seed, epoch, pause)
        elif self.splitter:
            split = self.splitter.split(split, training.subword_regularization, max_length, seed, epoch)
        batches = epoch_plan(split.lengths, training.batch_tokens, seed, epoch)
        size = training.accumulate_batches
        return split, [batches[i : i + size] for i in range(0, len(batches), size)]

    def _train(self, split, plan, bar):
        """Does the step that `self.progress` stands before."""
        training, progress = self.job.training, self.progress
        step_rows = plan[progress.batch]
        with self.clock("waiting"):
            batches = [self._batch(split, rows) for rows in step_rows]
        # Epochs may differ in their number of steps. As if all had this one's, the rate follows the share of the
        # training that is done, and needs no epoch but this one.
        position, end = progress.epoch * len(plan) + progress.batch, training.epochs * len(plan)
        rate = learning_rate(position, end, training.learning_rate, training.warmup_ratio)
        with self.clock("training"):
            loss, gradient_norm = self.train_step(batches, rate)
        self._require_finite(loss, gradient_norm, np.concatenate(step_rows))
        self.progress = dataclasses.replace(progress, step=progress.step + 1, batch=progress.batch + 1)
        real_tokens = sum(np.count_nonzero(token_ids) for token_ids, _ in batches)
        self.tokens_since_log += real_tokens
        bar.step(self.progress, loss)
        if self.progress.step % training.log_every_steps == 0:
            seconds, tokens, self.tokens_since_log = self.clock.lap("log"), self.tokens_since_log, 0
            busy = seconds["training"] + seconds["waiting"]
            self.record.add(
                {
                    "kind": "train",
                    "step": self.progress.step,
                    "epoch": progress.epoch,
                    "loss": loss,
                    "learning_rate": rate,
                    "gradient_norm": gradient_norm if math.isfinite(gradient_norm) else None,  # JSON knows no infinity
                    "padded_share": 1.0 - real_tokens / sum(token_ids.size for token_ids, _ in batches),
                    "real_tokens_per_s": tokens / busy,
                    "waiting_share": seconds["waiting"] / busy,
                }
            )

    def _batch(self, split, rows):
        token_ids = split.token_ids(rows)
        if rate := self.job.training.token_dropout:
            seed, epoch = self.job.seed, self.progress.epoch
            token_ids = drop_tokens(token_ids, rows, rate, self.tokenizer.mask_id, seed, epoch)
        return token_ids, split.labels[rows]

    @property
    def done(self):
        return f"{self.progress.step}, {self.progress.epoch} of {self.job.training.epochs} epochs done"

    def _end_epoch(self, stop, bar):
        progress, metric = self.progress, self.job.evaluation.metric
        with self.train_step.evaluated_weights():
            with self.clock("validating"):
                figures = self._validate(stop)
            better = progress.best_step < 0 or self.job.evaluation.is_better(figures[metric], progress.best_value)
            self.progress = self._after_epoch(figures[metric] if better else None)
            if better:
                # Before the checkpoint that names it: a kill in between repeats this epoch's end and writes it again.
                with self.clock("saving"):
                    weights = {f"{i:04d} {v.path}": v.value for i, v in enumerate(self.model.weights)}
                    checkpoint.save(self.run_dir / BEST, weights, self.progress, self.key)
        seconds = self.clock.lap("epoch")
        times = {f"{activity}_s": seconds[activity] for activity in ("training", "waiting", "validating", "saving")}
        self.record.add({"kind": "validation", "step": progress.step, "epoch": progress.epoch, **figures, **times})
        bar.epoch(progress, figures)
        self._save()

    def _after_epoch(self, new_best):
        """Returns the progress after this epoch's validation, whose value is the best so far, or None."""
        progress = dataclasses.replace(self.progress, epoch=self.progress.epoch + 1, batch=0)
        if new_best is None:
            waited = progress.evaluations_without_improvement + 1
            progress = dataclasses.replace(progress, evaluations_without_improvement=waited)
        else:
            progress = dataclasses.replace(
                progress, best_step=progress.step, best_value=new_best, evaluations_without_improvement=0
            )
        return dataclasses.replace(progress, finished=progress.why_finished(self.job.training))

    def _validate(self, stop):
        plan = sequential_plan(self.validation_split.lengths, self.job.training.batch_tokens)
        logits = evaluation.predict_logits(self.predict, self.validation_split, plan, stop.check)
        if not np.isfinite(logits).all():
            raise TrainingError(
                f"the model's answers on data.validation are not finite after step {self.progress.step}: its last "
                "updates were too large. Nothing of this epoch's end was saved; lower training.learning_rate or "
                "training.clip_norm, or use another training.precision."
            )
        figures = evaluation.metrics(evaluation.softmax(logits), self.validation_split.labels, self.labels)
        return {name: figures[name] for name in ("loss", "accuracy", "macro_f1", "calibration_error")}

    def _require_finite(self, loss, gradient_norm, rows):
        if math.isfinite(loss) and (math.isfinite(gradient_norm) or self.train_step.is_skipped(gradient_norm)):
            return
        shown = ", ".join(map(str, self.train_split.rows[rows]))
        raise TrainingError(
            f"the loss or its gradient is not finite at step {self.progress.step + 1}: loss={loss}, "
            f"gradient_norm={gradient_norm}, rows of data.train (from 0): {shown}. Nothing of this step was saved; "
            "lower training.learning_rate or training.clip_norm, or use another training.precision."
        )

    # The state: what is saved is all there is.

    def _variables(self):
        # By position: names of seed generators depend on how many models the process has built.
        count = len(self.model.variables)
        return {f"{'model' if i < count else 'optimizer'} {i:04d}": v for i, v in enumerate(self.train_step.variables)}

    def _save_if_due(self, is_last):
        training = self.job.training
        by_steps = training.checkpoint_every_steps and self.progress.step % training.checkpoint_every_steps == 0
        by_time = time.monotonic() - self.saved_at >= training.checkpoint_every_s
        if (by_steps or by_time) and not is_last:  # the epoch's end saves anyway
            self._save()

    def _save(self):
        if not self.replicas.is_chief:
            return
        self.record.sync()
        self.progress = dataclasses.replace(self.progress, metrics_bytes=self.record.num_bytes)
        directory = self.run_dir / CHECKPOINTS
        with self.clock("saving"):
            checkpoint.save(directory, self._variables(), self.progress, self.key)
        # Those of later steps are damaged ones that were passed over; they must not push out good ones.
        until_now = [step for step in checkpoint.steps(directory) if step <= self.progress.step]
        kept = until_now[-self.job.training.keep_checkpoints :]
        checkpoint.prune(directory, kept)
        # Every kept checkpoint keeps the best weights it names, in case the newer ones turn out damaged.
        checkpoint.prune(self.run_dir / BEST, {checkpoint.best_step(directory, step) for step in kept})
        trim_memory()
        self.saved_at = time.monotonic()

    def _restore(self):
        for directory in (CHECKPOINTS, BEST):
            remove_staged(self.run_dir / directory)
        found, _ = checkpoint.resume_point(self.run_dir, self.console.warn)
        if found is None:
            return
        if found.key != self.key:
            raise JobError(
                f"{self.run_dir / CHECKPOINTS} holds the training of another job or of other data. Undo the change to "
                "go on with it, or start over with `python -m pipeline run JOB.toml --fresh` (the old run is kept "
                "aside)."
            )
        if self.job.training.epochs < found.progress.epochs_begun:
            raise JobError(
                f"{self.run_dir / CHECKPOINTS} has begun epoch {found.progress.epochs_begun}, beyond "
                f"training.epochs={self.job.training.epochs}. Raise it, or start over with `python -m pipeline run "
                "JOB.toml --fresh` (the old run is kept aside)."
            )
        for name, variable in self._variables().items():
            variable.assign(found.arrays[name])
        if found.progress.replicas != self.replicas.count:
            self.console.warn(
                f"training goes on with {self.replicas.count} replicas, after {found.progress.replicas}: on the same "
                "batches, but rounded otherwise and with other dropout, so not bit for bit as without the change."
            )
        finished = found.progress.why_finished(self.job.training)
        self.progress = dataclasses.replace(found.progress, finished=finished, replicas=self.replicas.count)
        if not self.progress.finished:
            self.console.note(f"going on from step {self.done}")
