import dataclasses
import math
import re

import numpy as np
import pytest
from keras import ops

from pipeline import check as checks
from pipeline.check import CHECKS, Result, Subject, check
from pipeline.config import load_job
from pipeline.contract import PAD_ID
from pipeline.dataset import Split, prepare
from pipeline.errors import CheckFailed, Interrupted
from tests.jobs import LABELS, kill_when, make_job, make_rows, metrics_rows, snapshot

pytestmark = pytest.mark.usefixtures("deterministic")


class Lines:
    """Keeps what the console would print."""

    def __init__(self):
        self.lines = []

    def result(self, line):
        self.lines.append(line)


@pytest.fixture(scope="module")
def subject(tmp_path_factory):
    """The tiny job of the other tests, prepared."""
    return load(make_job(tmp_path_factory.mktemp("check")))


def load(job):
    config = load_job(job.file)
    prepare(config, job.run_dir / "data")
    return Subject.load(config, job.run_dir / "data")


def changed(subject, alter):
    """The same job with a model that `alter` has changed."""

    class Changed(Subject):
        def build(self, model_config):
            model = super().build(model_config)
            alter(model)
            return model

    return Changed(subject.config, subject.split, subject.labels, subject.report)


def with_settings(subject, **sections):
    update = {name: getattr(subject.config, name).model_copy(update=values) for name, values in sections.items()}
    return dataclasses.replace(subject, config=subject.config.model_copy(update=update))


def with_rows(subject, rows, labels):
    """The same job whose training split holds these token rows."""
    offsets = np.cumsum([0, *map(len, rows)])
    split = Split(np.array(sum(rows, []), np.int32), offsets, np.array(labels, np.int32), np.arange(len(rows)))
    return dataclasses.replace(subject, split=split)


# All of it.


def test_a_good_job_passes_every_check_and_its_model_stays_as_it_was(subject):
    before = [v.numpy() for v in subject.model.weights]
    console = Lines()
    check(subject, console)
    assert [line.split(":")[0].split(maxsplit=1) for line in console.lines[:-1]] == [["ok", name] for name in CHECKS]
    assert console.lines[-1] == "all 7 checks passed"
    for variable, array in zip(subject.model.weights, before, strict=True):
        np.testing.assert_array_equal(variable.numpy(), array, err_msg=variable.path)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["mixed_bfloat16", "mixed_float16"])
def test_a_good_job_passes_in_every_precision(subject, precision):
    check(with_settings(subject, training={"precision": precision}), Lines())


def test_all_checks_run_after_one_failed_and_the_error_names_them(subject, monkeypatch):
    def broken(subject):
        raise ZeroDivisionError("by\nzero")

    monkeypatch.setitem(CHECKS, "labels", broken)
    for name in list(CHECKS)[1:]:
        monkeypatch.setitem(CHECKS, name, lambda subject, name=name: Result(name, name != "batches", "7 rows."))
    console = Lines()
    with pytest.raises(CheckFailed, match="^2 of 7 checks failed: labels, batches. Their lines say what to do") as e:
        check(subject, console)
    assert e.value.exit_code == 1
    assert console.lines[0] == "FAILED  labels: ZeroDivisionError: by zero. --debug shows the traceback."
    assert console.lines[2] == "FAILED  batches: 7 rows."
    assert [line[:6] for line in console.lines] == ["FAILED", "ok    ", "FAILED", *["ok    "] * 4]


def test_a_signal_ends_it(subject, monkeypatch):
    def stop():
        raise Interrupted("stopped")

    monkeypatch.setitem(CHECKS, "labels", lambda subject: 1 / 0)  # what became of the signal
    with pytest.raises(Interrupted):
        check(subject, Lines(), stop)


# Each check fails when it should.


