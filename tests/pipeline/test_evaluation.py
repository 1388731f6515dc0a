import json
import math

import numpy as np
import pytest

from pipeline import evaluation

# Right:     a    a    a    b    b    c
# Predicted: a    a    b    b    c    c
GOLD = np.array([0, 0, 0, 1, 1, 2], np.int32)
PROBABILITIES = np.array(
    [
        [0.8, 0.1, 0.1],
        [0.5, 0.3, 0.2],
        [0.2, 0.7, 0.1],
        [0.1, 0.8, 0.1],
        [0.1, 0.3, 0.6],
        [0.0, 0.0, 1.0],
    ]
)
CLOSE = {"rel": 1e-12, "abs": 1e-12}


def test_metrics_by_hand():
    found = evaluation.metrics(PROBABILITIES, GOLD, ["a", "b", "c"])
    assert found["rows"] == 6
    assert found["accuracy"] == pytest.approx(4 / 6, **CLOSE)
    # a: 2 of 2 predictions right, 2 of 3 rows found; b: 1 of 2 and 1 of 2; c: 1 of 2 and 1 of 1.
    expected = {"a": (1.0, 2 / 3, 4 / 5, 3), "b": (1 / 2, 1 / 2, 1 / 2, 2), "c": (1 / 2, 1.0, 2 / 3, 1)}
    assert list(found["per_class"]) == ["a", "b", "c"]
    for label, (precision, recall, f1, support) in expected.items():
        figures = {"precision": precision, "recall": recall, "f1": f1, "support": support}
        assert found["per_class"][label] == pytest.approx(figures, **CLOSE)
    assert found["macro_f1"] == pytest.approx((4 / 5 + 1 / 2 + 2 / 3) / 3, **CLOSE)
    assert found["confusion_matrix"] == [[2, 1, 0], [0, 1, 1], [0, 0, 1]]
    # -ln of 0.8, 0.5, 0.2, 0.8, 0.3 and 1, of which the product is 0.0192.
    assert found["loss"] == pytest.approx(-math.log(0.0192) / 6, rel=1e-9)
    # Right: 0.8, 0.5, 0.8, 1; wrong: 0.7, 0.6. Of the 8 pairs the right one is higher in 6.
    assert found["confidence_auroc"] == pytest.approx(6 / 8, **CLOSE)
    expected = [(0.0, 1, 4 / 6), (0.5, 1, 4 / 6), (0.6, 5 / 6, 3 / 5), (0.7, 4 / 6, 3 / 4), (0.8, 3 / 6, 1.0)]
    expected += [(threshold, 1 / 6, 1.0) for threshold in (0.9, 0.95, 0.99)]
    assert [list(row) for row in found["thresholds"]] == [["threshold", "coverage", "accuracy"]] * 8
    assert [tuple(row.values()) for row in found["thresholds"]] == [pytest.approx(row, **CLOSE) for row in expected]
    assert json.loads(json.dumps(found)) == found


@pytest.mark.parametrize(("gold", "accuracy"), [([0, 1], 1.0), ([1, 0], 0.0)])
def test_confidence_where_all_are_right_or_all_wrong_and_none_is_sure(gold, accuracy):
    found = evaluation.metrics(np.array([[0.6, 0.4], [0.4, 0.6]]), np.array(gold), ["a", "b"])
    assert found["confidence_auroc"] is None
    assert found["thresholds"][2] == {"threshold": 0.6, "coverage": 1.0, "accuracy": accuracy}
    assert found["thresholds"][3] == {"threshold": 0.7, "coverage": 0.0, "accuracy": None}


def test_confidence_that_tells_nothing_and_a_tie():
    correct = np.array([True, False, True, False])
    assert evaluation.confidence_auroc(np.full(4, 0.7), correct) == 0.5
    assert evaluation.confidence_auroc(np.array([0.9, 0.9, 0.8, 0.2]), correct) == (0.5 + 1 + 0 + 1) / 4


