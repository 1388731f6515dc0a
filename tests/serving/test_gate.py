"""The gate against a live version; no TensorFlow needed."""

import dataclasses
import re
import shutil

import numpy as np
import pytest

from pipeline import evaluation
from pipeline.config import JobConfig
from pipeline.contract import Manifest
from pipeline.errors import ArtifactError
from serving import gate as gates
from serving.data_gate import check_data, live_labels
from serving.gate import check_gate, measure_live, overruled
from tests.serving.tiny import LABELS, TEXTS, Tiny

COUNTS = dict(zip(LABELS, (40, 40, 20), strict=True))


@pytest.fixture(scope="module")
def tiny():
    return Tiny.build()


@pytest.fixture(scope="module")
def made(tiny, tmp_path_factory):
    return tiny.write_version(tmp_path_factory.mktemp("made") / "version")


@pytest.fixture(scope="module")
def live_models(made, tmp_path_factory):
    """`base_path/name` with one version, 3."""
    model_dir = tmp_path_factory.mktemp("live") / "tiny"
    shutil.copytree(made, model_dir / "3")
    return model_dir


@pytest.fixture(scope="module")
def gold(tiny):
    """The live version's own answers, three of them wrong."""
    gold = tiny.expected_logits(TEXTS).argmax(axis=1)
    gold[:3] = (gold[:3] + 1) % len(LABELS)
    return gold


def _figures(probabilities, gold, labels=LABELS):
    return evaluation.metrics(np.asarray(probabilities), gold, labels)


def _exact(gold, right, labels=LABELS):
    """Probabilities that are right on `right` rows."""
    answers = np.where(np.arange(len(gold)) < right, gold, (gold + 1) % len(labels))
    return np.eye(len(labels))[answers] * 0.8 + 0.2 / len(labels)


def _job(model_dir, data=None, **evaluation):
    return JobConfig.model_validate(
        {
            "name": "tiny",
            "data": {"train": "train.csv", **(data or {})},
            "evaluation": evaluation,
            "publish": {"base_path": str(model_dir.parent)},
        }
    )


def _gate(model_dir, gold, metrics, labels=LABELS, **config):
    live = measure_live(model_dir, TEXTS, gold, labels, "some data", None)
    job = _job(model_dir, {"allow_new_labels": True}, **config)
    return check_gate(job, labels, dict.fromkeys(labels, 30), metrics, "onnx/model.onnx", live)


def test_without_a_live_version_only_the_minimum_counts_and_what_is_missing_is_said(tmp_path, gold):
    metrics = _figures(_exact(gold, 5), gold)
    gate = _gate(tmp_path / "tiny", gold, metrics)
    assert (gate["passed"], gate["live"], gate["reasons"], gate["forced"]) == (True, None, [], {})
    assert gate["notes"] == ["no evaluation.min_value set", "no live version to compare with"]
    assert gate["value"] == pytest.approx(5 / 9)
    for minimum, passed in [(5 / 9, True), (0.56, False)]:
        gate = _gate(tmp_path / "tiny", gold, metrics, min_value=minimum)
        assert gate["passed"] is passed
        assert gate["notes"] == ["no live version to compare with"]
    assert re.search(r"accuracy 0\.5556 is below evaluation\.min_value 0\.56: .* change that key", gate["reasons"][0])


@pytest.mark.parametrize(("value", "passed"), [(0.1, True), (0.1 + 1e-7, True), (0.1 + 1e-5, False)])
def test_rounding_refuses_nothing(tmp_path, gold, value, passed):
    """The same weights have a somewhat different loss in another runtime."""
    gate = _gate(tmp_path / "tiny", gold, {"loss": value}, metric="loss", min_value=0.1)
    assert gate["passed"] is passed


