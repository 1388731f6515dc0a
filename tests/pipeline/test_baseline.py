import json

import numpy as np
import pytest

from pipeline import baseline
from pipeline.baseline import CHARACTERS, WORDS, choose_features, choose_rows, compare, fit_and_predict, mcnemar
from pipeline.errors import Interrupted

ENGLISH = ["the film was good", "a dull plot", "I would see it again", "dreadful"]
CHINESE = ["这部电影非常好看。", "剧情无聊,演员也不好!"]


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        (ENGLISH, WORDS),
        (["good", "bad", "Straße"], WORDS),  # no white space at all
        (["영화가 정말 좋았다"], WORDS),
        (["यह फ़िल्म बहुत अच्छी थी"], WORDS),
        (["7 of 10", "3"], WORDS),
        (CHINESE, CHARACTERS),
        (["ภาษาไทยเป็นภาษาที่สวยงาม มาก"], CHARACTERS),
        (["とてもいい映画でした"], CHARACTERS),
        ([*CHINESE, "the iPhone 手机 很好"], CHARACTERS),
        ([*ENGLISH, "green 茶 please"], WORDS),
        (["?! ...", ":-)"], CHARACTERS),
        (["", ""], CHARACTERS),
    ],
)
def test_features_are_chosen_by_the_texts(texts, expected):
    assert choose_features(texts) == expected


def test_words_are_whole_in_every_script():
    """A letter is a word, and a vowel sign of Hindi ends none."""
    found = baseline._WORD.findall("I saw फ़िल्म, naïve cafe\u0301!")
    assert found == ["I", "saw", "फ़िल्म", "naïve", "cafe\u0301"]


@pytest.mark.parametrize(
    ("texts", "labels", "test_texts", "expected"),
    [
        # The order of the words decides: pairs are features.
        (["not good", "good not"] * 4, [0, 2] * 4, ["good not", "not good"], [2, 0]),
        (["a", "b"] * 4, [1, 0] * 4, ["b", "a", "A"], [0, 1, 1]),  # words of one letter, upper case
        (["好看", "无聊"] * 4, [0, 1] * 4, ["很无聊", "真好看"], [1, 0]),
        ([":-)", ":-("] * 4, [0, 1] * 4, [":-(", ":-)", ""], [1, 0, None]),  # no words
        (["a", "b", "c"] * 4, [0, 3, 1] * 4, ["c", "a", "b"], [1, 0, 3]),  # no row of class 2
        (["a", "b"], [2, 2], ["c", ""], [2, 2]),  # one class
        (["", "", ""], [0, 2, 2], ["a"], [2]),  # nothing to go by
    ],
)
def test_predictions(texts, labels, test_texts, expected):
    _, found = fit_and_predict(texts, np.array(labels, np.int32), test_texts)
    assert [a for a, b in zip(found, expected, strict=True) if b is not None] == [b for b in expected if b is not None]
    assert set(found) <= set(labels)
    np.testing.assert_array_equal(fit_and_predict(texts, np.array(labels, np.int32), test_texts)[1], found)


def test_rows_to_fit_on_are_a_fixed_sample(monkeypatch):
    lengths = np.full(1000, 10)
    assert choose_rows(lengths, 2).all()
    monkeypatch.setattr(baseline, "MAX_CHARACTERS", 1005)
    chosen = choose_rows(lengths, 2)
    assert chosen.sum() == 100
    np.testing.assert_array_equal(choose_rows(lengths, 2), chosen)
    assert 30 < chosen[:500].sum() < 70  # from everywhere
    monkeypatch.setattr(baseline, "MAX_CHARACTERS_TIMES_CLASSES", 1000)
    assert choose_rows(lengths, 5).sum() == 20
    assert choose_rows(lengths * 1000, 2).sum() == 1  # longer than that, but something to fit on


@pytest.mark.parametrize(
    ("only_ours", "only_baseline", "p_value"),
    [
        (1, 5, 0.21875),  # 2 (C(6, 0) + C(6, 1)) / 2^6
        (5, 1, 0.21875),
        (0, 5, 0.0625),  # 2 / 2^5
        (10, 1, 0.01171875),  # 2 (1 + 11) / 2^11
        (3, 3, 1.0),
        (0, 0, 1.0),
    ],
)
def test_mcnemar_by_hand(only_ours, only_baseline, p_value):
    ours = np.repeat([True, False, True, False], [only_ours, only_baseline, 7, 2])
    theirs = np.repeat([False, True, True, False], [only_ours, only_baseline, 7, 2])
    found = mcnemar(ours, theirs)
    assert found == {
        "only_ours_right": only_ours,
        "only_baseline_right": only_baseline,
        "p_value": pytest.approx(p_value, rel=1e-12),
    }


@pytest.fixture
def data_dir(tmp_path):
    """A split whose test rows the baseline has right but for the last: 0 0 1 1 0, found 0 0 1 1 1."""
    splits = {
        "train": (["good", "bad"] * 5, [0, 1] * 5),
        "test": (["good", "good", "bad", "bad", "bad"], [0, 0, 1, 1, 0]),
    }
    for name, (texts, labels) in splits.items():
        (tmp_path / name).mkdir()
        for array in ("tokens", "offsets", "rows"):
            np.save(tmp_path / name / f"{array}.npy", np.zeros(1, np.int32))
        np.save(tmp_path / name / "labels.npy", np.array(labels, np.int32))
        (tmp_path / name / "texts.jsonl").write_text("".join(json.dumps(text) + "\n" for text in texts))
    return tmp_path


@pytest.mark.parametrize(
    ("ours", "difference", "only", "better"),
    [([0, 0, 1, 1, 0], 0.2, (1, 0), True), ([0, 0, 1, 0, 0], 0.0, (1, 1), False), ([1] * 5, -0.4, (0, 2), False)],
)
def test_comparison_on_the_same_rows(data_dir, ours, difference, only, better):
    found = compare(data_dir, np.array(ours))
    assert found["features"] == WORDS
    assert (found["train_rows"], found["fitted_rows"], found["accuracy"]) == (10, 10, 0.8)
    # Class 0: precision 1, recall 2/3, F1 4/5; class 1: precision 2/3, recall 1, F1 4/5.
    assert found["macro_f1"] == pytest.approx(0.8, rel=1e-12)
    assert found["difference"] == pytest.approx(difference, abs=1e-12)
    assert (found["mcnemar"]["only_ours_right"], found["mcnemar"]["only_baseline_right"]) == only
    assert (found["better"], found["significant"]) == (better, False)
    assert json.loads(json.dumps(found)) == found


def test_significance_and_a_sample_are_told(data_dir, monkeypatch):
    monkeypatch.setattr(baseline, "SIGNIFICANT", 0.6)
    monkeypatch.setattr(baseline, "MAX_CHARACTERS", 20)
    found = compare(data_dir, np.array([1] * 5))
    assert found["mcnemar"]["p_value"] == 0.5 and found["significant"] is True
    assert 4 <= found["fitted_rows"] < found["train_rows"] == 10


def test_it_can_be_stopped(data_dir):
    """After each step, whichever it is: libraries may have dropped what a signal raised."""
    for allowed in range(4):
        left = iter(range(allowed))

        def stop(left=left):
            if next(left, None) is None:
                raise Interrupted

        with pytest.raises(Interrupted):
            compare(data_dir, np.zeros(5), stop)
