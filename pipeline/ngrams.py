"""The linear model over tokens and pairs of neighbouring tokens, in NumPy: its features, and how it is fitted.

`pipeline.layers.ngrams` computes the same inside the model. What is written here about slots, rows and weights is a
contract between the two, the SavedModel and the ONNX files.
"""

import threading
import warnings

import numpy as np

from pipeline.contract import PAD_ID

# A pair (a, b) of token ids has slot (a * MULTIPLIER + b) mod slots, in int64: an odd prime, so that pairs spread.
MULTIPLIER = 1_000_003
# Slots for each pair that is known: of those that are not, one in eight is taken for another. The more that do, the
# less the model knows: with one slot for each, 1 to 2 points of accuracy on small sets (benchmarks/NOTES.md).
_SLOTS_PER_PAIR = 8
# Instead of the sum of squared weights of a text without tokens. Below that of any other: the largest idf is scaled to
# 1, the smallest is then above 1 / 23 even with 2^31 rows.
TINY = 1e-6
# Of the linear model: LIBLINEAR's price of a row on the wrong side of its margin.
_C = 1.0
# Tokens of the rows that it is fitted on; of a larger split, that many of a fixed sample.
MAX_TOKENS = 3_000_000
_LOOK_S = 0.1


def slots_for(pairs):
    """Returns the number of slots for so many pairs: a power of 2."""
    return 1 << (_SLOTS_PER_PAIR * max(1, pairs) - 1).bit_length()


