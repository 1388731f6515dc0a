"""Batches as a pure function of the rows and (seed, epoch): resuming needs no iterator state."""

import numpy as np

from pipeline.contract import PAD_ID
from pipeline.dataset import padded_length
from pipeline.seeds import derive_seed

_POOL_BATCHES = 48
_PADDED_SHARE = 0.08  # of a batch; above, half of it is cut


def epoch_plan(lengths, batch_tokens, seed, epoch):
    """Returns the row indices of each batch of an epoch; every row is in exactly one batch.

    Rows are shuffled, sorted by length within pools of many batches, and cut so that rows * padded length stays within
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
    pools = max(1, round(lengths.sum() / (_POOL_BATCHES * batch_tokens)))
    batches, left = [], order[:0]
    for pool in np.array_split(order, pools):
        cut, left = _cut(np.concatenate([left, pool]), lengths, batch_tokens)
        batches += cut
    batches += [left] if len(left) else []
    return [batches[i] for i in rng.permutation(len(batches))]


def sequential_plan(lengths, batch_tokens):
    """Returns the row indices of each batch for evaluation: every row once, longest first.

    The first batch needs the most memory, so that a limit shows at once. Arguments as in `epoch_plan`.
    """
    lengths = np.maximum(np.asarray(lengths, np.int64), 1)
    batches, left = _cut(np.arange(len(lengths)), lengths, batch_tokens)
    return batches + ([left] if len(left) else [])


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


def _cut(rows, lengths, batch_tokens):
    """Cuts `rows`, longest first, into batches of rows * padded length <= `batch_tokens`.

    A padded length has one number of rows, or half of it where the rows differ much in length. oneDNN keeps code for
    every shape that it meets: some fifty shapes, instead of hundreds, keep the memory of a training flat.

    Returns:
        (list of batches, the rows that are too few for another one).
    """
    rows = rows[np.argsort(-lengths[rows], kind="stable")]
    batches = []
    while len(rows):
        padded = padded_length(lengths[rows[0]])
        count = max(1, batch_tokens // padded)
        if count > len(rows):
            break
        if count > 1 and lengths[rows[:count]].mean() < (1.0 - _PADDED_SHARE) * padded:
            count //= 2
        batches.append(rows[:count])
        rows = rows[count:]
    return batches, rows
