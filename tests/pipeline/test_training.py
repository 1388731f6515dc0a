import contextlib
import dataclasses
import itertools
import json
import os
import random
import shutil
import signal
import threading

import numpy as np
import pytest

from pipeline import checkpoint, classification, dataset, evaluation, training
from pipeline.batches import epoch_plan
from pipeline.config import JobConfig
from pipeline.contract import TIMINGS, sha256_file
from pipeline.errors import CheckpointError, Interrupted, JobError, TrainingError
from pipeline.optimization import learning_rate
from pipeline.replicas import OneDevice
from pipeline.train_step import TrainStep

pytestmark = pytest.mark.usefixtures("deterministic")

KEY = "key"
ROWS = 400


class Stub:
    """Stands in for the console; calls `on_start`, `on_step` after each step and `on_epoch` after each validation."""

    def __init__(self, on_step=lambda step: None, on_epoch=lambda step: None, on_start=lambda: None):
        self.on_step, self.on_epoch, self.on_start = on_step, on_epoch, on_start
        self.notes, self.warnings, self.steps, self.expected = [], [], [], []

    def note(self, line):
        self.notes.append(line)

    def warn(self, line):
        self.warnings.append(line)

    @contextlib.contextmanager
    def training(self, label):
        self.on_start()
        yield self

    def expect(self, steps):
        self.expected.append(steps)

    def step(self, progress, loss):
        self.steps.append(progress.step)
        self.on_step(progress.step)

    def epoch(self, progress, figures):
        self.on_epoch(progress.step)


def stop_at(step, number=signal.SIGTERM):
    return lambda now: os.kill(os.getpid(), number) if now == step else None


def make_job(data_file, seed=17, **training_section):
    return JobConfig.model_validate(
        {
            "name": "tiny",
            "seed": seed,
            "data": {"train": str(data_file), "validation_fraction": 0.2},
            "tokenizer": {"vocab_size": 300},
            "model": {"d_model": 8, "num_heads": 2, "d_ff": 12, "num_layers": 1, "max_length": 16},
            "training": {
                "epochs": 3,
                "batch_tokens": 512,
                "learning_rate": 0.05,
                "checkpoint_every_steps": 4,
                "log_every_steps": 2,
                "patience": 0,
                **training_section,
            },
        }
    )


@pytest.fixture(scope="module")
def data_file(tmp_path_factory):
    """Texts of 3 to 14 words; those with "great" or "lovely" are good."""
    rng = random.Random(0)
    neutral = ["".join(rng.choices("aeiounrstl", k=rng.randint(2, 6))) for _ in range(60)]
    path = tmp_path_factory.mktemp("source") / "rows.csv"
    lines = ["text,label"]
    for i in range(ROWS):
        words = rng.choices(neutral, k=rng.randint(2, 13))
        words.insert(rng.randrange(len(words)), rng.choice([["dull", "awful"], ["great", "lovely"]][i % 2]))
        lines.append(f"{' '.join(words)},{['bad', 'good'][i % 2]}")
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def data_dir(data_file, tmp_path_factory):
    directory = tmp_path_factory.mktemp("prepared") / "data"
    dataset.prepare(make_job(data_file), directory)
    return directory


@pytest.fixture
def run_dir(data_dir, tmp_path):
    (tmp_path / "run").mkdir()
    shutil.copytree(data_dir, tmp_path / "run" / "data")
    return tmp_path / "run"


@pytest.fixture(scope="module")
def whole(data_file, data_dir, tmp_path_factory):
    """A run that nothing disturbs: (job, run directory, console)."""
    directory = tmp_path_factory.mktemp("whole")
    shutil.copytree(data_dir, directory / "data")
    job, console = make_job(data_file), Stub()
    training.train(job, directory, KEY, console)
    return job, directory, console


def last(run_dir):
    return next(checkpoint.newest_first(run_dir / checkpoint.CHECKPOINTS, warn=pytest.fail), None)


def rows_of(run_dir):
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def without_speed(rows):
    return [{k: v for k, v in row.items() if k not in TIMINGS} for row in rows]


def assert_same_arrays(found, expected):
    assert list(found) == list(expected)
    for name, array in expected.items():
        assert found[name].tobytes() == array.tobytes(), name


def assert_same_run(found, expected):
    """Weights, optimizer, dropout seeds, counters, best weights and figures, bit for bit."""
    a, b = last(found), last(expected)
    assert_same_arrays(a.arrays, b.arrays)
    # The speed's digits are part of the file's length.
    assert dataclasses.replace(a.progress, metrics_bytes=0) == dataclasses.replace(b.progress, metrics_bytes=0)
    best = [checkpoint.read(run / checkpoint.BEST, a.progress.best_step) for run in (found, expected)]
    assert_same_arrays(best[0].arrays, best[1].arrays)
    assert without_speed(rows_of(found)) == without_speed(rows_of(expected))


