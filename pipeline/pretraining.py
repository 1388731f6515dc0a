"""The task of predicting masked tokens, before classification; see `pipeline.trainer` for what a task is."""

import dataclasses

import numpy as np

from pipeline import dataset
from pipeline.batches import epoch_plan, mask_tokens, sequential_plan
from pipeline.checkpoint import PRETRAINING
from pipeline.classifier import build_classifier
from pipeline.contract import PAD_ID, TOKENIZER_MODEL
from pipeline.dataset import UNLABELLED
from pipeline.masked_tokens import MaskedTokenModel, MaskedTokenStep, compile_measure
from pipeline.text import Tokenizer
from pipeline.trainer import NotFinite


class Pretraining:
    """Trains the encoder of the job's model on the texts of the training split and on the unlabelled ones.

    The last weights are what classification starts with; none are called the best. Texts are spelled as they are
    stored, without subword regularization: which tokens are masked differs from epoch to epoch anyway.

    Args:
        job: a `JobConfig`.
        run_dir: the run directory, with `data/` prepared.
        replicas: where it runs; see `pipeline.replicas`.
    """

    name = "pretraining"
    kind, validation_kind = "pretraining", "pretraining_validation"
    label = "pretraining epoch"

    def __init__(self, job, run_dir, replicas):
        self.job = job
        self.directory = run_dir / PRETRAINING
        own = {"epochs": job.pretraining.epochs, "learning_rate": job.pretraining.learning_rate}
        self.training = job.training.model_copy(update={**own, "patience": 0, "ema_decay": 0.0, "teacher": ""})
        data_dir = run_dir / "data"
        tokenizer = Tokenizer.load(data_dir / TOKENIZER_MODEL)
        self._mask_id = tokenizer.mask_id
        self._pieces = np.array([i for i, piece in enumerate(tokenizer.pieces) if piece is not None], np.int32)
        names = ["train", UNLABELLED] if job.data.unlabelled else ["train"]
        self._texts = _Texts({name: dataset.Split.load(data_dir, name) for name in names})
        self._validation = _Texts({"validation": dataset.Split.load(data_dir, "validation")})
        num_labels = len(dataset.load_labels(data_dir))
        with replicas.scope():
            self.encoder = build_classifier(
                job.model.model_copy(update={"encoders": 1}),  # all begin with what this one learns
                tokenizer.vocab_size,
                num_labels,
                seed=job.seed,
                dtype=self.training.precision,
                recompute=self.training.recompute,
            )
            model = MaskedTokenModel(self.encoder, name="masked_token_model")
            self.train_step = MaskedTokenStep(model, self.training, replicas)
        self._measure = compile_measure(model)

    def make_epoch(self, epoch, pause):
        """Returns (`_Texts`, the row indices of each batch)."""
        training = self.training
        plan = epoch_plan(self._texts.lengths, training.batch_tokens, self.job.seed, epoch, training.batch_rows)
        return self._texts, plan

    def batch(self, texts, indices, epoch):
        """Returns (token_ids, targets, counts): int32 [B, T] with masked tokens, int32 [B, T], the loss mask [B, T]."""
        targets = texts.token_ids(indices)
        share, seed = self.job.pretraining.masked_share, self.job.seed
        token_ids, counts = mask_tokens(targets, indices, share, self._mask_id, self._pieces, seed, epoch)
        return token_ids, targets, counts

    def describe_rows(self, indices):
        """Names rows of the input files."""
        return self._texts.describe(indices)

    def try_validation(self):
        """Runs the longest batch of the validation."""
        self._measure(*next(self._validation_batches()))

    def validate(self, stop):
        """Returns loss and accuracy at the masked positions of the validation split, always the same ones."""
        loss = right = count = 0.0
        for batch in self._validation_batches():
            stop.check()
            more_loss, more_right = self._measure(*batch)
            loss, right, count = loss + float(more_loss), right + float(more_right), count + float(batch[-1].sum())
        if not np.isfinite(loss):
            raise NotFinite
        return {"loss": loss / max(count, 1.0), "accuracy": right / max(count, 1.0)}

    def after_epoch(self, progress, figures):
        """Returns the progress after the validation of an epoch."""
        after = dataclasses.replace(progress, epoch=progress.epoch + 1, batch=0)
        return dataclasses.replace(after, finished=after.why_finished(self.training))

    def _validation_batches(self):
        for indices in sequential_plan(self._validation.lengths, self.training.batch_tokens):
            yield self.batch(self._validation, indices, "validation")


class _Texts:
    """The rows of several splits, one after the other; tokens stay memory-mapped."""

    def __init__(self, splits):
        self._splits = splits
        self.lengths = np.concatenate([split.lengths for split in splits.values()])  # [rows]

    def token_ids(self, indices):
        """Returns int32 [B, T], padded at the end."""
        parts = [(where, split.token_ids(own)) for _, where, split, own in self._parts(indices)]
        token_ids = np.full((len(indices), max(part.shape[1] for _, part in parts)), PAD_ID, np.int32)
        for where, part in parts:
            token_ids[where, : part.shape[1]] = part
        return token_ids

    def describe(self, indices):
        """Names rows of the input files."""
        return "; ".join(
            f"rows of data.{name} (from 0): {', '.join(map(str, split.rows[own]))}"
            for name, _, split, own in self._parts(indices)
        )

    def _parts(self, indices):
        """Yields per split that has some: its name, which of `indices` are in it, the split, their numbers in it."""
        start = 0
        for name, split in self._splits.items():
            where = (indices >= start) & (indices < start + len(split))
            if where.any():
                yield name, where, split, indices[where] - start
            start += len(split)
