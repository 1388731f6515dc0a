"""The gate against a live version; no TensorFlow needed."""

import shutil

import numpy as np
import pytest

from pipeline import evaluation
from pipeline.config import EvaluationConfig
from pipeline.errors import GateRefused
from serving.gate import check_gate, require_passed
from tests.serving.tiny import LABELS, TEXTS, Tiny


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


def _gate(model_dir, gold, metrics, labels=LABELS, **config):
    return check_gate(EvaluationConfig(**config), metrics, model_dir, TEXTS, gold, labels)


def test_without_a_live_version_only_the_minimum_counts(tmp_path, gold):
    metrics = _figures(_exact(gold, 5), gold)
    gate = _gate(tmp_path / "none", gold, metrics)
    assert (gate["passed"], gate["live"], gate["reasons"]) == (True, None, [])
    assert gate["value"] == pytest.approx(5 / 9)
    for minimum, passed in [(5 / 9, True), (0.56, False)]:
        assert _gate(tmp_path / "none", gold, metrics, min_value=minimum)["passed"] is passed
    with pytest.raises(GateRefused, match=r"accuracy 0\.5556 is below evaluation\.min_value 0\.56.*see x/report\.json"):
        require_passed(_gate(tmp_path / "none", gold, metrics, min_value=0.56), "x/report.json")


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

    # A label gone: rows that the live version gives to it are wrong, and its F1 of 0 does not count.
    fewer = LABELS[:2]
    fewer_gold = np.minimum(gold, 1)
    gate = _gate(live_models, fewer_gold, _figures(_exact(fewer_gold, 9, fewer), fewer_gold, fewer), fewer)
    answers = tiny.expected_logits(TEXTS).argmax(axis=1)
    assert gate["live"]["value"] == pytest.approx((answers == fewer_gold).mean())
    f1 = _gate(live_models, fewer_gold, {"macro_f1": 1.0}, fewer, metric="macro_f1")["live"]["value"]
    per_class = _figures(tiny.expected_probabilities(TEXTS), fewer_gold)["per_class"]
    assert f1 == pytest.approx(np.mean([per_class[label]["f1"] for label in fewer]))


@pytest.mark.parametrize("damage", ["onnx/model.onnx", "tokenizer.model", "manifest.json"])
def test_damaged_live_version_is_no_free_pass(made, gold, tmp_path, damage):
    shutil.copytree(made, tmp_path / "tiny" / "3")
    file = tmp_path / "tiny" / "3" / damage
    file.write_bytes(file.read_bytes()[:-7])
    gate = _gate(tmp_path / "tiny", gold, _figures(_exact(gold, 9), gold))
    assert not gate["passed"]
    assert gate["live"] == {"version": 3, "value": None}
    assert "live version 3 cannot be compared" in gate["reasons"][0]
    assert damage in gate["reasons"][0]


def test_the_highest_number_is_live(made, gold, tmp_path):
    for name in ("3", "0012", "13.tmp"):
        shutil.copytree(made, tmp_path / "tiny" / name)
    assert _gate(tmp_path / "tiny", gold, _figures(_exact(gold, 9), gold))["live"]["version"] == 12