def stopped_run(job, data_dir, run_dir, step):
    """A run in `run_dir` that was stopped after `step`."""
    shutil.copytree(data_dir, run_dir / "data")
    with pytest.raises(Interrupted):
        training.train(job, run_dir, KEY, Stub(stop_at(step)))


def test_learns_and_records(whole):
    job, run_dir, console = whole
    steps_per_epoch, rest = divmod(len(console.steps), 3)
    assert rest == 0 and steps_per_epoch >= 8
    assert console.steps == list(range(1, 3 * steps_per_epoch + 1))
    rows = rows_of(run_dir)
    of_training = [row for row in rows if row["kind"] == "train"]
    assert [row["step"] for row in of_training] == list(range(2, 3 * steps_per_epoch + 1, 2))
    figures = {"loss", "learning_rate", "gradient_norm", "padded_share", "real_tokens_per_s", "waiting_share"}
    for row in of_training:
        assert set(row) == {"kind", "step", "epoch"} | figures
        assert all(isinstance(row[name], float) for name in figures)
        assert row["epoch"] == (row["step"] - 1) // steps_per_epoch
        assert 0 <= row["padded_share"] < 0.5 and row["real_tokens_per_s"] > 0 and row["gradient_norm"] > 0
        assert 0 <= row["waiting_share"] <= 1
    validations = [row for row in rows if row["kind"] == "validation"]
    assert [(row["epoch"], row["step"]) for row in validations] == [(i, (i + 1) * steps_per_epoch) for i in range(3)]
    for row in validations:
        times = {"training_s", "waiting_s", "validating_s", "saving_s"}
        assert set(row) == {"kind", "step", "epoch", "loss", "accuracy", "macro_f1", "calibration_error"} | times
        assert all(isinstance(row[name], float) and row[name] >= 0 for name in times)
        assert row["training_s"] > 0 and row["validating_s"] > 0
    assert validations[-1]["accuracy"] > 0.75
    assert of_training[-1]["loss"] < 0.6 < of_training[0]["loss"]  # ln 2 is 0.69
    assert list((run_dir / "tensorboard").glob("events.out.tfevents.*"))
    assert not (run_dir / "pretraining").exists()
    assert (run_dir / "metrics.jsonl").stat().st_size == last(run_dir).progress.metrics_bytes


def test_checkpoints_that_are_kept(whole):
    job, run_dir, console = whole
    steps = checkpoint.steps(run_dir / checkpoint.CHECKPOINTS)
    assert len(steps) == job.training.keep_checkpoints
    assert steps[-1] == len(console.steps)
    named = {checkpoint.best_step(run_dir / checkpoint.CHECKPOINTS, step) for step in steps}
    assert set(checkpoint.steps(run_dir / checkpoint.BEST)) == named - {-1}
    assert not list(run_dir.rglob(".staged-*"))


def test_best_weights_are_those_of_the_best_validation(whole):
    job, run_dir, _ = whole
    validations = [row for row in rows_of(run_dir) if row["kind"] == "validation"]
    best = max(validations, key=lambda row: row["accuracy"])  # the first of equals
    progress = last(run_dir).progress
    assert (progress.best_step, progress.best_value) == (best["step"], best["accuracy"])
    assert (progress.finished, progress.epoch, progress.batch) == ("epochs", 3, 0)
    assert checkpoint.finished_best(run_dir, KEY, job.training) is not None
    assert checkpoint.finished_best(run_dir, "another key", job.training) is None

    model = training.load_best(job, run_dir, KEY)
    split = dataset.Split.load(run_dir / "data", "validation")
    logits = np.asarray(model(split.token_ids(np.arange(len(split)))))
    found = evaluation.metrics(evaluation.softmax(logits), split.labels, ["bad", "good"])
    assert found["accuracy"] == best["accuracy"]
    assert found["loss"] == pytest.approx(best["loss"], rel=1e-5)


def test_a_finished_run_is_not_trained_again(whole):
    job, run_dir, _ = whole
    before, console = (run_dir / "metrics.jsonl").read_bytes(), Stub()
    training.train(job, run_dir, KEY, console)
    assert console.steps == [] and console.notes == []
    assert (run_dir / "metrics.jsonl").read_bytes() == before


