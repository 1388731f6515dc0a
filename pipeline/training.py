"""Trains a job's model: first on masked tokens if the job asks for it, then on labels."""

import contextlib
import signal
from pathlib import Path

import numpy as np
import pydantic
import tensorflow as tf

from pipeline import checkpoint, dataset, teachers
from pipeline.batches import sequential_plan
from pipeline.calibrated import predict_parts
from pipeline.classification import Classification
from pipeline.classifier import build_classifier
from pipeline.config import JobConfig
from pipeline.contract import TOKENIZER_MODEL
from pipeline.errors import Interrupted, JobError, TrainingError
from pipeline.evaluation import softmax
from pipeline.fitting import fit_to
from pipeline.identity import JOB
from pipeline.pretraining import Pretraining
from pipeline.replicas import open_replicas
from pipeline.text import Tokenizer
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
        JobError: the checkpoints in `run_dir` are of another `key`, or a teacher cannot be used.
        DataError: a teacher's answers cannot be used.
    """
    run_dir = Path(run_dir)
    replicas = open_replicas(job.training.strategy, cluster)
    with _stop_signals() as stop, _finished_or_lost(job, run_dir, key, cluster), replicas.watched():
        soft_labels = _soft_labels(job, run_dir, key, replicas, stop) if job.training.teacher else None
        pretrained, metrics_bytes = None, 0
        if job.pretraining.epochs and not replicas.from_chief(lambda: _has_begun(run_dir)):
            task = Pretraining(job, run_dir, replicas)
            pretraining = Trainer(task, run_dir, key, console, replicas)
            pretraining.run(stop)
            pretrained, metrics_bytes = task.encoder, pretraining.progress.metrics_bytes
        task = Classification(job, run_dir, replicas, pretrained, soft_labels)
        Trainer(task, run_dir, key, console, replicas, metrics_bytes, after_validation).run(stop)
    stop.check()  # for what came after the last look and before the handlers were put back


@contextlib.contextmanager
def _finished_or_lost(job, run_dir, key, cluster):
    """A context in which a lost worker is no error once training is finished: one that left first is not missed."""
    try:
        yield
    except TrainingError:
        if cluster is None or checkpoint.finished_best(run_dir, key, job.training) is None:
            raise


def _soft_labels(job, run_dir, key, replicas, stop):
    """Returns the teachers' answers to the training texts, float32 [rows, C], the chief's on all workers."""
    shape = len(dataset.Split.load(run_dir / "data", "train")), len(dataset.load_labels(run_dir / "data"))
    shared = tf.Variable(tf.zeros(shape), trainable=False)

    def compute():
        def answer(teacher, texts):
            return answer_texts(teacher, texts, stop.check)

        shared.assign(teachers.soft_labels(job.training.teacher, run_dir, key, answer))

    replicas.from_chief(compute)
    replicas.copy_from_chief([shared])
    return shared.numpy()


def answer_texts(run_dir, texts, stop=lambda: None):
    """Returns (labels, float64 [rows, C]): what a finished run answers to texts, with its own tokenizer.

    Args:
        run_dir: its run directory.
        texts: list of str, not empty.
        stop: called before each batch; may raise to end early.

    Raises:
        JobError: its `job.json` cannot be used.
        TrainingError: it has not finished.
    """
    path = run_dir / JOB
    try:
        job = JobConfig.model_validate_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as e:
        reason = e.errors()[0]["msg"] if isinstance(e, pydantic.ValidationError) else e
        raise JobError(f"cannot read {path}, a teacher's job, with this version: {reason}. Train it again.") from e
    data_dir = run_dir / "data"
    model = load_best(job, run_dir, checkpoint.newest_key(run_dir / checkpoint.CHECKPOINTS), stop)
    rows = Tokenizer.load(data_dir / TOKENIZER_MODEL).encode(texts, job.model.max_length)
    offsets = np.cumsum([0, *map(len, rows)])
    split = dataset.Split(np.concatenate(rows), offsets, np.full(len(rows), -1, np.int32), np.arange(len(rows)))
    plan = sequential_plan(split.lengths, job.training.batch_tokens)
    logits, *_ = predict_parts(model, split, plan, stop)
    return dataset.load_labels(data_dir), softmax(logits / model.fitted_scalars()["temperature"])


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
