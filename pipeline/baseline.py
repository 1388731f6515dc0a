"""The linear baseline: TF-IDF and a linear support vector machine on the same split, to compare the model with.

It is strong where texts are few (Wang & Manning 2012, "Baselines and Bigrams") and takes seconds: a model that is
not better has not earned its place.
"""

import itertools
import re
import unicodedata
import warnings

import numpy as np

from pipeline import dataset

# Fitting takes time in proportion to both; at these limits half a minute to a minute on one core. 30 million characters
# are 22,500 film reviews of 1,300, or 300,000 texts of 100. Each class is a problem of its own, solved on all texts.
MAX_CHARACTERS = 30_000_000
MAX_CHARACTERS_TIMES_CLASSES = 150_000_000

SIGNIFICANT = 0.05  # p-values below

WORDS, CHARACTERS = "word 1-2-grams", "character 1-2-grams"

# Scripts that put no space between words: Thai, Lao, Burmese, Khmer, kana, Chinese characters.
_UNSPACED = re.compile(
    "[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3005-\u3007\u3040-\u30ff\u31f0-\u31ff\u3400-\u4dbf\u4e00-\u9fff"
    "\uf900-\ufaff\uff66-\uff9f\U00020000-\U0003ffff]"
)
# `\w` alone would cut Hindi and Tamil words at their vowel signs, which are marks; joiners stand within words, too.
_MARKS = "".join(c for c in map(chr, range(0x300, 0xFF00)) if unicodedata.category(c) in ("Mn", "Mc"))
_WORD = re.compile(rf"[\w{_MARKS}\u200c\u200d]+")


def compare(data_dir, predicted, stop=lambda: None):
    """Fits the baseline on the training split and compares its answers on the test split with a model's.

    Args:
        data_dir: a directory that `pipeline.dataset.prepare` made.
        predicted: int [N], the model's label index for each test row.
        stop: called between steps; may raise to end early.

    Returns:
        Plain JSON values: features (WORDS or CHARACTERS), fitted_rows (fewer than train_rows where the training texts
        exceed MAX_CHARACTERS or MAX_CHARACTERS_TIMES_CLASSES), accuracy and macro_f1 of the baseline, difference (the
        model's accuracy minus that), mcnemar (as from `mcnemar`), better (the model's accuracy is higher) and
        significant (the p-value is below SIGNIFICANT).

    Raises:
        DataError: `data_dir` is incomplete.
    """
    import sklearn.metrics

    train, test = (dataset.Split.load(data_dir, name).labels for name in ("train", "test"))
    lengths = np.fromiter(map(len, dataset.iterate_texts(data_dir, "train")), np.int64, len(train))
    chosen = choose_rows(lengths, len(np.unique(train)))
    stop()
    texts = list(itertools.compress(dataset.iterate_texts(data_dir, "train"), chosen))
    features, answers = fit_and_predict(texts, train[chosen], dataset.load_texts(data_dir, "test"), stop)
    accuracy = float((answers == test).mean())
    difference = float((predicted == test).mean()) - accuracy
    tested = mcnemar(predicted == test, answers == test)
    # Over the classes that have test rows, as in `pipeline.evaluation.metrics`.
    f1 = sklearn.metrics.f1_score(test, answers, labels=np.unique(test), average=None, zero_division=0.0)
    return {
        "features": features,
        "train_rows": len(train),
        "fitted_rows": len(texts),
        "accuracy": accuracy,
        "macro_f1": float(f1.mean()),
        "difference": difference,
        "mcnemar": tested,
        "better": difference > 0,
        "significant": tested["p_value"] < SIGNIFICANT,
    }


def choose_rows(lengths, classes):
    """Returns bool [rows]: which training rows to fit on, all of them or a random sample that is always the same.

    Args:
        lengths: int [rows], characters of each text.
        classes: number of classes with rows.
    """
    limit = min(MAX_CHARACTERS, MAX_CHARACTERS_TIMES_CLASSES // classes)
    order = np.random.default_rng(0).permutation(len(lengths))
    chosen = np.empty(len(lengths), bool)
    chosen[order] = np.cumsum(lengths[order]) <= limit
    chosen[order[0]] = True  # whatever its length
    return chosen


def choose_features(texts):
    """Returns WORDS, or CHARACTERS where most of what is written has no spaces between words.

    That is where letters of scripts without such spaces are at least as many as words of all others, or where there is
    neither, only punctuation. White space itself does not tell: a column of single words has none.
    """
    unspaced, words = 0, 0
    for text in texts:
        rest, found = _UNSPACED.subn(" ", text)
        unspaced += found
        words += len(_WORD.findall(rest))
    return WORDS if words > unspaced else CHARACTERS


def fit_and_predict(texts, labels, test_texts, stop=lambda: None):
    """Returns (WORDS or CHARACTERS, int [N] label index for each test text); equal arguments give equal answers.

    Args:
        texts: training texts, at least one.
        labels: int [rows], their label indices; those without a row are never answered.
        test_texts: N texts.
        stop: called between steps; may raise to end early.
    """
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.multiclass import OneVsRestClassifier
    from sklearn.svm import LinearSVC

    features = choose_features(texts)
    most_frequent = np.bincount(labels).argmax()
    if (labels == most_frequent).all() or not any(texts):  # nothing to tell apart, or nothing to tell it by
        return features, np.full(len(test_texts), most_frequent)
    if features == WORDS:
        vectorizer = TfidfVectorizer(token_pattern=_WORD.pattern, ngram_range=(1, 2))
    else:
        vectorizer = TfidfVectorizer(analyzer="char", ngram_range=(1, 2))
    train = vectorizer.fit_transform(texts)  # [rows, features]
    stop()
    test = vectorizer.transform(test_texts)
    stop()
    # What LinearSVC does by itself, but class by class in Python: a signal need not wait for all of them.
    classifier = OneVsRestClassifier(LinearSVC(C=1.0, random_state=0))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # it is as near as it comes in 1000 iterations
        classifier.fit(train, labels)
    stop()
    return features, classifier.predict(test)


def mcnemar(ours_right, baseline_right):
    """Compares two models on the same rows by McNemar's exact two-sided test of the rows that one alone has right.

    Args:
        ours_right: bool [N].
        baseline_right: bool [N].

    Returns:
        only_ours_right, only_baseline_right (rows) and p_value: how probable a split at least as uneven is if each of
        these rows goes to either model by a fair coin (McNemar 1947; Dietterich 1998, section 3.1).
    """
    from scipy.stats import binomtest

    ours, theirs = int((ours_right & ~baseline_right).sum()), int((baseline_right & ~ours_right).sum())
    p_value = float(binomtest(ours, ours + theirs).pvalue) if ours + theirs else 1.0
    return {"only_ours_right": ours, "only_baseline_right": theirs, "p_value": p_value}