def test_resume_is_exact_wherever_it_stops(whole, run_dir, monkeypatch):
    """One run, stopped again and again; dropout is at work."""
    job, expected, console = whole
    assert job.model.dropout > 0 and job.model.head_dropout > 0
    epoch = len(console.steps) // 3

    def interrupted(console, at):
        with pytest.raises(Interrupted, match=rf"^stopped by SIG\w+ at step {at}, \d of 3 epochs done; the state is"):
            training.train(job, run_dir, KEY, console)
        assert checkpoint.finished_best(run_dir, KEY, job.training) is None
        return console

    # Before the first step.
    interrupted(Stub(on_start=lambda: os.kill(os.getpid(), signal.SIGTERM)), 0)
    # In the middle of an epoch, between two checkpoints and by the other signal.
    interrupted(Stub(stop_at(3, signal.SIGINT)), 3)
    # At the last batch of an epoch: validation is due.
    console = interrupted(Stub(stop_at(epoch)), epoch)
    assert console.steps[0] == 4

    # During the validation.
    real = evaluation.predict_logits

    def stopped_in_the_middle(predict, split, plan, stop):
        def stop_at_the_last():
            if next(batch) == len(plan) - 1:
                os.kill(os.getpid(), signal.SIGTERM)
            stop()

        batch = itertools.count()
        assert len(plan) > 1
        return real(predict, split, plan, stop_at_the_last)

    with monkeypatch.context() as patch:
        patch.setattr(evaluation, "predict_logits", stopped_in_the_middle)
        assert interrupted(Stub(), epoch).steps == []

    # After the validation, before the best weights are written.
    assert interrupted(Stub(on_epoch=stop_at(epoch)), epoch).steps == []

    # A crash that saves nothing: goes on from the last checkpoint, and the figures after it are dropped.
    def crash(step):
        if step == epoch + 7:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        training.train(job, run_dir, KEY, Stub(crash))
    newest = checkpoint.steps(run_dir / checkpoint.CHECKPOINTS)[-1]
    assert epoch < newest < epoch + 7

    # And that checkpoint is damaged.
    state = run_dir / checkpoint.CHECKPOINTS / f"step-{newest:08d}" / checkpoint.STATE
    state.write_bytes(state.read_bytes()[:-1])
    before = checkpoint.steps(run_dir / checkpoint.CHECKPOINTS)[-2]
    console = interrupted(Stub(stop_at(2 * epoch + 1)), 2 * epoch + 1)
    assert console.steps[0] == before + 1
    assert len(console.warnings) == 1 and f"step-{newest:08d} is damaged" in console.warnings[0]
    assert console.notes == [f"going on from step {before}, 1 of 3 epochs done"]

    # At the very end: all is done, and the caller still learns of the signal.
    with pytest.raises(Interrupted):
        training.train(job, run_dir, KEY, Stub(on_epoch=stop_at(3 * epoch)))
    assert checkpoint.finished_best(run_dir, KEY, job.training) is not None
    training.train(job, run_dir, KEY, Stub())
    assert_same_run(run_dir, expected)


def test_signal_handlers_are_put_back(whole):
    job, run_dir, _ = whole
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    training.train(job, run_dir, KEY, Stub())
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before


