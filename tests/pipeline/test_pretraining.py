"""Masked-token pretraining before classification: what it teaches, and that no kill changes anything."""

import dataclasses
import itertools
import os
import shutil
import signal

import numpy as np
import pytest

from pipeline import checkpoint, dataset, training
from pipeline.checkpoint import PRETRAINING
from pipeline.classification import Classification
from pipeline.config import JobConfig
from pipeline.errors import Interrupted, JobError, TrainingError
from pipeline.pretraining import Pretraining
from pipeline.replicas import OneDevice
from tests.pipeline import test_training
from tests.pipeline.test_training import KEY, Stub, assert_same_run, last, rows_of, stop_at

pytestmark = pytest.mark.usefixtures("deterministic")

data_file = test_training.data_file  # a fixture


def make_job(data_file, pretraining=None, unlabelled="", **training_section):
    job = test_training.make_job(data_file, **{"epochs": 2, "ema_decay": 0.5, **training_section}).resolved()
    job["pretraining"] |= {"epochs": 2, "learning_rate": 0.02, **(pretraining or {})}
    job["data"]["unlabelled"] = str(unlabelled)
    return JobConfig.model_validate(job)


@pytest.fixture(scope="module")
def unlabelled_file(data_file, tmp_path_factory):
    """Texts in the words of the labelled ones."""
    lines = data_file.read_text(encoding="utf-8").splitlines()[1:]
    words = [" ".join(a.split(",")[0].split()[::-1]) for a in lines[::2]]
    path = tmp_path_factory.mktemp("unlabelled") / "texts.csv"
    path.write_text("\n".join(["text", *words]) + "\n", encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def whole(data_file, unlabelled_file, tmp_path_factory):
    """A run that nothing disturbs: (job, run directory, console)."""
    directory = tmp_path_factory.mktemp("whole")
    job, console = make_job(data_file, unlabelled=unlabelled_file), Stub()
    dataset.prepare(job, directory / "data")
    training.train(job, directory, KEY, console)
    return job, directory, console


@pytest.fixture
def run_dir(whole, tmp_path):
    shutil.copytree(whole[1] / "data", tmp_path / "run" / "data")
    return tmp_path / "run"


def assert_same_training(found, expected):
    """Both phases, bit for bit."""
    assert_same_run(found, expected)
    a, b = last(found / PRETRAINING), last(expected / PRETRAINING)
    assert dataclasses.replace(a.progress, metrics_bytes=0) == dataclasses.replace(b.progress, metrics_bytes=0)
    test_training.assert_same_arrays(a.arrays, b.arrays)


def test_it_learns_and_is_recorded(whole):
    _, run_dir, console = whole
    rows = rows_of(run_dir)
    kinds = [kind for kind, _ in itertools.groupby(row["kind"] for row in rows)]
    assert kinds == ["pretraining", "pretraining_validation"] * 2 + ["train", "validation"] * 2
    steps = last(run_dir / PRETRAINING).progress.step
    of_steps = [row for row in rows if row["kind"] == "pretraining"]
    assert [row["step"] for row in of_steps] == list(range(2, steps + 1, 2))
    assert set(of_steps[0]) == set(next(row for row in rows if row["kind"] == "train"))
    assert max(row["learning_rate"] for row in of_steps) == pytest.approx(0.02, rel=0.1)
    validations = [row for row in rows if row["kind"] == "pretraining_validation"]
    assert [(row["epoch"], row["step"]) for row in validations] == [(0, steps // 2), (1, steps)]
    times = {"training_s", "waiting_s", "validating_s", "saving_s"}
    assert set(validations[0]) == {"kind", "step", "epoch", "loss", "accuracy"} | times
    assert validations[1]["loss"] < validations[0]["loss"] < of_steps[0]["loss"] - 0.5
    assert 0 < validations[1]["accuracy"] < 1
    assert console.steps == [*range(1, steps + 1), *range(1, last(run_dir).progress.step + 1)]
    assert (run_dir / "metrics.jsonl").stat().st_size == last(run_dir).progress.metrics_bytes
    progress = last(run_dir / PRETRAINING).progress
    assert (progress.finished, progress.epoch, progress.best_step) == ("epochs", 2, -1)
    assert sorted(path.name for path in (run_dir / PRETRAINING).iterdir()) == ["checkpoints"]


def test_unlabelled_texts_are_read_beside_those_of_train(whole):
    job, run_dir, _ = whole
    task = Pretraining(job, run_dir, OneDevice())
    texts, plan = task.make_epoch(0, None)
    splits = [dataset.Split.load(run_dir / "data", name) for name in ("train", "unlabelled")]
    np.testing.assert_array_equal(np.sort(np.concatenate(plan)), np.arange(sum(map(len, splits))))
    tokens = [split.tokens[a:b] for split in splits for a, b in itertools.pairwise(split.offsets)]
    indices = np.array([len(splits[0]) + 3, 0, len(splits[0]), len(splits[0]) - 1])
    for i, row in zip(indices, texts.token_ids(indices), strict=True):
        np.testing.assert_array_equal(row[row != 0], tokens[i])
    own = splits[1].rows[[3, 0]]
    assert task.describe_rows(indices) == (
        f"rows of data.train (from 0): {splits[0].rows[0]}, {splits[0].rows[-1]}; "
        f"rows of data.unlabelled (from 0): {own[0]}, {own[1]}"
    )
    token_ids, targets, counts = task.batch(texts, indices, 1)
    np.testing.assert_array_equal(targets, texts.token_ids(indices))
    np.testing.assert_array_equal(token_ids[~counts], targets[~counts])
    assert not np.array_equal(counts, task.batch(texts, indices, 0)[2])
    assert set(task._pieces.tolist()).isdisjoint({0, 1, task._mask_id})
    # The validation is measured on the same masked tokens each time.
    first, second = list(task._validation_batches()), list(task._validation_batches())
    assert all(np.array_equal(a, b) for x, y in zip(first, second, strict=True) for a, b in zip(x, y, strict=True))
    assert 0.1 < sum(c.sum() for *_, c in first) / sum((t != 0).sum() for _, t, _ in first) < 0.2


def test_classification_starts_with_the_encoder_and_its_own_head(whole, data_file, run_dir):
    job, whole_dir, _ = whole
    task = Pretraining(job, whole_dir, OneDevice())
    state = last(whole_dir / PRETRAINING)
    for variable, array in zip(task.train_step.variables, state.arrays.values(), strict=True):
        variable.assign(array)
    classification = Classification(job, whole_dir, OneDevice(), task.encoder)
    plain = Classification(job, whole_dir, OneDevice())
    model, fresh = classification.train_step.model, plain.train_step.model
    for found, pretrained, initial in zip(
        model.encoder_weights, task.encoder.encoder_weights, fresh.encoder_weights, strict=True
    ):
        assert found.numpy().tobytes() == pretrained.numpy().tobytes() != initial.numpy().tobytes() or (
            found.path.endswith("key/bias")
        )
    for layer in ("head", "head_norm"):
        pairs = zip(getattr(model, layer).weights, getattr(fresh, layer).weights, strict=True)
        assert all(np.array_equal(a.numpy(), b.numpy()) for a, b in pairs)
    assert len(model.encoder_weights) + 4 == len(model.weights)
    # So do its averaged weights, and dropout starts from its seed.
    averages = classification.train_step.average.variables
    pairs = zip(averages, model.trainable_variables, strict=True)
    assert all(np.array_equal(a.numpy(), v.numpy()) for a, v in pairs)
    states = [[v.numpy().tolist() for v in m.non_trainable_variables] for m in (model, fresh)]
    assert states[0] == states[1] and states[0]
    # The first step of the run was taken from there.
    shutil.copytree(whole_dir / PRETRAINING, run_dir / PRETRAINING)
    shutil.copy2(whole_dir / "metrics.jsonl", run_dir)
    with pytest.raises(Interrupted):
        training.train(job, run_dir, KEY, Stub(on_start=lambda: os.kill(os.getpid(), signal.SIGTERM)))
    assert last(run_dir).progress.step == 0
    for variable, array in zip(model.variables, last(run_dir).arrays.values(), strict=False):
        assert variable.numpy().tobytes() == array.tobytes()


def test_resume_is_exact_wherever_it_stops(whole, run_dir, monkeypatch):
    """One run, stopped again and again in its pretraining and after it."""
    job, expected, console = whole
    assert job.model.dropout > 0
    steps = last(expected / PRETRAINING).progress.step
    epoch = steps // 2

    def interrupted(console, at):
        message = rf"^stopped by SIG\w+ at step {at}, \d of 2 epochs of pretraining done; the state is saved in .*pretr"
        with pytest.raises(Interrupted, match=message):
            training.train(job, run_dir, KEY, console)
        assert not (run_dir / checkpoint.CHECKPOINTS).exists()
        return console

    interrupted(Stub(stop_at(3, signal.SIGINT)), 3)

    # During the validation.
    real, done = Pretraining.batch, []

    def stop_in_validation(self, texts, indices, epoch):
        if epoch == "validation":
            done.append(indices)
            if len(done) == 2:  # the first is the one that shows whether it fits
                os.kill(os.getpid(), signal.SIGTERM)
        return real(self, texts, indices, epoch)

    with monkeypatch.context() as patch:
        patch.setattr(Pretraining, "batch", stop_in_validation)
        assert interrupted(Stub(), epoch).steps == list(range(4, epoch + 1))

    # A crash that saves nothing, and the newest checkpoint is damaged.
    def crash_at(step):
        def crash(now):
            if now == step:
                raise ZeroDivisionError

        return crash

    with pytest.raises(ZeroDivisionError):
        training.train(job, run_dir, KEY, Stub(crash_at(epoch + 6)))
    newest = checkpoint.steps(run_dir / PRETRAINING / checkpoint.CHECKPOINTS)[-1]
    state = run_dir / PRETRAINING / checkpoint.CHECKPOINTS / f"step-{newest:08d}" / checkpoint.STATE
    state.write_bytes(state.read_bytes()[:-1])

    # Goes on from the one before, and crashes again before there is anything of the classification.
    starts = itertools.count()
    console = Stub(on_start=lambda: next(starts) and crash_at(0)(0))
    with pytest.raises(ZeroDivisionError):
        training.train(job, run_dir, KEY, console)
    assert len(console.warnings) == 1 and "is damaged" in console.warnings[0]
    assert console.notes[0].endswith("1 of 2 epochs of pretraining done") and "going on from step" in console.notes[0]
    assert last(run_dir / PRETRAINING).progress.finished and not (run_dir / checkpoint.CHECKPOINTS).exists()
    with pytest.raises(Interrupted, match=r"at step 5, 0 of 2 epochs done; the state is saved in .*run.checkpoints"):
        training.train(job, run_dir, KEY, Stub(stop_at(5)))
    training.train(job, run_dir, KEY, Stub())
    assert_same_training(run_dir, expected)


def test_a_classification_that_has_begun_needs_no_pretraining(whole, run_dir):
    job, expected, console = whole
    for name in (PRETRAINING, checkpoint.CHECKPOINTS, checkpoint.BEST):
        shutil.copytree(expected / name, run_dir / name)
    shutil.copy2(expected / "metrics.jsonl", run_dir)
    steps = checkpoint.steps(run_dir / checkpoint.CHECKPOINTS)
    shutil.rmtree(run_dir / checkpoint.CHECKPOINTS / f"step-{steps[-1]:08d}")
    shutil.rmtree(run_dir / PRETRAINING)
    stub = Stub()
    training.train(job, run_dir, KEY, stub)
    assert stub.steps == list(range(steps[-2] + 1, steps[-1] + 1))
    assert not (run_dir / PRETRAINING).exists()
    assert_same_run(run_dir, expected)

    # When it has lost its own checkpoints, it begins with the pretrained weights again.
    shutil.copytree(expected / PRETRAINING, run_dir / PRETRAINING)
    for step in checkpoint.steps(run_dir / checkpoint.CHECKPOINTS):
        (run_dir / checkpoint.CHECKPOINTS / f"step-{step:08d}" / checkpoint.STATE).write_bytes(b"")
    stub = Stub()
    training.train(job, run_dir, KEY, stub)
    assert stub.steps == list(range(1, steps[-1] + 1))
    assert_same_training(run_dir, expected)


def test_another_job_does_not_go_on_with_it(whole, run_dir):
    job, expected, _ = whole
    shutil.copytree(expected / PRETRAINING, run_dir / PRETRAINING)
    with pytest.raises(JobError, match="pretraining.checkpoints holds the pretraining of another job or of other data"):
        training.train(job, run_dir, "another key", Stub())


def test_answers_that_are_not_finite_after_an_epochs_last_step(data_file, tmp_path):
    # One batch is the epoch: its loss is finite, the weights it leaves are not usable.
    job = make_job(data_file, pretraining={"learning_rate": 1e30}, batch_tokens=100_000)
    dataset.prepare(job, tmp_path / "data")
    with pytest.raises(TrainingError, match="data.validation are not finite after step 1:.*lower pretraining.learning"):
        training.train(job, tmp_path, KEY, Stub())


@pytest.mark.parametrize("share", [0.05, 0.6])
def test_the_share_of_masked_tokens_is_the_jobs(data_file, run_dir, share):
    job = make_job(data_file, pretraining={"masked_share": share})
    task = Pretraining(job, run_dir, OneDevice())
    texts, plan = task.make_epoch(0, lambda: None)
    counts = [task.batch(texts, indices, 0) for indices in plan]
    tokens = sum(np.count_nonzero(targets) for _, targets, _ in counts)
    found = sum(mask.sum() for *_, mask in counts) / tokens
    assert found == pytest.approx(share, abs=4 * (share * (1 - share) / tokens) ** 0.5)