@pytest.mark.parametrize(
    ("metric", "figures", "baseline", "passed"),
    [
        ("accuracy", {"accuracy": 0.8, "macro_f1": 0.1}, (0.7, 0.9), True),
        ("accuracy", {"accuracy": 0.8, "macro_f1": 1.0}, (0.8, 0.1), False),  # as good is not better
        ("macro_f1", {"accuracy": 0.1, "macro_f1": 0.8}, (0.9, 0.7), True),
        ("macro_f1", {"accuracy": 1.0, "macro_f1": 0.6}, (0.1, 0.7), False),
        ("loss", {"accuracy": 0.8, "loss": 0.3}, (0.7, 0.9), True),
        ("loss", {"accuracy": 0.6, "loss": 0.3}, (0.7, 0.1), False),
        ("accuracy", {"accuracy": float("nan")}, (0.0, 0.0), False),
    ],
)
def test_it_can_be_asked_to_beat_the_baseline(tmp_path, metric, figures, baseline, passed):
    job = _job(tmp_path / "tiny", metric=metric, beat_baseline=True)
    baseline = {"features": "word 1-2-grams", "accuracy": baseline[0], "macro_f1": baseline[1]}
    gate = check_gate(job, LABELS, COUNTS, figures, "onnx/model.onnx", None, baseline)
    figure = "macro_f1" if metric == "macro_f1" else "accuracy"
    assert (gate["passed"], gate["baseline"]) == (passed, baseline[figure])
    assert passed or gate["reasons"][0] == (
        f"test {figure} {figures[figure]:.4f} is not above {baseline[figure]:.4f} of the baseline (TF-IDF of word "
        "1-2-grams and a linear SVM), which evaluation.beat_baseline asks for: train a better model, or change that key"
    )
    # Nobody asked for it.
    figures = {**figures, metric: 0.5}
    gate = check_gate(_job(tmp_path / "tiny", metric=metric), LABELS, COUNTS, figures, "", None, baseline)
    assert (gate["passed"], gate["baseline"]) == (True, None)


def test_a_baseline_that_is_to_be_beaten_must_be_there(tmp_path):
    gate = check_gate(_job(tmp_path / "tiny", beat_baseline=True), LABELS, COUNTS, {"accuracy": 1.0}, "", None)
    assert not gate["passed"]
    assert "no baseline was fitted: run `python -m pipeline evaluate JOB.toml`" in gate["reasons"][0]


def test_figures_that_are_no_numbers_never_pass(tmp_path, gold):
    for config in ({}, {"min_value": 5.0}):
        gate = _gate(tmp_path / "tiny", gold, {"loss": float("nan")}, metric="loss", **config)
        assert "test loss is not a finite number" in gate["reasons"][-1]


@pytest.mark.parametrize(
    ("right", "max_regression", "passed"),
    [(6, 0.0, True), (7, 0.0, True), (5, 0.0, False), (5, 0.12, True), (4, 0.12, False)],
)
def test_accuracy_against_the_live_version(live_models, gold, right, max_regression, passed):
    """The live version has 6 of 9 right."""
    gate = _gate(live_models, gold, _figures(_exact(gold, right), gold), max_regression=max_regression)
    assert gate["live"] == {"version": 3, "value": pytest.approx(6 / 9)}
    assert gate["passed"] is passed
    if not passed:
        assert "0.6667 of live version 3" in gate["reasons"][0]
        assert "evaluation.max_regression" in gate["reasons"][0]


def test_loss_is_better_when_smaller(live_models, tiny, gold):
    live_loss = _figures(tiny.expected_probabilities(TEXTS), gold)["loss"]
    for factor, passed in [(0.99, True), (1.01, False)]:
        metrics = {**_figures(_exact(gold, 9), gold), "loss": live_loss * factor}
        gate = _gate(live_models, gold, metrics, metric="loss")
        assert gate["live"]["value"] == pytest.approx(live_loss, rel=1e-4)
        assert gate["passed"] is passed
    assert _gate(live_models, gold, metrics, metric="loss", max_regression=live_loss * 0.02)["passed"]
    gate = _gate(live_models, gold, metrics, metric="loss", max_regression=1.0, min_value=live_loss * 0.5)
    assert not gate["passed"]
    assert "above evaluation.min_value" in gate["reasons"][0]


