"""The training loop: batches from a plan, and a state that survives any kill exactly."""

import contextlib
import dataclasses
import math
import signal
import time
from pathlib import Path

import numpy as np

from pipeline import checkpoint, dataset, evaluation
from pipeline.batches import epoch_plan, sequential_plan
from pipeline.checkpoint import BEST, CHECKPOINTS, Progress
from pipeline.classifier import build_classifier
from pipeline.contract import TOKENIZER_MODEL
from pipeline.errors import Interrupted, JobError, TrainingError
from pipeline.files import remove_staged
from pipeline.optimization import build_optimizer, compile_predict, compile_train_step, learning_rate
from pipeline.record import Record
from pipeline.subwords import PieceSplitter
from pipeline.text import Tokenizer


def train(job, run_dir, key, console):
    """Trains until the last epoch or until patience runs out; goes on from the newest good checkpoint.

    Args:
        job: a `JobConfig`.
        run_dir: the run directory, with `data/` prepared.
        key: fingerprint of the data and of every setting that shapes the weights.
        console: shows progress; see `pipeline.console`.

    Raises:
        Interrupted: SIGTERM or SIGINT arrived; the state is saved.
        TrainingError: the loss, a gradient or a validation logit is not finite.
        CheckpointError: a checkpoint cannot be written.
        JobError: the checkpoints in `run_dir` are of another `key`.
    """
    with _stop_signals() as stop:
        trainer = _Trainer(job, Path(run_dir), key, console)
        try:
            trainer.run(stop)
            stop.check()
        except Interrupted as e:
            raise Interrupted(
                f"{e} at step {trainer.progress.step} of {trainer.steps}; the state is saved in "
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
        raise TrainingError(f"{run_dir} holds no finished training of this job. Run `python -m pipeline train` first.")
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
    def __init__(self, job, run_dir, key, console):
        self.job = job
        self.run_dir = run_dir
        self.key = key
        self.console = console
        data_dir = run_dir / "data"
        self.labels = dataset.load_labels(data_dir)
        self.train_split = dataset.Split.load(data_dir, "train")
        self.validation_split = dataset.Split.load(data_dir, "validation")
        tokenizer = Tokenizer.load(data_dir / TOKENIZER_MODEL)
        training = job.training
        self.splitter = PieceSplitter(tokenizer) if training.subword_regularization else None
        self.model = build_classifier(
            job.model, tokenizer.vocab_size, len(self.labels), seed=job.seed, dtype=training.precision
        )
        self.optimizer = build_optimizer(self.model, training)
        self.train_step = compile_train_step(self.model, self.optimizer, training.clip_norm)
        self.predict = compile_predict(self.model)
        self.steps = sum(len(self._epoch(epoch)[1]) for epoch in range(training.epochs))
        self.progress = Progress()
        self.saved_at = time.monotonic()

    # The loop, in the order things happen.

    def run(self, stop):
        self._restore()
        if self.progress.finished:
            return
        self.record = Record(self.run_dir, self.progress.metrics_bytes, self.console.warn)
        with self.record, self.console.training(self.steps) as bar:
            while not self.progress.finished:
                split, plan = self._epoch(self.progress.epoch)
                self._start_clock()
                try:
                    for batch in range(self.progress.batch, len(plan)):
                        stop.check()
                        self._train_batch(split, plan[batch], bar)
                        self._save_if_due(is_last=batch + 1 == len(plan))
                    self._end_epoch(stop, bar)
                except Interrupted:
                    self._save()
                    raise

    def _epoch(self, epoch):
        """Returns the rows of an epoch and their batches; a pure function of the seed and the epoch."""
        split, training, seed = self.train_split, self.job.training, self.job.seed
        if self.splitter:
            rate, max_length = training.subword_regularization, self.job.model.max_length
            split = self.splitter.split(split, rate, max_length, seed, epoch)
        return split, epoch_plan(split.lengths, training.batch_tokens, seed, epoch)

    def _train_batch(self, split, rows, bar):
        training = self.job.training
        step, epoch = self.progress.step, self.progress.epoch
        token_ids = split.token_ids(rows)
        rate = learning_rate(step, self.steps, training.learning_rate, training.warmup_ratio)
        loss, gradient_norm = self.train_step(token_ids, split.labels[rows], np.float32(rate))
        loss, gradient_norm = float(loss), float(gradient_norm)
        self._require_finite(loss, gradient_norm, rows)
        self.progress = dataclasses.replace(self.progress, step=step + 1, batch=self.progress.batch + 1)
        real_tokens = int(np.count_nonzero(token_ids))
        self.tokens_since_log += real_tokens
        bar.step(self.progress, loss)
        if self.progress.step % training.log_every_steps == 0:
            self.record.add(
                {
                    "kind": "train",
                    "step": self.progress.step,
                    "epoch": epoch,
                    "loss": loss,
                    "learning_rate": rate,
                    "gradient_norm": gradient_norm if math.isfinite(gradient_norm) else None,  # JSON knows no infinity
                    "padded_share": 1.0 - real_tokens / token_ids.size,
                    "real_tokens_per_s": self.tokens_since_log / max(time.monotonic() - self.logged_at, 1e-9),
                }
            )
            self._start_clock()

    def _start_clock(self):
        self.logged_at, self.tokens_since_log = time.monotonic(), 0

    def _end_epoch(self, stop, bar):
        progress, metric = self.progress, self.job.evaluation.metric
        figures = self._validate(stop)
        self.record.add({"kind": "validation", "step": progress.step, "epoch": progress.epoch, **figures})
        bar.epoch(progress, figures)
        value = figures[metric]
        better = progress.best_step < 0 or self.job.evaluation.is_better(value, progress.best_value)
        progress = dataclasses.replace(
            progress,
            epoch=progress.epoch + 1,
            batch=0,
            best_step=progress.step if better else progress.best_step,
            best_value=value if better else progress.best_value,
            evaluations_without_improvement=0 if better else progress.evaluations_without_improvement + 1,
        )
        self.progress = dataclasses.replace(progress, finished=progress.why_finished(self.job.training))
        if better:
            # Before the checkpoint that names it: a kill in between repeats this epoch's end and writes it again.
            weights = {f"{i:04d} {v.path}": v.numpy() for i, v in enumerate(self.model.weights)}
            checkpoint.save(self.run_dir / BEST, weights, self.progress, self.key)
        self._save()

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
        # In float16 an overflowing gradient is the loss scale's business: the step is skipped and the scale shrinks.
        scaled = self.job.training.precision == "mixed_float16"
        if math.isfinite(loss) and (scaled or math.isfinite(gradient_norm)):
            return
        numbers = self.train_split.rows[rows]
        shown = ", ".join(map(str, numbers[:20])) + (", ..." if len(numbers) > 20 else "")
        raise TrainingError(
            f"the loss or its gradient is not finite at step {self.progress.step + 1}: loss={loss}, "
            f"gradient_norm={gradient_norm}, rows of data.train (from 0): {shown}. Nothing of this step was saved; "
            "lower training.learning_rate or training.clip_norm, or use another training.precision."
        )

    # The state: what is saved is all there is.

    def _variables(self):
        # By position: names of seed generators depend on how many models the process has built.
        of_model = {f"model {i:04d}": v for i, v in enumerate(self.model.variables)}
        return of_model | {f"optimizer {i:04d}": v for i, v in enumerate(self.optimizer.variables)}

    def _save_if_due(self, is_last):
        training = self.job.training
        by_steps = training.checkpoint_every_steps and self.progress.step % training.checkpoint_every_steps == 0
        by_time = time.monotonic() - self.saved_at >= training.checkpoint_every_s
        if (by_steps or by_time) and not is_last:  # the epoch's end saves anyway
            self._save()

    def _save(self):
        self.record.sync()
        self.progress = dataclasses.replace(self.progress, metrics_bytes=self.record.num_bytes)
        arrays = {name: v.numpy() for name, v in self._variables().items()}
        directory = self.run_dir / CHECKPOINTS
        checkpoint.save(directory, arrays, self.progress, self.key)
        # Those of later steps are damaged ones that were passed over; they must not push out good ones.
        until_now = [step for step in checkpoint.steps(directory) if step <= self.progress.step]
        kept = until_now[-self.job.training.keep_checkpoints :]
        checkpoint.prune(directory, kept)
        # Every kept checkpoint keeps the best weights it names, in case the newer ones turn out damaged.
        checkpoint.prune(self.run_dir / BEST, {checkpoint.best_step(directory, step) for step in kept})
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
                "go on with it, or start over with `python -m pipeline run --fresh` (the old run is kept aside)."
            )
        if self.job.training.epochs < found.progress.epochs_begun:
            raise JobError(
                f"{self.run_dir / CHECKPOINTS} has begun epoch {found.progress.epochs_begun}, beyond "
                f"training.epochs={self.job.training.epochs}. Raise it, or start over with `python -m pipeline run "
                "--fresh` (the old run is kept aside)."
            )
        for name, variable in self._variables().items():
            variable.assign(found.arrays[name])
        finished = found.progress.why_finished(self.job.training)
        self.progress = dataclasses.replace(found.progress, finished=finished)
        if not self.progress.finished:
            self.console.note(f"going on from step {self.progress.step} of {self.steps}")
