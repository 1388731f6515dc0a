"""Texts spelled in other pieces, anew each epoch, so that few texts teach more.

The idea is Kudo's (2018, "Subword Regularization"). `sample_split` is his way: SentencePiece draws from all
segmentations of a text. `PieceSplitter` is BPE-dropout's (Provilkov et al. 2020): a piece of the best segmentation is
replaced by two pieces that spell it; it works on token ids, so no text is encoded again.
"""

import dataclasses
import itertools

import numpy as np

from pipeline.seeds import derive_seed


def sample_split(split, texts, tokenizer, share, alpha, max_length, seed, epoch, pause=lambda: None):
    """Returns the rows of one epoch, about a `share` of them with a segmentation drawn from all there are.

    What becomes of row i depends on its text and on (seed, epoch, i) only.

    Args:
        split: a `pipeline.dataset.Split`, left as it is.
        texts: its texts, an iterable in the order of the rows.
        tokenizer: the `pipeline.text.Tokenizer` that made `split`.
        share: chance of a row to be drawn, in [0, 1].
        alpha: as in `Tokenizer.sample`.
        max_length: longest row, in tokens; longer ones are cut at the end.
        seed: the job's seed.
        epoch: number of the epoch.
        pause: called after each text, e.g. to let other threads run.

    Returns:
        A `Split` in memory.
    """
    # Two streams, so that the numbers of a row do not depend on how many rows there are.
    chosen, seeds = (_generator(seed, f"subword-{name}/{epoch}") for name in ("rows", "seeds"))
    chosen = chosen.random(len(split)) < share  # [rows]
    seeds = seeds.integers(2**31, size=len(split))  # [rows]
    rows = []
    for text, row_seed in zip(itertools.compress(texts, chosen), seeds[chosen].tolist(), strict=True):
        rows.append(tokenizer.sample(text, alpha, row_seed)[:max_length])
        pause()
    lengths = split.lengths.copy()
    lengths[chosen] = [len(row) for row in rows]
    drawn = np.repeat(chosen, lengths)  # [tokens]
    tokens = np.empty(len(drawn), np.int32)
    tokens[drawn] = np.concatenate([np.empty(0, np.int32), *rows])
    tokens[~drawn] = split.tokens[np.repeat(~chosen, split.lengths)]
    return dataclasses.replace(split, tokens=tokens, offsets=np.concatenate([[0], np.cumsum(lengths)]))


def _generator(seed, name):
    return np.random.Generator(np.random.PCG64(derive_seed(seed, name)))


class PieceSplitter:
    """Knows every way to spell a piece of a vocabulary by two others.

    Args:
        tokenizer: a `pipeline.text.Tokenizer`.
    """

    def __init__(self, tokenizer):
        pieces = tokenizer.pieces
        index = {piece: i for i, piece in enumerate(pieces) if piece is not None}
        pairs = [[] for _ in pieces]
        for piece, i in index.items():
            halves = ((piece[:at], piece[at:]) for at in range(1, len(piece)))
            pairs[i] = [(index[a], index[b]) for a, b in halves if a in index and b in index]
        # The pairs of piece i are rows starts[i] to starts[i] + counts[i] of one flat table.
        self._counts = np.array([len(p) for p in pairs], np.int64)  # [V]
        self._starts = np.cumsum(self._counts) - self._counts  # [V]
        self._pairs = np.array([pair for p in pairs for pair in p], np.int32).reshape(-1, 2)

    def split(self, split, rate, max_length, seed, epoch):
        """Returns the rows of one epoch.

        Every piece that can be is split with probability `rate`, and each half once more; rows that grow beyond
        `max_length` are cut at the end.

        Args:
            split: a `pipeline.dataset.Split`, left as it is.
            rate: probability in [0, 1]; with 0 the rows stay the same.
            max_length: longest row, in tokens.
            seed: the job's seed.
            epoch: number of the epoch.

        Returns:
            A `Split` in memory; a pure function of the arguments.
        """
        rng = _generator(seed, f"subwords/{epoch}")
        tokens, offsets = np.asarray(split.tokens), split.offsets
        may_split = np.ones(len(tokens), bool)
        for _ in range(2):
            tokens, offsets, may_split = self._split_once(tokens, offsets, may_split, rate, rng)
        lengths = np.diff(offsets)
        kept = np.arange(len(tokens)) - np.repeat(offsets[:-1], lengths) < max_length
        offsets = np.concatenate([[0], np.cumsum(np.minimum(lengths, max_length))])
        return dataclasses.replace(split, tokens=tokens[kept], offsets=offsets)

    def _split_once(self, tokens, offsets, may_split, rate, rng):
        chosen = may_split & (rng.random(len(tokens)) < rate) & (self._counts[tokens] > 0)
        pair = self._starts[tokens] + (rng.random(len(tokens)) * self._counts[tokens]).astype(np.int64)
        ends = np.cumsum(1 + chosen)  # where each token's one or two pieces end
        halves = np.repeat(chosen, 1 + chosen)
        pieces = np.repeat(tokens, 1 + chosen)
        pieces[halves] = self._pairs[pair[chosen]].ravel()
        return pieces, np.concatenate([[0], ends])[offsets], halves
