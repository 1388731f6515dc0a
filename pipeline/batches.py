"""Batches as a pure function of the rows and (seed, epoch): resuming needs no iterator state."""

import numpy as np

from pipeline.contract import PAD_ID
from pipeline.dataset import padded_length
from pipeline.seeds import derive_seed

_POOL_BATCHES = 48
_PADDED_SHARE = 0.08  # of a batch; above, half of it is cut


def epoch_plan(lengths, batch_tokens, seed, epoch, batch_rows=0):
    """Returns the row indices of each batch of an epoch; every row is in exactly one batch.

    Rows are shuffled, sorted by length within pools of many batches, and cut so that rows * padded length stays within
    `batch_tokens`, and rows within `batch_rows`; then the batches are shuffled. Sorting all rows at once would pad
    less, but would give a row nearly the same batch mates in every epoch.

    Args:
        lengths: int `[rows]`, tokens per row; 0 counts as 1.
        batch_tokens: padded tokens of a batch; a longer row is alone in its batch.
        seed: the job's seed.
        epoch: number of the epoch.
        batch_rows: rows of a batch, at most; 0: as many as `batch_tokens` holds.

    Returns:
        A list of int64 arrays.
    """
    lengths = np.maximum(np.asarray(lengths, np.int64), 1)
    if not len(lengths):
        return []
    rng = np.random.Generator(np.random.PCG64(derive_seed(seed, f"batches/{epoch}")))
    order = rng.permutation(len(lengths))
    pools = lengths.sum() / (_POOL_BATCHES * batch_tokens)
    if batch_rows:
        pools = max(pools, len(lengths) / (_POOL_BATCHES * batch_rows))
    batches, left = [], order[:0]
    for pool in np.array_split(order, max(1, round(pools))):
        cut, left = _cut(np.concatenate([left, pool]), lengths, batch_tokens, batch_rows)
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
    uniform = _random_bits(seed, f"token-dropout/{epoch}", rows, token_ids.shape[1]) * 2.0**-64  # [B, T]
    return np.where((uniform < rate) & (token_ids != PAD_ID), np.int32(mask_id), token_ids)


def mask_tokens(token_ids, rows, share, mask_id, pieces, seed, epoch):
    """Chooses the tokens that a model is to predict, anew in each epoch, and hides most of them.

    Devlin et al. 2019 ("BERT"), section 3.1: of the chosen tokens 80 % become MASK, 10 % a random piece, and 10 % stay.
    Anew in each epoch as in Liu et al. 2019 ("RoBERTa"), section 4.1. What becomes of a row depends on its tokens and
    on (seed, epoch, the row's number) only, so not on its batch mates. Of a short row no token may be chosen.

    Args:
        token_ids: int32 `[B, T]`, left as it is.
        rows: int64 `[B]`, numbers of the rows.
        share: chance of each token but PAD to be chosen, in [0, 1].
        mask_id: MASK's id.
        pieces: int32 `[pieces]`, the ids that a random piece is drawn from.
        seed: the job's seed.
        epoch: number of the epoch, or a name for a choice that always stays the same.

    Returns:
        (int32 `[B, T]`, what the model is given; bool `[B, T]`, the loss mask: True = chosen, counts in the loss).
    """
    length = token_ids.shape[1]
    chance, way, piece = (_random_bits(seed, f"masked-{name}/{epoch}", rows, length) for name in ("at", "by", "with"))
    chosen = (chance * 2.0**-64 < share) & (token_ids != PAD_ID)  # [B, T]
    way = way * 2.0**-64
    random_pieces = pieces[piece % np.uint64(len(pieces))]
    hidden = np.where(way < 0.8, np.int32(mask_id), np.where(way < 0.9, random_pieces, token_ids))
    return np.where(chosen, hidden, token_ids), chosen


def _random_bits(seed, name, rows, length):
    """Returns a random number for each (row, position), uint64 [B, length], whatever the other rows are."""
    # Counters, hashed: no generator for each row.
    key = np.uint64(derive_seed(seed, name) << 32)
    row_keys = _hash(key + rows.astype(np.uint64))[:, None]  # [B, 1]
    return _hash(row_keys + np.arange(length, dtype=np.uint64))


def _hash(counters):
    """SplitMix64 (Steele et al. 2014) at these points of its sequence: uint64 -> uint64, modulo 2**64."""
    z = counters * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def _cut(rows, lengths, batch_tokens, batch_rows=0):
    """Cuts `rows`, longest first, into batches of rows * padded length <= `batch_tokens`, and rows <= `batch_rows`.

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
        count = min(count, batch_rows or count)
        if count > len(rows):
            break
        if count > 1 and lengths[rows[:count]].mean() < (1.0 - _PADDED_SHARE) * padded:
            count //= 2
        batches.append(rows[:count])
        rows = rows[count:]
    return batches, rows
