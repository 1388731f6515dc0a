"""The linear model over tokens, pairs of neighbouring tokens and their characters: its features, and how it is fitted.

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
# Tokens of the rows that it is fitted on; of a larger split, that many of a fixed sample. A token has some 15 n-grams
# of characters, so fewer rows teach those, and each class is a problem of its own.
MAX_TOKENS = 3_000_000
MAX_TOKENS_OF_CHARACTERS = 1_000_000
MAX_TOKENS_OF_CHARACTERS_TIMES_CLASSES = 30_000_000
# Characters of the n-grams, at most: a word in most scripts. 2 to 5 and 2 to 8 are as good (benchmarks/NOTES.md).
MAX_CHARACTERS = 6
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
        pairs: int [P, 2], the two tokens of row V + i; of several with one slot, those of most texts. Only
            `characters_of_rows` asks for them.
    """

    def __init__(self, vocab_size, pair_rows, pairs=()):
        self.vocab_size = vocab_size
        self.pair_rows = pair_rows
        self.pairs = pairs

    @classmethod
    def learn(cls, split, rows, vocab_size, most_pairs):
        """Knows the pairs that are in most of these rows of a `Split`, at most `most_pairs`; of equals the first."""
        tokens, text, goes_on = _flat(split, rows)
        keys = tokens[goes_on] * vocab_size + tokens[goes_on + 1]
        known, texts = np.unique(np.unique(keys * len(rows) + text[goes_on]) // len(rows), return_counts=True)
        known = known[np.argsort(-texts, kind="stable")[:most_pairs]]
        slots = slots_for(len(known))
        first, second = known // vocab_size, known % vocab_size
        slot, at = np.unique((first * MULTIPLIER + second) % slots, return_index=True)
        # A pair of the last token and the PAD after it is none, so no mask is needed.
        with_pad = np.isin(slot, (np.arange(vocab_size, dtype=np.int64) * MULTIPLIER + PAD_ID) % slots)
        slot, at = slot[~with_pad], at[~with_pad]
        pair_rows = np.zeros(slots, np.int32)
        pair_rows[slot] = vocab_size + np.arange(len(slot))
        return cls(vocab_size, pair_rows, np.stack([first[at], second[at]], axis=1))

    @property
    def count(self):
        """Rows of the tables: V and the known pairs'."""
        return max(self.vocab_size, int(self.pair_rows.max(initial=0)) + 1)

    def of(self, split, rows):
        """Returns the features of rows of a `Split`: a SciPy CSR array of 0 and 1, float64 [rows, count]."""
        import scipy.sparse

        tokens, text, goes_on = _flat(split, rows)
        pairs = self.pair_rows[(tokens[goes_on] * MULTIPLIER + tokens[goes_on + 1]) % len(self.pair_rows)]
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
    """Returns the `_idf` of each feature over its largest value: float64 [features]. PAD has weight 0."""
    idf = _idf(found.shape[0], found.sum(axis=0))
    idf[PAD_ID] = 0.0
    return idf / idf.max()


def _idf(texts, texts_with_it):
    """Returns ln((1 + texts) / (1 + texts with it)) + 1: the smoothed form of scikit-learn's TfidfTransformer."""
    return np.log((1 + texts) / (1 + texts_with_it)) + 1


def normalize(found, weights):
    """Returns the features times `weights`, float64 [features], each row over the root of its sum of squares."""
    import scipy.sparse

    return _over_norms(found, weights**2) @ found @ scipy.sparse.diags_array(weights)


def _over_norms(found, squared_weights):
    """Returns a diagonal matrix that divides each row by the root of its features' sum of squared weights."""
    import scipy.sparse

    return scipy.sparse.diags_array(1 / np.sqrt(np.maximum(found @ squared_weights, TINY)))


def characters_of_rows(features, pieces):
    """Returns how often each n-gram of characters is in each row of the tables: CSR float64 [rows, n-grams].

    A token's row has those of its piece, a pair's row those that begin in the first piece and end in the second: over
    the rows of a text, each n-gram that no third piece is needed for is found once for each time that it is there.

    Args:
        features: `Features` with pairs.
        pieces: the string of each token id, None where it has none.
    """
    import scipy.sparse

    numbers, rows, columns = {}, [], []

    def add(row, text, begins, ends_after):
        for begin in range(begins):
            for end in range(max(begin, ends_after) + 1, min(begin + MAX_CHARACTERS, len(text)) + 1):
                rows.append(row)
                columns.append(numbers.setdefault(text[begin:end], len(numbers)))

    for row, piece in enumerate(pieces):
        piece = piece or ""
        add(row, piece, len(piece), 0)
    for row, (a, b) in enumerate(np.asarray(features.pairs).tolist(), features.vocab_size):
        if pieces[a] is not None and pieces[b] is not None:
            head = pieces[a][1 - MAX_CHARACTERS :]
            add(row, head + pieces[b][: MAX_CHARACTERS - 1], len(head), len(head))
    shape = features.count, len(numbers)
    return scipy.sparse.coo_array((np.ones(len(rows)), (rows, columns)), shape).tocsr()


def fit(split, pieces, num_classes, most_pairs, class_weights, stop=lambda: None):
    """Fits linear support vector machines for each class against the others, on a text's tokens and its characters.

    Each is the mean of two: on tf-idf, and on tf-idf times the log-count ratios of naive Bayes (Wang and Manning 2012,
    "NBSVM"), which errs on other texts. scikit-learn's LinearSVC (LIBLINEAR; Fan et al. 2008) takes seconds where
    logistic regression takes minutes. Equal arguments give equal weights.

    Characters tell words apart from their other forms and misspellings, which are other tokens. Their n-grams are found
    in the tokens and pairs, so a machine that knows them is a table of the same rows as one that knows tokens.

    Args:
        split: the training `Split`.
        pieces: the string of each token id, None where it has none: `pipeline.text.Tokenizer.pieces`.
        num_classes: number of classes C. One without a row never wins: its scores are -1.
        most_pairs: pairs of neighbours that it knows, at most: those in most texts.
        class_weights: float [C], how much a row of each class counts.
        stop: called every 0.1 s while machines are fitted; may raise to end early.

    Returns:
        (weights, machines): weights of `pipeline.layers.ngrams.NgramScores` that the machines share, by name:
        pair_rows int32 [slots], squared_weights float32 [R]. And the machine of tokens, and that of characters where
        some are in more than one text, each {"table": float32 [R, C], "bias": float32 [C]}.
    """
    import scipy.sparse

    rows = _sample(split, MAX_TOKENS)
    features = Features.learn(split, rows, len(pieces), most_pairs)
    found = features.of(split, rows)
    weights = feature_weights(found)
    normalized = normalize(found, weights)
    class_weights = np.asarray(class_weights)
    in_rows = scipy.sparse.diags_array(weights)
    machines = [_machine(found, normalized, in_rows, split.labels[rows], num_classes, class_weights, stop)]
    shared = {"pair_rows": features.pair_rows, "squared_weights": (weights**2).astype(np.float32)}

    rows = _sample(split, min(MAX_TOKENS_OF_CHARACTERS, MAX_TOKENS_OF_CHARACTERS_TIMES_CLASSES // num_classes))
    found, in_rows = features.of(split, rows), characters_of_rows(features, pieces)
    characters = found @ in_rows
    in_texts = (characters > 0).sum(axis=0)
    in_rows, characters = in_rows[:, in_texts > 1], characters[:, in_texts > 1]  # of one text nothing is learnt
    if not characters.nnz:
        return shared, machines
    idf = scipy.sparse.diags_array(_idf(len(rows), in_texts[in_texts > 1]))
    # Over the same norm as the tokens, so that one table can have both; times a number, so that C means the same.
    normalized = _over_norms(found, weights**2) @ characters @ idf
    scale = 1 / np.sqrt(normalized.power(2).sum() / len(rows))
    in_rows, labels = in_rows @ idf * scale, split.labels[rows]
    machines.append(_machine(characters, normalized * scale, in_rows, labels, num_classes, class_weights, stop))
    return shared, machines


def scores(weights, machines, split):
    """Returns what `NgramScores` answers with the weights and each machine of `fit`: float64 [rows of the split, C]."""
    vocab_size = len(weights["squared_weights"]) - int((weights["pair_rows"] > 0).sum())
    found = Features(vocab_size, weights["pair_rows"]).of(split, np.arange(len(split)))
    found = _over_norms(found, weights["squared_weights"]) @ found
    return [found @ machine["table"] + machine["bias"] for machine in machines]


def mix(machines, shares):
    """Returns one machine of `fit`, whose scores are those of all times their shares, added."""
    return {
        name: sum(share * machine[name] for machine, share in zip(machines, shares, strict=True)).astype(np.float32)
        for name in ("table", "bias")
    }


def _machine(found, normalized, in_rows, labels, num_classes, class_weights, stop):
    """Fits each class against the others.

    Args:
        found: how often each feature is in each text, CSR [N, features].
        normalized: what is fitted to, CSR [N, features].
        in_rows: what a feature's coefficient adds to each row of the table, sparse [R, features].
        labels: int [N].
        num_classes, class_weights, stop: as of `fit`.

    Returns:
        {"table": float32 [R, C], "bias": float32 [C]}.
    """
    row_weights = class_weights[labels]
    table = np.zeros((in_rows.shape[0], num_classes), np.float32)
    bias = np.full(num_classes, -1.0, np.float32)
    present = np.unique(labels)
    if len(present) == 1:
        bias[present] = 1.0
    for one in present if len(present) > 2 else present[1:]:
        coefficients, bias[one] = _of_class(found, normalized, labels == one, row_weights, stop)
        table[:, one] = in_rows @ coefficients
    if len(present) == 2:  # one problem for both: the second class against the first
        table[:, present[0]], bias[present[0]] = -table[:, present[1]], -bias[present[1]]
    return {"table": table, "bias": bias}


def _of_class(found, normalized, is_one, row_weights, stop):
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


def _sample(split, most_tokens):
    """Returns the numbers of the rows that are fitted on, ascending."""
    if split.lengths.sum() <= most_tokens:
        return np.arange(len(split))
    order = np.random.Generator(np.random.PCG64(0)).permutation(len(split))
    fitting = np.searchsorted(np.cumsum(split.lengths[order]), most_tokens, side="right")
    return np.sort(order[: max(1, fitting)])


def _fitted(features, labels, row_weights, stop):
    """Fits in a thread, in which LIBLINEAR lets go of Python: a signal's handler can run meanwhile."""
    import sklearn.exceptions
    import sklearn.svm

    model, raised = sklearn.svm.LinearSVC(C=_C, random_state=0), []
    features = features.tocsr()
    for name in ("indices", "indptr"):  # LIBLINEAR takes 32-bit indices
        setattr(features, name, getattr(features, name).astype(np.int32, copy=False))

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