def test_labels(subject):
    rows = [[5, 6], [5, 7], [5, 8], [5, 9]]
    result = checks.check_labels(with_rows(subject, rows, [0, 1, 1, 1]))
    assert result.ok
    assert "2 classes of 1 to 3 training rows; always answering 'good' is right in 75.0%" in result.line

    result = checks.check_labels(with_rows(subject, rows, [1, 1, 1, 1]))
    assert not result.ok
    assert "classes without a training row: 'bad'" in result.line and "over 99% in one class" in result.line
    by_f1 = with_settings(subject, evaluation={"metric": "macro_f1"})
    assert "over 99%" not in checks.check_labels(with_rows(by_f1, rows, [1, 1, 1, 1])).line

    result = checks.check_labels(with_rows(subject, [*rows, [5, 6]], [0, 1, 1, 1, 1]))
    assert not result.ok
    assert "40.0% of the rows occur under another label too" in result.line and "contradict" in result.line
    assert checks.check_labels(with_rows(subject, [*rows, [5, 6]], [0, 1, 1, 1, 0])).ok  # a copy is no contradiction


def test_tokenizer(subject):
    assert checks.check_tokenizer(subject).ok
    train = {**subject.report["splits"]["train"], "unknown_share": 0.06}
    report = {**subject.report, "splits": {**subject.report["splits"], "train": train}}
    result = checks.check_tokenizer(dataclasses.replace(subject, report=report))
    assert not result.ok and "6.00% of the tokens are unknown" in result.line and "over 5% unknown" in result.line
    result = checks.check_tokenizer(with_rows(subject, [[5], []], [0, 1]))
    assert not result.ok and "50.00% empty" in result.line and "see data.text_column" in result.line


def test_batches(subject, monkeypatch):
    result = checks.check_batches(subject)
    assert result.ok
    share = float(re.search(r"([\d.]+)% padding", result.line)[1])
    assert 0 < share < 30
    real = checks.epoch_plan
    rows = len(subject.split)
    for plan, wrong in ((real(*args_of(subject))[1:], None), ([*real(*args_of(subject)), np.array([0])], 1)):
        wrong = wrong or rows - sum(map(len, plan))
        monkeypatch.setattr(checks, "epoch_plan", lambda *args, plan=plan: plan)
        result = checks.check_batches(subject)
        assert not result.ok and f"{wrong} rows are not in it exactly once" in result.line


def args_of(subject):
    return subject.split.lengths, subject.config.training.batch_tokens, subject.config.seed, 0


def test_first_loss(subject):
    result = checks.check_first_loss(subject)
    assert result.ok and "ln 2 is 0.693" in result.line

    def larger(model):
        model.head.kernel.assign(model.head.kernel * 100.0)

    result = checks.check_first_loss(changed(subject, larger))
    assert not result.ok and "the initial weights are too large" in result.line

    def not_finite(model):
        model.head.bias.assign([np.nan, 0.0])

    result = checks.check_first_loss(changed(subject, not_finite))
    assert not result.ok and "not finite" in result.line


def test_first_loss_weighs_classes_the_same(subject):
    """Three rows of one class to one of the other, and an answer that does not depend on the text."""

    def constant(model):
        model.head.kernel.assign(ops.zeros_like(model.head.kernel))
        model.head.bias.assign([0.0, 2.0])

    result = checks.check_first_loss(changed(with_rows(subject, [[5], [6], [7], [8]], [1, 1, 1, 0]), constant))
    expected = math.log(1 + math.exp(2.0)) - 1.0  # (-log p0 - log p1) / 2
    assert result.line.startswith(f"{expected:.3f} nats over 4 rows")
    assert "the classes' shares costs 0.562" in result.line  # -(3/4 ln 3/4 + 1/4 ln 1/4)


