"""Batches as a pure function of (lengths, batch_tokens, seed, epoch): resuming needs no iterator state."""

import numpy as np

from pipeline.seeds import derive_seed

_POOL_BATCHES = 32


def epoch_plan(lengths, batch_tokens, seed, epoch):
    """Returns the row indices of each batch of an epoch; every row is in exactly one batch.

    Rows are shuffled, sorted by length within pools of many batches, and cut so that rows * longest stays within
    `batch_tokens`; then the batches are shuffled. Sorting all rows at once would pad less, but would give a row
    nearly the same batch mates in every epoch.

    Args:
        lengths: int `[rows]`, tokens per row; 0 counts as 1.
        batch_tokens: padded tokens of a batch; a longer row is alone in its batch.
        seed: the job's seed.
        epoch: number of the epoch.

    Returns:
        A list of int64 arrays.
    """
    lengths = np.maximum(np.asarray(lengths, np.int64), 1)
    if not len(lengths):
        return []
    rng = np.random.Generator(np.random.PCG64(derive_seed(seed, f"batches/{epoch}")))
    order = rng.permutation(len(lengths))
    pool = np.arange(len(lengths)) // max(1, int(_POOL_BATCHES * batch_tokens / lengths.mean()))
    # Every other pool descends: lengths run on across the border of two pools, so no pool leaves a small batch over.
    sign = 1 - 2 * (pool % 2)
    order = order[np.lexsort((sign * lengths[order], pool))]
    batches = _cut(order, lengths, batch_tokens)
    return [batches[i] for i in rng.permutation(len(batches))]


def sequential_plan(lengths, batch_tokens):
    """Returns the row indices of each batch for evaluation: every row once, longest first.

    The first batch needs the most memory, so that a limit shows at once. Arguments as in `epoch_plan`.
    """
    lengths = np.maximum(np.asarray(lengths, np.int64), 1)
    return _cut(np.argsort(-lengths, kind="stable"), lengths, batch_tokens)


def _cut(order, lengths, batch_tokens):
    """Cuts `order` into the longest runs whose rows * longest row is at most `batch_tokens`."""
    lengths = lengths[order]
    batches, start = [], 0
    while start < len(order):
        window = lengths[start : start + max(1, batch_tokens // lengths[start])]
        padded = np.maximum.accumulate(window) * np.arange(1, len(window) + 1)
        rows = max(1, int(np.searchsorted(padded, batch_tokens, side="right")))
        batches.append(order[start : start + rows])
        start += rows
    return batches