def test_macro_f1(live_models, tiny, gold):
    live = _figures(tiny.expected_probabilities(TEXTS), gold)["macro_f1"]
    gate = _gate(live_models, gold, _figures(_exact(gold, 9), gold), metric="macro_f1")
    assert gate["passed"] and gate["value"] == 1.0
    assert gate["live"]["value"] == pytest.approx(live, abs=1e-6)


def test_labels_in_another_order_and_changed(live_models, tiny, gold):
    """A live version is measured by label, not by index; a label it does not know it never finds."""
    turned = LABELS[::-1]
    turned_gold = np.array([turned.index(LABELS[i]) for i in gold])
    gate = _gate(live_models, turned_gold, _figures(_exact(turned_gold, 9, turned), turned_gold, turned), turned)
    assert gate["live"]["value"] == pytest.approx(6 / 9)

    more = ["a new one", *LABELS]
    more_gold = np.array([0 if i in (3, 4) else more.index(LABELS[g]) for i, g in enumerate(gold)])
    gate = _gate(live_models, more_gold, _figures(_exact(more_gold, 9, more), more_gold, more), more)
    assert gate["live"]["value"] == pytest.approx(4 / 9)
    assert np.isfinite(_gate(live_models, more_gold, {"loss": 1.0}, more, metric="loss")["live"]["value"])

    # A label gone: rows that the live version gives to it are wrong.
    fewer = LABELS[:2]
    fewer_gold = np.minimum(gold, 1)
    gate = _gate(live_models, fewer_gold, _figures(_exact(fewer_gold, 9, fewer), fewer_gold, fewer), fewer)
    answers = tiny.expected_logits(TEXTS).argmax(axis=1)
    assert gate["live"]["value"] == pytest.approx((answers == fewer_gold).mean())


def test_macro_f1_counts_the_classes_of_the_test_rows_for_both(live_models, tiny, gold):
    """A class without test rows counts for neither, whether or not a model has it or finds it."""
    present = np.minimum(gold, 1)  # no row of the third class is left, though the live version finds some
    assert (tiny.expected_logits(TEXTS).argmax(axis=1) == 2).any()
    per_class = _figures(tiny.expected_probabilities(TEXTS), present)["per_class"]
    expected = np.mean([per_class[label]["f1"] for label in LABELS[:2]])
    for labels in (LABELS, LABELS[:2], [*LABELS, "a new one"]):
        metrics = _figures(_exact(present, 9, labels), present, labels)
        gate = _gate(live_models, present, metrics, labels, metric="macro_f1")
        assert gate["value"] == 1.0
        assert gate["live"]["value"] == pytest.approx(expected)


@pytest.mark.parametrize("damage", ["onnx/model.onnx", "tokenizer.model", "manifest.json"])
def test_damaged_live_version_is_no_free_pass(made, gold, tmp_path, damage):
    shutil.copytree(made, tmp_path / "tiny" / "3")
    file = tmp_path / "tiny" / "3" / damage
    file.write_bytes(file.read_bytes()[:-7])
    gate = _gate(tmp_path / "tiny", gold, _figures(_exact(gold, 9), gold))
    assert not gate["passed"]
    assert gate["live"] == {"version": 3, "value": None}
    (reason,) = [reason for reason in gate["reasons"] if damage in reason]
    assert "live version 3 cannot be compared" in reason
    assert "restore or remove" in reason


def test_the_highest_number_is_live(made, gold, tmp_path):
    for name in ("3", "0012", "13.tmp"):
        shutil.copytree(made, tmp_path / "tiny" / name)
    assert _gate(tmp_path / "tiny", gold, _figures(_exact(gold, 9), gold))["live"]["version"] == 12