@pytest.mark.parametrize(
    "section",
    [
        {"precision": "mixed_bfloat16", "r_drop": 1.0},
        {"ema_decay": 0.9, "accumulate_batches": 3, "batch_rows": 20, "beta_2": 0.9},
        {"precision": "mixed_float16", "ema_decay": 0.9, "accumulate_batches": 2, "r_drop": 1.0,
         "class_weights": "balanced", "label_smoothing": 0.1},
    ],
    ids=lambda section: "-".join(map(str, section.values())),
)  # fmt: skip
def test_resume_is_exact_with_every_part_of_the_state(data_file, data_dir, tmp_path, section):
    job = make_job(data_file, epochs=2, checkpoint_every_steps=2, **section)
    runs = [tmp_path / name for name in ("whole", "stopped")]
    for run in runs:
        shutil.copytree(data_dir, run / "data")
    console = Stub()
    training.train(job, runs[0], KEY, console)
    steps = last(runs[0]).progress.step
    lengths = dataset.Split.load(runs[0] / "data", "train").lengths
    batches = len(epoch_plan(lengths, 512, 17, 0, section.get("batch_rows", 0)))
    assert steps == 2 * -(-batches // section.get("accumulate_batches", 1)) == console.steps[-1] >= 6
    rates = {row["step"]: row["learning_rate"] for row in rows_of(runs[0]) if row["kind"] == "train"}
    assert rates == {step: learning_rate(step - 1, steps, 0.05, 0.1) for step in range(2, steps + 1, 2)}

    with pytest.raises(Interrupted):
        training.train(job, runs[1], KEY, Stub(stop_at(1)))

    def crash(step):
        if step == steps // 2 + 3:  # after the last checkpoint
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        training.train(job, runs[1], KEY, Stub(crash))
    training.train(job, runs[1], KEY, Stub())
    assert_same_run(runs[1], runs[0])


def test_a_student_goes_on_with_the_answers_it_began_with(whole, data_dir, tmp_path):
    """Of a run and of a file, both gone when it is stopped; what they said is in every batch of their texts."""
    job, run_dir, _ = whole
    teacher = shutil.copytree(run_dir, tmp_path / "teacher")
    (teacher / "job.json").write_text(json.dumps(job.resolved()))
    (teacher / "evaluation").mkdir()
    (teacher / "evaluation" / "report.json").write_text('{"test": {}}')
    texts, file = dataset.load_texts(data_dir, "train"), tmp_path / "answers.jsonl"
    lines = [{"text": text, "probabilities": {"good": 0.25, "bad": 0.75}} for text in texts]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    section = {"teacher": [str(teacher), str(file)], "batch_rows": 40, "r_drop": 1.0, "epochs": 1}
    student = make_job(job.data.train, **section)
    runs = [tmp_path / name for name in ("whole", "stopped")]
    for run in runs:
        shutil.copytree(data_dir, run / "data")
    training.train(student, runs[0], KEY, Stub())
    with pytest.raises(Interrupted):
        training.train(student, runs[1], KEY, Stub(stop_at(3)))
    shutil.rmtree(teacher)
    file.unlink()
    console = Stub()
    training.train(student, runs[1], KEY, console)
    assert console.steps[0] == 4
    assert_same_run(runs[1], runs[0])

    split = dataset.Split.load(data_dir, "train")
    teacher = training.load_best(job, run_dir, KEY)
    logits = np.asarray(teacher(split.token_ids(np.arange(len(split))))) / teacher.temperature.numpy()
    expected = (evaluation.softmax(logits) + [0.75, 0.25]) / 2
    found = np.load(runs[0] / "soft_labels" / "probabilities.npy")
    np.testing.assert_allclose(found, expected, atol=1e-5, rtol=0)
    task = classification.Classification(student, runs[0], OneDevice(), soft_labels=found)
    rows, plan = task.make_epoch(0, None)
    for indices in plan[:2]:
        np.testing.assert_array_equal(task.batch(rows, indices, 0)[2], found[indices])


@pytest.mark.parametrize("precision", ["mixed_bfloat16", "mixed_float16"])
def test_resume_is_exact_in_mixed_precision(data_file, data_dir, tmp_path, precision):
    job = make_job(data_file, precision=precision, epochs=2, log_every_steps=1)
    shutil.copytree(data_dir, tmp_path / "whole" / "data")
    training.train(job, tmp_path / "whole", KEY, Stub())
    stopped_run(job, data_dir, tmp_path / "stopped", 5)
    training.train(job, tmp_path / "stopped", KEY, Stub())
    assert_same_run(tmp_path / "stopped", tmp_path / "whole")


def test_the_loss_scale_and_its_counters_are_carried_over(data_file, data_dir, tmp_path):
    """The scale is set so high that the next steps overflow: they are skipped and it shrinks."""
    job = make_job(data_file, precision="mixed_float16", epochs=1, checkpoint_every_steps=1, keep_checkpoints=99)
    stopped_run(job, data_dir, tmp_path / "whole", 2)
    directory, raised = tmp_path / "whole" / checkpoint.CHECKPOINTS, np.float32(2.0**26)
    state = checkpoint.read(directory, 2)
    [scale] = [name for name, a in state.arrays.items() if a.shape == () and a.dtype == np.float32 and a == 2.0**15]
    checkpoint.save(directory, state.arrays | {scale: raised}, state.progress, KEY)
    shutil.copytree(tmp_path / "whole", tmp_path / "stopped")

    training.train(job, tmp_path / "whole", KEY, Stub())
    overflows = [step for step in (3, 4) if checkpoint.read(directory, step).arrays[scale] < raised]
    assert overflows == [3, 4]
    with pytest.raises(Interrupted):
        training.train(job, tmp_path / "stopped", KEY, Stub(stop_at(4)))
    assert last(tmp_path / "stopped").arrays[scale] == raised / 4
    training.train(job, tmp_path / "stopped", KEY, Stub())
    assert_same_run(tmp_path / "stopped", tmp_path / "whole")


def test_a_worse_epoch_after_a_resume_does_not_replace_the_best(data_file, data_dir, tmp_path):
    job = make_job(data_file, learning_rate=0.5, epochs=5)  # too large to get better every time
    shutil.copytree(data_dir, tmp_path / "whole" / "data")
    training.train(job, tmp_path / "whole", KEY, Stub())
    validations = [row for row in rows_of(tmp_path / "whole") if row["kind"] == "validation"]
    values = [row["accuracy"] for row in validations]
    worse = next(i for i, value in enumerate(values) if i and value < max(values[:i]))

    run_dir, at = tmp_path / "stopped", validations[worse - 1]["step"] + 2
    stopped_run(job, data_dir, run_dir, at)
    before, best = last(run_dir).progress, (run_dir / checkpoint.BEST)
    weights = best / f"step-{before.best_step:08d}" / checkpoint.STATE
    status = weights.stat()
    assert before.best_value == max(values[:worse])
    epochs = []
    with contextlib.suppress(Interrupted):  # it is the last epoch, or it is stopped after it
        training.train(job, run_dir, KEY, Stub(stop_at(validations[worse]["step"] + 1), epochs.append))
    assert epochs == [validations[worse]["step"]]
    after = last(run_dir).progress
    assert (after.best_step, after.best_value) == (before.best_step, before.best_value)
    assert after.evaluations_without_improvement == before.evaluations_without_improvement + 1
    assert checkpoint.steps(best) == [before.best_step]
    assert (weights.stat().st_ino, weights.stat().st_mtime_ns) == (status.st_ino, status.st_mtime_ns)


def test_averaged_weights_are_validated_kept_as_best_and_loaded_for_export(data_file, run_dir):
    job = make_job(data_file, ema_decay=0.9, keep_checkpoints=100)
    training.train(job, run_dir, KEY, Stub())
    progress, best = last(run_dir).progress, checkpoint.finished_best(run_dir, KEY, job.training).arrays
    state = list(checkpoint.read(run_dir / checkpoint.CHECKPOINTS, progress.best_step).arrays.values())
    model = training.load_best(job, run_dir, KEY).encoder
    averages, weights = state[-len(best) :], state[: len(model.variables)]
    assert [a.tobytes() for a in best.values()] == [a.tobytes() for a in averages]
    assert [v.numpy().tobytes() for v in model.weights] == [a.tobytes() for a in averages]
    # Training itself goes on with the weights that are not averaged.
    assert not np.allclose(weights[0], averages[0], atol=1e-3)

    row = next(r for r in rows_of(run_dir) if r["kind"] == "validation" and r["step"] == progress.best_step)
    split = dataset.Split.load(run_dir / "data", "validation")
    logits = np.asarray(model(split.token_ids(np.arange(len(split)))))
    found = evaluation.metrics(evaluation.softmax(logits), split.labels, ["bad", "good"])
    assert found["accuracy"] == row["accuracy"] == progress.best_value
    assert found["loss"] == pytest.approx(row["loss"], rel=1e-5)
    model.set_weights([a for a, v in zip(weights, model.variables, strict=True) if a.dtype.kind == "f"])
    logits = np.asarray(model(split.token_ids(np.arange(len(split)))))
    others = evaluation.metrics(evaluation.softmax(logits), split.labels, ["bad", "good"])
    assert others["loss"] != pytest.approx(row["loss"], rel=1e-3)


def test_class_weights_shape_the_answers(data_file, run_dir):
    # Rows of "bad" hardly count, so every answer is "good".
    job = make_job(data_file, epochs=1, class_weights={"bad": 1e-3})
    training.train(job, run_dir, KEY, Stub())
    split = dataset.Split.load(run_dir / "data", "validation")
    logits = np.asarray(training.load_best(job, run_dir, KEY)(split.token_ids(np.arange(len(split)))))
    assert (logits.argmax(axis=1) == 1).all() and 0 < split.labels.mean() < 1


def test_class_weights_of_an_unknown_label_are_refused(data_file, run_dir):
    with pytest.raises(JobError, match="training.class_weights names labels that are neither in .*: 'awful'"):
        training.train(make_job(data_file, class_weights={"awful": 2.0}), run_dir, KEY, Stub())


def test_another_seed_gives_other_weights(whole, data_file, run_dir):
    job = make_job(data_file, seed=18, epochs=1)
    training.train(job, run_dir, KEY, Stub())
    found, expected = (checkpoint.finished_best(run, KEY, job.training).arrays for run in (run_dir, whole[1]))
    assert list(found) == list(expected)
    kernels = [name for name, a in found.items() if a.ndim == 2]
    assert len(kernels) == 8  # the embeddings, four of the attention, two of the feed-forward, the head
    assert all(not np.allclose(found[name], expected[name], atol=1e-3) for name in kernels)


def test_patience_is_carried_over(data_file, run_dir):
    # Nothing improves after the first validation: two more are waited for, whatever comes between.
    job = make_job(data_file, epochs=6, learning_rate=1e-12, patience=2)
    epoch = len(epoch_plan(dataset.Split.load(run_dir / "data", "train").lengths, 512, 17, 0))
    counts = []
    with pytest.raises(Interrupted):
        training.train(job, run_dir, KEY, Stub(stop_at(2 * epoch + 1), on_epoch=counts.append))
    progress = last(run_dir).progress
    assert (progress.epoch, progress.evaluations_without_improvement, progress.finished) == (2, 1, "")
    training.train(job, run_dir, KEY, Stub(on_epoch=counts.append))
    assert len(counts) == 3
    progress = last(run_dir).progress
    assert (progress.epoch, progress.evaluations_without_improvement, progress.finished) == (3, 2, "patience")
    assert progress.best_step == counts[0]
    assert checkpoint.steps(run_dir / checkpoint.BEST) == [counts[0]]
    assert checkpoint.finished_best(run_dir, KEY, job.training) is not None


def test_a_loss_that_is_not_finite_ends_with_step_and_rows(data_file, run_dir):
    job = make_job(data_file, learning_rate=1e30, checkpoint_every_steps=1)
    console = Stub()
    with pytest.raises((TrainingError, CheckpointError)) as e:
        training.train(job, run_dir, KEY, console)
    assert isinstance(e.value, TrainingError)
    message = str(e.value)
    step = console.steps[-1] + 1
    assert f"not finite at step {step}: loss=nan" in message
    split = dataset.Split.load(run_dir / "data", "train")
    plan = epoch_plan(split.lengths, 512, 17, 0)
    shown = split.rows[plan[step - 1]][:20]
    assert f"rows of data.train (from 0): {', '.join(map(str, shown))}" in message
    assert "lower training.learning_rate" in message
    assert len(message.splitlines()) == 1
    for found in checkpoint.steps(run_dir / checkpoint.CHECKPOINTS):
        arrays = checkpoint.read(run_dir / checkpoint.CHECKPOINTS, found).arrays
        assert all(np.isfinite(a).all() for a in arrays.values())
    assert checkpoint.finished_best(run_dir, KEY, job.training) is None
    with pytest.raises(TrainingError, match="holds no finished training"):
        training.load_best(job, run_dir, KEY)


@pytest.mark.parametrize("saved_by", ["interval", "signal"])
def test_weights_that_are_not_finite_after_a_finite_loss_are_not_saved(data_file, run_dir, saved_by):
    # A rate that is infinite in float32: the first loss is finite, the weights after it are not.
    job = make_job(data_file, learning_rate=1e300, checkpoint_every_steps=1 if saved_by == "interval" else 0)
    console = Stub(stop_at(1) if saved_by == "signal" else lambda step: None)
    with pytest.raises(CheckpointError, match=r"step 1: model 0000 holds a value that is not finite.*Lower training"):
        training.train(job, run_dir, KEY, console)
    assert console.steps == [1]
    assert list(run_dir.rglob("state.npz")) == []
    assert list(run_dir.rglob(".staged-*")) == []


def test_best_weights_that_are_not_finite_are_not_loaded(whole, run_dir):
    """They cannot be saved; so even if they lie there with the right sums, no export is made from them."""
    job, other, _ = whole
    for directory in (checkpoint.CHECKPOINTS, checkpoint.BEST):
        shutil.copytree(other / directory, run_dir / directory)
    assert training.load_best(job, run_dir, KEY) is not None
    for path in (run_dir / checkpoint.BEST).iterdir():
        with np.load(path / checkpoint.STATE) as state:
            arrays = dict(state)
        next(iter(arrays.values())).flat[0] = np.nan
        np.savez(path / checkpoint.STATE, **arrays)
        names = (checkpoint.STATE, checkpoint.PROGRESS)
        (path / checkpoint.SUMS).write_text("".join(f"{sha256_file(path / name)}  {name}\n" for name in names))
    with pytest.raises(TrainingError, match="holds no finished training"):
        training.load_best(job, run_dir, KEY)


def test_answers_that_are_not_finite_after_an_epochs_last_step(data_file, run_dir):
    # One batch is the epoch: its loss is finite, the weights it leaves are not usable.
    job = make_job(data_file, learning_rate=1e30, batch_tokens=100_000)
    with pytest.raises(TrainingError, match="answers on data.validation are not finite after step 1:.*lower training"):
        training.train(job, run_dir, KEY, Stub())
    assert checkpoint.steps(run_dir / checkpoint.CHECKPOINTS) == []
    assert checkpoint.steps(run_dir / checkpoint.BEST) == []


def test_damaged_checkpoints_do_not_push_out_good_ones(data_file, data_dir, tmp_path):
    job = make_job(data_file, checkpoint_every_steps=2, keep_checkpoints=2)
    stopped_run(job, data_dir, tmp_path, 6)
    directory = tmp_path / checkpoint.CHECKPOINTS
    assert checkpoint.steps(directory) == [4, 6]
    state = directory / "step-00000006" / checkpoint.STATE
    state.write_bytes(state.read_bytes()[:-1])
    console = Stub(stop_at(5))
    with pytest.raises(Interrupted):
        training.train(job, tmp_path, KEY, console)
    assert console.steps == [5]
    assert checkpoint.steps(directory) == [4, 5]
    assert last(tmp_path).progress.step == 5  # and no warning


def test_damaged_best_weights_are_made_again(whole, run_dir):
    job, other, _ = whole
    for directory in (checkpoint.CHECKPOINTS, checkpoint.BEST):
        shutil.copytree(other / directory, run_dir / directory)
    for state in (run_dir / checkpoint.BEST).glob("*/state.npz"):
        state.write_bytes(state.read_bytes()[:-1])
    assert checkpoint.finished_best(run_dir, KEY, job.training) is None
    stub = Stub()
    training.train(job, run_dir, KEY, stub)
    assert any("is damaged" in line for line in stub.warnings)
    assert_same_arrays(last(run_dir).arrays, last(other).arrays)
    best = [checkpoint.finished_best(run, KEY, job.training) for run in (run_dir, other)]
    assert_same_arrays(best[0].arrays, best[1].arrays)


def test_checkpoints_of_another_key_are_refused(whole, run_dir):
    job, other, _ = whole
    for directory in (checkpoint.CHECKPOINTS, checkpoint.BEST):
        shutil.copytree(other / directory, run_dir / directory)
    with pytest.raises(JobError, match="holds the training of another job or of other data"):
        training.train(job, run_dir, "another key", Stub())
    assert_same_arrays(last(run_dir).arrays, last(other).arrays)


@pytest.mark.parametrize(
    "section",
    [{"subword_regularization": 0.6}, {"subword_sampling": 0.5, "subword_alpha": 0.05, "token_dropout": 0.2}],
    ids=lambda section: next(iter(section)),
)
def test_resume_is_exact_when_epochs_have_their_own_rows(data_file, tmp_path, section):
    job = make_job(data_file, **section, batch_tokens=90, log_every_steps=1).resolved()
    job = JobConfig.model_validate(
        {**job, "model": {**job["model"], "max_length": 64}, "tokenizer": {"vocab_size": 330}}
    )
    for run_dir in (tmp_path / "whole", tmp_path / "stopped"):
        dataset.prepare(job, run_dir / "data")
    console = Stub()
    training.train(job, tmp_path / "whole", KEY, console)
    steps = last(tmp_path / "whole").progress.step
    with pytest.raises(Interrupted):
        training.train(job, tmp_path / "stopped", KEY, Stub(stop_at(steps // 2)))
    training.train(job, tmp_path / "stopped", KEY, Stub())
    assert_same_run(tmp_path / "stopped", tmp_path / "whole")

    # Longer rows make more batches than the best segmentations would, and not as many in every epoch.
    rows = [row for row in rows_of(tmp_path / "whole") if row["kind"] == "train"]
    counts = [sum(row["epoch"] == epoch for row in rows) for epoch in range(3)]
    split = dataset.Split.load(tmp_path / "whole" / "data", "train")
    assert min(counts) > len(epoch_plan(split.lengths, 90, 17, 0))
    assert len(set(counts)) > 1
    assert console.expected == [3 * counts[0], counts[0] + 2 * counts[1], steps]
    # All the same each epoch is a third of the learning rate's course: a tenth up to the peak, then half a cosine.
    done = np.concatenate([epoch + np.arange(count) / count for epoch, count in enumerate(counts)])
    rates = np.array([row["learning_rate"] for row in rows])
    assert rates.max() == pytest.approx(0.05) and np.argmax(rates) + 1 == pytest.approx(0.1 * steps, abs=1)
    falling = done / 3 > 0.12
    expected = 0.025 * (1 + np.cos(np.pi * (done / 3 - 0.1) / 0.9))
    np.testing.assert_allclose(rates[falling], expected[falling], atol=0.05 * np.pi / 2 / steps)  # within one step


def test_settings_that_cannot_matter_may_change_while_a_run_waits(whole, data_file, data_dir, tmp_path):
    job, expected, console = whole
    stopped_run(job, data_dir, tmp_path / "run", 7)
    changed = make_job(
        data_file, log_every_steps=3, keep_checkpoints=1, checkpoint_every_s=0.01, checkpoint_every_steps=0, patience=9
    )
    stub = Stub()
    training.train(changed, tmp_path / "run", KEY, stub)
    assert stub.steps == console.steps[7:]
    assert_same_arrays(last(tmp_path / "run").arrays, last(expected).arrays)
    assert checkpoint.steps(tmp_path / "run" / checkpoint.CHECKPOINTS) == [console.steps[-1]]
    logged = [row["step"] for row in rows_of(tmp_path / "run") if row["kind"] == "train"]
    assert logged == [2, 4, 6] + list(range(9, console.steps[-1] + 1, 3))


@pytest.mark.parametrize("stop", ["in the middle", "finished"])
def test_more_epochs_go_on_from_where_the_run_stands(whole, data_file, data_dir, tmp_path, stop):
    job, expected, console = whole
    epoch = len(console.steps) // 3
    run_dir = tmp_path / "run"
    if stop == "finished":
        shutil.copytree(expected, run_dir)
        start = 3 * epoch
    else:
        start = epoch + 2
        stopped_run(job, data_dir, run_dir, start)
    longer = make_job(data_file, epochs=4)
    assert checkpoint.finished_best(run_dir, KEY, longer.training) is None
    stub = Stub()
    training.train(longer, run_dir, KEY, stub)
    assert stub.notes == [f"going on from step {start}, {start // epoch} of 4 epochs done"]
    assert stub.steps == list(range(start + 1, 4 * epoch + 1))
    assert last(run_dir).progress.finished == "epochs"
    assert checkpoint.finished_best(run_dir, KEY, longer.training) is not None
    peak, warmup = job.training.learning_rate, job.training.warmup_ratio
    for row in rows_of(run_dir):
        if row["kind"] == "train":
            steps = (3 if row["step"] <= start else 4) * epoch
            assert row["learning_rate"] == learning_rate(row["step"] - 1, steps, peak, warmup)

    # And fewer than were begun are refused.
    before = last(run_dir)
    with pytest.raises(JobError, match=r"has begun epoch 4, beyond training.epochs=3\. Raise it, or .* --fresh"):
        training.train(job, run_dir, KEY, Stub())
    assert last(run_dir).progress == before.progress


def test_another_patience_counts_from_where_the_run_stands(data_file, data_dir, tmp_path):
    # Nothing improves after the first validation.
    jobs = {n: make_job(data_file, epochs=6, learning_rate=1e-12, patience=n) for n in (1, 2, 3)}
    shutil.copytree(data_dir, tmp_path / "data")

    def train(patience):
        epochs = []
        training.train(jobs[patience], tmp_path, KEY, Stub(on_epoch=epochs.append))
        progress = last(tmp_path).progress
        return len(epochs), progress.epoch, progress.evaluations_without_improvement, progress.finished

    assert train(2) == (3, 3, 2, "patience")
    assert train(1) == (0, 3, 2, "patience")
    assert train(3) == (1, 4, 3, "patience")


def test_hidden_tokens_are_in_training_batches_only(data_file, tmp_path, monkeypatch):
    """What the compiled steps are given."""
    job = make_job(data_file, token_dropout=0.2)
    dataset.prepare(job, tmp_path / "data")
    trained, predicted = [], []

    class RecordingStep(TrainStep):
        def __call__(self, batches, rate):
            trained.extend(token_ids.copy() for token_ids, _ in batches)
            return super().__call__(batches, rate)

    def compile_and_record(model):
        predict = compile_predict(model)
        return lambda token_ids: predicted.append(np.array(token_ids)) or predict(token_ids)

    compile_predict = classification.compile_predict
    monkeypatch.setattr(classification, "TrainStep", RecordingStep)
    monkeypatch.setattr(classification, "compile_predict", compile_and_record)
    training.train(job, tmp_path, KEY, Stub())
    batches = len(trained) // 3
    for epoch in (trained[:batches], trained[-batches:]):
        tokens = np.concatenate([token_ids.ravel() for token_ids in epoch])
        assert np.mean(tokens[tokens != 0] == 2) == pytest.approx(0.2, abs=0.025)  # 4 standard deviations
        split = dataset.Split.load(tmp_path / "data", "train")
        assert np.count_nonzero(tokens) == len(split.tokens)
    assert predicted and not any((token_ids == 2).any() for token_ids in predicted)


def test_a_signal_while_the_rows_are_made(data_file, data_dir, run_dir, monkeypatch):
    """They take for ever; the run ends all the same, and its thread with it."""
    job = make_job(data_file, subword_sampling=0.5)

    def texts(data_dir, name):
        os.kill(os.getpid(), signal.SIGTERM)
        yield from itertools.repeat("great")

    with monkeypatch.context() as patch:
        patch.setattr(dataset, "iterate_texts", texts)
        patch.setattr(classification, "sample_split", lambda split, texts, *args: [args[-1]() for _ in texts])
        with pytest.raises(Interrupted, match="at step 0, 0 of 3 epochs done"):
            training.train(job, run_dir, KEY, Stub())
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("next-epoch")]
    training.train(job, run_dir, KEY, Stub())


def test_an_error_while_the_next_rows_are_made_ends_the_training(data_file, run_dir, monkeypatch):
    real = classification.sample_split

    def of_the_first_epoch(*args):
        if args[-2] > 0:
            raise ZeroDivisionError("in the background")
        return real(*args)

    monkeypatch.setattr(classification, "sample_split", of_the_first_epoch)
    with pytest.raises(ZeroDivisionError, match="in the background"):
        training.train(make_job(data_file, subword_sampling=0.5), run_dir, KEY, Stub())
    assert last(run_dir).progress.epoch == 1


def test_another_number_of_replicas_goes_on_with_a_warning(data_file, run_dir, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr("pipeline.replicas.OneDevice.count", 2)
        with pytest.raises(Interrupted):
            training.train(make_job(data_file), run_dir, KEY, Stub(stop_at(5)))
    assert last(run_dir).progress.replicas == 2
    stub = Stub()
    training.train(make_job(data_file), run_dir, KEY, stub)
    assert "training goes on with 1 replicas, after 2" in stub.warnings[0]
    assert last(run_dir).progress.replicas == 1


def test_tensorboard_that_cannot_be_written_costs_a_warning_only(whole, run_dir):
    job, other, _ = whole
    (run_dir / "tensorboard").write_text("a file where the directory should be")
    stub = Stub()
    training.train(job, run_dir, KEY, stub)
    assert [line for line in stub.warnings if "goes on without it" in line] == stub.warnings != []
    assert_same_run(run_dir, other)


def test_nothing_usable_is_said(whole, run_dir):
    """Hours of training begin anew: the log must say why."""
    job, other, _ = whole
    shutil.copytree(other / checkpoint.CHECKPOINTS, run_dir / checkpoint.CHECKPOINTS)  # and not one of the best weights
    stub = Stub()
    training.train(job, run_dir, KEY, stub)
    assert "can be used: training starts from its first step." in stub.warnings[-1]
    assert_same_run(run_dir, other)