def test_a_class_without_rows_and_a_class_never_predicted():
    # Right: a a b b; predicted: a d a b. Class c is neither there nor predicted, d is predicted only.
    gold = np.array([0, 0, 1, 1])
    probabilities = np.full((4, 4), 0.1)
    probabilities[np.arange(4), [0, 3, 0, 1]] = 0.7
    found = evaluation.metrics(probabilities, gold, ["a", "b", "c", "d"])
    assert found["accuracy"] == 0.5
    zero = {"precision": 0.0, "recall": 0.0, "f1": 0.0, "support": 0}
    assert found["per_class"]["c"] == found["per_class"]["d"] == zero
    # a: precision 1/2, recall 1/2; b: precision 1, recall 1/2, F1 2/3. Only they have rows.
    assert found["macro_f1"] == pytest.approx((1 / 2 + 2 / 3) / 2, **CLOSE)
    assert found["confusion_matrix"] == [[1, 0, 0, 1], [1, 1, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0]]


def test_loss_of_a_probability_of_zero_is_finite():
    found = evaluation.metrics(np.array([[1.0, 0.0]]), np.array([1]), ["a", "b"])
    assert found["loss"] == pytest.approx(-math.log(np.finfo(np.float32).tiny), rel=1e-9)
    assert found["accuracy"] == 0.0


def test_calibration_error_by_hand():
    # Bins of width 1/5: 0.45 | 0.7 0.75 | 0.9 1.0
    # bin 2: 1 row, right 0 of 1: gap 0.45; bin 3: right 1 of 2, confidence 0.725: gap 0.225;
    # bin 4: right 2 of 2, confidence 0.95: gap 0.05. (1 * 0.45 + 2 * 0.225 + 2 * 0.05) / 5 = 0.2
    probabilities = np.array(
        [[0.45, 0.3, 0.25], [0.7, 0.2, 0.1], [0.1, 0.75, 0.15], [0.05, 0.05, 0.9], [1.0, 0.0, 0.0]]
    )
    gold = np.array([1, 0, 0, 2, 0])
    assert evaluation.calibration_error(probabilities, gold, bins=5) == pytest.approx(0.2, **CLOSE)


@pytest.mark.parametrize(("gold", "expected"), [([0, 1], 0.0), ([1, 0], 1.0), ([0, 0], 0.5)])
def test_calibration_error_of_certain_answers(gold, expected):
    assert evaluation.calibration_error(np.eye(2), np.array(gold)) == pytest.approx(expected, **CLOSE)


def test_calibration_error_needs_no_row_in_every_bin():
    # 15 bins: 0.9 and 0.92 share one (right 1 of 2), 0.62 is alone: (2 * |0.5 - 0.91| + 0.38) / 3 = 0.4
    probabilities = np.array([[0.9, 0.1], [0.08, 0.92], [0.62, 0.38]])
    assert evaluation.calibration_error(probabilities, np.array([0, 0, 0])) == pytest.approx(0.4, **CLOSE)


def test_softmax():
    # Exponentials 1, 2, 5 of logits 0, ln 2, ln 5.
    logits = np.log(np.array([[1, 2, 5]], np.float32))
    np.testing.assert_allclose(evaluation.softmax(logits), [[1 / 8, 2 / 8, 5 / 8]], atol=1e-7, rtol=0)
    assert evaluation.softmax(logits).dtype == np.float64
    np.testing.assert_array_equal(evaluation.softmax([[1e4, -1e4], [-1e4, -1e4]]), [[1.0, 0.0], [0.5, 0.5]])


class Rows:
    """Stands in for a `Split`: row i is the token i."""

    def __len__(self):
        return 5

    def token_ids(self, rows):
        return np.asarray(rows)[:, None]


def predict(token_ids):
    return np.concatenate([token_ids, token_ids**2], axis=1)


def test_predict_logits_keeps_the_order_of_the_rows():
    stops = []
    plan = [np.array([4, 1]), np.array([0]), np.array([3, 2])]
    logits = evaluation.predict_logits(predict, Rows(), plan, stop=lambda: stops.append(1))
    np.testing.assert_array_equal(logits, [[0, 0], [1, 1], [2, 4], [3, 9], [4, 16]])
    assert logits.dtype == np.float32
    assert len(stops) == 3


def test_predict_logits_can_be_stopped():
    def stop():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        evaluation.predict_logits(predict, Rows(), [np.arange(5)], stop)
