"""The weights of the n-grams and the temperature, fitted to the answers on validation."""

import numpy as np

from pipeline.evaluation import softmax

# Where the answers say nothing about them, or only that they should go on and on.
TEMPERATURES = 0.05, 20.0
MAX_WEIGHT = 20.0  # of the n-grams' scores over the temperature: scores are a support vector machine's, about -1 to 1


def fit(encoder_logits, ngram_scores, gold):
    """Returns (weights of the n-grams' scores >= 0, temperature > 0) of least negative log-likelihood on validation.

    Temperature scaling is Guo et al. 2017, section 4.2. Of p = softmax(a * encoder + b * ngrams + ...) the negative
    log-likelihood is convex in (a, b, ...), so there is one optimum, and it does not matter where the search starts;
    the temperature is 1 / a, a weight b / a.

    Were all answers right, it would fall without end as a and b grow. Therefore the targets are those of Laplace's rule
    of succession, as in Platt 1999, section 2.2: after N of N right answers the next is right with a chance of
    (N + 1) / (N + 2); the rest is spread over the other classes. Besides, temperatures are within TEMPERATURES.

    Args:
        encoder_logits: float [N, C], N > 0.
        ngram_scores: a list of float [N, C], one for each weight; it may be empty.
        gold: int [N], index of the right label.

    Returns:
        (float64 array of a weight for each of `ngram_scores`, a float that float32 holds exactly). With one class there
        is nothing to fit: 0 and 1.
    """
    import scipy.optimize

    rows, classes = encoder_logits.shape
    if classes == 1:
        return np.zeros(len(ngram_scores)), 1.0
    parts = np.stack([encoder_logits, *ngram_scores]).astype(np.float64)  # [parts, N, C]
    targets = np.full((rows, classes), 1 / ((rows + 2) * (classes - 1)))
    targets[np.arange(rows), gold] = (rows + 1) / (rows + 2)

    def loss(factors):
        logits = np.tensordot(factors, parts, axes=1)
        p = softmax(logits)
        top = logits.max(axis=1, keepdims=True)
        log_sum = np.log(np.exp(logits - top).sum(axis=1, keepdims=True)) + top
        return (targets * (log_sum - logits)).sum(axis=1).mean(), (parts * (p - targets)).sum(axis=2).mean(axis=1)

    bounds = [(1 / TEMPERATURES[1], 1 / TEMPERATURES[0])] + [(0.0, MAX_WEIGHT)] * len(ngram_scores)
    start = np.ones(len(parts))
    found = scipy.optimize.minimize(
        loss, start, jac=True, method="L-BFGS-B", bounds=bounds, options={"ftol": 1e-12, "gtol": 1e-8}
    ).x
    return found[1:] / found[0], float(np.float32(1 / found[0]))