def test_the_live_version_is_measured_once_for_the_same_model_and_rows(made, gold, tmp_path, monkeypatch):
    shutil.copytree(made, tmp_path / "tiny" / "3")

    def measure(fingerprint, known):
        return measure_live(tmp_path / "tiny", TEXTS, gold, LABELS, fingerprint, known)

    known = measure("some data", None)
    assert known["metrics"] == evaluation.metrics(_probabilities(made), gold, LABELS)
    monkeypatch.setattr(gates, "measure", lambda *args: "measured again")
    assert measure("some data", known) == known
    assert measure("other data", known)["metrics"] == "measured again"
    for damaged in ({}, [], None, {**known, "onnx_sha256": "another"}, {**known, "version": 2}):
        assert measure("some data", damaged)["metrics"] == "measured again"
    file = tmp_path / "tiny" / "3" / "onnx" / "model.onnx"
    file.write_bytes(file.read_bytes()[:-7])  # what was measured before does not hold for it
    assert "onnx/model.onnx is damaged" in measure("some data", known)["problem"]


def _probabilities(version_dir):
    return gates.OnnxClassifier.load(version_dir).probabilities(TEXTS)


# Labels and training rows.


@pytest.fixture
def live(made, tmp_path):
    """A function: changes of the live manifest -> the model directory."""

    def make(**changes):
        directory = shutil.copytree(made, tmp_path / "tiny" / "3", dirs_exist_ok=True)
        dataclasses.replace(Manifest.read(made), **{"label_counts": COUNTS, **changes}).write(directory)
        return tmp_path / "tiny"

    return make


def _counts(*counts, labels=LABELS):
    return dict(zip(labels, counts, strict=True))


def _reasons(model_dir, labels, counts, data=None, **config):
    gate = check_data(_job(model_dir, data, **config), labels, counts)
    assert gate["passed"] is (not gate["reasons"])
    assert gate["value"] is None
    return gate["reasons"]


def test_data_like_that_of_the_live_version_passes(live):
    gate = check_data(_job(live()), LABELS, _counts(42, 40, 18))
    assert (gate["passed"], gate["notes"], gate["live"]) == (True, [], {"version": 3, "value": None})


def test_a_lost_class(live):
    (reason,) = _reasons(live(), LABELS, _counts(50, 50, 0))
    assert f"no training row is left of {LABELS[2]!r}, which live version 3 was trained on" in reason
    assert "--force" in reason
    shutil.copytree(live() / "3", live() / "0012")
    (reason,) = _reasons(live(), LABELS, _counts(50, 50, 0))
    assert "which live version 12 was trained on" in reason
    shutil.rmtree(live() / "0012")
    # Nor is a version from before counts were kept a way around.
    assert len(_reasons(live(label_counts={}), LABELS, _counts(50, 50, 0))) == 1
    # One that the live version was published without, by --force, is lost already.
    assert _reasons(live(label_counts=_counts(50, 50, 0)), LABELS, _counts(50, 50, 0)) == []


def test_indices_that_would_change_their_meaning(live):
    turned = [LABELS[1], LABELS[0], LABELS[2]]
    (reason,) = _reasons(live(), turned, _counts(40, 40, 20, labels=turned))
    assert "(2 of 3, e.g. 0 from 'bad' in live version 3 to 'good')" in reason and "--fresh" in reason
    reasons = _reasons(live(), LABELS[:2], _counts(50, 50, labels=LABELS[:2]))
    assert f"(1 of 3, e.g. 2 from {LABELS[2]!r} in live version 3 to 'none')" in reasons[1]


def test_new_labels(live):
    labels = [*LABELS, "a new one"]
    counts = _counts(40, 40, 20, 900, labels=labels)
    (reason,) = _reasons(live(), labels, counts)
    assert "live version 3 does not have the labels 'a new one': set data.allow_new_labels = true" in reason
    # Allowed, it may take its share from all others.
    assert _reasons(live(), labels, counts, {"allow_new_labels": True}) == []
    # In any other place than the end it changes what indices mean.
    labels = ["a new one", *LABELS]
    (reason,) = _reasons(live(), labels, _counts(90, 40, 40, 20, labels=labels), {"allow_new_labels": True})
    assert "(3 of 3, e.g. 0 from 'bad'" in reason


