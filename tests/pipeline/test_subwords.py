import subprocess
import sys

import numpy as np
import pytest

from pipeline.dataset import Split
from pipeline.subwords import PieceSplitter
from pipeline.text import Tokenizer, train_tokenizer


def make_texts(count=400):
    rng = np.random.default_rng(0)
    words = ["".join(rng.choice(["ba", "do", "ku", "mi", "ra", "st"], rng.integers(1, 5))) for _ in range(120)]
    return [" ".join(rng.choice(words, 6)) for _ in range(count)]


TEXTS = make_texts()


class Pieces:
    """A vocabulary given by hand."""

    def __init__(self, *pieces):
        self.pieces = [None, None, *pieces]


def make_split(rows):
    offsets = np.concatenate([[0], np.cumsum([len(row) for row in rows])]).astype(np.int64)
    tokens = np.concatenate([np.array(row, np.int32) for row in rows])
    return Split(tokens, offsets, np.arange(len(rows), dtype=np.int32), np.arange(len(rows)) + 100)


def rows_of(split):
    return [split.tokens[a:b].tolist() for a, b in zip(split.offsets[:-1], split.offsets[1:], strict=True)]


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer(train_tokenizer(TEXTS, 357))


@pytest.fixture(scope="module")
def real(tokenizer):
    return make_split(tokenizer.encode(TEXTS))


def test_pairs_by_hand():
    # Ids: 2 "ab", 3 "a", 4 "b", 5 "abc", 6 "c". "abc" = "ab" + "c" only, since "bc" is no piece.
    splitter = PieceSplitter(Pieces("ab", "a", "b", "abc", "c"))
    split = make_split([[2], [5], [3, 1], []])
    always = splitter.split(split, 1.0, 10, seed=1, epoch=0)
    assert rows_of(always) == [[3, 4], [3, 4, 6], [3, 1], []]  # "abc" twice: into "ab" + "c", then "a" + "b" + "c"
    assert rows_of(splitter.split(split, 1.0, 2, seed=1, epoch=0)) == [[3, 4], [3, 4], [3, 1], []]
    assert rows_of(splitter.split(split, 0.0, 10, seed=1, epoch=0)) == rows_of(split)
    np.testing.assert_array_equal(always.labels, split.labels)
    np.testing.assert_array_equal(always.rows, split.rows)


def test_rate_is_the_probability():
    splitter = PieceSplitter(Pieces("ab", "a", "b"))
    split = splitter.split(make_split([[2] * 10_000]), 0.3, 20_000, seed=1, epoch=0)
    assert len(split.tokens) - 10_000 == pytest.approx(3000, abs=200)  # 4 standard deviations


def test_split_rows_spell_the_same_text(tokenizer, real):
    split = PieceSplitter(tokenizer).split(real, 0.5, 1000, seed=3, epoch=2)
    assert split.tokens.dtype == np.int32
    assert len(split.tokens) > 1.05 * len(real.tokens)
    pieces = tokenizer.pieces
    for row, before in zip(rows_of(split), rows_of(real), strict=True):
        if all(pieces[i] is not None for i in before):
            assert "".join(pieces[i] for i in row) == "".join(pieces[i] for i in before)


def test_every_epoch_and_seed_has_its_own_rows(tokenizer, real):
    splitter = PieceSplitter(tokenizer)
    found = [splitter.split(real, 0.3, 50, seed, epoch) for seed, epoch in ((1, 0), (1, 0), (1, 1), (2, 0))]
    np.testing.assert_array_equal(found[0].tokens, found[1].tokens)
    assert len({tuple(split.tokens.tolist()) for split in found}) == 3


def test_the_same_rows_in_another_process(tokenizer, real, tmp_path):
    (tmp_path / "tokenizer.model").write_bytes(tokenizer.model)
    code = (
        "import sys; from pipeline.text import Tokenizer; from pipeline.subwords import PieceSplitter\n"
        "from tests.pipeline.test_subwords import TEXTS, make_split\n"
        "t = Tokenizer.load(sys.argv[1])\n"
        "print(PieceSplitter(t).split(make_split(t.encode(TEXTS)), 0.3, 50, 1, 5).tokens.tolist())"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "tokenizer.model")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(PieceSplitter(tokenizer).split(real, 0.3, 50, 1, 5).tokens.tolist())
