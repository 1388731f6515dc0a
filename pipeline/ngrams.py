"""The linear model over tokens and pairs of neighbouring tokens, in NumPy: its features, and how it is fitted.

`pipeline.layers.ngrams` computes the same inside the model. What is written here about rows and weights is a contract
between the two, the SavedModel and the ONNX files.
"""

import threading
import warnings

import numpy as np

from pipeline.contract import PAD_ID

# A pair (a, b) of token ids has bucket (a * MULTIPLIER + b) mod buckets, in int64: an odd prime, so that in any number
# of buckets, powers of 2 among them, pairs spread.
MULTIPLIER = 1_000_003
# Instead of the sum of squared weights of a text without tokens. Below that of any other: the largest idf is scaled to
# 1, the smallest is then above 1 / 23 even with 2^31 rows.
TINY = 1e-6
# Of the linear model: LIBLINEAR's price of a row on the wrong side of its margin.
_C = 1.0
# Tokens of the rows that it is fitted on; of a larger split, that many of a fixed sample: 0.6 GB while it is fitted.
MAX_TOKENS = 10_000_000
_LOOK_S = 0.1


def count_features(split, rows, vocab_size, buckets):
    """Returns how often each feature occurs: a SciPy CSR array, float64 [rows, V + buckets].

    Args:
        split: a `pipeline.dataset.Split`.
        rows: int64, numbers of rows of the split.
        vocab_size: number of token ids V.
        buckets: rows for pairs.
    """
    import scipy.sparse

    lengths = split.lengths[rows]
    ends = np.cumsum(lengths)
    within = np.arange(ends[-1]) - np.repeat(ends - lengths, lengths)  # position in its text
    tokens = split.tokens[np.repeat(split.offsets[rows], lengths) + within].astype(np.int64)
    text = np.repeat(np.arange(len(rows)), lengths)
    goes_on = np.flatnonzero(within[1:])  # the next token is of the same text
    pairs = vocab_size + (tokens[goes_on] * MULTIPLIER + tokens[goes_on + 1]) % buckets
    # LIBLINEAR takes 32-bit indices.
    indices = [np.concatenate(parts).astype(np.int32) for parts in ([text, text[goes_on]], [tokens, pairs])]
    counts = np.ones(len(indices[0]))
    return scipy.sparse.coo_array((counts, tuple(indices)), (len(rows), vocab_size + buckets)).tocsr()


def normalize(counts, weights):
    """Returns counts times `weights`, float64 [V + buckets], each row over the root of its sum of count * weight^2."""
    import scipy.sparse

    norms = np.sqrt(np.maximum(counts @ weights**2, TINY))
    return scipy.sparse.diags_array(1 / norms) @ counts @ scipy.sparse.diags_array(weights)


def feature_weights(counts):
    """Returns idf = ln((1 + rows) / (1 + rows with the feature)) + 1 over its largest value: float64 [V + buckets].

    The smoothed form of scikit-learn's TfidfTransformer. PAD has weight 0.
    """
    found = np.bincount(counts.indices, minlength=counts.shape[1])
    idf = np.log((1 + counts.shape[0]) / (1 + found)) + 1
    idf[PAD_ID] = 0.0
    return idf / idf.max()


def fit(split, vocab_size, num_classes, buckets, class_weights, stop=lambda: None):
    """Fits a linear support vector machine for each class against the others, on at most MAX_TOKENS tokens.

    scikit-learn's LinearSVC (LIBLINEAR; Fan et al. 2008), which takes seconds where logistic regression takes minutes.
    Equal arguments give equal weights.

    Args:
        split: the training `Split`.
        vocab_size: number of token ids V.
        num_classes: number of classes C. One without a row never wins: its scores are -1.
        buckets: rows for pairs.
        class_weights: float [C], how much a row of each class counts.
        stop: called every 0.1 s; may raise to end early.

    Returns:
        The weights of `pipeline.layers.ngrams.NgramScores`, float32: table [V + buckets, C], squared_weights
        [V + buckets], bias [C].
    """
    rows = _sample(split)
    labels = split.labels[rows]
    counts = count_features(split, rows, vocab_size, buckets)
    weights = feature_weights(counts)
    table = np.zeros((vocab_size + buckets, num_classes), np.float32)
    bias = np.full(num_classes, -1.0, np.float32)
    present = np.unique(labels)
    if len(present) == 1:
        bias[present] = 1.0
    else:
        model = _fitted(normalize(counts, weights), labels, np.asarray(class_weights)[labels], stop)
        coefficients, intercepts = model.coef_, model.intercept_
        if len(present) == 2:  # one machine for both: the second class against the first
            coefficients, intercepts = np.concatenate([-coefficients, coefficients]), np.append(-intercepts, intercepts)
        table[:, present] = (coefficients * weights).T
        bias[present] = intercepts
    return table, (weights**2).astype(np.float32), bias


def _sample(split):
    """Returns the numbers of the rows that are fitted on, ascending."""
    if split.lengths.sum() <= MAX_TOKENS:
        return np.arange(len(split))
    order = np.random.Generator(np.random.PCG64(0)).permutation(len(split))
    fitting = np.searchsorted(np.cumsum(split.lengths[order]), MAX_TOKENS, side="right")
    return np.sort(order[: max(1, fitting)])


def _fitted(features, labels, row_weights, stop):
    """Fits in a thread, in which LIBLINEAR lets go of Python: a signal's handler can run meanwhile."""
    import sklearn.exceptions
    import sklearn.svm

    model, raised = sklearn.svm.LinearSVC(C=_C, random_state=0), []

    def work():
        try:
            model.fit(features, labels, row_weights)
        except Exception as e:  # goes on in the thread that waits
            raised.append(e)

    with warnings.catch_warnings():
        # After its 1000 rounds what is left to gain is small, and calibration judges the scores.
        warnings.simplefilter("ignore", sklearn.exceptions.ConvergenceWarning)
        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        while thread.is_alive():
            stop()
            thread.join(_LOOK_S)
    if raised:
        raise raised[0]
    return model
