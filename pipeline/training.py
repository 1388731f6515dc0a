"""Trains a job's model: first on masked tokens if the job asks for it, then on labels."""

import contextlib
import signal
from pathlib import Path

from pipeline import checkpoint, dataset
from pipeline.classification import Classification
from pipeline.classifier import build_classifier
from pipeline.errors import Interrupted, TrainingError
from pipeline.fitting import fit_to
from pipeline.pretraining import Pretraining
from pipeline.replicas import open_replicas
from pipeline.trainer import Trainer


def train(job, run_dir, key, console, cluster=None, after_validation=lambda epoch, figures: None):
    """Trains until the last epoch or until patience runs out; goes on from the newest good checkpoint.

    Of several workers, each of which calls this, only the chief writes, judges and reads checkpoints.

    Args:
        job: a `JobConfig`.
        run_dir: the run directory, with `data/` prepared.
        key: fingerprint of the data and of every setting that shapes the weights.
        console: shows progress; see `pipeline.console`.
        cluster: the `pipeline.cluster.Cluster` that trains together, after its roll call; None for this process alone.
        after_validation: called after each epoch of the classification, see `pipeline.trainer.Trainer`.

    Raises:
        Interrupted: SIGTERM or SIGINT arrived, here or at another worker; the state is saved.
        TrainingError: the loss, a gradient or a validation logit is not finite, or another worker is lost.
        CheckpointError: a checkpoint cannot be written.
        JobError: the checkpoints in `run_dir` are of another `key`.
    """
    run_dir = Path(run_dir)
    replicas = open_replicas(job.training.strategy, cluster)
    with _stop_signals() as stop, replicas.watched():
        pretrained, metrics_bytes = None, 0
        if job.pretraining.epochs and not replicas.from_chief(lambda: _has_begun(run_dir)):
            task = Pretraining(job, run_dir, replicas)
            pretraining = Trainer(task, run_dir, key, console, replicas)
            pretraining.run(stop)
            pretrained, metrics_bytes = task.encoder, pretraining.progress.metrics_bytes
        task = Classification(job, run_dir, replicas, pretrained)
        Trainer(task, run_dir, key, console, replicas, metrics_bytes, after_validation).run(stop)
    stop.check()  # for what came after the last look and before the handlers were put back


def _has_begun(run_dir):
    """True when there is a checkpoint of the classification to go on from: it no longer needs what came before."""
    return checkpoint.resume_point(run_dir, warn=lambda line: None)[0] is not None


def load_best(job, run_dir, key, stop=lambda: None):
    """Returns the finished training's `CalibratedClassifier`: its best weights, and what is fitted to them, in float32.

    Args:
        job: a `JobConfig`.
        run_dir: the run directory; what is fitted is kept there.
        key: fingerprint of what was trained on and how.
        stop: called now and then while something is fitted; may raise to end early.

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
    encoder = build_classifier(job.model, vocab_size, len(dataset.load_labels(data_dir)), seed=job.seed)
    for variable, array in zip(encoder.weights, best.arrays.values(), strict=True):
        variable.assign(array)
    return fit_to(encoder, job, run_dir, best, stop)


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
