"""The task of telling a text's label; see `pipeline.trainer` for what a task is."""

import dataclasses

import numpy as np

from pipeline import dataset, evaluation
from pipeline.batches import drop_tokens, epoch_plan, sequential_plan
from pipeline.classifier import build_classifier, compile_predict
from pipeline.contract import TOKENIZER_MODEL
from pipeline.losses import class_weights
from pipeline.subwords import PieceSplitter, sample_split
from pipeline.text import Tokenizer
from pipeline.train_step import TrainStep
from pipeline.trainer import NotFinite


class Classification:
    """Trains the job's model on the labels of the training split.

    Args:
        job: a `JobConfig`.
        run_dir: the run directory, with `data/` prepared.
        replicas: where it runs; see `pipeline.replicas`.
        pretrained: an `EncoderClassifier` of the same sizes whose encoder it starts with, or None.
        soft_labels: float32 [rows, C], the teachers' answers to the training texts; None without a teacher.
    """

    name = "training"
    kind, validation_kind = "train", "validation"
    label = "epoch"

    def __init__(self, job, run_dir, replicas, pretrained=None, soft_labels=None):
        self.job = job
        self.directory = run_dir
        self.training = training = job.training
        self._data_dir = run_dir / "data"
        self._soft_labels = soft_labels
        self._labels = dataset.load_labels(self._data_dir)
        self._train_split = dataset.Split.load(self._data_dir, "train")
        self._validation_split = dataset.Split.load(self._data_dir, "validation")
        self._tokenizer = Tokenizer.load(self._data_dir / TOKENIZER_MODEL)
        self._splitter = PieceSplitter(self._tokenizer) if training.subword_regularization else None
        counts = np.bincount(self._train_split.labels, minlength=len(self._labels))
        weights = class_weights(training.class_weights, self._labels, counts)
        with replicas.scope():
            model = build_classifier(
                job.model,
                self._tokenizer.vocab_size,
                len(self._labels),
                seed=job.seed,
                dtype=training.precision,
                recompute=training.recompute,
            )
            if pretrained is not None:
                model.copy_encoder(pretrained)  # now: averaged weights start with them too
            self.train_step = TrainStep(model, training, weights, replicas)
        self._predict = compile_predict(model)

    def make_epoch(self, epoch, pause):
        """Returns (a `Split`, the row indices of each batch)."""
        split, training, seed = self._train_split, self.training, self.job.seed
        max_length = self.job.model.max_length
        if training.subword_sampling:
            texts = dataset.iterate_texts(self._data_dir, "train")
            share, alpha = training.subword_sampling, training.subword_alpha
            split = sample_split(split, texts, self._tokenizer, share, alpha, max_length, seed, epoch, pause)
        elif self._splitter:
            split = self._splitter.split(split, training.subword_regularization, max_length, seed, epoch)
        return split, epoch_plan(split.lengths, training.batch_tokens, seed, epoch, training.batch_rows)

    def batch(self, split, indices, epoch):
        """Returns (token_ids int32 [B, T], labels int32 [B]), with a teacher also soft_labels float32 [B, C]."""
        token_ids = split.token_ids(indices)
        if rate := self.training.token_dropout:
            token_ids = drop_tokens(token_ids, indices, rate, self._tokenizer.mask_id, self.job.seed, epoch)
        targets = (split.labels,) if self._soft_labels is None else (split.labels, self._soft_labels)
        return token_ids, *(target[indices] for target in targets)

    def describe_rows(self, indices):
        """Names rows of the input files."""
        return f"rows of data.train (from 0): {', '.join(map(str, self._train_split.rows[indices]))}"

    def try_validation(self):
        """Runs the longest batch of the validation."""
        self._predict(self._validation_split.token_ids(self._validation_plan()[0]))

    def validate(self, stop):
        """Returns loss, accuracy, macro_f1 and calibration_error on the validation split. Raises NotFinite."""
        logits = evaluation.predict_logits(self._predict, self._validation_split, self._validation_plan(), stop.check)
        if not np.isfinite(logits).all():
            raise NotFinite
        figures = evaluation.metrics(evaluation.softmax(logits), self._validation_split.labels, self._labels)
        return {name: figures[name] for name in ("loss", "accuracy", "macro_f1", "calibration_error")}

    def after_epoch(self, progress, figures):
        """Returns the progress after the validation of an epoch."""
        value = figures[self.job.evaluation.metric]
        after = dataclasses.replace(progress, epoch=progress.epoch + 1, batch=0)
        if progress.best_step < 0 or self.job.evaluation.is_better(value, progress.best_value):
            after = dataclasses.replace(
                after, best_step=progress.step, best_value=value, evaluations_without_improvement=0
            )
        else:
            waited = progress.evaluations_without_improvement + 1
            after = dataclasses.replace(after, evaluations_without_improvement=waited)
        return dataclasses.replace(after, finished=after.why_finished(self.training))

    def _validation_plan(self):
        return sequential_plan(self._validation_split.lengths, self.training.batch_tokens)