def test_gradients(subject):
    assert checks.check_gradients(subject).ok

    def cut_off(model):
        layer = model.encoder_layers[0]
        real = layer.feed_forward.call
        layer.feed_forward.call = lambda x, **options: ops.stop_gradient(real(x, **options))

    result = checks.check_gradients(changed(subject, cut_off))
    assert not result.ok
    named = result.line.split("no gradient reaches ")[1]
    assert "feed_forward/" in named and "feed_forward_norm/gamma" in named
    assert "attention" not in named and "embedding" not in named and "head" not in named

    def unused(model):
        model.head.kernel.assign(ops.zeros_like(model.head.kernel))  # a gradient of exactly zero before it

    result = checks.check_gradients(changed(subject, unused))
    assert not result.ok and "embedding/embeddings" in result.line and "head/" not in result.line

    def not_finite(model):
        model.head.bias.assign([np.nan, 0.0])

    result = checks.check_gradients(changed(subject, not_finite))
    assert not result.ok and "not finite for embedding/embeddings, encoder_0/" in result.line
    assert result.line.split(": use another training.precision")[0].endswith(" and 9 more")


def test_gradients_of_single_embedding_rows(subject):
    def half(model):
        real = model.embedding.call

        def call(token_ids):
            x = real(token_ids)
            return ops.where((token_ids % 2 == 0)[..., None], x, ops.stop_gradient(x))

        model.embedding.call = call

    result = checks.check_gradients(changed(subject, half))
    found = re.search(r"no gradient reaches embedding/embeddings \((\d+) of the batch's (\d+) tokens\)", result.line)
    assert not result.ok and found and 0 < int(found[1]) < int(found[2])


def test_padding_that_leaks_into_the_pooling(subject):
    def pool_all(model):
        real = model.pooling.call
        model.pooling.call = lambda x, token_valid: real(x, ops.ones_like(token_valid))

    result = checks.check_padding(changed(subject, pool_all))
    assert not result.ok
    assert "5 more columns" in result.line and "another embedding of PAD" in result.line


def test_padding_that_leaks_into_the_attention(subject):
    class Attending(type(subject.model)):
        """A model whose tokens attend to padding; the pooling alone has the mask."""

        def _encode(self, token_ids, training):
            position, embedding = self.position, self.embedding
            x = position(ops.cast(embedding(token_ids), "float32") * math.sqrt(self.d_model))
            for layer in self.encoder_layers:
                x = layer(x, attend=None, training=training)
            return x, token_ids != PAD_ID

    def attend_all(model):
        model.__class__ = Attending

    result = checks.check_padding(changed(subject, attend_all))
    assert not result.ok and "a layer ignores the mask" in result.line


def test_padding_seen_by_batch_statistics(subject):
    def normalize_by_batch(model):
        real = model.head_norm.call
        model.head_norm.call = lambda x: real(x - 0.1 * ops.mean(x, axis=0, keepdims=True))

    result = checks.check_padding(changed(subject, normalize_by_batch))
    assert not result.ok and "other batch mates" in result.line


def test_the_embedding_of_pad_alone(subject):
    """Padding columns whose own vector is zero do no harm in a sum; a trained vector would."""

    def sum_of_embeddings(model):
        table = model.embedding.embeddings
        values = table.numpy()
        values[PAD_ID] = 0.0
        table.assign(values)
        model.pooling.call = lambda x, token_valid: ops.sum(x, axis=1)
        model._encode = lambda token_ids, training: (model.embedding(token_ids), token_ids != PAD_ID)

    result = checks.check_padding(changed(subject, sum_of_embeddings))
    named = result.line.split("they move with ")[1]
    assert not result.ok and "another embedding of PAD" in named and "columns" not in named


def test_overfitting_needs_a_model_that_sees_the_text(subject, monkeypatch):
    monkeypatch.setattr(checks, "_OVERFIT_STEPS", 60)

    def blind(model):
        real = model.pooling.call
        model.pooling.call = lambda x, token_valid: 0.0 * real(x, token_valid)

    result = checks.check_overfitting(changed(subject, blind))
    assert not result.ok
    assert "50% right after 60 steps" in result.line and "the text does not reach the logits" in result.line


