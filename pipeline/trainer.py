"""The training loop: batches from a plan, and a state that survives any kill exactly.

What is trained is a task: `pipeline.classification.Classification`, or before it `pipeline.pretraining.Pretraining`.
A task has

    name             the section of the job that its settings come from, for messages
    directory        where its `checkpoints/` and `best/` lie
    training         a `pipeline.config.TrainingConfig`, with the settings of this task
    train_step       the `TrainStep` that holds everything it changes, and its `model`
    kind, validation_kind, label   what its rows of metrics.jsonl and its lines on the console are called
    make_epoch(epoch, pause)       (rows, batches of row indices): a pure function of the seed and the epoch
    batch(rows, indices, epoch)    the arrays of a batch, token ids first: a pure function likewise
    describe_rows(indices)         names rows of the input files
    try_validation()               runs the longest batch of the validation
    validate(stop)                 figures of the present weights; raises NotFinite
    after_epoch(progress, figures) the progress after an epoch; its `best_step` says whether these weights are the best
"""

import dataclasses
import math
import time

import numpy as np

from pipeline import checkpoint
from pipeline.ahead import Ahead
from pipeline.checkpoint import BEST, CHECKPOINTS, Progress
from pipeline.clock import Clock
from pipeline.errors import Interrupted, JobError, TrainingError
from pipeline.files import remove_staged
from pipeline.optimization import learning_rate
from pipeline.record import NoRecord, Record
from pipeline.runtime import trim_memory


class NotFinite(Exception):
    """The answers to the validation texts are not finite."""