@pytest.mark.parametrize(
    ("counts", "config", "moved"),
    [
        ((60, 20, 20), {}, None),  # by 20 points, as much as is allowed
        ((61, 19, 20), {}, "2 of 3 labels, e.g. 'bad' from 40.0% to 61.0%, 'good' from 40.0% to 19.0%"),
        ((6100, 1900, 2000), {}, "2 of 3 labels, e.g. 'bad' from 40.0% to 61.0%, 'good' from 40.0% to 19.0%"),
        ((61, 19, 20), {"max_label_shift": 0.3}, None),
        ((44, 36, 20), {"max_label_shift": 0.03}, "2 of 3 labels, e.g. 'bad' from 40.0% to 44.0%"),
        ((98, 2, 2), {"max_label_shift": 1.0}, None),
    ],
)
def test_moved_label_shares(live, counts, config, moved):
    reasons = _reasons(live(), LABELS, _counts(*counts), **config)
    if moved is None:
        assert reasons == []
    else:
        (reason,) = reasons
        assert "evaluation.max_label_shift" in reason and moved in reason


def test_label_shares_that_are_not_compared_are_said(live):
    notes = check_data(_job(live(label_counts={})), LABELS, _counts(98, 2, 2))["notes"]
    assert notes == ["label shares not compared: the manifest of live version 3 does not have them"]
    notes = check_data(_job(live(), max_label_shift=1.0), LABELS, _counts(98, 2, 2))["notes"]
    assert notes == ["label shares not compared: evaluation.max_label_shift is 1"]


def test_too_few_rows_with_and_without_a_live_version(live, tmp_path):
    none = tmp_path / "none" / "tiny"
    assert _reasons(none, LABELS, _counts(5, 2, 2)) == []
    (reason,) = _reasons(none, LABELS, _counts(5, 1, 1))
    assert f"a single training row is all there is of 'good', {LABELS[2]!r}" in reason
    reasons = _reasons(live(), LABELS, _counts(0, 7, 0), max_label_shift=1.0)
    assert "all 7 training rows are of one class, 'good'" in reasons[0]
    assert f"no training row is left of 'bad', {LABELS[2]!r}" in reasons[1]


def test_every_reason_is_given(live, gold):
    labels = [LABELS[1], LABELS[0], "a new one"]
    model_dir = live()
    job = _job(model_dir, min_value=0.9, max_regression=0.1)
    stored = measure_live(model_dir, TEXTS, gold, LABELS, "some data", None)
    gate = check_gate(job, labels, _counts(90, 9, 1, labels=labels), {"accuracy": 0.2}, "onnx/model.onnx", stored)
    assert not gate["passed"]
    expected = [
        "a single training row", "no training row is left", "would change their meaning", "does not have the labels",
        "max_label_shift", "evaluation.min_value", "evaluation.max_regression",
    ]  # fmt: skip
    assert len(gate["reasons"]) == len(expected)
    for part, reason in zip(expected, gate["reasons"], strict=True):
        assert part in reason


def test_labels_of_the_live_version(live, tmp_path):
    assert live_labels(tmp_path / "none") == []
    assert live_labels(live()) == LABELS
    (tmp_path / "tiny" / "4").mkdir()
    with pytest.raises(ArtifactError, match=r"labels of live version 4, .* cannot be told .*Restore or remove .*/4\."):
        live_labels(tmp_path / "tiny")


def test_an_overruled_gate_says_by_whom(live, monkeypatch):
    gate = check_data(_job(live()), LABELS, _counts(50, 50, 0))
    forced = overruled(gate)["forced"]
    assert forced["reasons"] == gate["reasons"] != []
    assert re.fullmatch(r"[^@]+@[^@]+", forced["by"])
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00", forced["at"])

    def nobody():
        raise OSError("No username set in the environment")

    monkeypatch.setattr("getpass.getuser", nobody)
    assert re.match(r"\d+@", overruled(gate)["forced"]["by"])
