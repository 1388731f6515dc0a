"""Batches as a pure function of the rows and (seed, epoch): resuming needs no iterator state."""

import numpy as np

from pipeline.contract import PAD_ID
from pipeline.seeds import derive_seed

_POOL_BATCHES = 32
_PADDED_SHARE = 0.05


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


def drop_tokens(token_ids, rows, rate, mask_id, seed, epoch):
    """Hides tokens behind MASK, anew in each epoch.

    Which tokens of a row are hidden depends on (seed, epoch, the row's number) only, so not on its batch mates.

    Args:
        token_ids: int32 `[B, T]`, left as it is.
        rows: int64 `[B]`, numbers of the rows in their split.
        rate: chance of each token but PAD, in [0, 1].
        mask_id: MASK's id.
        seed: the job's seed.
        epoch: number of the epoch.

    Returns:
        int32 `[B, T]`.
    """
    # A random number for each (row, position) without a generator for each row: counters, hashed.
    key = np.uint64(derive_seed(seed, f"token-dropout/{epoch}") << 32)
    row_keys = _hash(key + rows.astype(np.uint64))[:, None]  # [B, 1]
    uniform = _hash(row_keys + np.arange(token_ids.shape[1], dtype=np.uint64)) * 2.0**-64  # [B, T]
    return np.where((uniform < rate) & (token_ids != PAD_ID), np.int32(mask_id), token_ids)


def _hash(counters):
    """SplitMix64 (Steele et al. 2014) at these points of its sequence: uint64 -> uint64, modulo 2**64."""
    z = counters * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def _cut(order, lengths, batch_tokens):
    """Cuts `order` into runs whose rows * longest row is at most `batch_tokens`.

    A run is as long as it can be, or shorter, down to half of `batch_tokens`, where that keeps its padding in bounds.
    """
    lengths = lengths[order]
    batches, start = [], 0
    while start < len(order):
        window = lengths[start : start + max(1, batch_tokens // lengths[start])]
        padded = np.maximum.accumulate(window) * np.arange(1, len(window) + 1)  # of each number of rows
        most = max(1, int(np.searchsorted(padded, batch_tokens, side="right")))
        least = min(most, int(np.searchsorted(padded, batch_tokens // 2)) + 1)
        share = 1.0 - np.cumsum(window)[least - 1 : most] / padded[least - 1 : most]
        good = np.flatnonzero(share <= _PADDED_SHARE)
        rows = least + int(good[-1] if len(good) else np.argmin(share))
        batches.append(order[start : start + rows])
        start += rows
    return batches
