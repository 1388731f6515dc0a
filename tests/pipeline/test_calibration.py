"""The n-grams' weight and the temperature: least negative log-likelihood, whatever the validation split is like."""

import numpy as np
import pytest

from pipeline import calibration
from pipeline.evaluation import calibration_error, softmax


def loss(logits, gold):
    return -np.log(softmax(logits)[np.arange(len(gold)), gold]).mean()


def make_answers(rows=2000, classes=3, scale=1.0, seed=0):
    """Logits whose softmax, divided by `scale`, is the chance of each class."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(0.0, 2.0, (rows, classes))
    gold = (softmax(logits).cumsum(axis=1) < rng.random((rows, 1))).sum(axis=1)
    return logits * scale, gold


@pytest.mark.parametrize("scale", [0.3, 1.0, 4.0])
def test_the_temperature_that_answers_were_made_with_is_found(scale):
    logits, gold = make_answers(scale=scale)
    weights, temperature = calibration.fit(logits, [], gold)
    assert weights.shape == (0,)
    assert temperature == pytest.approx(scale, rel=0.1)
    assert loss(logits / temperature, gold) <= loss(logits, gold) + 1e-4
    assert calibration_error(softmax(logits / temperature), gold) < 0.03


def test_weight_and_temperature_are_the_best_of_a_grid():
    logits, gold = make_answers()
    noise = np.random.default_rng(1).normal(0.0, 1.0, logits.shape)
    encoder, scores = 3.0 * (logits / 2 + noise), 0.5 * (logits / 2 - noise)  # together they know all
    (weight,), temperature = calibration.fit(encoder, [scores], gold)
    assert (weight, temperature) == pytest.approx((6.0, 3.0), rel=0.1)
    found = loss((encoder + weight * scores) / temperature, gold)
    for w in weight * np.array([0.8, 1.0, 1.25]):
        for t in temperature * np.array([0.8, 1.0, 1.25]):
            assert found <= loss((encoder + w * scores) / t, gold) + 1e-6
    assert calibration.fit(encoder, [scores], gold) == ([weight], temperature)


def test_scores_that_mislead_get_no_weight():
    logits, gold = make_answers()
    misleading = np.random.default_rng(1).normal(size=logits.shape) - np.eye(3)[gold]
    weights, temperature = calibration.fit(logits, [misleading], gold)
    assert weights == 0
    assert temperature == calibration.fit(logits, [], gold)[1]


def test_each_of_several_scores_gets_its_weight():
    logits, gold = make_answers()
    rng = np.random.default_rng(1)
    noise, misleading = rng.normal(0.0, 1.0, logits.shape), rng.normal(size=logits.shape) - np.eye(3)[gold]
    parts = [0.5 * (logits / 2 + noise), misleading, 2.0 * (logits / 4 - noise / 2)]  # first and last know all
    weights, temperature = calibration.fit(logits, parts, gold)
    alone, alone_temperature = calibration.fit(logits, parts[:1], gold)
    assert weights[1] == 0
    assert alone == pytest.approx(0.0, abs=0.1) and alone_temperature == pytest.approx(1.0, rel=0.1)
    weights, temperature = calibration.fit(np.zeros_like(logits), parts, gold)
    assert weights / temperature == pytest.approx([2.0, 0.0, 1.0], rel=0.1)


@pytest.mark.parametrize("rows", [1, 30, 3000])
def test_where_all_answers_are_right(rows):
    """The mean probability is that of Laplace's rule, however large or small the logits are."""
    gold = np.arange(rows) % 3
    for scale in (0.5, 5.0):
        logits = scale * np.eye(3)[gold]
        _, temperature = calibration.fit(logits, [], gold)
        assert softmax(logits / temperature).max(axis=1).mean() == pytest.approx((rows + 1) / (rows + 2), abs=1e-4)
    _, temperature = calibration.fit(1e-4 * np.eye(3)[gold], [], gold)
    assert temperature == pytest.approx(calibration.TEMPERATURES[0])


def test_where_there_is_nothing_to_fit():
    assert calibration.fit(np.ones((5, 1)), [np.ones((5, 1))], np.zeros(5, int)) == (0.0, 1.0)
    assert calibration.fit(np.zeros((5, 2)), [np.zeros((5, 2))], np.zeros(5, int)) == (1.0, 1.0)
    logits, gold = make_answers()
    wrong = (gold + 1) % 3
    _, temperature = calibration.fit(10 * np.eye(3)[wrong], [], gold)
    assert temperature == pytest.approx(calibration.TEMPERATURES[1])