class Features:
    """Which rows of the tables a text has: a set, as often as a token or a pair may occur.

    A token has the row of its id; a known pair that of its slot. Row 0, PAD's, stands for nothing.

    Args:
        vocab_size: number of token ids V.
        pair_rows: int32 [slots], the row of each slot, from V on; 0 where there is none.
    """

    def __init__(self, vocab_size, pair_rows):
        self.vocab_size = vocab_size
        self.pair_rows = pair_rows

    @classmethod
    def learn(cls, split, rows, vocab_size, most_pairs):
        """Knows the pairs that are in most of these rows of a `Split`, at most `most_pairs`; of equals the first."""
        tokens, text, goes_on = _flat(split, rows)
        keys = tokens[goes_on] * vocab_size + tokens[goes_on + 1]
        known, texts = np.unique(np.unique(keys * len(rows) + text[goes_on]) // len(rows), return_counts=True)
        known = known[np.argsort(-texts, kind="stable")[:most_pairs]]
        slots = slots_for(len(known))
        slot = np.unique((known // vocab_size * MULTIPLIER + known % vocab_size) % slots)
        # A pair of the last token and the PAD after it is none, so no mask is needed.
        slot = np.setdiff1d(slot, (np.arange(vocab_size, dtype=np.int64) * MULTIPLIER + PAD_ID) % slots)
        pair_rows = np.zeros(slots, np.int32)
        pair_rows[slot] = vocab_size + np.arange(len(slot))
        return cls(vocab_size, pair_rows)

    @property
    def count(self):
        """Rows of the tables: V and the known pairs'."""
        return max(self.vocab_size, int(self.pair_rows.max(initial=0)) + 1)

    def of(self, split, rows):
        """Returns the features of rows of a `Split`: a SciPy CSR array of 0 and 1, float64 [rows, count]."""
        import scipy.sparse

        tokens, text, goes_on = _flat(split, rows)
        pairs = self.pair_rows[(tokens[goes_on] * MULTIPLIER + tokens[goes_on + 1]) % len(self.pair_rows)]
        # LIBLINEAR takes 32-bit indices.
        indices = [np.concatenate(parts).astype(np.int32) for parts in ([text, text[goes_on]], [tokens, pairs])]
        found = scipy.sparse.coo_array((np.ones(len(indices[0])), tuple(indices)), (len(rows), self.count)).tocsr()
        found.data[:] = found.indices != PAD_ID
        return found


def _flat(split, rows):
    """Returns (tokens int64, number of each one's text, places after which the text goes on)."""
    lengths = split.lengths[rows]
    ends = np.cumsum(lengths)
    within = np.arange(lengths.sum()) - np.repeat(ends - lengths, lengths)  # position in its text
    tokens = split.tokens[np.repeat(split.offsets[rows], lengths) + within].astype(np.int64)
    return tokens, np.repeat(np.arange(len(rows)), lengths), np.flatnonzero(within[1:])


def feature_weights(found):
    """Returns idf = ln((1 + rows) / (1 + rows with the feature)) + 1 over its largest value: float64 [features].

    The smoothed form of scikit-learn's TfidfTransformer. PAD has weight 0.
    """
    idf = np.log((1 + found.shape[0]) / (1 + found.sum(axis=0))) + 1
    idf[PAD_ID] = 0.0
    return idf / idf.max()


def normalize(found, weights):
    """Returns the features times `weights`, float64 [features], each row over the root of its sum of squares."""
    import scipy.sparse

    norms = np.sqrt(np.maximum(found @ weights**2, TINY))
    return scipy.sparse.diags_array(1 / norms) @ found @ scipy.sparse.diags_array(weights)


def fit(split, vocab_size, num_classes, most_pairs, class_weights, stop=lambda: None):
    """Fits linear support vector machines for each class against the others, on at most MAX_TOKENS tokens.

    The mean of two for each class: on tf-idf, and on tf-idf times the log-count ratios of naive Bayes (Wang and Manning
    2012, "NBSVM"), which errs on other texts. scikit-learn's LinearSVC (LIBLINEAR; Fan et al. 2008) takes seconds where
    logistic regression takes minutes. Equal arguments give equal weights.

    Args:
        split: the training `Split`.
        vocab_size: number of token ids V.
        num_classes: number of classes C. One without a row never wins: its scores are -1.
        most_pairs: pairs of neighbours that it knows, at most: those in most texts.
        class_weights: float [C], how much a row of each class counts.
        stop: called every 0.1 s; may raise to end early.

    Returns:
        The weights of `pipeline.layers.ngrams.NgramScores` by name: pair_rows int32 [slots], table float32 [R, C],
        squared_weights float32 [R], bias float32 [C].
    """
    rows = _sample(split)
    labels = split.labels[rows]
    features = Features.learn(split, rows, vocab_size, most_pairs)
    found = features.of(split, rows)
    weights = feature_weights(found)
    normalized = normalize(found, weights)
    row_weights = np.asarray(class_weights)[labels]
    table = np.zeros((features.count, num_classes), np.float32)
    bias = np.full(num_classes, -1.0, np.float32)
    present = np.unique(labels)
    if len(present) == 1:
        bias[present] = 1.0
    for one in present if len(present) > 2 else present[1:]:
        coefficients, intercept = _machine(found, normalized, labels == one, row_weights, stop)
        table[:, one], bias[one] = coefficients * weights, intercept
    if len(present) == 2:  # one machine for both: the second class against the first
        table[:, present[0]], bias[present[0]] = -table[:, present[1]], -bias[present[1]]
    return {
        "pair_rows": features.pair_rows,
        "table": table,
        "squared_weights": (weights**2).astype(np.float32),
        "bias": bias,
    }


def _machine(found, normalized, is_one, row_weights, stop):
    """Returns (coefficients float64 [features], intercept) of one class against the others."""
    import scipy.sparse

    ratios = np.log(_shares(found[is_one]) / _shares(found[~is_one]))
    plain = _fitted(normalized, is_one, row_weights, stop)
    bayes = _fitted(normalized @ scipy.sparse.diags_array(ratios), is_one, row_weights, stop)
    coefficients = plain.coef_[0] + bayes.coef_[0] * ratios
    return coefficients / 2, (plain.intercept_[0] + bayes.intercept_[0]) / 2


def _shares(found):
    """Returns each feature's share of all in these rows, one more of each counted."""
    counts = found.sum(axis=0) + 1.0
    return counts / counts.sum()


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