class Trainer:
    """Trains one task until its last epoch or until patience runs out; goes on from the newest good checkpoint.

    Of several workers only the chief writes, judges and reads checkpoints.

    Args:
        task: see above.
        run_dir: the run directory, where metrics.jsonl lies.
        key: fingerprint of the data and of every setting that shapes the weights.
        console: shows progress; see `pipeline.console`.
        replicas: where it runs; see `pipeline.replicas`.
        metrics_bytes: length of the part of metrics.jsonl that was written before this task began.
        after_validation: called with the number of an epoch, from 0, and its figures, before its end is saved: after
            a kill in between once more with the same ones. What it raises ends the training there.
    """

    def __init__(
        self, task, run_dir, key, console, replicas, metrics_bytes=0, after_validation=lambda epoch, figures: None
    ):
        self.task = task
        self.training = task.training
        self.train_step = task.train_step
        self.run_dir = run_dir
        self.key = key
        self.console = console
        self.replicas = replicas
        self.after_validation = after_validation
        self.epochs = Ahead(task.make_epoch, self.training.epochs)
        self.progress = Progress(metrics_bytes=metrics_bytes, replicas=replicas.count)
        self.clock = Clock()
        self.tokens_since_log = 0
        self.saved_at = time.monotonic()

    # The loop, in the order things happen.

    def run(self, stop):
        """Does what is left to do.

        Args:
            stop: its `check()` raises Interrupted once a signal came.

        Raises:
            Interrupted: a signal came, here or at another worker; the state is saved.
            TrainingError: the loss, a gradient or a validation answer is not finite, or another worker is lost.
            CheckpointError: a checkpoint cannot be written.
            JobError: the checkpoints are of another `key`.
        """
        try:
            self._run(stop)
            stop.check()
        except Interrupted as e:
            raise Interrupted(
                f"{e} at step {self._done}; the state is saved in "
                f"{self.task.directory / CHECKPOINTS}. Run the same command again to go on."
            ) from None

    def _run(self, stop):
        self._by_chief(self._restore)
        self.replicas.copy_from_chief(self.train_step.variables)
        if self.progress.finished:
            return
        self.record = self._open_record()
        agreed = self.replicas.agreed(stop)
        if self.replicas.is_chief:
            self.task.try_validation()  # now: what does not fit shows before an epoch is spent
        with self.record, self.epochs, self.console.training(self.task.label) as bar:
            while not self.progress.finished:
                try:
                    rows, plan = self._epoch(agreed, bar)
                    for batch in range(self.progress.batch, len(plan)):
                        agreed.check()
                        self._train(rows, plan, bar)
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
            rows, batches = self.epochs.get(self.progress.epoch, stop.check)
        size = self.training.accumulate_batches
        plan = [batches[i : i + size] for i in range(0, len(batches), size)]
        epochs_left = self.training.epochs - self.progress.epoch
        bar.expect(self.progress.step - self.progress.batch + epochs_left * len(plan))
        return rows, plan

    def _train(self, rows, plan, bar):
        """Does the step that `self.progress` stands before."""
        training, progress = self.training, self.progress
        step_rows = plan[progress.batch]
        with self.clock("waiting"):
            batches = [self.task.batch(rows, indices, progress.epoch) for indices in step_rows]
        # Epochs may differ in their number of steps. As if all had this one's, the rate follows the share of the
        # training that is done, and needs no epoch but this one.
        position, end = progress.epoch * len(plan) + progress.batch, training.epochs * len(plan)
        rate = learning_rate(position, end, training.learning_rate, training.warmup_ratio)
        with self.clock("training"):
            loss, gradient_norm = self.train_step(batches, rate)
        self._require_finite(loss, gradient_norm, np.concatenate(step_rows))
        self.progress = dataclasses.replace(progress, step=progress.step + 1, batch=progress.batch + 1)
        real_tokens = sum(np.count_nonzero(token_ids) for token_ids, *_ in batches)
        self.tokens_since_log += real_tokens
        bar.step(self.progress, loss)
        if self.progress.step % training.log_every_steps == 0:
            seconds, tokens, self.tokens_since_log = self.clock.lap("log"), self.tokens_since_log, 0
            busy = seconds["training"] + seconds["waiting"]
            self.record.add(
                {
                    "kind": self.task.kind,
                    "step": self.progress.step,
                    "epoch": progress.epoch,
                    "loss": loss,
                    "learning_rate": rate,
                    "gradient_norm": gradient_norm if math.isfinite(gradient_norm) else None,  # JSON knows no infinity
                    "padded_share": 1.0 - real_tokens / sum(token_ids.size for token_ids, *_ in batches),
                    "real_tokens_per_s": tokens / busy,
                    "waiting_share": seconds["waiting"] / busy,
                }
            )

    @property
    def _done(self):
        of = "" if self.task.name == "training" else f" of {self.task.name}"
        return f"{self.progress.step}, {self.progress.epoch} of {self.training.epochs} epochs{of} done"

    def _end_epoch(self, stop, bar):
        progress = self.progress
        with self.train_step.evaluated_weights():
            with self.clock("validating"):
                figures = self._validate(stop)
            self.progress = self.task.after_epoch(progress, figures)
            if self.progress.best_step == progress.step:
                # Before the checkpoint that names it: a kill in between repeats this epoch's end and writes it again.
                with self.clock("saving"):
                    weights = {f"{i:04d} {v.path}": v.value for i, v in enumerate(self.train_step.model.weights)}
                    checkpoint.save(self.task.directory / BEST, weights, self.progress, self.key)
        seconds = self.clock.lap("epoch")
        times = {f"{activity}_s": seconds[activity] for activity in ("training", "waiting", "validating", "saving")}
        row = {"kind": self.task.validation_kind, "step": progress.step, "epoch": progress.epoch}
        self.record.add({**row, **figures, **times})
        bar.epoch(progress, figures)
        self.after_validation(progress.epoch, figures)
        self._save()

    def _validate(self, stop):
        try:
            return self.task.validate(stop)
        except NotFinite:
            raise TrainingError(
                f"the model's answers on data.validation are not finite after step {self.progress.step}: its last "
                f"updates were too large. Nothing of this epoch's end was saved; lower {self.task.name}.learning_rate "
                "or training.clip_norm, or use another training.precision."
            ) from None

    def _require_finite(self, loss, gradient_norm, indices):
        if math.isfinite(loss) and (math.isfinite(gradient_norm) or self.train_step.is_skipped(gradient_norm)):
            return
        raise TrainingError(
            f"the loss or its gradient is not finite at step {self.progress.step + 1}: loss={loss}, "
            f"gradient_norm={gradient_norm}, {self.task.describe_rows(indices)}. Nothing of this step was saved; "
            f"lower {self.task.name}.learning_rate or training.clip_norm, or use another training.precision."
        )

    # The state: what is saved is all there is.

    def _variables(self):
        # By position: names of seed generators depend on how many models the process has built.
        count = len(self.train_step.model.variables)
        return {f"{'model' if i < count else 'optimizer'} {i:04d}": v for i, v in enumerate(self.train_step.variables)}

    def _save_if_due(self, is_last):
        every_steps = self.training.checkpoint_every_steps
        by_steps = every_steps and self.progress.step % every_steps == 0
        by_time = time.monotonic() - self.saved_at >= self.training.checkpoint_every_s
        if (by_steps or by_time) and not is_last:  # the epoch's end saves anyway
            self._save()

    def _save(self):
        if not self.replicas.is_chief:
            return
        self.record.sync()
        self.progress = dataclasses.replace(self.progress, metrics_bytes=self.record.num_bytes)
        directory = self.task.directory / CHECKPOINTS
        with self.clock("saving"):
            checkpoint.save(directory, self._variables(), self.progress, self.key)
        # Those of later steps are damaged ones that were passed over; they must not push out good ones.
        until_now = [step for step in checkpoint.steps(directory) if step <= self.progress.step]
        kept = until_now[-self.training.keep_checkpoints :]
        checkpoint.prune(directory, kept)
        # Every kept checkpoint keeps the best weights it names, in case the newer ones turn out damaged.
        checkpoint.prune(self.task.directory / BEST, {checkpoint.best_step(directory, step) for step in kept})
        trim_memory()
        self.saved_at = time.monotonic()

    def _restore(self):
        directory, section = self.task.directory, self.task.name
        for name in (CHECKPOINTS, BEST):
            remove_staged(directory / name)
        found, _ = checkpoint.resume_point(directory, self.console.warn)
        if found is None:
            return
        if found.key != self.key:
            raise JobError(
                f"{directory / CHECKPOINTS} holds the {section} of another job or of other data. Undo the change to "
                "go on with it, or start over with `python -m pipeline run JOB.toml --fresh` (the old run is kept "
                "aside)."
            )
        if self.training.epochs < found.progress.epochs_begun:
            raise JobError(
                f"{directory / CHECKPOINTS} has begun epoch {found.progress.epochs_begun}, beyond "
                f"{section}.epochs={self.training.epochs}. Raise it, or start over with `python -m pipeline run "
                "JOB.toml --fresh` (the old run is kept aside)."
            )
        for name, variable in self._variables().items():
            variable.assign(found.arrays[name])
        finished = found.progress.why_finished(self.training)
        self.progress = dataclasses.replace(found.progress, finished=finished, replicas=self.replicas.count)
        if finished:
            return
        if found.progress.replicas != self.replicas.count:
            self.console.warn(
                f"{section} goes on with {self.replicas.count} replicas, after {found.progress.replicas}: on the same "
                "batches, but rounded otherwise and with other dropout, so not bit for bit as without the change."
            )
        self.console.note(f"going on from step {self._done}")