@pytest.mark.parametrize(
    ("rate", "problem"),
    [
        (1e-7, "learning_rate=1e-07 is far too low"),
        (1e-3, "falls too slowly: training.learning_rate=0.001 is too low"),
        (1e4, "is too high"),
    ],
)
def test_overfitting_needs_a_learning_rate_that_learns(subject, monkeypatch, rate, problem):
    monkeypatch.setattr(checks, "_OVERFIT_STEPS", 60)
    result = checks.check_overfitting(with_settings(subject, training={"learning_rate": rate}))
    assert not result.ok and problem in result.line


@pytest.mark.parametrize(("row", "texts"), [([5, 6, 7], 1), ([], 0)])
def test_overfitting_needs_different_texts(subject, row, texts):
    result = checks.check_overfitting(with_rows(subject, [row] * 40, [0, 1] * 20))
    assert not result.ok and f"{texts} different texts" in result.line and "see data.text_column" in result.line


def test_different_rows_deal_the_classes_in_turn(subject):
    rows = [[5, i] for i in range(10, 40)] + [[], [6, 1], [6, 1], [6, 2]]
    rare = with_rows(subject, rows, [0] * 31 + [1, 1, 1])
    chosen = rare.different_rows(6, 16)
    assert len(chosen) == 6
    assert (rare.split.labels[chosen] == 1).sum() == 2  # the third is a copy
    assert 30 not in chosen  # empty
    assert len(rare.different_rows(6, 1)) == 2  # what is left of them starts with 5 or 6
    np.testing.assert_array_equal(chosen, rare.different_rows(6, 16))


# The command.


@pytest.mark.slow
def test_command_on_a_new_job_leaves_only_its_data(tmp_path):
    job = make_job(tmp_path)
    done = job.run(command="check")
    assert done.code == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "all 7 checks passed"
    assert [path.name for path in job.run_dir.iterdir()] == ["data"]
    assert not job.model_dir.exists()


@pytest.mark.slow
def test_command_leaves_an_unfinished_run_as_it_was(tmp_path):
    job = make_job(tmp_path)
    kill_when(job, lambda: len(metrics_rows(job.run_dir)) >= 8)
    before = snapshot(job.run_dir)
    assert any(name.startswith("checkpoints/") for name in before)
    assert job.run(command="check").code == 0
    assert snapshot(job.run_dir) == before

    # With other data, which `run` would refuse; many texts are there under both labels.
    make_job(tmp_path, make_rows(seed=5) + [(text, label) for text, _ in make_rows(100, seed=6) for label in LABELS])
    done = job.run(command="check")
    assert done.code == 1
    assert done.last_line.startswith("error: 1 of 7 checks failed: labels.")
    assert re.search(r"^FAILED  labels: .*contradict each other", done.stdout, re.MULTILINE)
    assert snapshot(job.run_dir) == before
    assert sorted(path.name for path in job.run_dir.parent.iterdir()) == [".tiny.lock", "tiny"]


# Experts.


def test_an_expert_without_tokens_is_no_failure_and_a_cut_off_router_is_one(subject):
    experts = with_settings(subject, model={"num_experts": 8, "top_k": 1}, training={"recompute": True})

    def avoid_expert_3(model):
        model.encoder_layers[0].feed_forward.router.bias.assign([0.0, 0.0, 0.0, -50.0, 0.0, 0.0, 0.0, 0.0])

    result = checks.check_gradients(changed(experts, avoid_expert_3))
    assert result.ok, result.line
    assert "experts got none of these tokens" in result.line

    def cut_off(model):
        router = model.encoder_layers[0].feed_forward.router
        call = router.call
        router.call = lambda x, training=None: ops.stop_gradient(call(x))

    result = checks.check_gradients(changed(experts, cut_off))
    assert not result.ok
    assert "feed_forward/router/kernel" in result.line


@pytest.mark.slow
def test_a_job_with_experts_passes(subject):
    check(with_settings(subject, model={"num_experts": 4, "top_k": 2}, training={"recompute": True}), Lines())
