"""How good a model is on one split: figures for people, and the one number that decides."""

import numpy as np

_CALIBRATION_BINS = 15
_THRESHOLDS = (0.0, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99)


def softmax(logits):
    """Returns float64 [N, C] probabilities of float [N, C] logits."""
    shifted = np.asarray(logits, np.float64)
    shifted = shifted - shifted.max(axis=-1, keepdims=True)
    exponential = np.exp(shifted)
    return exponential / exponential.sum(axis=-1, keepdims=True)


def predict_logits(predict, split, plan, stop=lambda: None):
    """Runs a model over a whole split.

    Args:
        predict: token_ids int32 [B, T] -> logits [B, C].
        split: a `pipeline.dataset.Split`.
        plan: row indices per batch, every row once.
        stop: called before each batch; may raise to end early.

    Returns:
        float32 [N, C], in the order of the rows.
    """
    logits = None
    for rows in plan:
        stop()
        batch = np.asarray(predict(split.token_ids(rows)))
        if logits is None:
            logits = np.empty((len(split), batch.shape[1]), np.float32)
        logits[rows] = batch
    return logits


def metrics(probabilities, gold, labels):
    """Returns every figure of one split as plain JSON values.

    Args:
        probabilities: float [N, C].
        gold: int [N], index of the right label.
        labels: C label strings.

    Returns:
        rows, accuracy, macro_f1 (the mean over the classes that have rows, so that models with other classes beside
        them are measured alike), loss (mean negative log-likelihood, nats), calibration_error, per_class (label ->
        precision, recall, f1, support), confusion_matrix (rows: right label, columns: predicted label),
        confidence_auroc (as from `confidence_auroc`) and thresholds (as from `threshold_table`).
    """
    import sklearn.metrics  # takes a second, which a process that verifies an artifact need not wait

    probabilities = np.asarray(probabilities, np.float64)
    predicted = probabilities.argmax(axis=1)
    indices = list(range(len(labels)))
    precision, recall, f1, support = sklearn.metrics.precision_recall_fscore_support(
        gold, predicted, labels=indices, zero_division=0.0
    )
    right = probabilities[np.arange(len(gold)), gold]
    confidence, correct = probabilities.max(axis=1), predicted == gold
    return {
        "rows": len(gold),
        "accuracy": float(correct.mean()),
        "macro_f1": float(f1[support > 0].mean()),
        "loss": float(-np.log(np.maximum(right, np.finfo(np.float32).tiny)).mean()),
        "calibration_error": calibration_error(probabilities, gold),
        "per_class": {
            label: {
                "precision": float(precision[i]),
                "recall": float(recall[i]),
                "f1": float(f1[i]),
                "support": int(support[i]),
            }
            for i, label in enumerate(labels)
        },
        "confusion_matrix": sklearn.metrics.confusion_matrix(gold, predicted, labels=indices).tolist(),
        "confidence_auroc": confidence_auroc(confidence, correct),
        "thresholds": threshold_table(confidence, correct),
    }


def confidence_auroc(confidence, correct):
    """Returns how well the confidence tells right answers from wrong ones (Hendrycks & Gimpel 2017, section 2).

    Args:
        confidence: float [N], the probability of the answer.
        correct: bool [N].

    Returns:
        The area under the ROC curve: how often a right answer has a higher confidence than a wrong one, ties counting
        half; 0.5 says that it does not tell. None when all answers are right, or all wrong.
    """
    import sklearn.metrics

    if correct.all() or not correct.any():
        return None
    return float(sklearn.metrics.roc_auc_score(correct, confidence))


def threshold_table(confidence, correct, thresholds=_THRESHOLDS):
    """Returns what it costs and gains to leave unanswered what the model is not sure of.

    Args:
        confidence: float [N], the probability of the answer.
        correct: bool [N].
        thresholds: an answer is given where the confidence is at least this.

    Returns:
        A list of {"threshold", "coverage" (share of the rows that are answered), "accuracy" (of these; None when there
        are none)}, in the order of the thresholds.
    """
    rows = []
    for threshold in thresholds:
        answered = confidence >= threshold
        accuracy = float(correct[answered].mean()) if answered.any() else None
        rows.append({"threshold": threshold, "coverage": float(answered.mean()), "accuracy": accuracy})
    return rows


def calibration_error(probabilities, gold, bins=_CALIBRATION_BINS):
    """Expected calibration error (Naeini et al. 2015; Guo et al. 2017, eq. 3) of the predicted class.

    Args:
        probabilities: float [N, C].
        gold: int [N].
        bins: number of equal bins of the confidence in (0, 1].

    Returns:
        The mean over bins, weighted by their rows, of |accuracy - mean confidence|.
    """
    confidence = probabilities.max(axis=1)
    correct = probabilities.argmax(axis=1) == gold
    which = np.minimum((confidence * bins).astype(int), bins - 1)
    count = np.bincount(which, minlength=bins)
    gap = np.bincount(which, confidence, bins) - np.bincount(which, correct, bins)
    return float(np.abs(gap).sum() / count.sum())
